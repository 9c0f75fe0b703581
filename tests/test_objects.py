"""Buffers, handles and outputs as Python objects: copied, pickled and printed."""

import copy
import io
import pickle

import pytest
import torch
from conftest import on_ranks
from lib.errors import assert_refused
from lib.round_trip import HIDDEN, NUM_EXPERTS, NUM_TOPK, inputs, make_buffer
from torch.optim.swa_utils import AveragedModel

import ep_dispatcher as ep
from ep_dispatcher.integrations.deep_ep.buffer import Runtime
from ep_dispatcher.integrations.deep_ep.events import CommStream


class Layer(torch.nn.Module):
    """Experts of one matrix, with a buffer among the module's attributes, as users keep it."""

    def __init__(self, buffer: ep.Buffer):
        super().__init__()
        self.buffer = buffer
        self.matrix = torch.nn.Parameter(torch.eye(HIDDEN))

    def forward(self, x, topk_idx):
        out = ep.dispatch(self.buffer, x, topk_idx)
        return ep.combine(self.buffer, out.x @ self.matrix, out.handle)


@on_ranks(2)
def test_a_copy_of_a_module_has_its_own_weights_and_the_same_buffer(rank):
    buffer = make_buffer(dtype=torch.float32)
    layer = Layer(buffer)
    x, topk_idx, _ = inputs(rank, dtype=torch.float32)
    copied, average = copy.deepcopy(layer), AveragedModel(layer)
    with torch.no_grad():
        layer.matrix.mul_(2)
        right = layer(x, topk_idx)
        assert all(torch.equal(2 * other(x, topk_idx), right) for other in (copied, average))
    copied(x, topk_idx).sum().backward()
    assert layer.matrix.grad is None and copied.matrix.grad.any()
    copy.copy(buffer).destroy()
    assert buffer.is_destroyed
    assert_refused("buffer", layer, x, topk_idx)


@on_ranks(1)
def test_a_pickle_is_a_type_error_that_says_what_to_do_instead(rank):
    with make_buffer(dtype=torch.float32) as buffer:
        layer = Layer(buffer)
        runs = [lambda: pickle.dumps(buffer), lambda: pickle.dumps(layer), lambda: torch.save(layer, io.BytesIO())]
        for run in runs:
            with pytest.raises(TypeError, match=r"^a Buffer .*state_dict\(\)"):
                run()
        torch.save(layer.state_dict(), io.BytesIO())


def test_an_object_that_answers_for_unknown_names_can_be_copied():
    """copy and pickle ask for names before there are attributes; a __getattr__ that reads one then calls itself."""
    runtime = Runtime(9, 16, CommStream())
    for twin in (copy.copy(runtime), copy.deepcopy(runtime), pickle.loads(pickle.dumps(runtime))):
        assert (twin.get_rdma_rank(), twin.get_num_rdma_ranks()) == (1, 2)
        with pytest.raises(NotImplementedError, match="runtime.get_dispatch_layout"):
            twin.get_dispatch_layout()


@on_ranks(1)
def test_outputs_and_handles_print_their_shapes_alone(rank):
    for layout, quantize in (("expert", None), ("rank", None), ("expert", "e4m3_1x128")):
        hidden = 128 if quantize else HIDDEN
        with make_buffer(dtype=torch.bfloat16, hidden=hidden) as buffer:
            _, topk_idx, weights = inputs(rank)
            x = torch.zeros(topk_idx.shape[0], hidden, dtype=torch.bfloat16)
            out = ep.dispatch(buffer, x, topk_idx, weights, layout=layout, quantize=quantize)
            res = buffer.combine(ep.dequantize(out.x) if quantize else out.x, out.handle)
        for value in (out, out.handle, res):
            text = repr(value)
            assert text.startswith(type(value).__name__ + "(") and len(text) < 500 and "tensor(" not in text, text
        rows = out.handle.num_rows
        x = f"x=(float8_e4m3fn[{rows}, 128], float32[{rows}, 1])" if quantize else f"x=bfloat16[{rows}, {HIDDEN}]"
        words = [x, f"tokens_per_expert=int64[{NUM_EXPERTS}]", f"layout='{layout}'", "plan=int32["]
        words.append(f"topk_idx=int64[{rows}, {NUM_TOPK}]" if layout == "rank" else "topk_idx=None")
        assert all(word in repr(out) for word in words), repr(out)
        assert "topk_weights=None, event=Event()" in repr(res)


@on_ranks(2)
def test_a_buffer_prints_its_sizes_and_what_carries_it(rank):
    with make_buffer(ranks_per_node=1) as buffer:
        living = repr(buffer)
    start = f"Buffer(rank {rank} of 2 nodes x 1, hidden={HIDDEN}, num_experts={NUM_EXPERTS}, num_topk={NUM_TOPK}, "
    assert living.startswith(start) and living.endswith(", CPU engine, shared memory, gloo between nodes)")
    assert repr(buffer).startswith(start) and repr(buffer).endswith(", destroyed)")
