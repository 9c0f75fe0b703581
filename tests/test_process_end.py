"""The end of a process while a thread of the package, or of the user, is still inside a call: the exit code is 0."""

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

COMMON = """
    import contextlib, os, sys, threading, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import ep_dispatcher as ep

    rank, port = int(sys.argv[1]), int(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    class SlowEnd:
        # In the last seconds of Python threads come back from their calls.
        def __del__(self, sleep=time.sleep):
            sleep(3)

    def make(store, **options):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        return ep.Buffer(hidden=64, num_experts=4, num_topk=2, max_tokens_per_rank=8, engine="cpu", **options)

    client = dist.TCPStore("127.0.0.1", port, is_master=False)
"""

# The store answers late when a rank says that it has left the exchange: the thread that asks outlives the making.
SLOW_STORE = """
    class Slow(dist.Store):
        def clone(self):
            return self
        def add(self, key, number):
            if key.endswith("/left"):
                with contextlib.suppress(RuntimeError):
                    other_client.wait(["nothing"], timedelta(seconds=4))
            return client.add(key, number)

    for name in ("set", "get", "check", "wait", "compare_set", "multi_get"):
        setattr(Slow, name, lambda self, *args, name=name: getattr(client, name)(*args))

    other_client = dist.TCPStore("127.0.0.1", port, is_master=False)
    slow = Slow()
    buffer = make(slow)
    buffer.destroy()
    print("made", flush=True)
    sys.at_the_end = SlowEnd()
"""

# A daemon thread waits for another node, which ends meanwhile.
INSIDE = """
    buffer = make(client, ranks_per_node=1, timeout_s=60)

    def dispatch():
        with contextlib.suppress(RuntimeError):
            x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cpu")
            buffer.dispatch(x, torch.zeros(8, 2, dtype=torch.int64, device="cpu") + torch.arange(2, device="cpu"))

    if rank == 0:
        threading.Thread(target=dispatch, daemon=True).start()
        time.sleep(1)  # it is inside
        print("made", flush=True)
        client.set("ends", "")
        sys.at_the_end = SlowEnd()
    else:
        print("made", flush=True)
        client.wait(["ends"], timedelta(seconds=60))
        time.sleep(1.5)
        os._exit(0)  # the wait of rank 0 ends by that
"""


@pytest.mark.parametrize("script", [SLOW_STORE, INSIDE], ids=["slow store", "daemon thread in an operation"])
def test_the_exit_code_is_0(script):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = textwrap.dedent(COMMON) + textwrap.dedent(script)
    command, pipes = [sys.executable, "-c", code], dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen([*command, str(rank), str(store.port)], **pipes) for rank in range(2)]
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, "made\n"), errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
