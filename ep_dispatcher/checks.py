"""Checks of arguments. A ValueError is a sentence with the argument, the given value and the allowed values.

Functions that raise check arguments before anything is sent. Functions that return an error put a mistake that an
engine has found into words.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, get_args

import torch
from torch import Tensor

from ep_dispatcher.argument_types import Quantize, QuantizeBlocks
from ep_dispatcher.envs import MAX_TIMEOUT_S
from ep_dispatcher.errors import DisagreementError, OtherRoutingError, TooFewRowsError, UnknownExpertError
from ep_dispatcher.handle import Handle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_GRANULARITY = 16  # bytes
MAX_TOPK = 64
POWERS_OF_TWO: Final = "e4m3_1x128_pow2"
MXFP8: Final = "mxfp8"
BLOCKS_OF_128 = (None, *get_args(QuantizeBlocks))
QUANTIZE = (None, *get_args(Quantize))
E8M0 = torch.float8_e8m0fnu  # of the scales of MXFP8
SCALES = (torch.float32, E8M0, torch.uint8)
BLOCK = 128  # elements of a row whose scales take 4 bytes: a float32, or four e8m0. The last block has what is left
MAX_INT = 2**31 - 1  # the engines count in int32


def num_scales(hidden: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the number of scales of a float8 row, rounded up to whole blocks. dtype: one of SCALES"""
    return -(-hidden // BLOCK) * (4 // dtype.itemsize)


def scale_dtype(quantize: str | None, scales: Tensor | None = None) -> torch.dtype | None:
    """Return the dtype of the scales that a dispatch makes or is given. None: it has none."""
    if quantize is not None:
        return E8M0 if quantize == MXFP8 else torch.float32
    return None if scales is None else scales.dtype


def error_text(argument: str, given: Any, allowed: str) -> str:
    """Return a sentence such as "layout is 'x', but has to be 'expert' or 'rank'"."""
    return f"{argument} is {given}, but has to be {allowed}"


def fail(argument: str, given: Any, allowed: str) -> NoReturn:
    raise ValueError(error_text(argument, given, allowed))


def refuse(why: str) -> NoReturn:
    """Raise an error with a sentence of its own: what is wrong, what was given, and what is allowed."""
    raise ValueError(why)


def list_options(allowed: Iterable[object]) -> str:
    """Return "'a', 'b' or 'c'"."""
    *others, last = map(repr, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def integer(argument: str, value: Any, lowest: int, highest: int = MAX_INT) -> int:
    """Return the value as an int. A NumPy integer is accepted; a tensor or a bool is not."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is None and not isinstance(value, (bool, Tensor)) and type(value).__name__ != "bool_":
        try:
            number = operator.index(value)
        except TypeError:
            pass
    if number is None or not lowest <= number <= highest:
        fail(argument, repr(value), f"an integer from {lowest} to {highest}")
    return number


def seconds(argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT_S:
        fail(argument, repr(value), f"a number of seconds above 0, at most {MAX_TIMEOUT_S:g}")


def boolean(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        fail(argument, repr(value), "True or False")
    return value


def one_of(argument: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Check a name, a dtype or None. Values of other types are not compared: arrays and tensors compare by element."""
    for one in allowed:
        if value is one or (isinstance(value, type(one)) and value == one):
            return
    fail(argument, repr(value), list_options(allowed))


def buffer_sizes(
    num_ranks: int, hidden: Any, num_experts: Any, num_topk: Any, max_tokens_per_rank: Any, dtype: Any
) -> dict[str, Any]:
    """Check a buffer's sizes. Return them by the names of their arguments."""
    hidden = integer("hidden", hidden, 1)
    num_experts = integer("num_experts", num_experts, 1)
    if num_experts % num_ranks:
        fail("num_experts", num_experts, f"a multiple of the number of ranks ({num_ranks})")
    num_topk = integer("num_topk", num_topk, 1, min(MAX_TOPK, num_experts))
    max_tokens_per_rank = integer("max_tokens_per_rank", max_tokens_per_rank, 1)
    one_of("dtype", dtype, DTYPES)
    if hidden * dtype.itemsize % ROW_GRANULARITY:
        fail(
            "hidden",
            f"{hidden} ({hidden * dtype.itemsize} bytes a row in {dtype})",
            f"a multiple of {ROW_GRANULARITY // dtype.itemsize}: rows are multiples of {ROW_GRANULARITY} bytes",
        )
    return dict(
        hidden=hidden, num_experts=num_experts, num_topk=num_topk, max_tokens_per_rank=max_tokens_per_rank, dtype=dtype
    )


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class, without importing it: before the import there can be no such value."""
    imported_class = getattr(sys.modules.get(module), name, None)
    return imported_class is not None and isinstance(value, imported_class)


def dtensor(argument: str, value: object) -> None:
    """Refuse a DTensor. Its shape covers all ranks together, but each rank sends its own rows."""
    if is_instance(value, "torch.distributed.tensor", "DTensor"):
        fail(argument, "a DTensor", "a tensor of this rank alone: the DTensor's to_local() or full_tensor()")


def tensor(argument: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...], device: str) -> None:
    """Check a tensor. ``shape`` has an int for each fixed size, and a name for each free one."""
    if not isinstance(value, Tensor):
        given = f"of type {type(value).__name__}"
    else:
        # Every attribute of a tensor costs host time: read each one once. `device.type` makes a new str each time, so
        # test for a GPU without it.
        try:
            sizes, dense = value.shape, value.layout == torch.strided
        except RuntimeError:  # a nested tensor has no shape
            fail(argument, "a nested tensor", "a tensor with one shape for all of its rows")
        is_on_device = value.is_cuda if device == "cuda" else value.device.type == device
        if is_on_device and dense and value.dtype in dtypes and (sizes == shape or _fits(sizes, shape)):
            return  # before a text is formatted: torch.compile cannot format unknown sizes
        dtensor(argument, value)
        given = f"a tensor {list(sizes)} of {value.dtype} on {value.device.type}{'' if dense else f' ({value.layout})'}"
    allowed = f"a tensor [{', '.join(str(s) for s in shape)}] of {' or '.join(str(d) for d in dtypes)} on {device}"
    fail(argument, given, allowed + _why_not_cast(argument, value, dtypes, device))


def _why_not_cast(argument: str, value: Any, dtypes: tuple[torch.dtype, ...], device: str) -> str:
    """Return a hint for tensors of another floating dtype: what casts them, and what does not. "" for other tensors.

    Weights are never cast up: a router or a wrapper that rounds them by mistake would go unnoticed.
    """
    if not isinstance(value, Tensor) or value.dtype in dtypes or value.dtype not in DTYPES:
        return ""
    if argument == "topk_weights":
        return (
            "; compute them in float32, also under torch.autocast. FSDP2's MixedPrecisionPolicy rounds arguments of a "
            "wrapped module: wrap a module with the router in it, or set cast_forward_inputs=False"
        )
    if torch.is_autocast_enabled(device):
        return f"; torch.autocast is on, and casts to {torch.get_autocast_dtype(device)} only"
    return ""


def _fits(sizes: tuple[int, ...], shape: tuple[Any, ...]) -> bool:
    """Return whether the sizes fit a shape with names."""
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape):  # a generator in all() takes three times as long
        if size != wanted and not isinstance(wanted, str):
            return False
    return True


def rows(x: Any, hidden: int, dtype: torch.dtype, device: str, max_tokens: int, quantize: str | None) -> None:
    if quantize is not None:
        one_of("quantize", quantize, QUANTIZE)
    if isinstance(x, (tuple, list)):
        if quantize is not None:
            fail("quantize", repr(quantize), "None when x is a pair, whose rows are quantized already")
        if len(x) != 2:
            fail("x", f"a {type(x).__name__} of {len(x)}", "a tensor, or a pair (rows, scales)")
        if hidden % ROW_GRANULARITY:
            refuse(f"x is a pair, which needs a hidden that is a multiple of {ROW_GRANULARITY}; it is {hidden}")
        tensor("x[0]", x[0], (torch.float8_e4m3fn,), ("num_tokens", hidden), device)
        dtype = x[1].dtype if isinstance(x[1], Tensor) and x[1].dtype in SCALES else torch.float32
        tensor("x[1]", x[1], SCALES, (x[0].shape[0], num_scales(hidden, dtype)), device)
        x = x[0]
    else:
        tensor("x", x, (dtype,), ("num_tokens", hidden), device)
        if quantize is not None and (dtype != torch.bfloat16 or hidden % ROW_GRANULARITY):
            refuse(
                f"quantize is {quantize!r}, which needs bfloat16 rows and a hidden that is a multiple of "
                f"{ROW_GRANULARITY}; here: {dtype}, {hidden}"
            )
    num_tokens("x", x.shape[0], max_tokens)


def tokens_to_node(most: object) -> int | None:
    return None if most is None else integer("max_tokens_to_node", most, 1)


def num_tokens(argument: str, given: int, max_tokens: int) -> None:
    """Raise ValueError if a rank has more tokens than its buffer takes."""
    if given > max_tokens:
        refuse(f"{argument} has {given} rows, but at most max_tokens_per_rank = {max_tokens} are allowed")


def handle(handle: Handle, buffer_id: str) -> None:
    if not isinstance(handle, Handle):
        fail("handle", f"of type {type(handle).__name__}", "the Handle of a dispatch on this buffer")
    if handle.buffer_id != buffer_id:
        refuse(f"handle belongs to another buffer ({handle.buffer_id}) than this one ({buffer_id})")
    # Engines trust these fields: with other values they would leave the memory of the plan or of the rows.
    if not torch.compiler.is_compiling() and not handle.is_as_made():
        refuse("handle was modified: pass it as its dispatch returned it")


def handle_reuse(
    handle: Handle,
    num_tokens: int,
    topk_idx: Tensor | None,
    layout: str,
    expert_alignment: int,
    max_recv_rows: int | None,
) -> None:
    """Refuse arguments of a dispatch that disagree with its handle. An argument with its default value is ignored."""
    if topk_idx is not None:
        refuse("topk_idx is given beside handle, which has the routing: give one of them")
    if num_tokens != handle.num_tokens:
        refuse(f"x has {num_tokens} rows, but the handle was made for {handle.num_tokens}")
    if layout not in ("expert", handle.layout):
        fail("layout", repr(layout), f"the handle's {handle.layout!r}")
    if expert_alignment not in (1, handle.expert_alignment):
        fail("expert_alignment", expert_alignment, f"the handle's {handle.expert_alignment}")
    if max_recv_rows not in (None, handle.num_rows):
        fail("max_recv_rows", max_recv_rows, f"None, or the handle's {handle.num_rows} rows")


def invalid_entry_error(entry: tuple[int, int, int | None, bool], num_experts: int) -> ValueError:
    """Return the error of an invalid entry of topk_idx: (token, k, expert, whether the expert is repeated).

    expert: None if it is repeated, and only the slot of its redundant copy is known
    """
    token, k, expert, repeated = entry
    where = f"topk_idx[{token}, {k}]"
    if expert is None:
        return ValueError(f"{where} is an expert that another entry of the row is too; a row may have it only once")
    if repeated:
        return ValueError(f"{where} is expert {expert} again, but a row may have an expert only once")
    text = error_text(where, expert, f"-1 (no expert), or an expert from 0 to {num_experts - 1}")
    return UnknownExpertError(text, token) if expert >= num_experts else ValueError(text)


def other_routing_error(argument: str, given: Any, planned: Any, where: tuple[int, int]) -> OtherRoutingError:
    """Return the error of a routing, or of an entry of it, that is not the one of the plan."""
    allowed = f"{planned}, as in the plan: a recompute must choose the experts that its forward pass chose"
    return OtherRoutingError(error_text(argument, given, allowed), where)


# Fields that must be equal on all ranks, in the order in which engines compare them. Each function describes a value.
AGREED: dict[str, Callable[[int], str]] = {
    "operation": lambda n: ("a dispatch", "a combine", "a combine of decode layout", "a gather of counts")[n],
    "handle": lambda epoch: f"the plan of epoch {epoch}" if epoch > 0 else "None",
    "max_tokens_to_node": lambda most: str(most or "no limit"),
    "layout": lambda n: ("'rank'", "'expert'", "'decode'")[n],
    "expert_alignment": str,
    "topk_weights": lambda given: "them" if given else "None",
    "x: bytes per row": str,
    "x: scales per row": str,
}


def disagreement_error(field: str, rank: int, theirs: int, other: int, ours: int) -> ValueError:
    """Return the error of unequal fields of ``AGREED``: ``rank`` gave ``theirs``, and ``other`` gave ``ours``.

    "handle" of a new plan: 0, or in the CUDA engine the negative max_tokens_to_node
    """
    if field == "handle" and max(theirs, ours) <= 0:
        field, theirs, ours = "max_tokens_to_node", -theirs, -ours
    describe = AGREED[field]
    verb, imperative = ("is in", "call") if field == "operation" else ("gave", "give")
    text = _unequal_text(field, (rank, describe(theirs)), (other, describe(ours)), verb, imperative)
    if field == "operation" or (field == "handle" and min(theirs, ours) <= 0):
        text += ". So it looks if one of them is in a backward, and the other in a forward pass"
    return DisagreementError(text)


def require_same(everyone: Sequence[Mapping[str, object]], *, none: str = "None", more: str = "") -> None:
    """Raise ValueError if ranks have given different values of a name, for the first rank that differs from rank 0.

    everyone: what each rank has given, by name; all ranks call this with the same
    none: the word for None. more: the end of the sentence
    """
    for rank, given in enumerate(everyone):
        for name, first in everyone[0].items():
            if given[name] != first:
                values = [none if value is None else value for value in (first, given[name])]
                refuse(_unequal_text(name, (0, values[0]), (rank, values[1])) + more)


def _unequal_text(
    name: str, first: tuple[int, object], second: tuple[int, object], verb: str = "gave", imperative: str = "give"
) -> str:
    """Return a sentence about two ranks and what they have given."""
    words = ", ".join(f"rank {rank} {verb} {value}" for rank, value in (first, second))
    return f"{name}: {words}; all ranks must {imperative} the same"


def unknown_disagreement_error() -> ValueError:
    """Return the error of unequal fields that kernels did not report, because of an earlier error."""
    return DisagreementError("an operation after the last error: all ranks must call and give the same")


def too_few_rows_error(needs: Iterable[tuple[int, int]], label: int = 0) -> TooFewRowsError:
    """``needs``: (rows that are needed, max_recv_rows or -1 for none) of each rank, in rank order."""
    short = {rank: (needed, given) for rank, (needed, given) in enumerate(needs) if needed > given >= 0}
    each = (f"rank {rank} needs {needed} rows, but has {given}" for rank, (needed, given) in short.items())
    text = "max_recv_rows is too small: " + "; ".join(each)
    return TooFewRowsError(text, max(needed for needed, _ in short.values()), label)


def too_many_to_node_error(counts: Iterable[tuple[int, int]], label: int = 0) -> TooFewRowsError:
    """``counts``: (most tokens for another node, max_tokens_to_node) of each rank, in rank order."""
    short = {rank: (most, given) for rank, (most, given) in enumerate(counts) if most > given}
    each = (f"rank {rank} has {most} tokens for another node" for rank, (most, _) in short.items())
    needed, given = max(short.values())
    text = f"max_tokens_to_node is {given}, which is too small: {'; '.join(each)}. {needed} is enough for this dispatch"
    return TooFewRowsError(text, needed, label, "max_tokens_to_node")


def too_many_rows_error(alignment: int, rank: int, needed: int) -> ValueError:
    return ValueError(
        f"expert_alignment is {alignment}, with which rank {rank} receives {needed} rows; a rank may receive up to "
        f"{MAX_INT} rows in one dispatch"
    )


def too_many_choices_error(rank: int, choices: int) -> ValueError:
    return ValueError(
        f"topk_idx has {choices} choices of experts on rank {rank}; up to {MAX_INT} are allowed in one dispatch"
    )
