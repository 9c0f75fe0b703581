#!/usr/bin/env bash
# PyTorch 2.13.0, torch.distributed.FileStore(path, 2): a store in a file for two workers, which the last one deletes.
#
# Seen: FileStore.clone() gives a second object of the same worker, and each object that is freed counts as a worker that
# has left. One worker alone that clones its store and frees both objects deletes the file, with all keys in it. The other
# worker, which comes later, opens a new file and does not find what the first one has set. Without the clone it does.
#
# A good guess: a clone is another connection of the same worker, as that of a TCPStore is, so the file stays until two
# workers have left. It matters for libraries that clone the default store to wait on it in a thread: the first rank that
# ends takes the file away from the others.
#
# Exits 0 if the behaviour is as described, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy

cat > "$folder/worker.py" <<'PYTHON'
import os
import sys

import torch.distributed as dist

path, number, clones = sys.argv[1], sys.argv[2], sys.argv[3] == "clones"
store = dist.FileStore(path, 2)
if number == "first":
    store.set("key", "of the first worker")
    objects = [store, store.clone()] if clones else [store]
    del store
    while objects:
        del objects[0]
    print("a file is left:", os.path.exists(path))
else:
    print("the second worker finds the key:", store.check(["key"]))
PYTHON

for how in alone clones; do
    for number in first second; do
        "$folder/venv/bin/python" "$folder/worker.py" "$folder/$how" "$number" "$how"
    done
done 2> /dev/null | tee "$folder/seen"

diff - "$folder/seen" <<'SEEN'
a file is left: True
the second worker finds the key: True
a file is left: False
the second worker finds the key: False
SEEN
