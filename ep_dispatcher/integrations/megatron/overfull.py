"""Finds tokens with more than top-k experts in a routing map: an error, on a GPU without a host wait.

On a CPU the host checks the routing map before anything is sent. On a GPU it would have to wait for the router. So the
token gets an expert number that does not exist, and the engine reports that as for any routing: from the dispatch, or
from a later call if the number of rows is given. ``explained`` rewords that error in Megatron's terms.
"""

from __future__ import annotations

from torch import Tensor

from ep_dispatcher import checks
from ep_dispatcher.errors import UnknownExpertError


def host_looks(routing_map: Tensor) -> bool:
    """Return whether the host can read the routing map without waiting for a device."""
    return not routing_map.is_cuda


def refuse(routing_map: Tensor, topk: int) -> None:
    """Raise the ValueError for a routing map that the host can read."""
    most = int(routing_map.sum(1).max())
    checks.fail("routing_map", f"a token with {most} experts", f"--moe-router-topk {topk}")


def mark(topk_idx: Tensor, is_overfull: Tensor, num_experts: int) -> None:
    """Put an expert that does not exist into the last column of the tokens [num_tokens, 1] that are overfull."""
    topk_idx[:, -1:].masked_fill_(is_overfull, num_experts)


def explained(error: ValueError, topk: int) -> ValueError:
    """Return the error. If it is about a marked token, return one in Megatron's terms, with it as the cause."""
    if not isinstance(error, UnknownExpertError):
        return error
    given = f"token {error.token} with more than {topk} experts"
    mistake = checks.mistake("routing_map", given, f"--moe-router-topk {topk}")
    told = ValueError(f"{mistake} (the engine was given an expert that does not exist: {error})")
    told.__cause__ = error
    return told
