"""Whom waits of the CUDA engine blame: csrc/cuda/sync/wait.cuh, compiled for the host, where a lane is a fiber.

A rank that waits may be waited for itself. Every survivor has to name the rank at the end of such a chain, also where
the host of no other rank looks at its report.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import exhaustive
from lib.commands import ROOT, compile_header

from ep_dispatcher.engines.cuda.aborts import rank_set

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
HEADER = ROOT / "csrc/cuda/sync/wait.cuh"
LIMIT_MS = 500
WORD, SLOTS, PUSHED, SUMMED = 1, 4, 5, 7  # of Phase in csrc/cuda/state.h


class Result(NamedTuple):
    late: list[list[int] | None]  # by rank; None: no report
    waited_ms: list[int]  # 0 without a report
    waits: list[bool]  # in the order of the steps


def build(folder: Path, change: tuple[str, str] | None = None) -> Path:
    """Compile the program, with one change of the header. Wire and instructions there are the program's own."""
    return compile_header(
        HEADER, "waits", folder, "-O0", "-pthread", empty=("rail/wire.cuh", "device/ptx.cuh"), change=change
    )


def run(program: Path, num_nodes: int, ranks_per_node: int, steps: str) -> Result:
    command = [program, *map(str, (num_nodes, ranks_per_node, LIMIT_MS)), *steps.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    parts = [line.partition("after ") for line in said[:-1]]
    late = [None if names == "-" else [int(name) for name in names.split()] for names, _, _ in parts]
    return Result(late, [int(ms or 0) for *_, ms in parts], [word == "1" for word in said[-1].split()])


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("waits"))


# By name: nodes, ranks of a node, steps, and whom each rank names. Rank 2 is late, unless another one is said to be.
CASES = {
    # Rank 0 pushes to rank 1, which sums what rank 2 has pushed. Rank 0 waits for free slots, and earlier.
    "the owner of slots waits later": ((1, 3), f"wait:0:0:{SLOTS}:1 wait:1:300:{PUSHED}:2", [[2], [2], None]),
    "the owner of slots is late": ((1, 2), f"wait:0:0:{SLOTS}:1", [[1], None]),
    "a late rank is passed on": ((1, 3), f"wait:0:300:{PUSHED}:1 wait:1:0:{PUSHED}:2", [[2], [2], None]),
    "a rank that may still come is not late": (
        (1, 4),
        f"wait:0:300:{PUSHED}:1,3 wait:1:0:{PUSHED}:2 raise:0:900:3",
        [[2], [2], None, None],
    ),
    # Rank 0 gives up on rank 1, which waits for 0 too, but could not go on: it has no rows of rank 2.
    "a rank that is named waits itself": ((1, 3), f"wait:0:0:{PUSHED}:1 wait:1:350:{PUSHED}:0,2", [[1], [2], None]),
    "a late rank that wakes up names itself": (
        (1, 3),
        f"wait:0:0:{PUSHED}:2 wait:1:0:{PUSHED}:2 wait:2:1000:{PUSHED}:0,1",
        [[2], [2], [2]],
    ),
    # Rank 1 is late in pushes on node 0. Ranks 2 and 3 wait for sums of that node, rank 2 in two warps.
    "sums of another node": (
        (2, 2),
        f"wait:0:300:{PUSHED}:1 wait:2:0:{SUMMED}:0 wait:2:0:{SUMMED}:0/2 wait:3:0:{SUMMED}:1",
        [[1], None, [1], [1]],
    ),
    # Rank 3 does not come. Rank 1 is its relay on node 0; rank 3 itself would relay rank 1.
    "a relay is late": (
        (2, 2),
        f"wait:0:0:{PUSHED}:3/1 wait:1:200:{PUSHED}:3 wait:2:0:{PUSHED}:0/2,1/3,3 raise:2:100:0",
        [[3], [3], [3], None],
    ),
    "a rank that has left and names nobody": ((1, 2), f"wait:0:0:{PUSHED}:1 leave:1:100:-1", [[1], None]),
    "a rank that has left": ((1, 2), f"wait:0:0:{PUSHED}:1 leave:1:100", [[1], None]),
    "a flag that rose before its rank left": ((1, 2), f"raise:0:50:1 leave:1:50 wait:0:100:{PUSHED}:1", [None, None]),
    # All ranks have announced the operation, and their words should be on their way.
    "a word that does not come": ((1, 3), f"word:0:0:{WORD}:2 word:1:200:{WORD}:2", [[2], [2], None]),
    "a word within the limit": ((1, 2), f"word:0:0:{WORD}:1 send:0:300:1", [None, None]),
    "a word of a rank that has left": ((1, 2), f"word:0:0:{WORD}:1 leave:1:100", [[1], None]),
    "a word of a rank that names another one": ((1, 3), f"word:0:0:{WORD}:1 leave:1:100:2", [[2], None, None]),
    "a word of a rank that names only its reader": ((1, 2), f"word:0:0:{WORD}:1 leave:1:100:0", [[1], None]),
    # The reader looks for the word, and pauses. Then it sees that the rank has left.
    "a word that came before its rank left": ((1, 2), f"word:0:0:{WORD}:1:300 send:0:50:1 leave:1:150", [None, None]),
    # A tagged sum is sent only after all ranks have announced the combine.
    "a late rank that wakes up and waits for a sum names itself": (
        (1, 3),
        f"wait:0:0:{PUSHED}:2 wait:1:0:{PUSHED}:2 word:2:1000:{PUSHED}:0",
        [[2], [2], [2]],
    ),
    "a sum of a rank that has left and names nobody": ((1, 2), f"word:0:0:{PUSHED}:1 leave:1:100:-1", [[1], None]),
    # A sum of rank 0 for itself hangs on a wait for a word of rank 1, which begins later.
    "an own sum names nobody": ((1, 2), f"word:0:0:{PUSHED}:0 word:0:300:{WORD}:1", [[1], None]),
    "the last of 64 ranks": ((8, 8), f"wait:0:0:{PUSHED}:63/7,31/7", [[31, 63], *[None] * 63]),
    "the last of 512 ranks": (
        (32, 16),
        f"wait:0:1200:{PUSHED}:1 wait:1:0:{PUSHED}:511/15,62/14,63/15,300/12",
        [[62, 63, 300, 511]] * 2 + [None] * 510,
    ),
    "a word of a rank that names a far one": ((9, 8), f"word:0:0:{WORD}:1 leave:1:100:70", [[70], *[None] * 71]),
}


