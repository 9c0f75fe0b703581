"""Faults at each call of NCCL and CUDA while an NCCL wire is made or ends: the caller goes on, and nothing is left.

tests/nccl_faults.cpp plays NCCL and CUDA, so no GPU is needed. It guards against a communicator that nobody could abort
before its first message, and against what constructors left behind when they threw midway.
"""

import subprocess
from pathlib import Path

import pytest
from lib.commands import ROOT

from ep_dispatcher.tools.nvcc import find_for_build

NVCC = find_for_build()
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")
LIMIT_MS = 300  # of the program
FLAGS = ["-std=c++17", "-O1", "--expt-relaxed-constexpr", "-arch=sm_90", f"-I{ROOT / 'csrc'}"]
SOURCES = [ROOT / "tests/nccl_faults.cpp", ROOT / "csrc/cuda/rail/messages.cu"]
NOTHING = "0 streams, 0 events, 0 memories, 0 communicators"
NO_MISTAKES = "0 ended twice, 0 used after their end, 0 ended in use"


def build(folder: Path, objects: list[Path], change: tuple[str, str] | None = None) -> Path:
    """Link the program, with a change of csrc/cuda/nccl.cpp."""
    text = (ROOT / "csrc/cuda/nccl.cpp").read_text()
    if change is not None:
        assert text.count(change[0]) == 1
        text = text.replace(*change)
    source, program = folder / "nccl.cpp", folder / "nccl_faults"
    source.write_text(text)
    command = [NVCC, *FLAGS, "-cudart=none", source, *objects, "-Xcompiler=-pthread,-rdynamic", "-ldl", "-o", program]
    subprocess.run(command, check=True, timeout=300)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("objects")
    built = [folder / f"{source.stem}.o" for source in SOURCES]
    for source, to in zip(SOURCES, built, strict=True):
        subprocess.run([NVCC, *FLAGS, "-c", source, "-o", to], check=True, timeout=300)
    return built


@pytest.fixture(scope="module")
def program(objects, tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("nccl_faults"), objects)


def run(program: Path, *words: str) -> dict[str, str]:
    command = [str(program), *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return dict(line.split(": ", 1) for line in said.splitlines())


def assert_nothing_is_left(said: dict[str, str]) -> None:
    assert said["left"] == NOTHING and said["mistakes"] == NO_MISTAKES, said


def calls_of(program: Path, *words: str) -> range:
    return range(1, int(run(program, *words)["calls"]) + 1)


@pytest.mark.parametrize("end", [[], ["destroy"], ["drop"]], ids=["abort", "destroy", "drop"])
def test_a_communicator_is_made_and_ends(program, end):
    said = run(program, "comm", *end)
    assert said["result"] == said["end"] == "right"
    assert_nothing_is_left(said)


def test_each_call_of_a_communicator_fails(program):
    for call in calls_of(program, "comm"):
        said = run(program, "comm", f"fail:{call}")
        error = said["result"] if said["failed"] != "ncclCommAbort" else said["end"]
        cause = "remote process exited" if said["failed"].startswith("nccl") else "unknown error"
        assert cause in error, said
        assert_nothing_is_left(said)


@pytest.mark.exhaustive
def test_each_call_of_a_communicator_hangs(program):
    """A peer stops there until long after the limit. A thread inside NCCL then frees what it gets."""
    for call in calls_of(program, "comm")[:-1]:  # the last one is the end
        said = run(program, "comm", f"hang:{call}")
        assert said["result"] == "late" and "was freed while it was made" in said["thread"], said
        assert LIMIT_MS <= int(said["went on"]) < LIMIT_MS + 2500, said
        assert_nothing_is_left(said)


def test_a_peer_is_gone_before_the_first_message(program):
    """The kernel of the first message ends by an abort at the limit, and so does the thread that waits for it."""
    said = run(program, "comm", "gone")
    assert said["result"] == "late" and "was freed while it was made" in said["thread"], said
    assert LIMIT_MS <= int(said["went on"]) < LIMIT_MS + 1000, said
    assert_nothing_is_left(said)


@pytest.mark.parametrize(
    "change,words",
    [
        (("if (!lock && connects_) return;", ""), ["hang:9"]),  # an abort while another thread is in ncclGroupEnd
        (("  is_freed_ = true;\n", ""), ["hang:1"]),  # the thread does not learn that it is too late
        (("comm_ = comm;  // NCCL", "if (result == 0) comm_ = comm;  // NCCL"), ["fail:1"]),
        (("NcclComm::~NcclComm() { abort_if_left(); }", "NcclComm::~NcclComm() {}"), ["drop"]),
    ],
    ids=["abort in use", "too late", "after an error", "no destructor"],
)
def test_a_mistake_in_the_code_is_found(objects, tmp_path, change, words):
    said = run(build(tmp_path, objects, change), "comm", *words)
    assert said["left"] != NOTHING or said["mistakes"] != NO_MISTAKES or said.get("thread") == "right", said


def test_each_call_of_the_messages_fails(program):
    for call in calls_of(program, "messages"):
        said = run(program, "messages", f"fail:{call}")
        assert said["result"] != "right", said
        assert_nothing_is_left(said)


def test_the_first_launch_of_the_messages_has_a_limit(program):
    said = run(program, "messages", "busy")
    assert "no room on the GPU" in said["result"], said
    assert_nothing_is_left(said)
