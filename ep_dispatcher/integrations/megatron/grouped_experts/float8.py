"""Experts in FP8: which layers Megatron runs in FP8, their quantized weights, and rows that arrive quantized.

Megatron runs a layer in FP8 inside a context of Transformer Engine, and only layers of the engine are quantized.
Grouped GEMMs support one of its recipes, Float8BlockScaling in e4m3.

**Weights.** With --fp8-param-gather the parameters are quantized, and are read in place. Otherwise they are bfloat16.
Then they are quantized when Megatron says that a microbatch is the first of a step (``is_first_microbatch`` of the
engine's layers), and used again in the step's other passes, as in the engine. A replay of a CUDA graph reads on the
device whether its microbatch is the first (``skip_flag``). ``Weights.get`` lists the other cases in which they are
quantized again.

**Rows.** Tokens are quantized before the dispatch. Megatron's steps pass on a tensor without memory, their anchor,
whose gradient is that of the rows. The rows themselves are in a ``QuantizedInput`` (experts_interface.py), which is
passed in place of the counts.
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
from ep_dispatcher.integrations.megatron.dispatcher import graphs, megatron_config
from ep_dispatcher.moe import float8_gemm
from ep_dispatcher.moe.expert_matrices import ExpertMatrices, QuantizedMatrices, matrix_shape, num_matrices
from ep_dispatcher.moe.grouped_mlp import Float8, Parameters

WIRE: Final = POWERS_OF_TWO  # how ep.dispatch quantizes
FLOAT32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # of Transformer Engine
# Fields of a quantized parameter: rows and transposed copy, and their scales. The engine makes the copy when needed.
_FIELDS = attrgetter("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
_transposed, _has_square_blocks = attrgetter("_columnwise_data"), attrgetter("_is_2D_scaled")


def is_wanted(config: Any, layer_number: int | None) -> bool:
    """Return whether Megatron runs this layer in FP8: it may keep the first and last ones in bfloat16.

    The answer may be wrong for layers of multi-token prediction, which have other numbers: see ``is_entered``.
    """
    if not config.fp8:
        return False
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    return not is_first_last_bf16_layer(config, (layer_number or 0) - 1)


def are_quantized(linears: Sequence[Module]) -> bool:
    """Return whether these linear layers are quantized in FP8: Megatron's own are not."""
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
        return f"sizes of its weights are not multiples of {ROW_GRANULARITY}, as FP8 needs"
    if first.is_cuda and torch.cuda.get_device_capability(first.device) < (9, 0):
        return "FP8 needs a GPU with compute capability 9.0 or newer"
    kinds = {is_quantized(weight) for weight in weights}
    if len(kinds) > 1:
        return "some of its weights are quantized"
    if kinds == {True} and not all(map(_has_square_blocks, weights)):
        return "its weights have scales for blocks of 1 x 128"
    return None


def is_quantized(weight: Any) -> bool:
    """Return whether this is Transformer Engine's Float8BlockwiseQTensor, which looks like a bfloat16 parameter."""
    return type(weight).__name__ == "Float8BlockwiseQTensor"


def has_lasting_transposed_copies() -> bool:
    """Return whether an optimizer's step updates transposed copies of quantized weights in place.

    Older versions throw them away, and a forward pass makes new ones. A replay of a CUDA graph would read the old ones.
    """
    from megatron.core import fp8_utils

    return getattr(fp8_utils, "te_post_all_gather_processing", None) is not None


def is_on() -> bool:
    """Return whether this pass is inside Megatron's FP8 context. True without Transformer Engine, as in tests."""
    manager = _manager()
    return manager is None or manager.is_fp8_enabled()


def is_entered() -> bool:
    """Return whether this pass is known to be inside Megatron's FP8 context."""
    manager = _manager()
    return manager is not None and manager.is_fp8_enabled()


def _manager() -> Any:
    engine = sys.modules.get("transformer_engine.pytorch.fp8")  # Megatron imports it
    return getattr(engine, "FP8GlobalStateManager", None)


def take_is_first(linears: Sequence[Module]) -> bool:
    """Return whether this microbatch is the first of a step, and clear the flag of the linear layers.

    Megatron sets ``is_first_microbatch``, and the layers' own forward would clear it. Without the flag a layer may
    always be in the first microbatch.
    """
    found = [vars(one).get("is_first_microbatch", True) for one in linears]
    for one, is_first in zip(linears, found):
        if is_first and "is_first_microbatch" in vars(one):
            one.is_first_microbatch = False  # type: ignore[assignment]
    return any(found)


