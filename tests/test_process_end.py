"""The end of a process while a thread of the package, or of the user, is still inside a call: the exit code is 0."""

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from conftest import NO_CUDA

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

# A daemon thread waits for the other rank, and freeing fails, as after an error of the GPU. That held the end for ever.
FREEING_FAILS = """
    join(store=client)
    buffer = make(timeout_s=60)

    def fail():
        raise RuntimeError("CUDA error")

    def dispatch():
        x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cpu")
        buffer.dispatch(x, torch.zeros(8, 2, dtype=torch.int64, device="cpu") + torch.arange(2, device="cpu"))

    if rank == 0:
        threading.Thread(target=dispatch, daemon=True).start()
        while not buffer.live_engine().health.is_busy:
            time.sleep(0.1)
        buffer._engine._connections.free = fail
    print("made", flush=True)
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
    "daemon thread in an operation, freeing fails": FREEING_FAILS,
    "daemon thread makes a buffer": MAKING,
}


# A kernel's assertion loses the GPU for this process, while a thread waits in a dispatch. The end of such a process is
# PyTorch's own affair.
LOST_GPU = """
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    join(store=client)
    torch.cuda.set_device(0)
    buffer = ep.Buffer(hidden=64, num_experts=4, num_topk=2, max_tokens_per_rank=8, engine="cuda", timeout_s=40)
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    idx = torch.zeros(8, 2, dtype=torch.int64, device="cuda") + torch.arange(2, device="cuda")
    ok = torch.zeros((), dtype=torch.bool, device="cuda")
    torch.cuda.synchronize()
    if rank == 0:
        left, ended = [], []

        def dispatch():
            try:
                buffer.dispatch(x, idx)
            except Exception as error:
                left.append(error)

        def watchdog():
            try:
                buffer.destroy()
            except RuntimeError as error:
                ended.append(error)

        threads = [threading.Thread(target=dispatch, daemon=True), threading.Thread(target=watchdog, daemon=True)]
        threads[0].start()
        while not buffer.live_engine().health.is_busy:
            time.sleep(0.1)
        time.sleep(1)  # it waits
        with torch.cuda.stream(torch.cuda.Stream()):
            torch._assert_async(ok)
        time.sleep(1)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "destroy() or the dispatch does not end"
        assert left and ended, (left, ended)
        assert "given up" not in str(ended[0]) and "gave up" not in str(ended[0]), ended
        client.set("ends", "")
        print("made", flush=True)
        os._exit(0)
    client.wait(["ends"], timedelta(seconds=100))
    print("made", flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(NO_CUDA is not None, reason=f"no GPU: {NO_CUDA}")
def test_a_lost_gpu_does_not_hold_destroy():
    """Freeing raised in the thread inside, before that woke the watchdog."""
    run_both(LOST_GPU)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script",
    SCRIPTS.values(),
    ids=SCRIPTS,
)
def test_the_exit_code_is_0(script):
    run_both(script)


def run_both(script: str) -> None:
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
