"""benchmarks/collectivex: the adapter gives CollectiveX the numbers that it checks, and says what a row was.

The base class is a stand-in (lib/collectivex.py). The last test runs CollectiveX itself: it needs GPUs and a checkout.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import NO_CUDA, on_ranks
from lib import collectivex
from lib.commands import ROOT

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of

sys.modules["ep_backend"] = collectivex  # of CollectiveX, which the adapter imports
from ep_ep_dispatcher import EPDispatcherBackend  # noqa: E402

ADAPTER = ROOT / "benchmarks" / "collectivex" / "ep_ep_dispatcher.py"
SIZES = dict(hidden=512, experts=16, topk=8)
CHECKS = {"normal": collectivex.check_normal, "low-latency": collectivex.check_low_latency}
NUM_SMS, LAYOUT, HOST_WAITS = (f"CX_EP_DISPATCHER_{name}" for name in ("NUM_SMS", "LAYOUT", "HOST_WAITS"))


def make_backend(mode: str, precision: str, rank: int = 0, device: str = "cpu") -> EPDispatcherBackend:
    args = SimpleNamespace(mode=mode, precision=precision, **SIZES)
    return EPDispatcherBackend(args, rank, 2, rank, torch.device(device))


@pytest.fixture
def environ(monkeypatch):
    """Set variables of the adapter, and none that are set outside."""
    for name in (NUM_SMS, LAYOUT, HOST_WAITS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def num_addends(backend: EPDispatcherBackend, problem: SimpleNamespace) -> torch.Tensor:
    """Return [tokens, 1]: how often a token's own row is in its sum. In low-latency mode its weights are 1 together."""
    if backend.layout == "decode":
        return torch.ones(problem.T, 1, device=problem.x.device)
    owners = problem.topk_idx // backend.num_local_experts
    rows = torch.stack([(owners == rank).sum(1, keepdim=True) for rank in range(backend.world_size)])
    return (rows > 0).sum(0) if backend.layout == "rank" else rows.sum(0)


def check_pair(backend: EPDispatcherBackend, problem: SimpleNamespace) -> None:
    """What is timed: the same rows come back, summed. A staged tensor and a handle may be used again."""
    received = backend.dispatch(problem)
    backend.stage(problem, received)
    sums = backend.combine(problem, received)
    collectivex.assert_close(sums, problem.oracle_x.float() * num_addends(backend, problem))
    again = backend.dispatch(problem)
    again.combine_input = received.combine_input
    assert torch.equal(backend.combine(problem, again), sums)


CASES = {
    ("normal", "bf16"): [{}, {HOST_WAITS: "0", NUM_SMS: "8"}, {LAYOUT: "expert"}, {LAYOUT: "expert", HOST_WAITS: "0"}],
    ("normal", "fp8"): [{}, {LAYOUT: "expert", HOST_WAITS: "0"}],
    ("low-latency", "bf16"): [{}],
    ("low-latency", "fp8"): [{}],
}


@pytest.mark.parametrize(
    "mode,precision,switches", [(*case, switches) for case, all_of in CASES.items() for switches in all_of]
)
@on_ranks(2)
def test_numbers(rank, engine, mode, precision, switches):
    device = torch.device(device_of(engine, rank))
    with pytest.MonkeyPatch.context() as patch:
        for name in (NUM_SMS, LAYOUT, HOST_WAITS):
            patch.delenv(name, raising=False)
        for name, value in switches.items():
            patch.setenv(name, value)
        backend = make_backend(mode, precision, rank, device)
    ladder = (1, 6, 40)
    backend.create_buffer(SimpleNamespace(max_tokens_per_rank=max(ladder)))
    assert backend.buffer.engine == engine
    assert backend.buffer.config.num_sms == (8 if NUM_SMS in switches else None)
    for num_tokens in ladder:
        tokens = collectivex.Tokens(backend.args, 2, num_tokens, device, seed=num_tokens)
        problem = backend.make_problem(num_tokens, *tokens.of(rank))
        CHECKS[mode](backend, problem, tokens)
        check_pair(backend, problem)
        rows = backend.recv_tokens(backend.dispatch(problem))
        is_local = tokens.topk_idx // tokens.experts_per_rank == rank
        assert rows == (is_local.any(1) if backend.layout == "rank" else is_local).sum()
    assert backend.finalize(0) == 0 and backend.buffer.is_destroyed


