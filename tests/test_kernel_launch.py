"""Launches of Triton kernels: which compiled kernel gets which arguments. Neither Triton nor a GPU is needed.

Results of real kernels are in test_grouped_gemm.py and test_float8_gemm.py, which launch most of them twice.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch


@dataclass
class Descriptor:
    """Stands for triton.tools.tensor_descriptor.TensorDescriptor."""

    base: torch.Tensor
    shape: list
    strides: list
    block_shape: list

    def __post_init__(self):
        assert self.strides[-1] == 1, "checked by Triton"


@pytest.fixture
def kernel_launch(monkeypatch):
    for name in ("triton", "triton.tools", "triton.tools.tensor_descriptor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["triton.tools.tensor_descriptor"].TensorDescriptor = Descriptor
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None, interpret=False)
    sys.modules["triton"].knobs = SimpleNamespace(runtime=hooks)
    monkeypatch.delitem(sys.modules, "ep_dispatcher.moe.kernel_launch", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    yield importlib.import_module("ep_dispatcher.moe.kernel_launch")  # `from` would take the one of the test before
    sys.modules.pop("ep_dispatcher.moe.kernel_launch", None)


class Kernel:
    """Stands for a function with triton.jit: it notes how it is launched, and how what it has compiled is."""

    arg_names = ("matrix", "x", "count", "other", "BLOCK", "WIDE")

    def __init__(self):
        self.pre_run_hooks, self.by_triton, self.direct = [], [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.by_triton.append((grid, arguments, options))
            return Compiled(arguments, self.direct)

        return launch


class Compiled:
    """Stands for Triton's CompiledKernel, whose launches are the same either way."""

    function, packed_metadata = 5, (4, 1)

    def __init__(self, first, launches):
        self.first, self.launches = first, launches

    def __getitem__(self, grid):
        hooks = sys.modules["triton"].knobs.runtime
        described = hooks.launch_enter_hook, hooks.launch_exit_hook
        launched = self.function, self.packed_metadata, "described", *described
        return lambda *arguments, stream: self.run(*grid, stream, *launched, *arguments)

    def run(self, x, y, z, stream, function, metadata, described, enter, leave, *arguments):
        assert (function, metadata) == (self.function, self.packed_metadata)
        for hook in filter(None, (enter, leave)):
            for call in hook.calls:
                call(described)
        self.launches.append((self.first, (x, y, z), arguments, stream))


def inputs(module, **changed):
    memory = torch.zeros(64, dtype=torch.bfloat16)
    given = dict(matrix=module.Matrix(memory, [4, 16], [16, 1], [2, 8]), x=memory, count=32, other=None)
    return {**given, **changed}.values()


def test_the_second_launch_goes_to_the_compiled_kernel(kernel_launch):
    kernel = Kernel()
    launch = kernel_launch.Launcher(kernel)
    in_another_order = kernel_launch.Configuration(dict(WIDE=False, BLOCK=128), num_warps=4)
    for count in (32, 48):
        launch((5, 1, 1), in_another_order, *inputs(kernel_launch, count=count))
    ((grid, arguments, keywords),) = kernel.by_triton
    assert grid == (5, 1, 1) and keywords == dict(WIDE=False, BLOCK=128, num_warps=4)
    assert type(arguments[0]) is Descriptor, "the first launch checks it"
    ((_, grid, arguments, stream),) = kernel.direct
    assert grid == (5, 1, 1) and stream == 77
    assert type(arguments[0]) is kernel_launch.Matrix and arguments[2:] == (48, None, 128, False)


@pytest.mark.parametrize(
    "changed",
    [
        dict(count=33),
        dict(count=1),
        dict(count=2**31),
        dict(other=torch.zeros(4)),
        dict(x=torch.zeros(64, dtype=torch.float16)),
        dict(x=torch.zeros(64, dtype=torch.bfloat16)[1:]),
        {},  # but another configuration
    ],
)
def test_arguments_of_another_kind_go_to_triton(kernel_launch, changed):
    """Each of them may need code of its own: Triton specializes on 1, on multiples of 16, on widths and on dtypes."""
    kernel = Kernel()
    launch, usual = kernel_launch.Launcher(kernel), kernel_launch.Configuration(dict(BLOCK=128, WIDE=False))
    other = usual if changed else kernel_launch.Configuration(dict(BLOCK=64, WIDE=False))
    for given, configuration in (({}, usual), (changed, other), ({}, usual), (changed, other)):
        launch((1, 1, 1), configuration, *inputs(kernel_launch, **given))
    assert len(kernel.by_triton) == 2 and len(kernel.direct) == 2
    first, second = (arguments for _, arguments, _ in kernel.by_triton)
    assert [compiled for compiled, *_ in kernel.direct] == [first, second]


def test_hooks_that_triton_calls_before_a_launch_are_called(kernel_launch):
    kernel = Kernel()
    kernel.pre_run_hooks.append(lambda *arguments, **options: None)
    launch, configuration = kernel_launch.Launcher(kernel), kernel_launch.Configuration(dict(BLOCK=128, WIDE=False))
    for _ in range(2):
        launch((1, 1, 1), configuration, *inputs(kernel_launch))
    assert len(kernel.by_triton) == 2 and not kernel.direct


def test_a_profiler_sees_every_launch(kernel_launch):
    kernel, seen = Kernel(), []
    launch, configuration = kernel_launch.Launcher(kernel), kernel_launch.Configuration(dict(BLOCK=128, WIDE=False))
    calls = sys.modules["triton"].knobs.runtime.launch_enter_hook.calls
    for is_profiled in (False, False, True, False):
        calls[:] = [seen.append] * is_profiled
        launch((2, 3, 4), configuration, *inputs(kernel_launch))
    assert seen == ["described"] and len(kernel.by_triton) == 1
    direct = [launched[1:] for launched in kernel.direct]
    assert direct[0][0] == (2, 3, 4) and direct[0][2] == 77 and len(direct) == 3
    assert all(one[1][2:] == direct[0][1][2:] for one in direct)
