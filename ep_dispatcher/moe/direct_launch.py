"""Launches kernels of Triton by its function in C, without its code in Python around it.

That code describes every matrix to the tensor memory accelerator again in each launch, and the function in C asks the
driver about each tensor. Here a description is kept for later matrices at the same address with the same sizes, and
tensors are given by address.

What the function in C takes beside the arguments of a kernel depends on Triton's version. None of it is written down
here: one call of Triton's is noted, and launches repeat it with another grid, stream and arguments. Triton 3.4 to 3.9
call it in ways that are understood. For others ``DirectLaunch.of`` returns None, and launches go through Triton.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

MOST_DESCRIPTIONS = 1024  # that are kept for a kernel
_NOTED_GRID, _NOTED_STREAM = (1, 1, 1), 0  # of the noted call, which launches nothing


class DirectLaunch:
    """Launches one compiled kernel. It does not look at the arguments, which have to be of the right kinds."""

    def __init__(self, launch: Callable[..., None], between: Sequence[Any], is_packed: bool, describe: Any):
        self._launch = launch  # Triton's function in C
        self._between = between  # what it takes between the stream and the arguments
        self._is_packed = is_packed  # whether it takes the arguments as one
        self._describe = describe  # describe(matrix, number): what stands for the kernel's first Matrix, or second, ...
        self._descriptions: dict[tuple[int, ...], list[Any]] = {}

    @staticmethod
    def of(compiled: Any, arguments: Sequence[Any]) -> DirectLaunch | None:
        """Return that of a kernel which Triton has compiled for these arguments, with the constants behind them."""
        try:
            describe = _describer(compiled)
            launch, call = _note_call(compiled, arguments)
            expected, number = list[Any](), 0
            for argument in arguments:
                if hasattr(argument, "block_shape"):  # a Matrix
                    description = describe(argument, number)
                    if any(map(_has_memory, description)):  # the kernel was compiled without tensor maps
                        return None
                    expected += description
                    number += 1
                else:
                    expected.append(argument)
        except Exception:  # whatever an unknown version does: Triton launches the kernel, as it has just done
            return None
        is_packed = _are_alike(call[-1], expected)
        behind = 1 if is_packed else len(expected)
        between = call[4:-behind]
        is_known = is_packed or _are_alike(call[-behind:], expected)
        if not is_known or call[:4] != (*_NOTED_GRID, _NOTED_STREAM) or any(map(_has_memory, between)):
            return None
        return DirectLaunch(launch, between, is_packed, describe)

    def __call__(self, grid: tuple[int, int, int], stream: int, arguments: list[Any], matrices: list[int]) -> None:
        """Launch the kernel.

        arguments   as for `of`, but addresses in place of tensors; the call changes this list
        matrices    the indexes of each Matrix in it, in order
        """
        for number in range(len(matrices) - 1, -1, -1):  # from the end, as a description is longer than its Matrix
            i = matrices[number]
            arguments[i : i + 1] = self._description(arguments[i], number)
        if self._is_packed:
            self._launch(*grid, stream, *self._between, arguments)
        else:
            self._launch(*grid, stream, *self._between, *arguments)

    def _description(self, matrix: Any, number: int) -> list[Any]:
        key = (number, matrix.base.data_ptr(), *matrix.shape, *matrix.strides)
        found = self._descriptions.get(key)
        if found is None:
            if len(self._descriptions) >= MOST_DESCRIPTIONS:
                self._descriptions.clear()
            found = self._descriptions[key] = self._describe(matrix, number)
        return found


def _describer(compiled: Any) -> Callable[[Any, int], list[Any]]:
    """Return a function that describes a Matrix as Triton does: by a tensor map, its shape and its strides."""
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
    describe = sys.modules[type(compiled.run).__module__].make_tensordesc_arg
    ignored = [None] * (len(inspect.signature(describe).parameters) - 2)  # newer versions have one, without a use

    def described(matrix: Any, number: int) -> list[Any]:
        return describe(matrix, metadata[number], *ignored)

    return described


def _note_call(compiled: Any, arguments: Sequence[Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return Triton's function in C, and what Triton would call it with. Nothing is launched."""
    noted: list[tuple[Any, ...]] = []

    def note(*call: Any) -> None:
        noted.append(call)

    run = copy.copy(compiled.run)
    launch = run.launch
    if inspect.isfunction(launch):  # it describes matrices, and then calls the function in C
        cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or ()))
        launch_in_c = cells["launcher"].cell_contents
        cells["launcher"] = types.CellType(note)
        run.launch = types.FunctionType(launch.__code__, launch.__globals__, closure=tuple(cells.values()))
    else:
        launch_in_c, run.launch = launch, note
    run(*_NOTED_GRID, _NOTED_STREAM, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    (call,) = noted
    return launch_in_c, call


def _are_alike(given: Any, expected: list[Any]) -> bool:
    """Return whether these are the expected arguments."""
    is_list = isinstance(given, (list, tuple)) and len(given) == len(expected)
    return is_list and all(map(_is_alike, given, expected))


def _is_alike(given: Any, expected: Any) -> bool:
    if given is expected:
        return True
    if isinstance(given, int):
        return isinstance(expected, int) and given == expected
    return type(given) is type(expected) and not _has_memory(given)  # tensor maps, which are made anew


def _has_memory(argument: Any) -> bool:
    """Return whether it is a tensor. Among what is repeated in each launch none is expected."""
    return hasattr(argument, "data_ptr")
