"""Experts in FP8: which layers Megatron runs so, their quantised weights, and rows that arrive quantised.

Megatron runs a layer in FP8 inside a context of Transformer Engine, and only layers of the engine are quantised.
Grouped GEMMs have one of its recipes, Float8BlockScaling in e4m3.

**Weights.** With --fp8-param-gather the parameters are quantised, and are read where they lie. Otherwise they are
bfloat16. Then they are quantised when Megatron says that a microbatch is the first of a step (``is_first_microbatch``
of the engine's layers), and used in the step's other passes, as the engine does it. ``Weights`` has what else renews
them.

**Rows.** Tokens are quantised before the dispatch. Megatron's steps pass on a tensor without memory, their anchor,
whose gradient is that of the rows. A ``Quantized`` (handover.py) takes the rows past them, in place of the counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from ep_dispatcher.checks import POWERS_OF_TWO, ROW_GRANULARITY
from ep_dispatcher.integrations.megatron.dispatcher import graphs
from ep_dispatcher.moe import float8_gemm
from ep_dispatcher.moe.expert_matrices import QuantizedMatrices
from ep_dispatcher.moe.grouped_mlp import Float8, Parameters

WIRE: Final = POWERS_OF_TWO  # how ep.dispatch quantises
FLOAT32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # of Transformer Engine
# Of a quantised parameter: rows and transposed copy, and their scales. The engine makes the copy when it is needed.
_FIELDS = attrgetter("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
_transposed, _has_square_blocks = attrgetter("_columnwise_data"), attrgetter("_is_2D_scaled")


def is_wanted(config: Any, layer_number: int | None) -> bool:
    """Return whether Megatron runs this layer in FP8: it may keep the first and last ones in bfloat16.

    It may be wrong for layers of multi-token prediction, which have numbers of their own: see ``is_entered``.
    """
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    return bool(config.fp8) and not is_first_last_bf16_layer(config, (layer_number or 0) - 1)


def are_quantised(linears: Sequence[Module]) -> bool:
    """Return whether these linear layers are quantised in FP8: Megatron's own are not."""
    from megatron.core import tensor_parallel

    plain = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    return not any(isinstance(linear, plain) for linear in linears)


def why_not(config: Any, weights: Sequence[Any]) -> str | None:
    """Say why experts in FP8 with these weights cannot run in grouped GEMMs. None: they can."""
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if (config.fp8, recipe) != ("e4m3", "blockwise"):
        return f"fp8 is {config.fp8} with the recipe {recipe}, not e4m3 with blockwise"
    if os.environ.get(FLOAT32_SCALES) == "1":
        return f"{FLOAT32_SCALES} is 1"
    first = weights[0]
    if first.dtype != torch.bfloat16:
        return f"params_dtype is {first.dtype} in FP8"
    if any(size % ROW_GRANULARITY for weight in weights for size in weight.shape):
        return f"its weights are no multiples of {ROW_GRANULARITY} in FP8"
    if first.is_cuda and torch.cuda.get_device_capability(first.device) < (9, 0):
        return "FP8 needs a GPU with compute capability 9.0 or newer"
    kinds = {is_quantised(weight) for weight in weights}
    if len(kinds) > 1:
        return "some of its weights are quantised"
    if kinds == {True} and not all(map(_has_square_blocks, weights)):
        return "its weights have scales for 1 x 128"
    return None


def is_quantised(weight: Any) -> bool:
    """Return whether this is Transformer Engine's Float8BlockwiseQTensor, which looks like a bfloat16 parameter."""
    return type(weight).__name__ == "Float8BlockwiseQTensor"


def has_lasting_transposed_copies() -> bool:
    """Return whether an optimizer's step leaves transposed copies of quantised weights where they are, and right.

    Older versions throw them away, and a forward pass makes new ones. A replay of a CUDA graph would read the old.
    """
    from megatron.core import fp8_utils

    return getattr(fp8_utils, "te_post_all_gather_processing", None) is not None


