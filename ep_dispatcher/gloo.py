"""What a failure of gloo means: decided by our clock and by its connections.

gloo raises a plain RuntimeError for everything, and says only in words what it is about. But a wait that is over by our
clock is one for a late peer. And gloo closes its connections when a peer has left or a wait has timed out; then it
refuses at once to receive. An error that is neither says something else.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

MAX_WAIT_S = 10 * 86400.0  # PyTorch counts a wait in milliseconds, in 32 bits
NO_TAG = 2**31 - 1  # no message has this tag


def wait_limit(limit_s: float) -> timedelta:
    """``limit_s`` as PyTorch takes it, rounded up: when its wait is over, it is also over by our clock."""
    return timedelta(milliseconds=math.ceil(1000 * min(limit_s, MAX_WAIT_S)))


def is_closed(group: ProcessGroup | ProcessGroupGloo, rank: int) -> bool:
    """Return whether the connection to another rank of the group is closed."""
    receive = group.recv  # type: ignore[union-attr]  # PyTorch's stubs lack it
    try:
        receive([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, NO_TAG)
    except RuntimeError:  # refused
        return True
    return False
