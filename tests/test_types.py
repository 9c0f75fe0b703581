"""The stubs of the compiled modules have their names, and the types of arguments the words that are allowed.

That a user's code and the examples have types: format.sh, with tests/typed/.
"""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import ep_dispatcher
from ep_dispatcher import Buffer, argument_types, arguments, checks, dispatch
from ep_dispatcher.engines.cpu.engine import CpuEngine
from ep_dispatcher.moe import activation

PACKAGE = Path(ep_dispatcher.__file__).parent
FOR_HOPPER = ("bfloat16_gemm", "float8_gemm", "weight_grad")  # whose code no module with NVSHMEM can have


def built(name: str):
    is_there = importlib.util.find_spec(f"ep_dispatcher.{name}") is not None
    return pytest.param(name, marks=pytest.mark.skipif(not is_there, reason=f"{name} is not built here"))


def names_of_the_stub(name: str) -> dict[str, set[str]]:
    """Public names of a stub; each class with its members, everything else with none."""
    found: dict[str, set[str]] = {}
    for node in ast.parse((PACKAGE / f"{name}.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = {m.name if isinstance(m, ast.FunctionDef) else m.target.id for m in node.body if _is_named(m)}
            found[node.name] = {member for member in members if not member.startswith("_")}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = set()
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= names_of_the_stub(node.module.rpartition(".")[2])
    return found


def _is_named(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AnnAssign))


def names_of_the_module(module: ModuleType) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, value in vars(module).items():
        if not name.startswith("_"):
            members = vars(value) if isinstance(value, type) else ()
            found[name] = {member for member in members if not member.startswith("_")}
    return found


@pytest.mark.parametrize("name", [built("_C_cpu"), built("_C_cuda"), built("_C_nvshmem")])
def test_a_stub_has_the_names_of_its_module(name):
    module = importlib.import_module(f"ep_dispatcher.{name}")
    stub, compiled = names_of_the_stub(name), names_of_the_module(module)
    if name == "_C_nvshmem":
        stub = {function: members for function, members in stub.items() if function not in FOR_HOPPER}
    for error, members in stub.items():  # C++ gives an exception its attributes when it raises it
        if members and issubclass(getattr(module, error, object), Exception):
            compiled[error] = members
    assert stub == compiled


def test_the_words_of_the_types_are_those_that_are_allowed():
    words = {name: get_args(value) for name, value in vars(argument_types).items() if get_args(value)}
    assert words["Layout"] == CpuEngine.layouts == (*words["TrainingLayout"], "decode")
    assert (None, *words["Quantize"]) == checks.QUANTIZE == (*checks.BLOCKS_OF_128, checks.MXFP8)
    assert (None, *words["QuantizeBlocks"]) == checks.BLOCKS_OF_128 and checks.POWERS_OF_TWO in checks.BLOCKS_OF_128
    assert words["ActivationFunction"] == activation.FUNCTIONS
    assert set(words["ActivationName"]) == set(activation.NAMED)
    assert all(one.function in activation.FUNCTIONS for one in activation.NAMED.values())


@pytest.mark.parametrize(
    "function, options", [(dispatch, "DispatchOptions"), (Buffer.dispatch, "BufferDispatchOptions")]
)
def test_the_options_of_the_overloads_are_those_of_the_function(function, options):
    parameters = inspect.signature(function).parameters
    keywords = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert {*getattr(arguments, options).__annotations__, "quantize"} == keywords
