#!/usr/bin/env python3
"""Rules for the package's Python that ruff does not have. Prints each broken one with its line; exit 1 then.

    lint.py FOLDER ...

A tensor names its dtype and its device where it is made. Otherwise both are the process's defaults, which belong to the
user: torch.set_default_dtype and torch.set_default_device. Memory of another size than compiled code takes it for is
written beyond its end.

An ``except`` that catches more than one kind of error says why on its line. A time-out was named where something else
had failed, and healthy ranks were blamed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# Functions of torch that make a tensor of the default dtype or on the default device.
FACTORIES = set(
    "arange as_tensor empty empty_strided eye full hann_window linspace logspace ones rand randint randn randperm "
    "scalar_tensor tensor zeros".split()
)


def unnamed(call: ast.Call) -> str:
    """Return what a call that makes a tensor leaves to the defaults, or an empty string."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
        return ""
    if function.value.id != "torch" or function.attr not in FACTORIES:
        return ""
    named = {keyword.arg for keyword in call.keywords}
    return " and ".join(name for name in ("dtype", "device") if name not in named)


# What a handler may only catch with a comment.
BROAD = {"BaseException", "Exception", "RuntimeError"}


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def mistakes(text: str, path: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.ExceptHandler) and is_broad(node):
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]  # with a tuple of kinds several lines
            if not any("  # " in line for line in head):
                yield node.lineno, "a broad except without a comment that says why"
        if isinstance(node, ast.Call) and (left_out := unnamed(node)):
            yield node.lineno, f"a tensor is made without {left_out}"


def main() -> int:
    found = 0
    for path in sorted(path for folder in sys.argv[1:] for path in Path(folder).rglob("*.py")):
        for line, text in sorted(mistakes(path.read_text(), str(path))):
            print(f"{path}:{line}: {text}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
