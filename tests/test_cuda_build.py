"""What of the CUDA engine can be tested without a GPU: what it compiles to, and what its host side does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ep_dispatcher import engines
from ep_dispatcher.errors import PeerTimeoutError

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "csrc/cuda").glob("*.cu"))
MAX_REGISTERS = 128

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_module = pytest.mark.skipif("cuda" not in engines.ENGINES, reason="built without the CUDA module")


@needs_nvcc
@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_kernels_spill_nothing(source, tmp_path):
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    command = ["nvcc", *flags, "-Icsrc", "-cubin", str(source), "-o", str(tmp_path / "kernels.cubin")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said.stderr)]
    assert registers and max(registers) <= MAX_REGISTERS
    assert spills and max(spills) == 0, said.stderr


@pytest.mark.parametrize(
    "wanted,path,said",
    [("2", None, "EP_DISPATCHER_CUDA: given '2', allowed: 0, 1"), ("1", "/nowhere", "there is no nvcc; install")],
)
def test_the_build_switch_is_checked(wanted, path, said):
    code = "import setuptools, sys; setuptools.setup = lambda **_: None; exec(open('setup.py').read())"
    code = f"import os, shutil; shutil.which = lambda *_, **__: None; {code}" if path else code
    env = os.environ | {"EP_DISPATCHER_CUDA": wanted}
    code = code.replace("open('setup.py').read()", "compile(open('setup.py').read(), 'setup.py', 'exec')")
    code = "__file__ = 'setup.py'; " + code
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode != 0 and said in result.stderr


@pytest.mark.skipif(engines.cuda_problem() is None, reason="this process can use a GPU")
def test_without_a_gpu_the_engine_says_why():
    with pytest.raises(ValueError, match="engine: given 'cuda', allowed: 'auto', 'cpu'"):
        engines.choose("cuda")
    assert engines.choose("auto") == "cpu"


@needs_module
@pytest.mark.parametrize("modules", ["_C_cpu, _C_cuda", "_C_cuda, _C_cpu"])
def test_one_process_can_use_both_engines(modules):
    code = f"from ep_dispatcher import {modules}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def host_side():
    """An engine whose kernels never run, and the fields of the report that they would write."""
    from ep_dispatcher import _C_cuda

    sizes = _C_cuda.Sizes()
    sizes.num_ranks, sizes.num_experts, sizes.num_topk, sizes.max_tokens, sizes.hidden = 2, 8, 2, 64, 64
    state = torch.zeros(_C_cuda.state_bytes(sizes, 4), dtype=torch.uint8)
    report = torch.zeros(_C_cuda.report_bytes, dtype=torch.uint8)
    regions = [1 << 20, 1 << 30]
    engine = _C_cuda.Engine(sizes, regions, state.data_ptr(), report.data_ptr(), 0.1, 4)
    return engine, report.view(torch.int32), report.view(torch.int64), (state, report)


@needs_module
def test_the_host_reads_what_kernels_report(host_side):
    engine, words, longs, _ = host_side
    assert engine.late() is None and engine.take_mistake() is None
    longs[0], longs[1] = 7, 123
    assert engine.wait_for_counts(7) == 123
    words[4], words[5], words[6], words[7], longs[4] = 0b10, 1, 5, 2500, 42
    assert engine.late() == (1, 5, 42, [1], 2.5)
    assert engine.wait_for_counts(8) == -1  # at once: a kernel gave up
    words[10], words[11], words[12], words[13], longs[7] = 4, 3, 1, 0, 2**40
    longs[8:12] = torch.tensor([5, 6, 7, 8])
    assert engine.take_mistake() == (4, 2**40, [3, 1, 0], [5, 6, 7, 8]) and engine.take_mistake() is None


EPOCH = 6  # of the operation with the mistake


class Reports:
    """Stands for the compiled engine, with what its kernels have reported."""

    def __init__(self, late=None, mistake=None):
        self._late, self._mistake = late, mistake and (mistake[0], EPOCH, *mistake[1:])

    def late(self):
        return self._late

    def take_mistake(self):
        mistake, self._mistake = self._mistake, None
        return mistake


class Regions:
    """Stands for the symmetric memory of all ranks."""

    def __init__(self, num_ranks: int):
        self.flags = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)

    def get_buffer(self, rank, sizes, dtype):
        assert dtype == self.flags.dtype and sizes == self.flags[rank].shape
        return self.flags[rank]


def engine_with(reports: Reports):
    """Rank 0 of 3; what it has told its peers is in ``engine._symmetric.flags``."""
    from ep_dispatcher.engines.cuda import CudaEngine

    class Store:
        def set(self, *_):
            raise RuntimeError("gone")

    engine = CudaEngine.__new__(CudaEngine)
    engine._c, engine._failure, engine._stream, engine._launched = reports, None, None, 0
    engine._state = torch.tensor([EPOCH]).view(torch.uint8)
    engine._config = SimpleNamespace(num_experts=8, store=Store())
    engine._topology = SimpleNamespace(rank=0, num_ranks=3)
    engine._symmetric, engine._one, engine._to_peers = Regions(3), torch.ones(1, dtype=torch.int64), None
    return engine


def told(engine) -> list[int]:
    """Which ranks rank 0 has told that it gave up; it speaks for nobody else."""
    flags = engine._symmetric.flags
    assert not flags[:, 1:].any()
    return flags[:, 0].tolist()


HANDLES = "handle: rank 1 gave the plan of epoch 2, rank 0 gave the plan of epoch 1; all ranks must give the same"
MISTAKES = [
    ((1, [3, 1, 0], [9, 0, 0, 0]), "topk_idx[3, 1]: given 9, allowed: -1 (no expert), or an expert from 0 to 7"),
    ((1, [3, 1, 1], [5, 0, 0, 0]), "topk_idx[3, 1]: given expert 5 again, allowed: every expert at most once in a row"),
    ((2, [1, 0, 0], [40, 39, 3, 39]), "max_recv_rows: too small: rank 0 needs 40 rows, given 39"),
    (
        (3, [64, 0, 0], [2**40, -1, 0, -1]),
        f"expert_alignment: given 64, with which rank 0 receives {2**40} rows; allowed: up to 2147483647 rows of a "
        "rank in one dispatch",
    ),
    ((4, [1, 1, 1], [0, 0, 0, 0]), "layout: rank 1 gave 'expert', rank 0 gave 'rank'; all ranks must give the same"),
    ((4, [4, 2, 0], [1, 0, 0, 0]), "topk_weights: rank 2 gave None, rank 0 gave them; all ranks must give the same"),
    ((4, [5, 1, 64], [128, 0, 0]), "x: bytes per row: rank 1 gave 64, rank 0 gave 128; all ranks must give the same"),
    ((4, [0, 1, 2], [1, 0, 0, 0]), HANDLES),
]


@needs_module
@pytest.mark.parametrize("launched", [0, 1, 5])
@pytest.mark.parametrize("mistake,said", MISTAKES)
def test_mistakes_become_value_errors(mistake, said, launched):
    """At once after the operation, where all ranks find them: raised once, and the buffer is as good as before."""
    engine = engine_with(Reports(mistake=mistake))
    engine._launched = launched
    with pytest.raises(ValueError) as caught:
        engine.synchronize()
    assert str(caught.value) == said
    engine.synchronize()
    engine._check()
    assert told(engine) == [0, 0, 0]


@needs_module
@pytest.mark.parametrize("mistake,said", MISTAKES[:3])
@pytest.mark.parametrize("late", [None, (1, 5, 42, [1], 2.5)])
def test_a_mistake_found_by_a_later_operation_ends_the_use_of_the_buffer(mistake, said, late):
    """Also where a peer has found it first, and refused what this rank had launched."""
    engine = engine_with(Reports(mistake=mistake, late=late))
    seen = []
    for ask in (engine._check if late is None else engine.synchronize, engine._check, engine.synchronize):
        with pytest.raises(ValueError) as caught:
            ask()
        seen.append(str(caught.value))
    assert len(set(seen)) == 1 and seen[0].startswith(f"{said}. Found when other") and "destroy() this" in seen[0]
    assert told(engine) == [1, 1, 1]


@needs_module
def test_a_mistake_found_behind_a_later_operation_ends_the_use_of_the_buffer():
    """What this rank launched behind the dispatch, others may have refused."""
    mistake, said = MISTAKES[0]
    engine = engine_with(Reports(mistake=mistake))
    engine._launched, engine._state = 2, torch.tensor([EPOCH + 1]).view(torch.uint8)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            engine.synchronize()
        assert str(caught.value).startswith(f"{said}. Found when other")
    assert told(engine) == [1, 1, 1]


@needs_module
def test_a_rank_that_gives_up_tells_its_peers():
    engine = engine_with(Reports())
    engine._give_up(lambda: RuntimeError("no memory"))
    assert told(engine) == [1, 1, 1]
    with pytest.raises(RuntimeError, match="no memory"):
        engine._check()


@needs_module
def test_a_lost_device_does_not_hide_why_a_rank_gives_up():
    engine = engine_with(Reports())
    engine._symmetric = SimpleNamespace()
    engine._symmetric.get_buffer = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error"))
    engine._give_up(lambda: RuntimeError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        engine._check()


@needs_module
def test_a_late_peer_ends_the_use_of_the_buffer():
    engine = engine_with(Reports(late=(1, 5, 42, [1], 2.5)))
    for ask in (engine.synchronize, engine._check):
        with pytest.raises(PeerTimeoutError) as caught:
            ask()
        error = caught.value
        assert (error.operation, error.epoch, error.phase) == ("combine", 42, "partial sums")
        assert (error.rank, error.late_ranks, error.waited_s) == (0, (1,), 2.5)
    assert told(engine) == [0, 0, 0]  # its kernel has told them
