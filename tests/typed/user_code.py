"""A user's code that type checkers accept, with the types that they find. Nothing runs it: format.sh checks it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from typing_extensions import assert_type

import ep_dispatcher as ep


def training(
    buffer: ep.Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, pair: tuple[Tensor, Tensor]
) -> Tensor:
    out = ep.dispatch(buffer, x, topk_idx, topk_weights, expert_alignment=16, max_recv_rows=buffer.max_recv_rows())
    assert_type(out.x, Tensor)
    assert_type(out.topk_weights, Tensor)
    assert_type(out.rows_on_host, Tensor)
    assert_type(out.handle, ep.Handle)
    again = ep.dispatch(buffer, x, topk_weights=topk_weights, handle=out.handle)
    assert_type(again.topk_weights, Tensor)
    assert_type(ep.dispatch(buffer, x, topk_idx).topk_weights, None)
    quantized = ep.dispatch(buffer, x, topk_idx, topk_weights, quantize="mxfp8", layout="rank")
    assert_type(quantized.x, ep.QuantizedRows)
    assert_type(quantized.x.anchor, Tensor | None)
    assert_type(ep.dispatch(buffer, pair, topk_idx).x, ep.QuantizedRows)
    y = ep.combine(buffer, out.x * out.topk_weights[:, None], out.handle)
    assert_type(y, Tensor)
    sums, weights = ep.combine(buffer, out.x, out.handle, topk_weights=out.topk_weights)
    assert_type(weights, Tensor)
    return y + sums + ep.dequantize(quantized.x)


def plain(buffer: ep.Buffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, pair: tuple[Tensor, Tensor]) -> None:
    out = buffer.dispatch(x, topk_idx, topk_weights, async_finish=True)
    assert_type(out.x, Tensor)
    assert_type(out.topk_weights, Tensor)
    out.event.wait()
    assert_type(buffer.dispatch(pair, topk_idx).x, tuple[Tensor, Tensor])
    res = buffer.combine(out.x, buffer.plan(topk_idx), topk_weights=out.topk_weights)
    assert_type(res.x, Tensor)
    assert_type(res.topk_weights, Tensor)
    assert_type(buffer.combine(out.x, out.handle).topk_weights, None)


def decoding(buffer: ep.Buffer, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
    out = buffer.dispatch(x, topk_idx, layout="decode", return_hook=True)
    out.hook()
    assert_type(out.x, Tensor)
    rows, scales = buffer.dispatch(x, topk_idx, layout="decode", quantize="e4m3_1x128", scale_format="ue8m0").x
    assert_type(scales, Tensor)
    res = buffer.combine(rows, out.handle, weights=weights, return_hook=True)
    assert_type(res.hook, Callable[[], None])
    res.hook()
    return res.x


def of_any_kind(out: ep.DispatchOutput) -> None:
    """Without arguments the class stands for all of them."""
    assert_type(out.x, Tensor | tuple[Tensor, Tensor])
    assert_type(out.topk_weights, Tensor | None)


def make_buffer(mesh: DeviceMesh) -> ep.Buffer:
    sizes = ep.buffer_bytes(num_ranks=8, hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=16, engine="cpu")
    assert_type(sizes.total, int)
    buffer = ep.Buffer(mesh, hidden=64, num_experts=8, num_topk=2, max_tokens_per_rank=16, ranks_per_node="nvlink")
    assert_type(buffer.group, ProcessGroup)
    assert_type(buffer.hidden + buffer.num_experts + buffer.num_topk + buffer.max_tokens_per_rank, int)
    assert_type(buffer.dtype, torch.dtype)
    assert_type(buffer.device, torch.device)
    with buffer as same:
        assert_type(same, ep.Buffer)
    return buffer


class Layer(nn.Module):
    """Own experts, in a checkpoint."""

    def __init__(self, buffer: ep.Buffer, router: nn.Module):
        super().__init__()
        self.ours = ep.MoELayer(buffer, 32, activation="gelu", bias=True, router=router, average_gradients=True)
        self.swish = ep.MoELayer(buffer, 32, activation=ep.Activation("silu", alpha=1.702, limit=7.0, offset=1.0))

    def forward(self, x: Tensor) -> Tensor:
        assert_type(self.ours(x), Tensor)
        y = checkpoint(self.ours, x, use_reentrant=False, context_fn=ep.recompute_contexts)
        return self.swish(y)


def errors(step: Callable[[], None]) -> int:
    try:
        step()
    except ep.TooFewRowsError as error:
        return error.needed_rows
    except ep.UnknownExpertError as error:
        return error.token
    except ep.PeerTimeoutError as error:
        assert_type(error.late_ranks, tuple[int, ...])
    except ep.PeerDataError as error:
        return error.sender
    except (ep.DisagreementError, ep.OtherRoutingError):
        pass
    return 0
