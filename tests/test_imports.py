"""Files of the package import each other in one direction, so that a reader can begin at the bottom."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from lib.commands import ROOT

MEGATRON = "ep_dispatcher.integrations.megatron"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted((ROOT / "ep_dispatcher").rglob("*.py"))}


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere: in functions too, for types alone too, and by import_module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "an import names its whole path"
            names = [alias.name for alias in node.names if not alias.name.startswith("_C_")]  # they import nothing
            whole = [f"{node.module}.{name}" for name in names]
            found |= {name if name in modules else node.module for name in whole}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return found & modules


IMPORTS = {name: imported(tree, set(TREES)) - {name} for name, tree in TREES.items()}


def test_no_files_import_each_other_in_a_circle():
    assert len(IMPORTS) > 100 and IMPORTS["ep_dispatcher.autograd"] >= {"ep_dispatcher.buffer", "ep_dispatcher.request"}
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError


@pytest.mark.parametrize(
    "source",
    ["import p.b", "from p import b", "from p.b import f", "def f():\n    from p.b import g", "import_module('p.b')"],
)
def test_every_way_to_import_counts(source: str):
    assert imported(ast.parse(source), {"p", "p.a", "p.b"}) == {"p.b"}
    with pytest.raises(CycleError):
        TopologicalSorter({"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}}).prepare()


def test_megatrons_dispatcher_knows_no_grouped_experts():
    package = f"{MEGATRON}.dispatcher"
    for name, names in IMPORTS.items():
        if name.startswith(package):
            of_megatron = {one for one in names if one.startswith(MEGATRON)}
            assert all(one == package or one.startswith(f"{package}.") for one in of_megatron), name
    assert any(one.startswith(package) for one in IMPORTS[f"{MEGATRON}.grouped_experts.experts"])


def test_modules_of_megatrons_integration_keep_no_state():
    """One object has all that it keeps in a process: registration.py. Constants are tuples and tables."""
    mutable = re.compile(r"^(list|dict|set|deque|defaultdict|Counter|Weak\w+)$")
    for name, tree in TREES.items():
        if not name.startswith(MEGATRON):
            continue
        for node in tree.body:
            assert not isinstance(node, ast.FunctionDef) or not any(map(is_cache, node.decorator_list)), node.name
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                called = node.value.func
                kind = getattr(called, "attr", getattr(called, "id", ""))
                assert not mutable.match(kind), (name, node.lineno)
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), name


def is_cache(decorator: ast.expr) -> bool:
    found = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(found, "attr", getattr(found, "id", "")) in ("cache", "lru_cache")
