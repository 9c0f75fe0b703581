"""The two packages of Megatron's integration: no circle of imports, and the dispatcher knows no grouped experts."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import ep_dispatcher

PACKAGE = "ep_dispatcher.integrations.megatron"
ROOT = Path(ep_dispatcher.__file__).parents[1]
FOLDER = ROOT / PACKAGE.replace(".", "/")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of the integration that a file imports: in functions and for types alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "an import names its whole path"
            names = [f"{node.module}.{one.name}" for one in node.names]
            names = [name if name in TREES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in TREES)


IMPORTS = {name: set(imported(tree)) - {name} for name, tree in TREES.items()}


def test_imports_form_no_circle():
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError
    for name in ("plugin", "moe_layer", "dispatcher.dispatcher", "grouped_experts.experts"):
        assert len(IMPORTS[f"{PACKAGE}.{name}"]) > 1, name


def test_the_dispatcher_knows_no_grouped_experts():
    for name, names in IMPORTS.items():
        if name.startswith(f"{PACKAGE}.dispatcher"):
            assert all(one.startswith(f"{PACKAGE}.dispatcher.") for one in names if one != f"{PACKAGE}.dispatcher"), (
                name
            )
    assert any("dispatcher" in one for one in IMPORTS[f"{PACKAGE}.grouped_experts.experts"])


def test_modules_keep_no_state():
    """One object has all that the integration keeps in a process: registration.py. Constants are tuples and tables."""
    mutable = re.compile(r"^(list|dict|set|deque|defaultdict|Counter|Weak\w+)$")
    for name, tree in TREES.items():
        for node in tree.body:
            assert not isinstance(node, ast.FunctionDef) or not any(map(is_cache, node.decorator_list)), (
                name,
                node.name,
            )
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                called = node.value.func
                kind = getattr(called, "attr", getattr(called, "id", ""))
                assert not mutable.match(kind), (name, node.lineno)
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), name


def is_cache(decorator: ast.expr) -> bool:
    found = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(found, "attr", getattr(found, "id", "")) in ("cache", "lru_cache")
