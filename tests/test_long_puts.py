"""Long puts between nodes: csrc/cuda/rail/long_puts.cuh, compiled for the host with bulk copies that take any time."""

import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, compile_header

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
HEADER = ROOT / "csrc/cuda/rail/long_puts.cuh"


def build(folder: Path, change: tuple[str, str] | None = None) -> Path:
    """Compile the program, with one change of the header. The wire there is the program's own."""
    return compile_header(HEADER, "long_puts", folder, "-O1", empty=("rail/wire.cuh",), change=change)


def run(program: Path, seed: int, shared_bytes: int) -> str:
    command = [program, str(seed), str(shared_bytes), "300"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100).stdout.strip()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("long_puts"))


# Of one warp: 176 is the least, with places of 16 bytes; 14336 is what a dispatch gives.
@pytest.mark.parametrize("shared_bytes", [176, 384, 4096, 14336])
def test_all_arrives_whenever_copies_happen(program, shared_bytes):
    for seed in range(10):
        assert run(program, seed, shared_bytes) == "right"


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
def test_a_mistake_is_found(tmp_path, change):
    broken = build(tmp_path, change)
    assert any(run(broken, seed, 14336) != "right" for seed in range(10))
