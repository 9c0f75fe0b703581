"""What of the CUDA engine can be tested without a GPU: what it compiles to, and what its host side does."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lib.commands import ROOT
from lib.cuda_build import needs_module, needs_nvcc, reports_of

import ep_dispatcher as ep
from ep_dispatcher import engines
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.wording import Wording

KERNELS = sorted((ROOT / "csrc/cuda").rglob("*.cu"))
MAX_REGISTERS, MAX_HOPPER_REGISTERS = 128, 168


@needs_nvcc
@pytest.mark.exhaustive
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_kernels_spill_nothing(source, tmp_path):
    is_for_hopper = source.stem.endswith("_sm90a")  # then a warp group takes registers from another one
    architecture = "sm_90a" if is_for_hopper else "sm_90"
    flags = ["-O3", "-std=c++17", f"-arch={architecture}", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    command = ["nvcc", *flags, "-Icsrc", "-cubin", str(source), "-o", str(tmp_path / "kernels.cubin")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said.stderr)]
    assert registers and max(registers) <= (MAX_HOPPER_REGISTERS if is_for_hopper else MAX_REGISTERS)
    assert spills and max(spills) == 0, said.stderr


@pytest.mark.parametrize(
    "wanted,path,said",
    [("2", None, "EP_DISPATCHER_CUDA is '2'"), ("1", "/nowhere", "there is no nvcc; pip install")],
)
def test_the_build_switch_is_checked(wanted, path, said):
    code = "__file__ = 'setup.py'; import setuptools; setuptools.setup = lambda **_: None; "
    code += "import shutil; shutil.which = lambda *_, **__: None; " if path else ""
    code += "exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    env = os.environ | {"EP_DISPATCHER_CUDA": wanted}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode != 0 and said in result.stderr


@pytest.mark.skipif(engines.cuda_problem() is None, reason="this process can use a GPU")
def test_without_a_gpu_the_engine_says_why(monkeypatch):
    assert engines.choose("auto") == "cpu"
    for built in (engines.ENGINES, ("cpu",)):
        monkeypatch.setattr(engines, "ENGINES", built)
        for name in ("cuda", "gpu"):
            with pytest.raises(ValueError, match=f"engine is '{name}'"):
                engines.choose(name)


def driver_knows(monkeypatch, version: int, built_by: int = 13000) -> None:
    """The GPU driver knows one version of CUDA, and another one has built the module."""
    from ep_dispatcher import _C_cuda

    monkeypatch.setattr(_C_cuda, "cuda_versions", lambda: (version, built_by))


@needs_module
@pytest.mark.parametrize("driver, built_by, works", [(12080, 13000, False), (13000, 13050, True), (13000, 12040, True)])
def test_a_driver_that_is_too_old_is_refused(monkeypatch, driver, built_by, works):
    """Any of the same major version runs what CUDA has built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    driver_knows(monkeypatch, driver, built_by)
    assert engines.choose("auto") == ("cuda" if works else "cpu")
    if not works:
        assert "built by CUDA 13.0" in engines.summary() and "12.8" in engines.summary()


@needs_module
def test_the_module_says_which_cuda_has_built_it():
    from ep_dispatcher import _C_cuda

    driver, built_by = _C_cuda.cuda_versions()
    assert driver >= 0 and built_by >= 12040