def skip_flag(config: Any) -> Tensor | None:
    """Return the number on the device that tells a replay whether to quantize weights: 0 in the first microbatch.

    None: replays are not told. The number is that of Transformer Engine's own layers. A replay sets it, as Megatron
    says, if its graph comes first in an FP8 context. With the blockwise recipe each layer has a context of its own, so
    graphs of whole layers set it, and graphs behind an eager attention do not.

    Megatron's own graphs (local) set it too, but with pipeline parallelism not in each step. So they are not told.
    """
    if not megatron_config.graphs_begin_layers(config):
        return None
    manager = _manager()
    owner = getattr(manager, "quantization_state", manager)  # from Transformer Engine 2.15 on
    return getattr(owner, "skip_fp8_weight_update_tensor", None)


class Weights:
    """The quantized weights of a layer's experts.

    For bfloat16 weights it holds two copies in FP8, as Transformer Engine does, together as large as the weights.

    All graphs of the layer write and read the same copies, because only a replay of the first microbatch writes them.
    This object keeps them from the warm-up before the first capture on, whatever changes, so the allocator gives their
    memory to nobody else. A copy that was allocated during a capture would be safe for the same reason.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._quantized: Float8 | None = None
        self._are_in_graphs = False  # whether replays write and read them
        self._sources: list[Any] = []  # what they were made of: versions of bfloat16 weights, or the quantized tensors

    def forget(self) -> None:
        """Let the next pass quantize again, because weights may change until then without a signal to this object."""
        self._sources = []
        if not self._are_in_graphs:
            self._quantized = None

    def get(self, parameters: Parameters, linears: Sequence[Any], is_first: bool) -> Float8:
        """Return w1 and w2, quantized. Call it in each forward pass, once hooks have brought the weights.

        Weights in bfloat16 are quantized again
          - in the first microbatch of a step,
          - after a weight was written to in place (by an optimizer of PyTorch or load_state_dict),
          - after ``forget``,
          - in every pass, if disable_parameter_transpose_cache is set,
          - in every replay of a CUDA graph that is not told whether its microbatch is the first (``skip_flag``). The
            result is not kept, because it exists only during replays.

        linears: the layers of Transformer Engine that own the weights; is_first: what ``take_is_first`` has returned
        """
        weights = [*parameters.w1, *parameters.w2]
        if is_quantized(weights[0]):
            return self._views(parameters, weights)
        if any(getattr(one, "disable_parameter_transpose_cache", False) for one in linears):
            return _quantized(parameters)
        if graphs.is_capturing() or graphs.stream_is_captured():
            return self._get_in_graph(parameters)
        versions = [weight._version for weight in weights]
        if is_first or self._quantized is None or versions != self._sources:
            self.forget()  # frees memory first
            self._quantized, self._sources = _quantized(parameters, self._quantized), versions
        return self._quantized

    def _get_in_graph(self, parameters: Parameters) -> Float8:
        """Do what ``get`` does in a capture, and in a warm-up before it."""
        skip = skip_flag(self._config)
        self._are_in_graphs |= skip is not None
        self.forget()
        if skip is None:
            return _quantized(parameters)
        self._quantized = _quantized(parameters, self._quantized, skip)
        return self._quantized

    def _views(self, parameters: Parameters, weights: list[Any]) -> Float8:
        """Return the quantized parameters themselves."""
        for weight in weights:
            if _transposed(weight) is None:
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        held = [tensor for weight in weights for tensor in _FIELDS(weight)]
        if self._quantized is None or not all(map(is_, held, self._sources)):
            self._quantized, self._sources = (_viewed(parameters.w1), _viewed(parameters.w2)), held
        return self._quantized


def _quantized(parameters: Parameters, earlier: Float8 | None = None, skip: Tensor | None = None) -> Float8:
    """Quantize weights, to the memory of earlier ones if there are some of the same shapes on the same device."""
    w1, w2 = parameters.w1, parameters.w2
    out_w1, out_w2 = earlier or (None, None)
    if not (_fits(out_w1, w1) and _fits(out_w2, w2)):
        out_w1 = out_w2 = None
    return float8_gemm.quantize_weights(w1, out_w1, skip), float8_gemm.quantize_weights(w2, out_w2, skip)


def _fits(quantized: QuantizedMatrices | None, weights: ExpertMatrices) -> bool:
    rows: Any = quantized and quantized.rows  # one tensor
    shape = num_matrices(weights), *matrix_shape(weights)
    return rows is not None and rows.shape == shape and rows.device == weights[0].device


def _viewed(weights: Iterable[Any]) -> QuantizedMatrices:
    rows, scales, transposed, transposed_scales = zip(*map(_FIELDS, weights))

    def entries(tensors: Sequence[Tensor]) -> list[Tensor]:  # Transformer Engine has them as bytes
        return [tensor.view(torch.float8_e4m3fn) for tensor in tensors]

    return QuantizedMatrices(entries(rows), list(scales), entries(transposed), list(transposed_scales))
