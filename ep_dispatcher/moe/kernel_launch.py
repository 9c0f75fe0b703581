"""Launches Triton kernels. The second launch with arguments of the same kinds takes the host half as long as Triton's.

Triton looks at all arguments in every launch, to find the kernel that it has compiled for them. That takes longer than
the launch itself. Here a launch is looked up by the kinds of its arguments. A kind tells more than Triton asks for when
it decides whether to compile: the dtype of a tensor and whether its address is a multiple of 16; whether an integer is
1, a multiple of 16, or longer than 32 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Matrix(TensorDescriptor):
    """What the tensor memory accelerator needs to load blocks of a matrix. It is an argument of `launch`.

    Only the first launch checks it, because a check takes the host as long as the rest of this class.
    """

    def __post_init__(self) -> None:
        pass

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape)


class _Compiled(NamedTuple):
    kernel: Any  # triton.compiler.CompiledKernel
    constant_names: Sequence[str]  # in the order of the kernel's parameters


_compiled: dict[Hashable, _Compiled] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], *arguments: Any, constants: dict[str, Any], options: dict[str, int]
) -> None:
    """Launch a kernel in the current stream of the current device.

    kernel      a function with triton.jit, whose constexpr parameters come last
    arguments   those before: tensors, Matrix, integers and None
    constants   the constexpr parameters by name, hashable
    options     of the compiler, such as num_warps
    """
    device = torch._C._cuda_getDevice()
    key = (kernel, device, *map(_kind, arguments), *constants.values(), *options.values())
    compiled = _compiled.get(key)
    if compiled is None or kernel.pre_run_hooks:
        given = [one.checked() if type(one) is Matrix else one for one in arguments]
        found = kernel[grid](*given, **constants, **options)
        if found is not None:  # as with TRITON_INTERPRET=1
            _compiled[key] = _Compiled(found, kernel.arg_names[len(arguments) :])
        return
    values = [constants[name] for name in compiled.constant_names]
    compiled.kernel[grid](*arguments, *values, stream=torch._C._cuda_getCurrentRawStream(device))


def _kind(argument: Any) -> Hashable:
    """Return what decides which compiled kernel takes this argument."""
    kind = type(argument)
    if kind is int:
        return argument & 15 == 0, argument == 1, -(2**31) <= argument < 2**31
    if argument is None:
        return None
    if kind is Matrix:
        return argument.base.dtype, *argument.block_shape
    return argument.dtype, argument.data_ptr() & 15 == 0
