"""Headers of kernels, compiled for the host: long puts between nodes, and a division."""

import shutil
import subprocess
from pathlib import Path

import pytest
from lib.commands import ROOT, compile_header

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def build_long_puts(folder: Path, change: tuple[str, str] | None = None) -> Path:
    """Compile csrc/cuda/rail/long_puts.cuh with one change. The wire is the program's own: copies take any time."""
    header = ROOT / "csrc/cuda/rail/long_puts.cuh"
    return compile_header(header, "long_puts", folder, "-O1", empty=("rail/wire.cuh",), change=change)


def is_right(program: Path, seed: int, shared_bytes: int) -> bool:
    command = [program, str(seed), str(shared_bytes), "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100).stdout.strip() == "right"


def test_all_arrives_whenever_copies_happen(tmp_path):
    program = build_long_puts(tmp_path)
    for shared_bytes in (176, 384, 4096, 14336):  # of one warp: the least, with places of 16 bytes, to a dispatch's
        assert all(is_right(program, seed, shared_bytes) for seed in range(10)), shared_bytes


@pytest.mark.parametrize(
    "change",
    [
        ("bulk_wait_read<1>", "bulk_wait_read<2>"),  # a place is loaded while a store still reads it
        ("ptx::bulk_wait<0>", "ptx::bulk_wait_read<0>"),  # the flag would come before the data
        ("stored / kPlaces % 2", "stored % 2"),
        ("rest + beside.bytes <= place_bytes", "true"),  # the short array runs into the next place
    ],
    ids=["read", "drain", "parity", "room"],
)
def test_a_mistake_in_long_puts_is_found(tmp_path, change):
    broken = build_long_puts(tmp_path, change)
    assert not all(is_right(broken, seed, 14336) for seed in range(10))


def test_quotients_are_rounded_as_in_ieee_754(tmp_path):
    """The division of csrc/cuda/dispatch/quantize.cuh, tried with all numbers: 10^9."""
    program, source = tmp_path / "division", ROOT / "tests" / "division.cpp"
    flags = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off"]
    subprocess.run(["c++", *flags, source, "-o", program], check=True, timeout=300)
    assert subprocess.run([program], capture_output=True, text=True, timeout=300, check=True).stdout == "0\n"
