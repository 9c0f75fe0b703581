"""Wrong numbers from another rank: each ends in an error that names it, or harms nobody else; never a crash.

Guards a fault: counts, lists and calls of other ranks, from shared memory and from messages between nodes, were used as
indices without a check.
"""

import fcntl
import os
import pickle
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import on_ranks, sparsely
from lib.commands import ROOT
from lib.errors import assert_refused
from lib.round_trip import inputs, make_buffer

import ep_dispatcher as ep
from ep_dispatcher.errors import PeerDataError

SHAPES = ["expert", "rank", "spare", "decode", "masks", "nodes", "decode nodes", "away"]
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wno-unknown-pragmas"]

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def compile_source(source: Path, folder: Path) -> Path:
    built = folder / f"{source.stem}.o"
    subprocess.run(["c++", *FLAGS, "-I", ROOT / "csrc", "-c", source, "-o", built], check=True, timeout=300)
    return built


def link(objects: dict[str, Path], folder: Path) -> Path:
    program = folder / "lying_rank"
    subprocess.run(["c++", *FLAGS, *objects.values(), "-o", program], check=True, timeout=300)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The CPU engine, and tests/lying_rank.cpp, which drives it. Compiled once for all processes of this test run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "lying_rank"
    folder.mkdir(exist_ok=True)
    sources = [*(ROOT / "csrc/cpu").glob("*.cpp"), ROOT / "tests/lying_rank.cpp"]
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            list(pool.map(lambda source: compile_source(source, folder), sources))
            (folder / "done").touch()
    return {source.stem: folder / f"{source.stem}.o" for source in sources}


def run(program: Path, shape: str, *options: int) -> tuple[int, str]:
    command = [program, shape, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("every", [pytest.param(29, id="some"), pytest.param(2, id="all")])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_of_a_lying_rank_does_harm(objects, tmp_path, shape, every):
    """Every field of its calls, counts, lists, flags and messages becomes others, one at a time, under sanitizers.

    Each becomes seven numbers; of these cases every second one runs, so that no field is left out.
    """
    code, text = run(link(objects, tmp_path), shape, every, 3 % every)
    assert code == 0, text
    ends = {end: int(count) for end, count in (line.split(": ") for line in text.splitlines())}
    assert ends["bad data"] > 20 and ends["refused"] > 5 and ends["right"] > 50 and ends["changed plans"] > 1000, text


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check,shape",
    [("check_number", "nodes"), ("check_counts", "expert"), ("check_list", "nodes")],
)
def test_without_a_check_it_would(objects, tmp_path, check, shape):
    text = (ROOT / "csrc/cpu/peer_data.cpp").read_text()
    begin = text.index(f"void {check}(")
    brace = text.index(") {\n", begin) + len(") {\n")
    changed = tmp_path / "peer_data.cpp"
    changed.write_text(f"{text[:brace]}  return;\n{text[brace:]}")
    broken = {**objects, "peer_data": compile_source(changed, tmp_path)}
    code, output = run(link(broken, tmp_path), shape, 2)
    assert code != 0, output


# Kinds of messages between nodes, as the engine numbers them: (kind, int32 of the message, its field, operation)
LIES = [
    (0, 19, "num_tokens", "dispatch"),
    (0, 0, "the rank in its call", "dispatch"),
    (1, 0, "slot_begin[0]", "dispatch"),
    (2, 0, "the rank in its call", "dispatch"),
    (3, 0, "the rank in its call", "combine"),
]


@pytest.mark.parametrize("kind,place,field,operation", sparsely(LIES, 3))
@on_ranks(2)
def test_a_wrong_message_ends_the_buffer_and_names_its_sender(rank, kind, place, field, operation):
    """Two nodes of one rank. Rank 1 sends one number too many: rank 0 says so, and rank 1 learns that rank 0 left."""
    with make_buffer(engine="cpu", ranks_per_node=1, timeout_s=20) as buffer:
        rail = buffer._engine._rail
        send = rail.send

        def lie(phase, node, message, tag, **options):
            if rank == 1 and tag & 7 == kind:
                message.cast("B").cast("i")[place] += 1000
            send(phase, node, message, tag, **options)

        rail.send = lie
        x, topk_idx, topk_weights = inputs(rank)

        def both() -> None:
            out = buffer.dispatch(x, topk_idx, topk_weights)
            buffer.combine(out.x, out.handle)

        if rank == 1:
            with pytest.raises(ep.PeerTimeoutError) as late:
                both()
                both()  # where rank 0 finds the lie in the last message
            assert late.value.late_ranks == (0,) and late.value.waited_s < 10
            return
        with pytest.raises(PeerDataError, match=", epoch .: rank 0 got data of rank 1 that cannot be right") as caught:
            both()
        error = caught.value
        assert (error.operation, error.rank, error.sender, error.field) == (operation, 0, 1, field)
        assert not error.least <= error.found <= error.most
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        with pytest.raises(RuntimeError, match="gave up in .*, by PeerDataError: "):
            both()


@on_ranks(2)
def test_a_changed_plan_is_refused(rank):
    """A plan lies in memory of the caller, whom hooks on saved tensors may have helped to change it."""
    with make_buffer(engine="cpu") as buffer:
        x, topk_idx, topk_weights = inputs(rank)
        out = buffer.dispatch(x, topk_idx, topk_weights)
        plan = out.handle.plan
        for index in (4, 16, plan.numel() // 2, plan.numel() - 1):
            plan[index] += 1
            assert_refused("handle", buffer.combine, out.x, out.handle)
            assert_refused("handle", buffer.dispatch, x, handle=out.handle)
            plan[index] -= 1
        buffer.combine(out.x, out.handle)