@pytest.fixture(scope="module")
def results(program) -> dict[str, Result]:
    """Of all cases; they run side by side, because they only wait."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CASES, pool.map(lambda name: run(program, *CASES[name][0], CASES[name][1]), CASES)))


@pytest.mark.parametrize("name", CASES)
def test_every_survivor_names_the_late_rank(results, name):
    result = results[name]
    assert result.late == CASES[name][-1]
    assert max(result.waited_ms) < LIMIT_MS + 5000
    steps = [step.split(":") for step in CASES[name][1].split()]
    assert result.waits == [result.late[int(rank)] is None for kind, rank, *_ in steps if kind in ("wait", "word")]


def test_nobody_waits_for_a_rank_that_has_given_up(results):
    """Its limit is not over: it began later."""
    waited_ms = results["a late rank is passed on"].waited_ms
    assert waited_ms[0] < LIMIT_MS <= waited_ms[1]
    for name in ("a word of a rank that has left", "a word of a rank that names only its reader"):
        assert results[name].waited_ms[0] < LIMIT_MS


MISTAKES = {
    "patience": ("kPatienceNs = 1'000'000'000", "kPatienceNs = 0", "the owner of slots waits later"),
    "sums": ("phase == Phase::kNodeSums", "false", "sums of another node"),
    "node": (
        "raise_on_node(context, aborted, names)",
        "raise_on_node(context, aborted, 1)",
        "a late rank is passed on",
    ),
    "rail": (".signal(node, aborted, names)", ".signal(node, aborted, 1)", "sums of another node"),
    "relay": ("is_relayed ||", "false ||", "a relay is late"),
    "slow": (": is_over ?", ": waits ?", "a rank that may still come is not late"),
    "itself": ("waits && !named ? RankSet::bit(rank, word) : 0", "0", "a rank that is named waits itself"),
    "words": (
        "waited > op.context.timeout_ns) {\n    // The rank",
        "waited > 0) {\n    // The rank",
        "a word within the limit",
    ),
    "again": ("if (arrived == num) return false;", "", "a word that came before its rank left"),
    "reader": (
        "if (others != 0)\n      abort",
        "if (named)\n      abort",
        "a word of a rank that names only its reader",
    ),
    "own": ("if (rank == op.rank()) return", "if (false) return", "an own sum names nobody"),
    "woken": (
        "Phase::kSums && own != 0",
        "Phase::kSums && false",
        "a late rank that wakes up and waits for a sum names itself",
    ),
    "left": ("Phase::kSums && own != 0", "Phase::kSums", "a sum of a rank that has left and names nobody"),
    "bits": ("bits >> 32", "bits >> 31", "the last of 64 ranks"),
    "names": (
        "return named ? ptx::load_acquire(names_by(op, raiser) + word)",
        "return named ? ptx::load_acquire(names_by(op, raiser))",
        "the last of 512 ranks",
    ),
}


# All are found by the same cases; each costs a compilation.
@pytest.mark.parametrize("mistake", [*list(MISTAKES)[:2], *map(exhaustive, list(MISTAKES)[2:])])
def test_a_mistake_is_found(tmp_path, mistake):
    old, new, name = MISTAKES[mistake]
    sizes, steps, named = CASES[name]
    assert run(build(tmp_path, (old, new)), *sizes, steps).late != named


@pytest.mark.parametrize(
    "ranks,words",
    [([0], [3]), ([1, 3, 3], [21]), ([61, 62], [1 - (1 << 62)]), ([63], [1, 1]), ([0, 191], [3, 0, 0, 1])],
)
def test_a_host_names_ranks_as_kernels_do(ranks, words):
    """In words of int64, whose bits are those of the uint64: 1 for the first word, and 2 << rank."""
    assert rank_set(ranks, len(words)) == words
