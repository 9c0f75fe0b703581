"""torch.compile breaks its graph at calls of deep_ep, and changes nothing. Its errors stay what they are."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.deep_ep_case import EXPERTS, Case, make_data, opened, routed

from ep_dispatcher.integrations import collectives
from ep_dispatcher.integrations.deep_ep import Buffer

RANKS, COMPILE_S = 2, 300
LENGTHS = (13, 7)
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def layer(_, x, idx, weights, matrix):
    """A layer of one matrix. It makes its buffer where it is first needed, as DeepEP's examples do."""
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    options = dict(previous_event=buffer.capture(), async_finish=True)
    recv_x, _, recv_weights, counts, handle, event = buffer.dispatch(
        torch.tanh(x), **routed(buffer, idx, weights), **options
    )
    event.current_stream_wait()
    y = torch.relu(recv_x @ matrix) * recv_weights.sum(1, keepdim=True).to(recv_x.dtype)
    combined = buffer.combine(y + sum(counts), handle)[0]
    buffer.destroy()
    return combined * 2


def decoding(buffer, x, idx, weights, matrix):
    recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
        x + 1, idx, max(LENGTHS), EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()
    there = torch.arange(recv_x.shape[1], device=x.device) < count[:, None]
    y = torch.relu(recv_x.where(there[..., None], 0.0) @ matrix)
    combined, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
    hook()
    return combined * 2


@pytest.mark.parametrize("function", [layer, decoding])
@on_ranks(RANKS, timeout_s=COMPILE_S)
def test_compiled_programs_give_the_same_bits(rank, engine, function):
    case = Case(engine, lengths=LENGTHS)
    torch._dynamo.reset()
    compiled, results = torch.compile(function, backend="aot_eager"), []
    with opened(case, dict(EP_DISPATCHER_TIMEOUT_S=str(COMPILE_S))) as buffer:
        for seed in range(2):
            data = make_data(case, rank, seed=seed, dtype=torch.bfloat16)
            matrix = torch.randn(data.x[0].shape[1], data.x[0].shape[1], generator=torch.Generator().manual_seed(rank))
            given = data.x[rank], data.topk_idx[rank], data.weights[rank], matrix.to(data.x[rank])
            for f in (compiled, function) if seed == 0 else (function, compiled):
                results.append(f(buffer, *given))
    assert torch.equal(*results[:2]) and torch.equal(*results[2:]) and results[0].any()
    if function is decoding or VERSION >= (2, 13):  # Dynamo of 2.11 cannot keep the group over a break: all is eager
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "nothing was compiled"


@on_ranks(RANKS, timeout_s=COMPILE_S)
def test_an_agreement_under_compile(rank):
    def total(x):
        y = x + 1
        collectives.all_reduce(y, dist.ReduceOp.SUM, dist.group.WORLD, about="test", note="")
        return y * 2

    torch._dynamo.reset()
    found = torch.compile(total, backend="aot_eager")(torch.arange(3, dtype=torch.int64))
    assert found.tolist() == [4, 8, 12]


@on_ranks(RANKS)
def test_other_errors_of_an_agreement_are_raised_as_they_are(rank):
    error = dist.DistBackendError("invalid usage")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(dist.DistBackendError) as caught:
        patch.setattr(collectives.dist, "all_reduce", mock.Mock(side_effect=error))
        collectives.all_reduce(
            torch.ones(2, dtype=torch.int64), dist.ReduceOp.SUM, dist.group.WORLD, about="test", note=""
        )
    assert caught.value is error
