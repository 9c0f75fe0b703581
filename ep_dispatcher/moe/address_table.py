"""Tables of addresses on a device: where the matrices of the experts lie."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_dispatcher.moe.expert_matrices import ExpertMatrices, addresses_of, check_not_capturing, even_step


def address_table(matrices: ExpertMatrices, device: torch.device) -> tuple[Tensor, bool]:
    """Return the addresses of the matrices, int64 on the device, and whether all are multiples of 16."""
    if isinstance(matrices, Tensor):
        step = matrices.stride(0) * matrices.element_size()
        return _evenly_spaced_table(matrices.data_ptr(), step, matrices.shape[0], device)
    return table_of(addresses_of(matrices), device)


def table_of(addresses: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    """Return `address_table` of these addresses. It is copied to the device once."""
    table = _address_tables.get((addresses, device))
    if table is None:
        table = _make_address_table(addresses, device)
    return table


# Tables that were copied to a device.
_address_tables: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, bool]] = {}
MOST_ADDRESS_TABLES = 4096


def _make_address_table(addresses: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    """Make a table of addresses. While a CUDA graph is captured nothing can be copied from the host: ValueError.

    During a capture gradients are new, and lie side by side in one piece of memory. So their table is computed on the
    GPU. It belongs to the graph, because only replays of the graph write it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        step = even_step(addresses)
        if step is not None:
            return _evenly_spaced_table(addresses[0], step, len(addresses), device)
    check_not_capturing(len(addresses), device)
    table = torch.tensor(addresses, dtype=torch.int64, device=device)
    if len(_address_tables) >= MOST_ADDRESS_TABLES:
        _address_tables.clear()
    is_aligned = all(address % 16 == 0 for address in addresses)
    return _address_tables.setdefault((addresses, device), (table, is_aligned))


def _evenly_spaced_table(begin: int, step: int, count: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return `address_table` for matrices at begin, begin + step and so on, without a copy from the host."""
    if step == 0:  # one matrix, or the same one for all experts
        addresses = torch.full((count,), begin, dtype=torch.int64, device=device)
    else:
        addresses = torch.arange(begin, begin + count * step, step, dtype=torch.int64, device=device)
    return addresses, not (begin % 16 or step % 16)
