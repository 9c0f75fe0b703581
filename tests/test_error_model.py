"""Explore a small model of the error protocol: in whatever order things happen, no rank waits forever or goes on alone.

The ranks of one buffer run the same host program. A host launches operations; the device of its rank executes them in
order. In every phase of an operation a device first arrives and then waits for the arrival of all ranks. Some ranks
find a mistake of the caller in an operation. The rule under test is that of buffers on GPUs:

1. A device publishes a mistake to its host when the operation is complete on that rank, not when it finds it.
2. ``synchronize``, ``check`` and a dispatch that waits for counts raise a published mistake. The buffer stays usable,
   whatever was launched behind that operation.
3. A host that sees a published mistake when it starts an operation raises it, ends its buffer and signals the peers.
   A device that waits for a signalled rank aborts and signals too, and its host then ends the buffer.

A *state* says where each rank is. Each step of one host or one device leads to a next state. The tests visit every
state that any order of steps can reach, so that their answers hold for ranks of any speed. In a *final* state no step
is left. Four things can be wrong with it:

- a *hang*: some host still waits (in a real job it gets a PeerTimeoutError when the limit is over);
- a *split*: one rank's buffer has ended, and another rank has done its program and has a usable buffer, whose next
  operation will meet nobody;
- a *lost mistake*: a rank that finds the mistake has not raised it (it named a late peer instead, or raised nothing);
- a *broken promise*: a rank raised the mistake as one that leaves the buffer usable, and the buffer ended later.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

LAUNCH, COUNTS, SYNCHRONIZE = "launch", "wait for counts", "synchronize"
# The mistake on one rank: not raised, raised by a buffer that stays usable, raised by a buffer that ends.
HIDDEN, PUBLISHED, RAISED, FATAL = "hidden", "published", "raised", "fatal"
PHASES = 2  # of an operation; the counts are there when all ranks have arrived in the first


class Rank(NamedTuple):
    """Where the host and the device of one rank are."""

    host: int = 0  # steps of its program that the host has done
    launched: int = 0  # operations; the next three are written by the device
    arrivals: int = 0  # phases of all operations in which the device has arrived; read by the peers
    completed: int = 0  # operations
    aborted: bool = False
    mistake: str = HIDDEN
    signalled: bool = False  # tells the peers to wait no longer for this rank
    ended: bool = False  # the use of the buffer


State = tuple[Rank, ...]


class Model(NamedTuple):
    """A program for each rank, the mistakes, and the rule."""

    programs: tuple[tuple[str, ...], ...]
    finds_in: tuple[int, ...]  # per rank: the number of the operation in which it finds a mistake; 0: in none
    publishes_when_found: bool = False
    synchronize_may_end: bool = False  # the buffer, where a later operation than the one with the mistake is complete
    meets_nobody: int = 0  # an operation that completes without waiting for any other rank


def device_steps(model: Model, state: State, number: int) -> Iterator[Rank]:
    """Yield what the device of rank ``number`` can do next."""
    rank = state[number]
    if rank.aborted or rank.completed == rank.launched:
        return
    operation = rank.completed + 1
    unpublished = model.finds_in[number] == operation and rank.mistake == HIDDEN
    if unpublished and model.publishes_when_found:
        yield rank._replace(mistake=PUBLISHED)
    late = [] if operation == model.meets_nobody else [peer for peer in state if peer.arrivals < rank.arrivals]
    begins = rank.arrivals == PHASES * rank.completed
    if begins or (not late and rank.arrivals < PHASES * operation):
        yield rank._replace(arrivals=rank.arrivals + 1)
    elif not late:
        yield rank._replace(completed=operation, mistake=PUBLISHED if unpublished else rank.mistake)
    elif any(peer.signalled for peer in late):
        yield rank._replace(aborted=True, signalled=True)


def host_steps(model: Model, state: State, number: int) -> Iterator[Rank]:
    """Yield what the host of rank ``number`` can do next."""
    rank, program = state[number], model.programs[number]
    if rank.ended or rank.host == len(program):
        return
    step, is_complete = program[rank.host], rank.completed == rank.launched
    is_published = rank.mistake == PUBLISHED
    ended = rank._replace(mistake=FATAL if is_published else rank.mistake, ended=True, signalled=True)
    if rank.aborted or (step == LAUNCH and is_published):
        yield ended
        return
    if step == LAUNCH:
        yield rank._replace(host=rank.host + 1, launched=rank.launched + 1)
        return
    if step == COUNTS and (model.publishes_when_found or model.finds_in[number] != rank.launched):
        is_ready = rank.arrivals > PHASES * (rank.launched - 1) + 1  # the device has gone on to the second phase
    else:  # without counts the host waits for the whole operation, which then publishes why there are none
        is_ready = is_complete
    if is_ready:
        is_old = step == SYNCHRONIZE and rank.completed != model.finds_in[number]
        ends = is_published and is_old and model.synchronize_may_end
        yield ended if ends else rank._replace(host=rank.host + 1, mistake=RAISED if is_published else rank.mistake)


def final_states(model: Model) -> list[State]:
    """Visit all states: return those that no step leaves."""
    start = (Rank(),) * len(model.programs)
    reached, todo, final = {start}, [start], []
    while todo:
        state = todo.pop()
        following = [
            (*state[:number], rank, *state[number + 1 :])
            for number in range(len(state))
            for steps in (device_steps, host_steps)
            for rank in steps(model, state, number)
        ]
        todo += set(following) - reached
        reached.update(following)
        if not following:
            final.append(state)
    return final


def faults(model: Model, state: State) -> set[str]:
    """Name what is wrong with a final state."""
    done = [rank.host == len(program) for rank, program in zip(state, model.programs)]
    ended = [rank.ended for rank in state]
    operation = min(filter(None, model.finds_in))  # peers may abort a later operation before they find its mistake
    finders = [rank for rank, found in zip(state, model.finds_in) if found == operation]
    wrong = {
        "hang": not all(d or e for d, e in zip(done, ended)),
        "split": any(done) and any(ended),
        "lost mistake": any(rank.mistake in (HIDDEN, PUBLISHED) for rank in finders),
        "broken promise": any(rank.ended and rank.mistake == RAISED for rank in finders)
        and set(model.finds_in) <= {0, operation},
    }
    return {name for name, is_so in wrong.items() if is_so}


def programs_of(most_steps: int) -> Iterator[tuple[str, ...]]:
    """Yield all host programs that launch first and synchronize last; a host waits for counts right after a launch."""
    for length in range(2, most_steps + 1):
        for inner in itertools.product((LAUNCH, COUNTS, SYNCHRONIZE), repeat=length - 2):
            program = (LAUNCH, *inner, SYNCHRONIZE)
            if all(a == LAUNCH for a, b in itertools.pairwise(program) if b == COUNTS):
                yield program


def models(num_ranks: int, most_steps: int, *, mistakes: int = 1, **rule) -> Iterator[Model]:
    """Yield every program with mistakes in up to so many of its operations, found by one rank, by some or by all."""
    for program in programs_of(most_steps):
        operations = range(program.count(LAUNCH) + 1)
        for finds_in in itertools.combinations_with_replacement(operations, num_ranks):  # ranks are alike
            if 1 <= len({*finds_in} - {0}) <= mistakes:
                yield Model((program,) * num_ranks, finds_in, **rule)


def find_faults(models: Iterable[Model]) -> dict[str, tuple[Model, State]]:
    """Name what is wrong with any of the models, each with a final state that has it."""
    found = {}
    for model in models:
        final = final_states(model)
        assert final, "some state must be the last"
        found |= {name: (model, state) for state in final for name in faults(model, state)}
    return found


# Programs have up to five steps. With three ranks they are shorter where there are too many states for a quick test.
@pytest.mark.parametrize("num_ranks,most_steps,mistakes", [(2, 5, 2), (3, 5, 1), (3, 4, 3)])
def test_the_rule_has_no_fault(num_ranks, most_steps, mistakes):
    assert find_faults(models(num_ranks, most_steps, mistakes=mistakes)) == {}


@pytest.mark.parametrize(
    "rule,wrong",
    [
        # One rank finds the mistake and ends its buffer; the others have completed all and find nothing.
        (dict(synchronize_may_end=True), {"split"}),
        # One rank refuses an operation that another rank completes without it.
        (dict(meets_nobody=2), {"split"}),
        # A host ends its buffer while peers are in the operation with the mistake: these name it as a late peer.
        (dict(publishes_when_found=True), {"lost mistake"}),
    ],
)
@pytest.mark.parametrize("num_ranks,most_steps", [(2, 5), (3, 3)])
def test_each_part_of_the_rule_is_needed(num_ranks, most_steps, rule, wrong):
    assert find_faults(models(num_ranks, most_steps, **rule)).keys() & {"hang", "split", *wrong} == wrong
