"""The types of arguments: the words that some of them take, and options that several signatures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from ep_dispatcher.handle import Handle

EngineName = Literal["cpu", "cuda"]
Layout = Literal["expert", "rank", "decode"]
TrainingLayout = Literal["expert", "rank"]  # of dispatches with gradients, and of plans
ScaleFormat = Literal["float32", "ue8m0"]
QuantizeBlocks = Literal["e4m3_1x128", "e4m3_1x128_pow2"]  # kinds that the GEMMs of experts take
Quantize = Literal["e4m3_1x128", "e4m3_1x128_pow2", "mxfp8"]
ActivationFunction = Literal["silu", "gelu", "gelu_tanh", "squared_relu", "situ"]
ActivationName = Literal["swiglu", "geglu", "gelu", "squared_relu", "situ"]


class DispatchOptions(TypedDict, total=False):
    """What does not decide the types of ep.dispatch's results."""

    layout: TrainingLayout
    expert_alignment: int
    handle: Handle | None
    max_recv_rows: int | None


class BufferDispatchOptions(TypedDict, total=False):
    """What does not decide the types of Buffer.dispatch's results."""

    layout: Layout
    expert_alignment: int
    handle: Handle | None
    max_recv_rows: int | None
    async_finish: bool
    scale_format: ScaleFormat
    return_hook: bool
