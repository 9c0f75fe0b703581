"""A file as the default store: its life, and a disk that is full."""

import os
import subprocess
import sys
import tempfile

import pytest
from lib.commands import ROOT

BUFFER = """
import gc, os, sys, time
import ep_dispatcher as ep
import torch.distributed as dist

def make(timeout_s):
    sizes = dict(hidden=64, num_experts=4, num_topk=2, max_tokens_per_rank=16)
    ep.Buffer(**sizes, engine="cpu", timeout_s=timeout_s).destroy()

path = sys.argv[1] + "/store"
"""
LEAVES = """
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=0, world_size=1)
make(30)
dist.destroy_process_group()
gc.collect()
print("the file is there:", os.path.exists(path))
"""
IS_FULL = """
dist.init_process_group("gloo", store=dist.FileStore(path, 1), rank=0, world_size=1)
make(30)
with open(sys.argv[1] + "/rest", "wb", buffering=0) as rest:
    failures = 0
    while failures < 50:
        try:
            rest.write(bytes(512))
        except OSError:
            failures += 1
errors = []
while len(errors) < 2:
    try:
        make(1)  # until it has filled the last page
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
print(*errors, sep="\\n", flush=True)
os._exit(0)  # at once: what is tested is over
"""


def run(program: str, folder: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BUFFER + program, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rank_that_leaves_does_not_delete_the_file(tmp_path):
    """Each clone that gather.py made of the store counted as a worker. So the first rank to end deleted the file."""
    assert run(LEAVES, str(tmp_path)) == "the file is there: True\n"


@pytest.mark.exhaustive
def test_a_full_disk_is_an_error():
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("needs root, to mount a small file system")
        try:
            errors = run(IS_FULL, folder).splitlines()
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    assert len(errors) == 2
    for error in errors:
        assert error.startswith("PeerTimeoutError: ") or "store of the default process group failed" in error, errors