@needs_module
@pytest.mark.parametrize("capability, works", [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_gpus_whose_kernels_cannot_run_are_refused(monkeypatch, capability, works):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    driver_knows(monkeypatch, 13000)
    assert (engines.cuda_problem() is None) == works and engines.choose("auto") == ("cuda" if works else "cpu")


@needs_module
@pytest.mark.parametrize("modules", ["_C_cpu, _C_cuda", "_C_cuda, _C_cpu"])
def test_one_process_can_use_both_engines(modules):
    code = f"from ep_dispatcher import {modules}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@needs_module
def test_an_event_raises_errors_as_the_buffer_words_them():
    from ep_dispatcher.engines.cuda.engine import StreamEvent

    def synchronize():
        raise ep.DisagreementError("the engine's")

    wording = Wording()
    wording.note = "layer 3"
    engine = SimpleNamespace(synchronize=synchronize, config=SimpleNamespace(wording=wording))
    with pytest.raises(ep.DisagreementError, match="layer 3: the engine's"):
        StreamEvent(engine).synchronize()


@pytest.fixture
def host_side():
    """An engine whose kernels never run, and the fields of the report that they would write."""
    from ep_dispatcher import _C_cuda

    config = _C_cuda.Config()
    config.ranks_per_node, config.num_experts, config.num_topk, config.max_tokens, config.hidden = 2, 64, 2, 64, 64
    config.num_nodes = 32  # 64 ranks: their bits need two words
    state = torch.zeros(_C_cuda.state_bytes(config, 4), dtype=torch.uint8)
    report = torch.zeros(_C_cuda.report_bytes(config), dtype=torch.uint8)
    regions = [1 << 20, 1 << 30]
    addresses = dict(regions=regions, rail=regions[:1], rail_pes=[], state=state.data_ptr(), report=report.data_ptr())
    engine = _C_cuda.Engine(config=config, timeout_s=0.1, num_sms=4, **addresses)
    return engine, report.view(torch.int32), report.view(torch.int64), (state, report)


@needs_module
def test_the_host_reads_what_kernels_report(host_side):
    engine, words, longs, _ = host_side
    assert engine.late() is None and engine.take_error() is None
    longs[0], longs[1] = 7, 123
    assert engine.wait_for_counts(0.01) == -2  # those of another dispatch
    longs[0] = 0  # the ticket of an engine that has planned nothing
    assert engine.wait_for_counts(0.01) == 123
    longs[0] = 7
    words[5], words[6], words[7], longs[4], longs[16], longs[17] = 1, 5, 2500, 42, 0b1101, 1
    words[4] = 1
    assert engine.late() == ("combine", "partial sums", 42, [1, 2, 63], 2.5)
    assert engine.wait_for_counts(10.0) == -1  # at once: a kernel has aborted
    words[4] = 0
    assert not engine.out_of_step() and not engine.has_report()
    words[10] = 1
    assert engine.out_of_step() and engine.has_report() and engine.wait_for_counts(10.0) == -1
    words[11] = 4
    words[12:16] = torch.tensor([3, 1, 0, 2])
    longs[8] = 2**40
    longs[24:28] = torch.tensor([5, 6, 7, 8])
    assert engine.take_error() == ("differ", [3, 1, 0, 2], 2**40, [(5, 6), (7, 8), *[(0, 0)] * 62])
    assert engine.take_error() is None


def test_ranks_of_a_node_must_be_neighbours():
    from ep_dispatcher.memory import Shape, check_cuda_sizes
    from ep_dispatcher.topology import Topology

    with pytest.raises(ValueError, match="^group has "):
        check_cuda_sizes(Topology(0, ((0, 2), (1, 3))), Shape(2, 2, 72, 2, 8, 64, torch.bfloat16))


LATE = "combine", "partial sums", 42, [1], 2.5
MISTAKES = [  # kind, detail, value, rows by rank; how its text begins, with the ranks that it names
    (("bad_entry", [3, 1, 0, 0], 9, []), "topk_idx[3, 1] is 9, "),
    (("bad_entry", [3, 1, 1, 0], 5, []), "topk_idx[3, 1] is expert 5 again, "),
    (
        ("too_few_rows", [1, 0, 0, 0], 0, [(40, 39), (3, 39)]),
        "max_recv_rows is too small: rank 0 needs 40 rows, but has 39",
    ),
    (("other_routing", [3, 1, 7, 2], 9, [(4, 0)]), "topk_idx[3, 1] is 9, but has to be 4, as in the plan"),
    (("too_many_rows", [64, 0, 0, 0], 0, [(5, -1), (2**40, -1)]), "expert_alignment is 64, with which rank 1 "),
    (
        ("too_many_to_node", [1, 0, 0, 0], 0, [(40, 39), (3, 39)]),
        "max_tokens_to_node is 39, which is too small: rank 0 has 40 tokens for another node. 40 is enough",
    ),
    (("differ", ["operation", 1, 1, 0], 0, []), "operation: rank 1 is in a combine, rank 0 is in a dispatch; "),
    (("differ", ["handle", 2, -6, 0], 1, []), "max_tokens_to_node: rank 2 gave 6, rank 1 gave no limit; all ranks "),
    (("differ", ["handle", 2, -6, 1], 1, []), "handle: rank 2 gave None, rank 1 gave the plan of epoch 1; "),
    (("differ", ["handle", 2, 2, 1], 1, []), "handle: rank 2 gave the plan of epoch 2, rank 1 "),
]


def report_of(kind, detail, value, rows):
    from ep_dispatcher import _C_cuda

    if kind == "differ":
        detail = [_C_cuda.COMPARED.index(detail[0]), *detail[1:]]
    return kind, detail, value, rows


@needs_module
@pytest.mark.parametrize("mistake,said", MISTAKES)
def test_mistakes_become_value_errors(mistake, said):
    """Where all ranks ask before their next operation: raised once, and the buffer stays usable."""
    reports, aborts = reports_of(mistake=report_of(*mistake))
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        reports.raise_found(ends=False)
    reports.raise_found(ends=False)
    reports.raise_found(ends=True)
    assert not aborts


@needs_module
@pytest.mark.parametrize("mistake,said", MISTAKES[:3])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_mistake_found_by_a_later_operation_ends_the_use_of_the_buffer(mistake, said, is_late):
    """Also where a peer has found it first, and refused what this rank had launched."""
    reports, aborts = reports_of(LATE if is_late else None, report_of(*mistake))
    seen = []
    for ends in (not is_late, True, False):
        with pytest.raises(ValueError) as caught:
            reports.raise_found(ends=ends)
        seen.append(str(caught.value))
    assert len(set(seen)) == 1 and seen[0].startswith(said) and "destroy() this" in seen[0]
    assert aborts == [1]


@needs_module
@pytest.mark.parametrize("mistake", [MISTAKES[0][0], MISTAKES[2][0], MISTAKES[-1][0], None])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_ranks_that_differ_end_the_use_of_a_buffer_with_messages(mistake, when):
    """Also where an earlier error, dropped or not, has kept the kernels from publishing the difference."""
    reports, aborts = reports_of(mistake=mistake and report_of(*mistake), has_messages=True)
    reports.overlooks = lambda error: True
    differs = mistake == MISTAKES[-1][0]
    if when == "later" and not differs:
        reports.raise_found(ends=False)
        assert not aborts
    reports._engine.out_of_step = lambda: not differs
    for ends in (False, True):
        with pytest.raises(ValueError, match="messages of the NCCL wire do not fit together; destroy"):
            reports.raise_found(ends=ends)
    assert aborts == [1]


@needs_module
def test_a_late_peer_ends_the_use_of_the_buffer():
    reports, _ = reports_of(LATE)
    for ends in (False, True):
        with pytest.raises(PeerTimeoutError) as caught:
            reports.raise_found(ends=ends)
        error = caught.value
        assert (error.operation, error.epoch, error.phase) == ("combine", 42, "partial sums")
        assert (error.rank, error.late_ranks, error.waited_s) == (0, (1,), 2.5)


@needs_module
def test_numbers_out_of_range_end_the_use_of_the_buffer():
    """Not a time-out: nobody was late, and to wait longer does not help."""
    from ep_dispatcher import _C_cuda

    assert "counts out of range" in _C_cuda.WRONG_NUMBERS and "counts" not in _C_cuda.WRONG_NUMBERS
    for phase in _C_cuda.WRONG_NUMBERS:
        reports, aborts = reports_of(("dispatch", phase, 42, [2], 0.0))
        for ends in (False, True):
            with pytest.raises(RuntimeError, match=f"epoch 42: rank 0 has read {phase}, written by rank 2") as caught:
                reports.raise_found(ends=ends)
            assert not isinstance(caught.value, PeerTimeoutError)
        assert aborts == [1]


@needs_module
def test_a_rank_that_finds_itself_masked_says_so():
    reports, aborts = reports_of((*LATE[:3], [0], LATE[-1]), masks=True)
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match="rank 0 came too late.*unmask.. on all ranks lets it in") as caught:
            reports.raise_found(ends=True)
        assert caught.value.late_ranks == (0,) and caught.value.epoch == 42
    assert aborts == [1]


@needs_module
def test_every_field_that_ranks_give_alike_has_words():
    """The order of checks.AGREED is that of no enum: fields are found by name."""
    from ep_dispatcher import _C_cuda

    for field in range(len(_C_cuda.COMPARED)):
        reports, _ = reports_of(mistake=("differ", [field, 1, 0, 1], 0, []))
        with pytest.raises(ValueError, match="all ranks must (give|call) the same"):
            reports.raise_found(ends=False)
