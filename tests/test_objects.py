"""Buffers, handles and outputs as Python objects: copied, pickled and printed."""

import copy
import io
import pickle

import torch
from round_trip import HIDDEN, NUM_EXPERTS, NUM_TOPK, inputs, make_buffer
from torch.optim.swa_utils import AveragedModel

import ep_dispatcher as ep


class Layer(torch.nn.Module):
    """Experts of one matrix, with a buffer among the module's attributes, as users keep it."""

    def __init__(self, buffer: ep.Buffer):
        super().__init__()
        self.buffer = buffer
        self.matrix = torch.nn.Parameter(torch.eye(HIDDEN))

    def forward(self, x, topk_idx):
        out = ep.dispatch(self.buffer, x, topk_idx)
        return ep.combine(self.buffer, out.x @ self.matrix, out.handle)


def message_of(run) -> str:
    try:
        return f"no error: {run()}"
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def copies_of_a_module(rank: int):
    buffer = make_buffer(dtype=torch.float32)
    layer = Layer(buffer)
    x, topk_idx, _ = inputs(rank, dtype=torch.float32)
    copied, average = copy.deepcopy(layer), AveragedModel(layer)
    with torch.no_grad():
        layer.matrix.mul_(2)
        right = layer(x, topk_idx)
        same = [torch.equal(2 * other(x, topk_idx), right) for other in (copied, average)]
    copied(x, topk_idx).sum().backward()
    shallow = copy.copy(buffer)
    shallow.destroy()
    after = message_of(lambda: layer(x, topk_idx))
    return same, layer.matrix.grad is None, copied.matrix.grad.any(), buffer.is_destroyed, after


def test_a_copy_of_a_module_has_its_own_weights_and_the_same_buffer(pools):
    for same, own_gradients, has_gradients, destroyed, after in pools(2).run(copies_of_a_module):
        assert same == [True, True] and own_gradients and has_gradients
        assert destroyed and after.startswith("ValueError: buffer: given one that was destroyed")


def messages_of_pickles(rank: int) -> list[str]:
    with make_buffer(dtype=torch.float32) as buffer:
        layer = Layer(buffer)
        runs = [lambda: pickle.dumps(buffer), lambda: pickle.dumps(layer), lambda: torch.save(layer, io.BytesIO())]
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        return [message_of(run) for run in runs]


def test_a_pickle_says_what_to_do_instead(pools):
    (messages,) = pools(1).run(messages_of_pickles)
    assert len(messages) == 3
    for message in messages:
        assert message.startswith("TypeError: a Buffer is a connection")
        assert "state_dict()" in message and "__getstate__" in message


def printed(rank: int) -> dict[str, tuple[str, str]]:
    """What is printed of every object, and the shape of its rows."""
    seen = {}
    for layout, quantize in (("expert", None), ("rank", None), ("expert", "e4m3_1x128")):
        hidden = HIDDEN if quantize is None else 128
        with make_buffer(dtype=torch.bfloat16, hidden=hidden) as buffer:
            _, topk_idx, weights = inputs(rank)
            x = torch.zeros(topk_idx.shape[0], hidden, dtype=torch.bfloat16)
            out = ep.dispatch(buffer, x, topk_idx, weights, layout=layout, quantize=quantize)
            res = buffer.combine(ep.dequantize(out.x) if quantize else out.x, out.handle)
            for value in (out, out.handle, res):
                seen[f"{type(value).__name__}, {layout}, {quantize}"] = (repr(value), str(out.handle.num_rows))
    return seen


def test_outputs_and_handles_print_their_shapes_alone(pools):
    (seen,) = pools(1).run(printed)
    assert len(seen) == 9
    for name, (text, _) in seen.items():
        assert text.startswith(name.partition(",")[0] + "(") and len(text) < 500 and "tensor(" not in text, text
    text, rows = seen["DispatchOutput, rank, None"]
    assert f"(x=bfloat16[{rows}, {HIDDEN}], topk_weights=float32[{rows}, {NUM_TOPK}], topk_idx=int64[{rows}" in text
    assert f"tokens_per_expert=int64[{NUM_EXPERTS}]" in text and "layout='rank'" in text and "plan=int32[" in text
    text, rows = seen["DispatchOutput, expert, e4m3_1x128"]
    assert f"x=(float8_e4m3fn[{rows}, 128], float32[{rows}, 1])" in text and "topk_idx=None" in text
    assert "topk_weights=None, event=CompletedEvent()" in seen["CombineOutput, expert, None"][0]


def printed_buffers(rank: int) -> list[str]:
    with make_buffer(ranks_per_node=1) as buffer:
        living = repr(buffer)
    return [living, repr(buffer)]


def test_a_buffer_prints_its_sizes_and_what_carries_it(pools):
    for rank, (living, destroyed) in enumerate(pools(2).run(printed_buffers)):
        start = f"Buffer(rank {rank} of 2 nodes x 1, hidden={HIDDEN}, num_experts={NUM_EXPERTS}, num_topk={NUM_TOPK}, "
        assert living.startswith(start) and living.endswith(", CPU engine, shared memory, gloo between nodes)")
        assert destroyed.startswith(start) and destroyed.endswith(", destroyed)")
