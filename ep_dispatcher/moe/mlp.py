"""A whole layer of experts in one call: dispatch, two grouped GEMMs with the activation between them, combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ep_dispatcher import checks
from ep_dispatcher.addressable import check_memory
from ep_dispatcher.argument_types import ActivationName, QuantizeBlocks
from ep_dispatcher.arguments import as_autocast, dispatch_request
from ep_dispatcher.autograd import check_buffer, combine, dispatch
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.handle import DispatchOutput, Handle
from ep_dispatcher.moe import activation as activations
from ep_dispatcher.moe import float8_gemm, grouped_gemm
from ep_dispatcher.moe import overlap as overlapping
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.balanced_mlp import balanced_mlp
from ep_dispatcher.moe.expert_matrices import LINE_BYTES
from ep_dispatcher.moe.gradients import mean_gradient
from ep_dispatcher.moe.grouped_mlp import Parameters, grouped_mlp
from ep_dispatcher.moe.pytorch_experts import expert_inputs, pad_parameters, run_pytorch_experts
from ep_dispatcher.observers import is_observed, refuse_dtensors, refuse_transforms


def moe_mlp(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: ActivationName | Activation = "swiglu",
    max_recv_rows: int | None = None,
    overlap: bool = True,
    num_parts: int | None = None,
    keep_activated: bool = True,
    quantize: QuantizeBlocks | None = None,
    average_gradients: bool = False,
) -> Tensor:
    """Run a layer of experts, each an MLP of two linear layers. Return y [num_tokens, hidden] of the buffer's dtype.

        gate, up = w1[e] @ x[t] + b1[e]                           the first half of the entries, and the second half
        y[t] = sum over k of topk_weights[t, k] * (w2[e] @ (silu(gate) * up) + b2[e]),  e = topk_idx[t, k]

    x              [num_tokens, hidden] of the buffer's dtype
    topk_idx       int32 or int64 [num_tokens, num_topk]: the experts of each token, -1 for none
    topk_weights   float32 [num_tokens, num_topk]
    w1             [num_local_experts, 2 * intermediate, hidden] of the buffer's dtype: for each expert of this rank the
                   weight of a linear layer, as torch.nn.Linear has it. Without a gate [.., intermediate, hidden]
    w2             [num_local_experts, hidden, intermediate], likewise. On a GPU a row must have a multiple of 16 bytes
    b1, b2         [num_local_experts, 2 * intermediate or intermediate] and [num_local_experts, hidden] of the buffer's
                   dtype. None: no bias
    activation     "swiglu", "geglu", "situ"; without a gate "gelu", "squared_relu"; or an ep.Activation, for example
                   that of gpt-oss: ep.Activation("silu", alpha=1.702, limit=7.0, offset=1.0)
    max_recv_rows  as in ep.dispatch, for each part. With it the host never waits on a GPU with bfloat16 or float16
    overlap        let communication run under the GEMMs: with two parts in both passes, otherwise the combine of the
                   backward under the gradients of weights. Every bit of the results is the same. It needs a GPU,
                   bfloat16 or float16, and no redundant experts. Elsewhere it changes nothing. Ranks may choose
                   differently
    num_parts      1 or 2, the same on all ranks. 2: the first half of this rank's tokens, and the rest. Each part has a
                   dispatch and a combine of its own. With overlap these run under the GEMMs of the other part. None:
                   2 with several nodes on GPUs, bfloat16 or float16, and max_tokens_per_rank of 2048 or more;
                   otherwise 1
    keep_activated False: the backward computes the activation again, with the same bits. That saves the memory of
                   ``intermediate`` values per received row
    quantize       as in ep.dispatch, except "mxfp8": x travels as float8 pairs, and all GEMMs are float8
                   (docs/limits.md). Only in bfloat16, and not where something looks at operators, as torch.compile
                   does. Each call quantizes the weights. The backward keeps the pairs, and never the results of the
                   activation. On a GPU hidden and intermediate must be multiples of 16
    average_gradients  divide the gradients of weights and biases by the number of ranks of the buffer. They are then
                   gradients of the mean of the ranks' losses, as with FSDP2 and DDP. Otherwise they are gradients of
                   the sum of the losses

    Under torch.autocast of the buffer's dtype x, weights and biases are cast in each call, as in ep.dispatch.
    torch.compile keeps a layer whole in bfloat16 only, because PyTorch traces grouped GEMMs of no other dtype.

    GEMMs accumulate in float32, add the bias and round once. The activation is computed in float32, multiplied by
    topk_weights, then rounded; the second GEMM follows. Gradients between the GEMMs are rounded to the buffer's dtype
    too. The gradients of weights and biases sum over the rows of the first part, then over those of the second, and are
    rounded once. Under torch.compile the sum of each part is rounded, and GEMMs are rounded before the bias is added.

    Gradients reach x, topk_weights, weights and biases. For the backward the layer keeps the received rows, the results
    of the first GEMM and those of the activation, all in the buffer's dtype. With max_recv_rows two parts keep twice as
    many rows. There are no second derivatives. As in ep.dispatch, every rank must run the backward. x, topk_weights,
    and the parameters as a whole, must each require a gradient on all ranks or on none. torch.autograd.grad or
    backward(inputs=...) must ask for the same gradients on all ranks too.

    It raises the errors of ep.dispatch. A wrong argument is a ValueError before anything is sent.
    """
    check_buffer(buffer)
    refuse_transforms(x=x, topk_weights=topk_weights, w1=w1, w2=w2, b1=b1, b2=b2)
    activation = activations.check_activation(activation)
    checks.boolean("overlap", overlap)
    checks.boolean("keep_activated", keep_activated)
    checks.boolean("average_gradients", average_gradients)
    if max_recv_rows is not None:
        max_recv_rows = checks.integer("max_recv_rows", max_recv_rows, 0)
    num_parts = overlapping.resolve_num_parts(buffer, num_parts)
    config, num_experts = buffer.config, buffer.num_local_experts
    engine = buffer.live_engine()
    device = engine.device
    if average_gradients:  # before autocast: the gradients that the caller gets are divided in their own dtype
        w1, w2 = mean_gradient(buffer, w1), mean_gradient(buffer, w2)
        b1 = None if b1 is None else mean_gradient(buffer, b1)
        b2 = None if b2 is None else mean_gradient(buffer, b2)
    if torch.is_autocast_enabled(device):
        x, w1, w2, b1, b2 = (as_autocast(engine, t) for t in (x, w1, w2, b1, b2))
    checks.tensor("x", x, (config.dtype,), ("num_tokens", config.hidden), device)
    checks.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", config.num_topk), device)
    checks.tensor("w2", w2, (config.dtype,), (num_experts, config.hidden, "intermediate"), device)
    intermediate = w2.shape[2]
    checks.tensor("w1", w1, (config.dtype,), (num_experts, activation.pair * intermediate, config.hidden), device)
    if b1 is not None:
        checks.tensor("b1", b1, (config.dtype,), (num_experts, activation.pair * intermediate), device)
    if b2 is not None:
        checks.tensor("b2", b2, (config.dtype,), (num_experts, config.hidden), device)
    _check_width("w2", intermediate, config.dtype, device)
    refuse_dtensors(w1=w1, w2=w2, b1=b1, b2=b2)
    is_eager = not is_observed((x, topk_idx, topk_weights, w1, w2, b1, b2))
    _check_quantize(quantize, is_eager, config.dtype, device, config.hidden, intermediate)
    has_kernels = grouped_gemm.has_kernels(x) and is_eager
    if has_kernels:
        w1, w2 = _aligned("w1", w1), _aligned("w2", w2)
    parameters = Parameters(w1, w2, b1, b2)
    options: dict[str, Any] = dict(activation=activation, keep_activated=keep_activated)
    if buffer.redundant_experts_per_rank:
        _check_balanced(is_eager, num_parts)
        # Slots copy the memory of each expert as it lies.
        b1, b2 = (None if bias is None else bias.contiguous() for bias in (b1, b2))
        parameters = Parameters(w1.contiguous(), w2.contiguous(), b1, b2)
    if buffer.redundant_experts_per_rank or has_kernels or quantize is not None or (is_eager and num_parts > 1):
        with torch.cuda.device_of(x):
            if quantize is not None:
                options["float8"] = float8_gemm.quantize_weights(w1), float8_gemm.quantize_weights(w2)
            if buffer.redundant_experts_per_rank:
                inputs = buffer, x, topk_idx, topk_weights, parameters, max_recv_rows
                return balanced_mlp(*inputs, quantize=quantize, **options)
            in_parts = buffer, x, topk_idx, topk_weights, parameters, max_recv_rows, num_parts
            return overlapping.mlp_in_parts(*in_parts, overlap=overlap, quantize=quantize, **options)
    padded_parameters = pad_parameters(parameters, activation.pair)

    def run_experts(dispatched: Sequence[DispatchOutput]) -> Sequence[Tensor]:
        return [run_pytorch_experts(out, padded_parameters, **options) for out in dispatched]

    return run_nodes(buffer, x, topk_idx, topk_weights, max_recv_rows, num_parts, run_experts)


def _check_quantize(
    quantize: str | None, is_eager: bool, dtype: torch.dtype, device: str, hidden: int, intermediate: int
) -> None:
    checks.one_of("quantize", quantize, checks.BLOCKS_OF_128)
    if quantize is None:
        return
    if not is_eager:
        checks.fail("quantize", repr(quantize), "None where something looks at operators, as torch.compile does")
    line = LINE_BYTES if device == "cuda" else 1
    if dtype != torch.bfloat16 or hidden % line or intermediate % line:
        given = f"{quantize!r} with {dtype}, hidden {hidden}, intermediate {intermediate}"
        checks.refuse(f"quantize is {given}, but needs torch.bfloat16 and, on a GPU, multiples of {LINE_BYTES}")


def _check_balanced(is_eager: bool, num_parts: int) -> None:
    """Refuse what does not go with redundant experts."""
    given = "buffer has redundant experts, which"
    if not is_eager:
        checks.refuse(f"{given} cannot run where something looks at operators, as torch.compile does")
    if num_parts > 1:
        checks.refuse(f"{given} run in one part, but num_parts is {num_parts}")


def check_options(buffer: Buffer, intermediate: int, options: dict[str, Any]) -> dict[str, Any]:
    """Check options of moe_mlp for experts of this width before the first call. Return them."""
    config, device = buffer.config, buffer.live_engine().device
    checks.boolean("overlap", options["overlap"])
    checks.boolean("keep_activated", options["keep_activated"])
    if options["num_parts"] is not None:
        checks.integer("num_parts", options["num_parts"], 1, 2)
    _check_quantize(options["quantize"], True, config.dtype, device, config.hidden, intermediate)
    _check_width("intermediate", intermediate, config.dtype, device)
    return options | {"activation": activations.check_activation(options["activation"])}


def _check_width(argument: str, intermediate: int, dtype: torch.dtype, device: str) -> None:
    """Refuse experts whose rows the kernels on GPUs cannot read."""
    if device == "cuda" and (intermediate == 0 or intermediate * dtype.itemsize % LINE_BYTES):
        allowed = f"a multiple of {LINE_BYTES // dtype.itemsize} with {dtype} on a GPU"
        checks.refuse(f"{argument} has intermediate {intermediate}, but it has to be {allowed}")


def why_no_overlap(buffer: Buffer, *, num_parts: int | None = None) -> str | None:
    """Return why ``ep.moe_mlp`` with this buffer does not overlap its steps in two parts. None: it does.

        reason = ep.why_no_overlap(buffer)      # such as "its engine is cpu"

    num_parts   as in ep.moe_mlp. With one part there is a reason, but the combine of the backward overlaps on a GPU

    It sends nothing, and needs no other rank. ``torch.compile`` and tools that look at operators (FakeTensor, make_fx)
    never overlap, whatever this returns.

    Raises ValueError if `buffer` is not an ep_dispatcher.Buffer or was destroyed, and for any other num_parts.
    """
    check_buffer(buffer)
    return overlapping.no_overlap_reason(buffer, num_parts)


def run_nodes(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    max_recv_rows: int | None,
    num_parts: int,
    run_experts: Callable[[Sequence[DispatchOutput]], Sequence[Tensor]],
    handles: list[Handle] | None = None,
    *,
    quantize: QuantizeBlocks | None = None,
) -> Tensor:
    """Run ``moe_mlp`` with each operation as an autograd node of its own. overlap.py explains the order.

    run_experts: takes the dispatch of each part, and returns the results for its rows
    handles: as in mlp_in_parts
    """
    if num_parts > 1:  # an error about B comes before anything of A is sent
        engine = buffer.live_engine()
        dispatch_request(
            engine, x, topk_idx, topk_weights, quantize=quantize, max_recv_rows=max_recv_rows, has_gradients=True
        )
        if _has_values(topk_idx):
            engine.check_routing(topk_idx)
    parts = list(zip(*(overlapping.split_tokens(t, num_parts) for t in (x, topk_idx, topk_weights))))
    # All parts are dispatched before the first experts run.
    if handles:
        dispatched = [
            dispatch(buffer, rows, topk_weights=weights, handle=handle, quantize=quantize)
            for (rows, _, weights), handle in zip(parts, handles, strict=True)
        ]
    else:
        dispatched = [dispatch(buffer, *part, quantize=quantize, max_recv_rows=max_recv_rows) for part in parts]
    if handles is not None:
        handles[:] = [out.handle for out in dispatched]
    y = [combine(buffer, rows, out.handle) for rows, out in zip(run_experts(dispatched), dispatched)]
    return y[0] if num_parts == 1 else torch.cat(y)


def run_grouped_nodes(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    parameters: Parameters,
    max_recv_rows: int | None,
    num_parts: int,
    handles: list[Handle] | None = None,
    *,
    quantize: QuantizeBlocks | None = None,
    **options: Any,
) -> Tensor:
    """Run ``run_nodes`` with grouped_mlp and its options, which writes the gradients of weights once for both parts."""

    def run_experts(dispatched: Sequence[DispatchOutput]) -> Sequence[Tensor]:
        return grouped_mlp([expert_inputs(out) for out in dispatched], parameters, **options)

    inputs = buffer, x, topk_idx, topk_weights, max_recv_rows, num_parts
    return run_nodes(*inputs, run_experts, handles, quantize=quantize)


def _has_values(t: Tensor) -> bool:
    """Return whether the host may read the values of a tensor: it is not fake, and no compiler traces it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(t) is Tensor and detect_fake_mode((t,)) is None


def _aligned(argument: str, weight: Tensor) -> Tensor:
    """Return the weight in contiguous memory, at an address that the kernels of grouped GEMMs accept."""
    check_memory(argument, weight)
    weight = weight.contiguous()
    return weight if weight.data_ptr() % LINE_BYTES == 0 else weight.clone()
