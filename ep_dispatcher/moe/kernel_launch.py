"""Launches Triton kernels, in less time of the host than Triton from the second launch with similar arguments on.

Triton looks at all arguments in every launch, to find the kernel that it has compiled for them. That takes longer than
the launch itself. Here a launch is looked up by the kinds of its arguments. A kind tells more than Triton asks for when
it decides whether to compile: the dtype of a tensor, its kind of device, and whether its address is a multiple of 16;
whether an integer is 1, a multiple of 16, or longer than 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_dispatcher.moe.direct_launch import DirectLaunch


# Triton's own versions of these two functions take the host 2 us per call.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Matrix(TensorDescriptor):
    """What the tensor memory accelerator needs to load blocks of a matrix. It is an argument of a launch.

    Only the first launch checks it, because a check takes the host as long as the rest of this class.
    """

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int]):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape))


class Configuration:
    """The constexpr parameters of a kernel, by name, and options of the compiler, such as num_warps.

    Keep one and use it again, because a launch looks it up by its identity.
    """

    def __init__(self, constants: dict[str, Any], **options: int):
        self.constants, self.options = constants, options


class _Compiled(NamedTuple):
    """A kernel that Triton has compiled."""

    kernel: Any  # Triton's CompiledKernel
    constants: list[Any]  # in the order of the kernel's parameters
    direct: DirectLaunch | None


class Launcher:
    """Launches one kernel: a function with triton.jit, whose constexpr parameters come last."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._is_compiled = not knobs.runtime.interpret  # TRITON_INTERPRET=1 needs no GPU
        self._compiled: dict[Hashable, _Compiled] = {}

    def __call__(self, grid: tuple[int, int, int], configuration: Configuration, *arguments: Any) -> None:
        """Launch it in the current stream of the current device.

        arguments   those before the constants: tensors, Matrix, integers and None
        """
        device = torch._C._cuda_getDevice() if self._is_compiled else -1
        kinds: list[Hashable] = [configuration, device]  # what decides which compiled kernel takes the arguments
        values, matrices = list[Any](), list[int]()  # as DirectLaunch takes them
        for argument in arguments:
            kind = type(argument)
            if argument is None:
                kinds.append(None)
            elif kind is int:
                kinds.append(_kind_of_integer(argument))
            elif kind is Matrix:
                kinds.append((argument.base.dtype, *argument.block_shape))
                matrices.append(len(values))
            else:
                address = argument.data_ptr()
                kinds.append((argument.dtype, argument.is_cuda, not address & 15))
                argument = address
            values.append(argument)
        key = tuple(kinds)
        found = self._compiled.get(key)
        if found is None or self._kernel.pre_run_hooks:
            self._launch_by_triton(grid, configuration, arguments, key)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernel, constants, direct = found
        if _has_hooks():
            kernel[grid](*arguments, *constants, stream=stream)
        elif direct is not None:
            direct(grid, stream, values + constants, matrices)
        else:  # that is what kernel[grid] does; it describes each launch to hooks, also where there are none
            launched = kernel.function, kernel.packed_metadata
            kernel.run(*grid, stream, *launched, None, None, None, *arguments, *constants)

    def _launch_by_triton(
        self, grid: tuple[int, int, int], configuration: Configuration, arguments: tuple[Any, ...], key: Hashable
    ) -> None:
        """Launch it, and keep what Triton has compiled."""
        checked = [one.checked() if type(one) is Matrix else one for one in arguments]
        kernel = self._kernel[grid](*checked, **configuration.constants, **configuration.options)
        if self._is_compiled and kernel is not None:  # a hook of Triton may keep it from being compiled
            names = self._kernel.arg_names[len(arguments) :]
            constants = [configuration.constants[name] for name in names]
            self._compiled[key] = _Compiled(kernel, constants, DirectLaunch.of(kernel, [*arguments, *constants]))


@functools.lru_cache(4096)  # to find it takes half as long as to compute it
def _kind_of_integer(argument: int) -> int:
    is_long = not -(2**31) <= argument < 2**31
    return (not argument & 15) | (argument == 1) << 1 | is_long << 2


def _has_hooks() -> bool:
    """Return whether somebody looks at launches of Triton, such as a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
