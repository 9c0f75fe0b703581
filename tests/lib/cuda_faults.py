"""A kernel that keeps a GPU busy."""

import torch


def spin(seconds: float) -> None:
    """Keep the current stream at least so long."""
    torch.cuda._sleep(int(2e9 * seconds))  # no clock is faster than 2 GHz