def test_what_a_row_says(environ):
    normal, fp8, decode = (
        make_backend(*case) for case in (("normal", "bf16"), ("normal", "fp8"), ("low-latency", "fp8"))
    )
    assert (normal.receive_layout, normal.combine_weight_semantics) == ("token-rank", "unweighted-rank-sum")
    assert (decode.receive_layout, decode.combine_weight_semantics) == ("token-expert", "weighted-kernel-sum")
    assert (normal.dispatch_dtype, normal.dispatch_value_bytes, normal.dispatch_scale_bytes_per_copy) == ("bf16", 2, 0)
    assert (fp8.dispatch_dtype, fp8.dispatch_value_bytes, fp8.dispatch_scale_bytes_per_copy) == ("fp8-e4m3fn", 1, 16)
    assert not normal.stage_device_work and fp8.stage_device_work and decode.stage_device_work
    assert not normal.requires_fresh_pair and decode.requires_fresh_pair
    assert (normal.buffer_cap(None), decode.buffer_cap(None)) == (None, 256)
    assert normal.library_version == ep.__version__


@pytest.mark.parametrize(
    "mode,switches,name",
    [
        ("normal", {}, "ep-dispatcher-rank"),
        ("normal", {LAYOUT: "expert", NUM_SMS: "32"}, "ep-dispatcher-expert-32sms"),
        ("normal", {HOST_WAITS: "0"}, "ep-dispatcher-rank-max-recv-rows"),
        ("low-latency", {LAYOUT: "expert", HOST_WAITS: "0"}, "ep-dispatcher-decode"),
    ],
)
def test_switches_are_in_the_result(environ, mode, switches, name):
    for variable, value in switches.items():
        environ(variable, value)
    assert make_backend(mode, "bf16").kernel_generation == name


@pytest.mark.parametrize("variable,value", [(LAYOUT, "decode"), (HOST_WAITS, "no"), (NUM_SMS, "many")])
def test_unknown_switches(environ, variable, value):
    environ(variable, value)
    with pytest.raises(ValueError, match=value):
        make_backend("normal", "bf16")


# ---- CollectiveX itself ----------------------------------------------------------------------------------------------

CHECKOUT = os.environ.get("EP_TEST_COLLECTIVEX")  # its folder experimental/CollectiveX


def why_not() -> str | None:
    if NO_CUDA:
        return f"CollectiveX times with CUDA events, which needs a usable GPU: {NO_CUDA}"
    if torch.cuda.device_count() < 2:
        return "CollectiveX takes a GPU for each rank, and there is one"
    return None if CHECKOUT else "EP_TEST_COLLECTIVEX names no folder experimental/CollectiveX"


def install(bench: Path) -> None:
    """Do what the adapter's first lines say."""
    shutil.copy(ADAPTER, bench)
    script = (bench / "run_ep.py").read_text()
    choices, first = 'choices=["deepep-v2"', 'if args.backend == "mori":'
    assert script.count(choices) == script.count(first) == 1, (
        "run_ep.py is not the one that the adapter was written for"
    )
    script = script.replace(choices, 'choices=["ep-dispatcher", "deepep-v2"')
    branch = (
        'if args.backend == "ep-dispatcher":\n        from ep_ep_dispatcher import EPDispatcherBackend as Backend\n'
    )
    (bench / "run_ep.py").write_text(script.replace(first, f"{branch}    el{first}"))


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("mode,precision", CASES)
def test_under_collectivex(tmp_path, environ, mode, precision):
    bench, out = tmp_path / "bench", tmp_path / "out.json"
    shutil.copytree(Path(CHECKOUT) / "bench", bench)
    install(bench)
    options = dict(
        backend="ep-dispatcher", mode=mode, precision=precision, phase="decode", tokens_ladder="1 8 64", hidden=7168,
        topk=8, experts=256, routing="uniform", seed=67, warmup=2, iters=4, trials=4, chain_iters=32, version=1,
        suite="test", workload_name="small", runner="test", topology_class="test", transport="nvlink", scope="scale-up",
        scale_up_transport="nvlink", scale_out_transport="", gpus_per_node=2, scale_up_domain=2, out=out,
        case_id=f"test-ep-dispatcher-small-{mode}-decode-ep2-uniform-{precision}",
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", bench / "run_ep.py"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, timeout=500, env=os.environ | {"PYTHONPATH": paths})
    result = json.loads(out.read_text())
    assert result["outcome"]["status"] == "success"
    for row in result["measurement"]["rows"]:
        assert row["correctness"]["passed"]
        assert row["components"]["pair_period"]["percentiles_us"]["p50"] > 0
