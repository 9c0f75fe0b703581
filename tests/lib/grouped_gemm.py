"""Operands of grouped GEMMs, and how close results have to be."""

import torch

ROWS_BEHIND = 3  # behind the last expert's: not a number, and not to be read

COUNTS = {"uneven": [5, 0, 70, 1], "many rows": [700, 129, 1, 0], "none": [0, 0, 0, 0], "one expert": [257]}

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def groups(ends: torch.Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in zip([0, *ends.tolist()], ends.tolist())]


def rows_of(ends: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(int(ends[-1]) + ROWS_BEHIND, width, device=ends.device).to(dtype)
    rows[int(ends[-1]) :] = float("nan")
    return rows


def close(seen: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """Nearly equal, in units of the largest value."""
    assert seen.shape == right.shape
    if right.numel():
        assert float((seen.double() - right).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(right.abs().max()))
