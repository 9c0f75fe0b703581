"""What all tests share: the engines to test, marks of cases, and processes that live as long as the session."""

import contextlib
import gc
import importlib
import inspect
import os
from collections import defaultdict

import pytest
import torch

from ep_dispatcher import engines
from ep_dispatcher.engines.cpu.engine import CpuEngine
from ep_dispatcher.tools.testing import RankPool

pytest.register_assert_rewrite("lib")  # so that an assert there shows its values too

# EP_TEST_ENGINES chooses; tests of an engine that cannot run here are skipped.
NO_CUDA = engines.cuda_problem()
ENGINES = os.environ.get("EP_TEST_ENGINES", "cpu" if NO_CUDA else "cpu cuda").split()
os.environ.setdefault("EP_DISPATCHER_ENGINE", "cpu")  # of tests that name none
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # there may be fewer GPUs than ranks

torch.set_num_threads(1)  # the ranks need the cores
HANG_S = 300.0  # of a run on ranks: on a busy machine some that compile take minutes


def on(engine: str, *values):
    """Parameters of a test, which is skipped where that engine cannot run."""
    skip = pytest.mark.skipif(engine == "cuda" and NO_CUDA is not None, reason=f"no GPU: {NO_CUDA}")
    return pytest.param(engine, *values, marks=skip)


def exhaustive(*values):
    """Mark a case that repeats a path in another shape: ``make test`` leaves it out, and CI runs it.

    A whole test is marked so if it starts a command or an example in processes of their own, which takes seconds.
    """
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def sparsely(cases, step: int = 2) -> list:
    """Mark all but every ``step``-th case exhaustive: they take one path in turn."""
    values = [case if type(case) is tuple else (case,) for case in cases]
    return [exhaustive(*given) if n % step else pytest.param(*given) for n, given in enumerate(values)]


def long(*values):
    """Mark an exhaustive case that costs far more than it can find in most changes: ``make test-all`` alone has it."""
    return pytest.param(*values, marks=[pytest.mark.exhaustive, pytest.mark.long])


@pytest.hookimpl(tryfirst=True)  # before -m leaves cases out
def pytest_collection_modifyitems(config, items):
    """Refuse a test all of whose cases are exhaustive, unless the whole function is marked so."""
    if config.option.markexpr == "not exhaustive" and not config.option.keyword:
        stays = defaultdict(bool)  # by test: whether a case is left, or the function itself is marked
        for item in items:
            marks = getattr(item.function, "pytestmark", [])
            is_left = item.get_closest_marker("exhaustive") is None
            stays[item.nodeid.partition("[")[0]] |= is_left or any(mark.name == "exhaustive" for mark in marks)
        missing = {name for name, is_there in stays.items() if not is_there}
        if missing:
            raise pytest.UsageError(
                f"{sorted(missing)}: all cases are exhaustive: leave one out, or mark the whole function"
            )


@pytest.fixture(params=[on(engine) for engine in ENGINES])
def engine(request) -> str:
    return request.param


def as_test(body, parameters: list[str], run):
    """A test with these parameters that calls ``run(body, **parameters)``, which sends the body to ranks."""

    def test(**given):
        run(body, **given)

    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    body.__name__ = body.__qualname__ = f"body_of_{test.__name__}"  # the ranks import it by this name
    body.__globals__[body.__name__] = body
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    return test


_mapped_before: set[str] = set()  # of a rank, when its test began


def load(rank: int, body) -> None:
    """A run before that of the body: a rank may need seconds to import the body's module, and others would time out."""
    from lib.faults import mappings  # not before its asserts can be rewritten

    _mapped_before.clear()
    _mapped_before.update(mappings())


def leaves_nothing(rank: int) -> None:
    """A run behind that of the body: later tests of these ranks look for memory that their own buffers leave."""
    from lib.faults import mappings

    if not _mapped_before.issuperset(mappings()):
        gc.collect()
    assert _mapped_before.issuperset(mappings()), "a buffer is left to the tests that come"


def on_ranks(num_ranks: int | None = None, *, fresh: bool = False, **options):
    """Run the body of a test on that many ranks. It takes the rank, and then the test's fixtures and cases.

    num_ranks: without it, as many as the test's case ``num_ranks`` says
    fresh: whether the ranks are this test's alone, which may change or end them
    options: of RankPool.run
    """

    def run(body, pools, **given):
        number = num_ranks or given["num_ranks"]
        with RankPool(number, timeout_s=HANG_S) if fresh else contextlib.nullcontext(pools(number)) as pool:
            pool.run(load, body)
            pool.run(body, *given.values(), **options)
            if not fresh:
                pool.run(leaves_nothing)

    return lambda body: as_test(body, ["pools", *list(inspect.signature(body).parameters)[1:]], run)


@contextlib.contextmanager
def launched_operations():
    """Yield a list that gets "dispatch" or "combine" for every operation that this rank launches."""
    launched: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dispatch", "combine"):
            for kind in engine_classes():
                old = getattr(kind, name)

                def launch(*given, old=old, name=name):
                    launched.append(name)
                    return old(*given)

                patch.setattr(kind, name, launch)
        yield launched


def engine_classes() -> list[type]:
    """Return the classes of engines whose operations a test may watch."""
    if NO_CUDA:
        return [CpuEngine]
    return [CpuEngine, importlib.import_module("ep_dispatcher.engines.cuda.engine").CudaEngine]


@contextlib.contextmanager
def planned_dispatches():
    """Yield a list that gets "plan" for every dispatch of this rank that makes a plan, and "reuse" for the others."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in engine_classes():

            def note(engine, request, run=kind.dispatch):
                seen.append("plan" if request.plan is None else "reuse")
                return run(engine, request)

            patch.setattr(kind, "dispatch", note)
        yield seen


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request) -> str:
    """Where the operands of one process lie."""
    return request.param


@pytest.fixture
def make_hosts():
    """``make_hosts(num, **options)``: two_hosts.Hosts, closed after the test. Skipped where there can be none."""
    from lib import two_hosts

    why_not = two_hosts.problem()
    if why_not is not None:
        pytest.skip(f"no hosts: {why_not}")
    with contextlib.ExitStack() as made:
        yield lambda num=2, **options: made.enter_context(two_hosts.Hosts(num, **options))


@pytest.fixture(scope="session")
def pools():
    """``pools(num_ranks)`` is a pool of that size, started at the first use and replaced after a failure closed it."""
    started: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        if num_ranks not in started or started[num_ranks].closed:
            started[num_ranks] = RankPool(num_ranks, timeout_s=HANG_S)
        return started[num_ranks]

    yield pool_of
    for pool in started.values():
        pool.close()