def is_on() -> bool:
    """Return whether this pass is inside Megatron's FP8 context. True without Transformer Engine, as in tests."""
    manager = _manager()
    return manager is None or manager.is_fp8_enabled()


def is_entered() -> bool:
    """Return whether this pass is surely inside Megatron's FP8 context."""
    manager = _manager()
    return manager is not None and manager.is_fp8_enabled()


def _manager() -> Any:
    engine = sys.modules.get("transformer_engine.pytorch.fp8")  # Megatron imports it
    return getattr(engine, "FP8GlobalStateManager", None)


def take_first(linears: Sequence[Module]) -> bool:
    """Return whether this microbatch is the first of a step, and tell the linear layers that it has run.

    Their own forward does so. Megatron sets ``is_first_microbatch``. Layers without it may always be in the first.
    """
    found = [vars(one).get("is_first_microbatch", True) for one in linears]
    for one, is_first in zip(linears, found):
        if is_first and "is_first_microbatch" in vars(one):
            one.is_first_microbatch = False  # type: ignore[assignment]
    return any(found)


class Weights:
    """The quantised weights of a layer's experts.

    Of bfloat16 weights it holds two copies in FP8, together as large as the weights, as Transformer Engine does.
    """

    def __init__(self) -> None:
        self._kept: Float8 | None = None
        self._of: list[Any] = []  # what they were made of: versions of bfloat16 weights, or the quantised tensors

    def forget(self) -> None:
        """Let the next pass quantise: weights may change meanwhile, and no signal reaches this layer."""
        self._kept, self._of = None, []

    def get(self, parameters: Parameters, linears: Sequence[Any], is_first: bool) -> Float8:
        """Return w1 and w2, quantised. Call it in each forward pass, once hooks have brought the weights.

        Weights in bfloat16 are quantised in the first microbatch of a step, if a weight was written to in place since
        (as by optimizers of PyTorch and load_state_dict), after ``forget``, and in every pass if
        disable_parameter_transpose_cache is set. A CUDA graph does it in every replay: a replay does not know whether
        its microbatch is the first. What a graph has made is not kept, because it is there during replays alone.

        linears: the layers of Transformer Engine that have them; is_first: what ``take_first`` said of them
        """
        weights = [*parameters.w1, *parameters.w2]
        if is_quantised(weights[0]):
            return self._views(parameters, weights)
        if graphs.is_capturing() or graphs.stream_is_captured():
            self.forget()
            return _quantised(parameters)
        if any(getattr(one, "disable_parameter_transpose_cache", False) for one in linears):
            return _quantised(parameters)
        versions = [weight._version for weight in weights]
        if is_first or self._kept is None or versions != self._of:
            self.forget()  # frees memory first
            self._kept, self._of = _quantised(parameters), versions
        return self._kept

    def _views(self, parameters: Parameters, weights: list[Any]) -> Float8:
        """Return the quantised parameters themselves."""
        for weight in weights:
            if _transposed(weight) is None:
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        held = [tensor for weight in weights for tensor in _FIELDS(weight)]
        if self._kept is None or not all(map(is_, held, self._of)):
            self._kept, self._of = (_viewed(parameters.w1), _viewed(parameters.w2)), held
        return self._kept


def _quantised(parameters: Parameters) -> Float8:
    return float8_gemm.quantize_weights(parameters.w1), float8_gemm.quantize_weights(parameters.w2)


def _viewed(weights: Iterable[Any]) -> QuantizedMatrices:
    rows, scales, transposed, transposed_scales = zip(*map(_FIELDS, weights))

    def entries(tensors: Sequence[Tensor]) -> list[Tensor]:  # Transformer Engine has them as bytes
        return [tensor.view(torch.float8_e4m3fn) for tensor in tensors]

    return QuantizedMatrices(entries(rows), list(scales), entries(transposed), list(transposed_scales))
