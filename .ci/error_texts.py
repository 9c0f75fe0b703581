"""Pins the wording of every error in one file, .ci/error_texts.txt, so that tests need not repeat it.

python .ci/error_texts.py            write the file again, after a change that is meant
python .ci/error_texts.py --check    fail where the code words an error in another way than the file
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / ".ci/error_texts.txt"
WORDING = {"fail", "mistake", "refuse", "warn", "Unusable"}  # these make a text of their arguments, or are raised


def called(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def texts(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not (isinstance(node, ast.Raise) or called(call.func) in WORDING):
            continue
        if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(call)):
            arguments = ", ".join(ast.unparse(argument) for argument in (*call.args, *(k.value for k in call.keywords)))
            found.append(f"{called(call.func)}: {arguments}")
    return sorted(set(found))


def main() -> int:
    lines = []
    for path in sorted((ROOT / "ep_dispatcher").rglob("*.py")):
        found = texts(path)
        lines += [f"== {path.relative_to(ROOT)}", *found] if found else []
    if "--check" not in sys.argv:
        FILE.write_text("\n".join(lines) + "\n")
        return 0
    changes = list(
        difflib.unified_diff(FILE.read_text().splitlines(), lines, "pinned", "in the code", n=0, lineterm="")
    )
    if changes:
        print(*changes, "Run python .ci/error_texts.py if these words are meant.", sep="\n")
    return int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())
