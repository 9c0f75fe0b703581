"""The process pool and the routings that all other tests stand on."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from lib.commands import ROOT, environment
from lib.faults import is_running

from ep_dispatcher.tools import testing
from ep_dispatcher.tools.testing import (
    ROUTINGS,
    RankError,
    RankPool,
    different_bits,
    make_routing,
    run_ranks,
    same_bits,
    with_negative_zeros,
)


def all_gone(pids, within_s=60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def late_for_low_ranks(rank, text):
    time.sleep(0.2 if rank == 0 else 0.0)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return text, rank, int(total)


def process_id(rank):
    return os.getpid()


def echo(rank, *args):
    return args


def fail_on(rank, ranks):
    if rank in ranks:
        raise KeyError(f"no {rank}")
    return rank


def fail_before_barrier(rank):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 is here"])
        raise ValueError("rank 1 leaves")
    store.set("rank 0 is here", "")
    dist.barrier()


def call_on(rank, ranks, fn, *args):
    if rank in ranks:
        fn(*args)
    return rank


def unpicklable(rank):
    return lambda: rank


class NotRestorable:
    def __reduce__(self):
        return int, ("no number",)


def not_restorable(rank):
    return NotRestorable() if rank == 0 else rank


def test_results_come_in_rank_order_and_the_pool_is_reused():
    with RankPool(3) as pool:
        assert pool.run(late_for_low_ranks, "a") == [("a", 0, 3), ("a", 1, 3), ("a", 2, 3)]
        pids = pool.pids
        assert pool.run(process_id) == pool.run(process_id) == pids
    assert all_gone(pids)


def test_tensors_of_every_dtype_survive_both_ways():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)
    tensors = [torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype) for dtype in dtypes]
    tensors += [torch.tensor(2.5), torch.empty(0, 7, dtype=torch.bfloat16), torch.rand(4, 6).T]
    (result,) = run_ranks(1, echo, tensors, {"x": tensors[1]})
    for given, back in zip([*tensors, tensors[1]], [*result[0], result[1]["x"]]):
        assert given.dtype == back.dtype and given.shape == back.shape
        assert same_bits(given, back)
    assert len(testing._dumps(torch.zeros(1 << 20)[:4])) < 1000, "a small view does not carry its storage"


def test_exceptions_are_reported_per_rank_and_leave_the_pool_usable():
    with RankPool(3) as pool:
        with pytest.raises(RankError) as caught:
            pool.run(fail_on, [0, 2])
        assert set(caught.value.failures) == {0, 2}
        assert caught.value.failures[2][:2] == ("KeyError", "'no 2'")
        assert "in fail_on" in caught.value.failures[2][2] and "in fail_on" in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).failures == caught.value.failures
        with pytest.raises(RankError, match="(?i)can't pickle|can't get local"):
            pool.run(unpicklable)
        for fn, args in [(not_restorable, ()), (echo, (NotRestorable(),))]:
            with pytest.raises(RankError, match="ValueError: invalid literal") as caught:
                pool.run(fn, *args)
            assert 0 in caught.value.failures
        assert pool.run(fail_on, []) == [0, 1, 2]


def test_ranks_that_wait_for_a_failed_one_are_stopped_early(monkeypatch):
    monkeypatch.setattr(testing, "GRACE_S", 0.5)
    with RankPool(2) as pool:
        pool.run(fail_on, [])
        pids, started = pool.pids, time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(fail_before_barrier)
        assert time.monotonic() - started < 60  # not the two minutes that the pool may take
        assert caught.value.failures[1][:2] == ("ValueError", "rank 1 leaves")
        name, message, stack = caught.value.failures[0]
        assert name == "Stopped" and "after rank 1 failed" in message and "in fail_before_barrier" in stack
        assert pool.closed and all_gone(pids)


@pytest.mark.parametrize("way, number", [("signal", 9), ("signal", 11), ("code", 3)])
def test_a_dead_rank_is_named_and_closes_the_pool(way, number):
    die = signal.raise_signal if way == "signal" else os._exit
    for allowed in ({1}, ()):
        pool = RankPool(2)
        pids = pool.pids
        if allowed:
            assert pool.run(call_on, [1], die, number, allow_dead=allowed) == [0, None]
        else:
            with pytest.raises(RankError) as caught:
                pool.run(call_on, [1], die, number)
            ((rank, (name, message, _)),) = caught.value.failures.items()
            assert (rank, name) == (1, "Died") and message.endswith(f"{way} {number}")
        assert pool.closed and all_gone(pids)
        with pytest.raises(RuntimeError, match="closed"):
            pool.run(fail_on, [])


def test_a_rank_that_died_is_named_before_the_stacks_of_the_others():
    """What CI shows of a long text is its begin and its end."""
    stack = "Traceback\n" + 1000 * "a line of the stack\n"
    failures = {rank: ("RuntimeError", "reset by peer", stack) for rank in (3, 0)} | {1: ("Died", "signal 9", "")}
    text = str(RankError(failures))
    assert text.splitlines()[:4] == [
        "3 rank(s) failed",
        "rank 0: RuntimeError: reset by peer",
        "rank 1: Died: signal 9",
        "rank 3: RuntimeError: reset by peer",
    ]
    assert text.count(stack) == 2 and "rank 3:\nTraceback" in text


def test_a_rank_killed_between_runs_is_named():
    with RankPool(2) as pool:
        os.kill(pool.pids[0], signal.SIGKILL)
        with pytest.raises(RankError) as caught:
            pool.run(fail_on, [])
    assert caught.value.failures[0][0] == "Died"


def test_a_rank_that_takes_too_long_is_killed_and_named_with_its_stack():
    pool = RankPool(2)
    pids = pool.pids
    pool.run(call_on, [], time.sleep)  # the ranks have imported this file
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(call_on, [1], time.sleep, 100, timeout_s=4)  # rank 0 answers within these
    assert 4 <= time.monotonic() - started < 60
    assert set(caught.value.failures) == {1}
    name, message, stack = caught.value.failures[1]
    assert name == "Timeout" and "4 s" in message and "in call_on" in stack
    assert pool.closed and all_gone(pids)


@pytest.mark.exhaustive
def test_no_rank_outlives_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from ep_dispatcher.tools.testing import RankPool\n"
        "def stay(rank):\n"
        "    time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    print(*pool.pids, flush=True)\n"
        "    pool.run(stay)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        time.sleep(0.3)  # until the ranks are busy
        parent.kill()
    assert all_gone(pids)


@pytest.mark.parametrize("num_tokens,num_experts,num_topk", [(500, 8, 3), (0, 4, 2), (40, 4, 4)])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings_keep_their_promises(kind, num_tokens, num_experts, num_topk):
    idx, weights = make_routing(kind, num_tokens, num_experts, num_topk, seed=5)
    assert idx.dtype == torch.int64 and weights.dtype == torch.float32
    assert idx.shape == weights.shape == (num_tokens, num_topk)
    assert ((idx >= -1) & (idx < num_experts)).all() and ((weights > 0) & (weights <= 1)).all()
    chosen = torch.stack([(idx == e).sum(1) for e in range(num_experts)], 1)
    assert (chosen <= 1).all(), "an expert twice in a row"
    again = make_routing(kind, num_tokens, num_experts, num_topk, seed=5)
    assert torch.equal(again[0], idx) and torch.equal(again[1], weights)
    if num_tokens < 500:
        return
    share, masked = chosen.sum(0) / num_tokens, idx == -1
    promises = {
        "uniform": (share / (num_topk / num_experts) - 1).abs().max() < 0.3 and not masked.any(),
        "skewed": share[0] > 2 * share[-1] and not masked.any(),
        "one_expert": (chosen[:, 0] == 1).all() and chosen.sum() == num_tokens,
        "masked": 0.2 < masked.float().mean() < 0.5 and masked.all(1).any(),
        "empty": masked.all(),
    }
    assert promises[kind]
    if kind not in ("one_expert", "empty"):
        assert not torch.equal(make_routing(kind, num_tokens, num_experts, num_topk, seed=6)[0], idx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_bits_are_compared_and_not_values(dtype):
    nan = float("nan")
    a = torch.tensor([0.0, -0.0, 1.0, nan, nan, 2.0]).to(dtype)
    b = torch.tensor([-0.0, -0.0, 1.5, -nan, 1.0, 2.0]).to(dtype)
    assert different_bits(a, b).tolist() == [True, False, True, False, True, False]
    assert same_bits(a, a.clone()) and not same_bits(a, b) and not same_bits(a[:2], a[:3])
    assert not same_bits(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=torch.int64))
    zeros = with_negative_zeros(torch.ones(1000), seed=1)
    assert same_bits(zeros, with_negative_zeros(torch.ones(1000), seed=1))
    assert 200 < int(zeros.signbit().sum()) == int((zeros == 0).sum()) < 300


@pytest.mark.parametrize("kind, num_topk, named", [("random", 1, "kind"), ("uniform", 3, "num_topk")])
def test_routing_mistakes(kind, num_topk, named):
    with pytest.raises(ValueError, match=named):
        make_routing(kind, 1, 2, num_topk, seed=0)


@pytest.mark.exhaustive
def test_without_megatron_its_tests_are_skipped(tmp_path):
    """Each file of tests can be imported, and those of Megatron say why they are skipped."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ModuleNotFoundError('none here', name='megatron')")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rs",
        str(ROOT / "tests"),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert "megatron-core is not installed" in result.stdout
    assert "test_megatron_graphs" not in result.stdout and "test_dispatch_combine.py::" in result.stdout
