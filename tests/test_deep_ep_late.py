"""Wrong values in a program's tensors that only the device sees: a ValueError as soon as the host knows, and no assert.

On a GPU such a mistake was a device-side assert, after which the process could not use CUDA. Here CPU tensors stand in
for those of a GPU; test_deep_ep_gpu.py gives the same mistakes to a GPU.
"""

import contextlib
import time

import pytest
import torch
from conftest import on_ranks
from lib.deep_ep_case import EXPERTS, RANKS, Case, Data, make_data, opened, routed

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep import late_errors, layout

CASE = Case("cpu")
TOO_LATE = "destroy\\(\\) this buffer"


@contextlib.contextmanager
def no_host_sees_values():
    """The code for GPUs, with CPU tensors: copies to the host are complete at once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (late_errors, layout):
            patch.setattr(module, "must_host_wait", lambda t: True)
        yield


def hand_made(routing: dict) -> dict:
    """The routing of a program that counted its own layout, wrongly: no token goes to any rank."""
    return routing | dict(is_token_in_rank=torch.zeros_like(routing["is_token_in_rank"]))


def given_to(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    data: Data = make_data(CASE, rank)
    return data.x[rank], data.topk_idx[rank], data.weights[rank]


@on_ranks(RANKS)
def test_a_dispatch_that_waits_raises_it_and_leaves_the_buffer(rank: int):
    x, idx, weights = given_to(rank)
    with no_host_sees_values(), opened(CASE) as buffer:
        routing = routed(buffer, idx, weights)
        wanted = buffer.dispatch(x, **routing)
        for mode in (torch.inference_mode(), contextlib.nullcontext()):
            with mode:
                if rank == 0:
                    with pytest.raises(ValueError, match="^is_token_in_rank ") as raised:
                        buffer.dispatch(x, **hand_made(routing))
                    assert "destroy" not in str(raised.value)
                else:
                    assert torch.equal(buffer.dispatch(x, **routing)[0], wanted[0])
        again = buffer.dispatch(x, **routing)
        assert torch.equal(again[0], wanted[0]) and torch.equal(again[2], wanted[2])


@pytest.mark.parametrize("operation", ["dispatch", "low_latency_combine"])
@on_ranks(RANKS)
def test_no_host_waits_so_the_next_operation_raises_it(rank: int, operation: str):
    """It ends the buffers, and the other ranks learn that this one has left, long before their limit."""
    x, idx, weights = given_to(rank)
    most = max(CASE.lengths)
    with no_host_sees_values():
        with opened(CASE) as buffer:
            routing = routed(buffer, idx, weights)
            buffer.dispatch(x, **routing, num_worst_tokens=RANKS * most)  # makes the engine's buffer
            if operation == "dispatch":
                given = hand_made(routing) if rank == 0 else routing
                buffer.dispatch(x, **given, num_worst_tokens=RANKS * most)
            else:
                rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, most, EXPERTS, use_fp8=False)
                sums, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
                other = idx.clone()
                if rank == 0:
                    other[0] = EXPERTS + 5  # to whom no token was sent
                found, _, _ = buffer.low_latency_combine(rows, other, weights, handle)
                first = 1 if rank == 0 else 0
                assert torch.equal(found[first:], sums[first:])
                assert rank > 0 or not found[0].any(), "an expert without the token adds nothing"
            begin = time.monotonic()
            name = "is_token_in_rank" if operation == "dispatch" else "topk_idx"
            options = dict(num_worst_tokens=RANKS * most)
            for rows in (x, x, x.float()) if rank == 0 else (x, x):  # another engine's buffer is refused too
                with pytest.raises(ValueError if rank == 0 else ep.PeerTimeoutError) as raised:
                    buffer.dispatch(rows, **routing, **options)
                if rank == 0:
                    raised.match(f"^{name} .*{TOO_LATE}")
                else:
                    assert 0 in raised.value.late_ranks
            assert time.monotonic() - begin < 30
        with opened(CASE) as buffer:  # the process goes on, with new buffers
            buffer.dispatch(x, **routed(buffer, idx, weights))


@on_ranks(1)
def test_experts_that_do_not_exist(rank: int):
    """A layout counts them as none. The dispatch refuses them: by the engine, or without topk_idx by the layout."""
    idx = torch.tensor([[0, 1, -1], [2, EXPERTS, 3], [-2, 5, 7], [2**63 - 1, -(2**63), 1]])
    x, weights = torch.ones(len(idx), 128, dtype=torch.bfloat16), torch.ones(idx.shape)
    with no_host_sees_values(), opened(CASE) as buffer:
        routing = routed(buffer, idx, weights)
        plain = layout.dispatch_layout(idx.where((idx >= 0) & (idx < EXPERTS), -1), EXPERTS, 1)
        for name in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"):
            assert torch.equal(routing[name], getattr(plain, name))
        for exact in ("0", "1"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("EP_DISPATCHER_DEEP_EP_EXACT", exact)
                with pytest.raises(ValueError, match="^topk_idx\\["):
                    buffer.dispatch(x, **routing)
        without = {name: value for name, value in routing.items() if not name.startswith("topk")}
        with pytest.raises(ValueError, match="^topk_idx .*get_dispatch_layout"):
            buffer.dispatch(x, **without)


@on_ranks(1)
def test_counts_that_do_not_fit(rank: int):
    x, idx, weights = torch.ones(2, 128), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)
    other_sum = dict(num_tokens_per_rank=torch.tensor([1], dtype=torch.int32))
    other_expert = dict(num_tokens_per_expert=torch.ones(EXPERTS, dtype=torch.int32))
    for scope in (no_host_sees_values, contextlib.nullcontext):
        with scope(), opened(CASE) as buffer:
            wrong = [
                ("num_tokens_per_rank", routed(buffer, idx) | other_sum),
                ("num_tokens_per_rank", routed(buffer, idx, weights) | other_sum),
                ("num_tokens_per_expert", routed(buffer, idx, weights) | other_expert),
            ]
            for name, routing in wrong:
                with pytest.raises(ValueError, match=f"^{name} "):
                    buffer.dispatch(x, **routing)


@on_ranks(1)
def test_a_layout_that_was_changed_in_place_is_not_trusted(rank: int):
    x, idx, weights = torch.ones(2, 128), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)
    with no_host_sees_values(), opened(CASE) as buffer:
        for changed in ("is_token_in_rank", "topk_idx"):
            routing = routed(buffer, idx.clone(), weights)
            buffer.dispatch(x, **routing)
            routing[changed].fill_(0 if changed == "is_token_in_rank" else -1)
            with pytest.raises(ValueError, match="^is_token_in_rank "):
                buffer.dispatch(x, **routing)


@on_ranks(1)
def test_destroy_raises_what_nothing_has_raised(rank: int):
    x, idx, weights = torch.ones(2, 128), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)
    with no_host_sees_values():
        with pytest.raises(ValueError, match="^is_token_in_rank "), opened(CASE) as buffer:
            buffer.dispatch(x, **hand_made(routed(buffer, idx, weights)), num_worst_tokens=2)
        with opened(CASE) as buffer:
            buffer.dispatch(x, **routed(buffer, idx, weights), num_worst_tokens=2)
