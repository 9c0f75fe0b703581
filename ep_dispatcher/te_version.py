"""The installed version of Transformer Engine, and a fault of its CUDA graphs. It imports nothing but Python's own."""

from __future__ import annotations

import re
from importlib import metadata

FIXED = (2, 14)
FAULT = (
    "its CUDA graphs of Megatron's layers overwrite gradients of linear layers in bfloat16 and float16: without "
    "pipeline parallelism only the last microbatch of a step counts"
)


def version() -> str | None:
    """Return the version of Transformer Engine, None if it is not installed."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def graphs_lose_gradients() -> bool:
    """Return whether the installed version has the fault: it is older than 2.14."""
    numbers = re.match(r"(\d+)\.(\d+)", version() or "")
    return numbers is not None and tuple(map(int, numbers.groups())) < FIXED
