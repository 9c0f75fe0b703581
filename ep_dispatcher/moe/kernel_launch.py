"""Launches Triton kernels, in less time of the host than Triton from the second launch with similar arguments on.

Triton looks at all arguments in every launch, to find the kernel that it has compiled for them. That takes longer than
the launch itself. Here a launch is looked up by the kinds of its arguments. A kind tells more than Triton asks for when
it decides whether to compile: the dtype of a tensor and whether its address is a multiple of 16; whether an integer is
1, a multiple of 16, or longer than 32 bits.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor


# Triton's own versions of these two functions take the host 2 us per call.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Matrix(TensorDescriptor):
    """What the tensor memory accelerator needs to load blocks of a matrix. It is an argument of a launch.

    Only the first launch checks it, because a check takes the host as long as the rest of this class.
    """

    def __post_init__(self) -> None:
        pass

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape)


class Configuration:
    """The constexpr parameters of a kernel, by name, and options of the compiler, such as num_warps.

    Keep one and use it again, because a launch looks it up by its identity.
    """

    def __init__(self, constants: dict[str, Any], **options: int):
        self.constants, self.options = constants, options


class Launcher:
    """Launches one kernel: a function with triton.jit, whose constexpr parameters come last."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[Hashable, tuple[Any, list[Any]]] = {}  # with the values of constants, in order

    def __call__(self, grid: tuple[int, int, int], configuration: Configuration, *arguments: Any) -> None:
        """Launch it in the current stream of the current device.

        arguments   those before the constants: tensors, Matrix, integers and None
        """
        device = torch._C._cuda_getDevice()
        key = (configuration, device, *map(_kind, arguments))
        found = self._compiled.get(key)
        if found is None or self._kernel.pre_run_hooks:
            self._launch_by_triton(grid, configuration, arguments, key)
        else:
            compiled, constants = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            if _has_hooks():
                compiled[grid](*arguments, *constants, stream=stream)
            else:  # that is what compiled[grid] does; it describes each launch to hooks, also where there are none
                launched = compiled.function, compiled.packed_metadata
                compiled.run(*grid, stream, *launched, None, None, None, *arguments, *constants)

    def _launch_by_triton(
        self, grid: tuple[int, int, int], configuration: Configuration, arguments: tuple[Any, ...], key: Hashable
    ) -> None:
        """Launch it, and keep what Triton has compiled."""
        checked = [one.checked() if type(one) is Matrix else one for one in arguments]
        compiled = self._kernel[grid](*checked, **configuration.constants, **configuration.options)
        if compiled is not None:  # None: TRITON_INTERPRET=1
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[key] = compiled, [configuration.constants[name] for name in names]


def _has_hooks() -> bool:
    """Return whether somebody looks at launches of Triton, such as a profiler."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _kind(argument: Any) -> Hashable:
    """Return what decides which compiled kernel takes this argument."""
    kind = type(argument)
    if kind is int:
        return (not argument & 15) | (argument == 1) << 1 | (not -(2**31) <= argument < 2**31) << 2
    if argument is None:
        return None
    if kind is Matrix:
        return argument.base.dtype, *argument.block_shape
    return argument.dtype, not argument.data_ptr() & 15
