"""Expert-parallel dispatch and combine for mixture-of-experts training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ep_dispatcher import _built  # noqa: F401  # first of all, as it says what to do where nothing is built
from ep_dispatcher._version import __version__
from ep_dispatcher.autograd import combine, dispatch
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.errors import (
    DisagreementError,
    OtherRoutingError,
    PeerDataError,
    PeerTimeoutError,
    TooFewRowsError,
    UnknownExpertError,
)
from ep_dispatcher.float8 import QuantizedRows, dequantize, quantize
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle
from ep_dispatcher.memory import BufferBytes, buffer_bytes
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.mlp import moe_mlp, why_no_overlap
from ep_dispatcher.recompute import recompute_contexts
from ep_dispatcher.statistics import Stats

if TYPE_CHECKING:
    from ep_dispatcher.moe.layer import MoELayer
else:

    def __getattr__(name: str) -> Any:
        """Import the layer when it is asked for: PyTorch's DTensors, which it needs, take as long as all the rest."""
        if name != "MoELayer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("ep_dispatcher.moe.layer").MoELayer


__all__ = [
    "Activation",
    "Buffer",
    "BufferBytes",
    "CombineOutput",
    "DisagreementError",
    "DispatchOutput",
    "Handle",
    "MoELayer",
    "OtherRoutingError",
    "PeerDataError",
    "PeerTimeoutError",
    "QuantizedRows",
    "Stats",
    "TooFewRowsError",
    "UnknownExpertError",
    "__version__",
    "buffer_bytes",
    "combine",
    "dequantize",
    "dispatch",
    "moe_mlp",
    "quantize",
    "recompute_contexts",
    "why_no_overlap",
]


def __dir__() -> list[str]:
    """List the public names alone: modules of the package would hide them in a completion."""
    return __all__
