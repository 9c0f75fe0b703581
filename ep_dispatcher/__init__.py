"""Expert-parallel dispatch and combine for mixture-of-experts training."""

from ep_dispatcher._version import __version__
from ep_dispatcher.autograd import combine, dispatch
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.errors import PeerTimeoutError
from ep_dispatcher.float8 import QuantizedRows, dequantize, quantize
from ep_dispatcher.handle import CombineOutput, DispatchOutput, Handle

__all__ = [
    "Buffer",
    "CombineOutput",
    "DispatchOutput",
    "Handle",
    "PeerTimeoutError",
    "QuantizedRows",
    "__version__",
    "combine",
    "dequantize",
    "dispatch",
    "quantize",
]
