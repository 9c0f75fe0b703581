"""The stubs of the compiled modules have their names."""

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import ep_dispatcher

PACKAGE = Path(ep_dispatcher.__file__).parent


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
    for error, members in stub.items():  # C++ gives an exception its attributes when it raises it
        if members and issubclass(getattr(module, error, object), Exception):
            compiled[error] = members
    assert stub == compiled
