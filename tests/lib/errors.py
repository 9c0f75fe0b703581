"""Errors of a caller: who raises them, and that they name the argument."""

import re
from functools import partial

import torch

from ep_dispatcher.errors import DisagreementError, TooFewRowsError, UnknownExpertError
from lib.round_trip import device, inputs, make_buffer, round_trip


def error_of(call, *args, **kwargs) -> str:
    """The text of the ValueError that the call raises."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        assert type(error) in (ValueError, DisagreementError, TooFewRowsError, UnknownExpertError)
        return str(error)
    raise AssertionError("no error")


def assert_refused(argument: str, call, *args, **kwargs) -> str:
    """The call raises a ValueError whose sentence names the argument. Return its text."""
    text = error_of(call, *args, **kwargs)
    assert re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", text), text
    return text


def construct(rank: int, changes_of_rank: list[dict]) -> str:
    """The error of every rank; a correct buffer can be made afterwards."""
    message = error_of(make_buffer, **changes_of_rank[rank])
    with make_buffer() as buffer:
        round_trip(buffer)
    return message


def make_disagreement(rank: int, engine: str, kind: str, odd: int, ranks_per_node: int, timeout_s: float) -> str:
    """Rank ``odd`` does something else than the others. Returns the error; the buffer works afterwards."""
    buffer = make_buffer(hidden=128, engine=engine, ranks_per_node=ranks_per_node, timeout_s=timeout_s)
    odd_one = rank == odd
    _, topk_idx, topk_weights = inputs(rank, device=device(buffer))
    x = torch.randn(len(topk_idx), 128, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device(buffer))
    first, second = (buffer.dispatch(x, topk_idx, topk_weights) for _ in range(2))
    out = second if odd_one else first

    def right() -> None:
        again = buffer.dispatch(x, topk_idx, topk_weights)
        assert torch.equal(again.x, first.x) and torch.equal(again.topk_weights, first.topk_weights)
        assert torch.equal(buffer.combine(again.x, again.handle).x, buffer.combine(first.x, first.handle).x)

    new, cached = partial(buffer.dispatch, x, topk_idx), partial(buffer.dispatch, x, handle=first.handle)
    calls = {
        "layout": lambda: new(layout="rank" if odd_one else "expert"),
        "expert_alignment": lambda: new(expert_alignment=8 if odd_one else 1),
        "topk_weights": lambda: new(topk_weights=None if odd_one else topk_weights),
        "x": lambda: new(quantize="e4m3_1x128" if odd_one else None),
        "cached handle": lambda: cached(handle=out.handle),
        "cached topk_weights": lambda: cached(topk_weights=topk_weights if odd_one else None),
        "cached x": lambda: cached(quantize="mxfp8" if odd_one else "e4m3_1x128"),  # as many bytes
        "combined handle": lambda: buffer.combine(out.x, out.handle),
        "combined topk_weights": lambda: buffer.combine(
            first.x, first.handle, topk_weights=None if odd_one else first.topk_weights
        ),
    }
    with buffer:
        right()
        # On a GPU it is found once the operation is complete.
        message = error_of(lambda: (calls[kind](), buffer.check()))
        right()
        return message


DISAGREEMENTS = ["layout", "expert_alignment", "topk_weights", "x", "cached handle", "cached topk_weights", "cached x"]
