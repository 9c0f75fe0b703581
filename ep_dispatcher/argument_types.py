"""The types of arguments: the words that some of them take."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["cpu", "cuda"]
Layout = Literal["expert", "rank", "decode"]
TrainingLayout = Literal["expert", "rank"]  # of dispatches with gradients, and of plans
ScaleFormat = Literal["float32", "ue8m0"]
QuantizeBlocks = Literal["e4m3_1x128", "e4m3_1x128_pow2"]  # kinds that the GEMMs of experts take
Quantize = Literal["e4m3_1x128", "e4m3_1x128_pow2", "mxfp8"]
ActivationFunction = Literal["silu", "gelu", "gelu_tanh", "squared_relu", "situ"]
ActivationName = Literal["swiglu", "geglu", "gelu", "squared_relu", "situ"]
