"""The end of a process while a thread of the package, or of the user, is still inside a call: the exit code is 0."""

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

COMMON = """
    import contextlib, functools, os, sys, threading, time
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

    join = functools.partial(dist.init_process_group, "gloo", rank=rank, world_size=2)

    def make(**options):
        return ep.Buffer(hidden=64, num_experts=4, num_topk=2, max_tokens_per_rank=8, engine="cpu", **options)

    client, other_client = (dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))

    def be_slow(seconds):
        # Inside PyTorch. A thread that comes back from there after the end of Python aborts the process.
        with contextlib.suppress(RuntimeError):
            other_client.wait(["nothing"], timedelta(seconds=seconds))
"""

# The store answers late when a rank says that it has left the exchange: the thread that asks outlives the making.
SLOW_STORE = """
    class Slow(dist.Store):
        def clone(self):
            return self
        def add(self, key, number):
            if key.endswith("/left"):
                be_slow(4)
            return client.add(key, number)

    for name in ("set", "get", "check", "wait", "compare_set", "multi_get"):
        setattr(Slow, name, lambda self, *args, name=name: getattr(client, name)(*args))

    slow = Slow()
    join(store=slow)
    buffer = make()
    buffer.destroy()
    print("made", flush=True)
    sys.at_the_end = SlowEnd()
"""

# A daemon thread waits for another node, which ends meanwhile. The thread outlives its call: it frees what it holds.
INSIDE = """
    join(store=client)
    buffer = make(ranks_per_node=1, timeout_s=60)

    def dispatch():
        with contextlib.suppress(RuntimeError):
            x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cpu")
            buffer.dispatch(x, torch.zeros(8, 2, dtype=torch.int64, device="cpu") + torch.arange(2, device="cpu"))
        be_slow(1)

    if rank == 0:
        threading.Thread(target=dispatch, daemon=True).start()
        while not buffer.live_engine().health.is_busy:
            time.sleep(0.1)
        time.sleep(0.5)  # it waits
        print("made", flush=True)
        client.set("ends", "")
        sys.at_the_end = SlowEnd()
    else:
        print("made", flush=True)
        client.wait(["ends"], timedelta(seconds=60))
        time.sleep(1.5)
        os._exit(0)  # the wait of rank 0 ends by that
"""

# A daemon thread makes a buffer. The other rank arrives when the process has begun to end.
MAKING = """
    join(store=client)
    make().destroy()
    if rank == 0:
        threading.Thread(target=make, kwargs=dict(timeout_s=20), daemon=True).start()
        while all(thread.name != "ep_dispatcher call" for thread in threading.enumerate()):
            time.sleep(0.01)  # until it waits for the other rank
        client.set("ends", "")
        sys.at_the_end = SlowEnd()
    else:
        client.wait(["ends"], timedelta(seconds=60))
        time.sleep(1)
        make(timeout_s=20)
    print("made", flush=True)
"""

SCRIPTS = {
    "slow store": SLOW_STORE,
    "daemon thread in an operation": INSIDE,
    "daemon thread makes a buffer": MAKING,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
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
