"""No collective of ``deep_ep`` is decided by one rank's data, variables or garbage collection: peers learn at once."""

import contextlib
import gc
import time

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.deep_ep_case import Case, routed
from lib.deep_ep_case import environment as environment_of

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep import Buffer, ElasticBuffer, destroy_buffers
from ep_dispatcher.integrations.deep_ep.buffer_pool import _pools

RANKS, EXPERTS, HIDDEN, TOPK, MOST = 2, 4, 128, 2, 8
LIMIT_S = 30.0  # of every wait; what is learnt at once takes a small part of it
VARIABLE = "EP_DISPATCHER_MAX_TOKENS_PER_RANK"
EXACT = "EP_DISPATCHER_DEEP_EP_EXACT"


def environment(**variables: str):
    return environment_of(Case("cpu"), EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S), **variables)


@contextlib.contextmanager
def at_once():
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < LIMIT_S / 3


def tokens(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx = torch.stack([torch.arange(num_tokens) % EXPERTS, (torch.arange(num_tokens) + 2) % EXPERTS], 1)
    return torch.ones(num_tokens, HIDDEN, dtype=dtype), idx, torch.ones(num_tokens, TOPK)


def dispatch(buffer: Buffer, num_tokens: int = 3, **options):
    x, idx, weights = tokens(num_tokens)
    return buffer.dispatch(x, **routed(buffer, idx, weights, EXPERTS), **options)


def made(**options) -> Buffer:
    """A buffer of a group of its own, because other tests share theirs with what a failure leaves behind."""
    return Buffer(dist.new_group(), explicitly_destroy=True, low_latency_mode=True, **options)


def refuse_on_rank_1(rank: int, operation, wrong, kind: type[Exception], text: str) -> None:
    """Rank 1 raises its own mistake, and the other learns at once that it has left. Then rank 1 refuses to go on."""
    with at_once():
        if rank == 1:
            with pytest.raises(kind, match=text):
                wrong()
            with pytest.raises(kind, match=f"{text}.*this rank has left the operation"):
                operation()
        else:
            with pytest.raises(ep.PeerTimeoutError) as caught:
                operation()
            assert caught.value.late_ranks == (1,)


TWICE = torch.tensor([[0, 0], [1, 2], [3, -1]])
REFUSED = {
    "tokens above the variable": (MOST + 1, None, ValueError, f"^x has 9 tokens on rank 1, but at most {VARIABLE}=8"),
    "tokens above num_worst_tokens": (
        MOST + 1,
        RANKS * MOST,
        ValueError,
        "^x has 9 tokens on rank 1, but at most num_worst_tokens / ranks = 8",
    ),
    "an expert twice": (TWICE, None, NotImplementedError, "^topk_idx has an expert twice"),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", REFUSED)
@on_ranks(RANKS)
def test_a_dispatch_that_one_rank_refuses(rank: int, name: str, is_first: bool):
    """The other ranks waited out their limit, in the dispatch or while they made the buffer."""
    given, worst, kind, text = REFUSED[name]
    with environment(**{VARIABLE: "" if worst else str(MOST)}):
        buffer, options = made(), dict(num_worst_tokens=worst or 0)

        def wrong():
            x, idx, weights = tokens(3 if isinstance(given, torch.Tensor) else given)
            idx = given if isinstance(given, torch.Tensor) else idx
            buffer.dispatch(x, **routed(buffer, idx, weights, EXPERTS), **options)

        if not is_first:
            dispatch(buffer, **options)
        refuse_on_rank_1(rank, lambda: dispatch(buffer, **options), wrong, kind, text)
        buffer.destroy()
        buffer = Buffer(buffer.group, explicitly_destroy=True)
        dispatch(buffer, **options)  # with new memory the ranks go on
        buffer.destroy()


@pytest.mark.parametrize("mistake", ["tokens", "an expert twice"])
@on_ranks(RANKS)
def test_a_low_latency_dispatch_that_one_rank_refuses(rank: int, mistake: str):
    with environment():
        buffer = made()
        x, idx, _ = tokens(3)
        bad = tokens(MOST + 1)[:2] if mistake == "tokens" else (x, TWICE)

        def run(x, idx):
            buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)

        if mistake == "tokens":
            kind, text = ValueError, "^x has 9 tokens on rank 1, but at most num_max_dispatch_tokens_per_rank = 8"
        else:
            kind, text = NotImplementedError, "^topk_idx has an expert twice"
        refuse_on_rank_1(rank, lambda: run(x, idx), lambda: run(*bad), kind, text)
        buffer.destroy()


@on_ranks(RANKS)
def test_weights_of_other_ranks_experts(rank: int):
    with environment():
        buffer = made()
        recv_x, _, recv_weights, _, handle, _ = dispatch(buffer)
        refuse_on_rank_1(
            rank,
            lambda: buffer.combine(recv_x, handle, topk_weights=recv_weights),
            lambda: buffer.combine(recv_x, handle, topk_weights=torch.ones_like(recv_weights)),
            NotImplementedError,
            "^topk_weights: .*EXACT",
        )
        buffer.destroy()


@pytest.mark.parametrize("expand", [False, True])
@on_ranks(RANKS)
def test_more_tokens_than_an_elastic_buffer_has(rank: int, expand: bool):
    with environment():
        buffer = ElasticBuffer(dist.new_group(), num_max_tokens_per_rank=MOST, explicitly_destroy=True)

        def run(num_tokens: int):
            x, idx, weights = tokens(num_tokens)
            buffer.dispatch(x, idx, weights, num_experts=EXPERTS, do_expand=expand)

        text = "^x has 9 tokens on rank 1, but num_max_tokens_per_rank is 8"
        refuse_on_rank_1(rank, lambda: run(3), lambda: run(MOST + 1), ValueError, text)
        buffer.destroy()


@on_ranks(RANKS)
def test_elastic_buffers_of_unequal_size(rank: int):
    with environment(), at_once():
        with pytest.raises(ValueError, match="^num_max_tokens_per_rank: rank 0 gave 8, rank 1 gave 9; all ranks must"):
            ElasticBuffer(dist.new_group(), num_max_tokens_per_rank=MOST + rank)


@pytest.mark.parametrize(
    "variable, of_ranks", [(VARIABLE, ("8", "16")), (VARIABLE, ("8", "")), (EXACT, ("0", "1")), (None, (8, 16))]
)
@on_ranks(RANKS)
def test_settings_of_one_rank_alone(rank: int, variable: str | None, of_ranks: tuple):
    """They choose between operations, so ranks waited for each other in different ones."""
    options = dict(num_worst_tokens=of_ranks[rank]) if variable is None else {}
    with environment(**{} if variable is None else {variable: of_ranks[rank]}):
        buffer, shown = made(), [value or "none" for value in of_ranks]
        text = f"^{variable or 'num_worst_tokens'}: rank 0 gave {shown[0]}, rank 1 gave {shown[1]}; all ranks must"
        for _ in range(2):
            with at_once(), pytest.raises(ValueError, match=text):
                dispatch(buffer, **options)
    with environment():
        dispatch(buffer)  # after the mistake is mended
        buffer.destroy()


@on_ranks(RANKS)
def test_a_variable_that_all_ranks_change(rank: int):
    with environment():
        buffer = made()
        dispatch(buffer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(EXACT, "1")
            *_, handle, _ = dispatch(buffer)
            assert handle[0].tolist() == [[3, 3], [6, 6]]
        buffer.destroy()


@pytest.mark.parametrize("other", ["without topk_idx", "another dtype"])
@on_ranks(RANKS)
def test_routings_of_another_kind_on_one_rank(rank: int, other: str):
    """Where the hosts agree in every dispatch, they also find that they need different buffers."""
    with environment():
        buffer = made()
        dispatch(buffer)
        x, idx, weights = tokens(3, torch.float32 if rank == 1 and other == "another dtype" else torch.bfloat16)
        routing = routed(buffer, idx, weights, EXPERTS)
        if rank == 1 and other == "without topk_idx":
            routing |= dict(topk_idx=None, topk_weights=None)
        with at_once(), pytest.raises(ValueError, match="^x, topk_idx: this rank gave rows .* all ranks must give"):
            buffer.dispatch(x, **routing)
        dispatch(buffer)  # it has cost the buffer nothing
        buffer.destroy()


class Cycle:
    """Keeps an object until Python looks for cycles."""

    def __init__(self, kept: object):
        self.kept, self.itself = kept, self


@contextlib.contextmanager
def no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("is_used", [False, True])
@on_ranks(RANKS)
def test_a_buffer_in_a_cycle_keeps_no_memory(rank: int, is_used: bool):
    """One rank's old buffer was in a cycle, so destroy() of another freed the memory on one rank alone."""
    with environment(), no_garbage_collection(), at_once():
        group = dist.new_group()
        old, buffer = Buffer(group), Buffer(group, explicitly_destroy=True)
        if is_used:
            dispatch(old)
        received = dispatch(buffer)
        if rank == 0:
            Cycle(old)
        del old
        buffer.destroy()
        buffer = Buffer(group, explicitly_destroy=True)
        again = dispatch(buffer)
        assert torch.equal(again[0], received[0])
        buffer.destroy()
        destroy_buffers()


@on_ranks(RANKS)
def test_the_last_buffer_and_handle_in_a_cycle(rank: int):
    """The memory went with the last of them, and the next dispatch made new memory on one rank alone."""
    with environment(), no_garbage_collection(), at_once():
        group = dist.new_group()
        buffer = Buffer(group)
        received = dispatch(buffer)
        if rank == 0:
            Cycle((buffer, received))
        del buffer, received
        dispatch(Buffer(group))
        destroy_buffers()
        dispatch(Buffer(group))


@on_ranks(RANKS)
def test_memory_ends_with_its_group(rank: int):
    with environment():
        group = dist.new_group()
        dispatch(Buffer(group))
        dist.destroy_process_group(group)
        buffer = made()
        dispatch(buffer)
        buffer.destroy()
        assert group not in _pools
