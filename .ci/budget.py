"""Prints the sizes of the project beside .ci/budget.txt, and fails where one is above its budget.

A budget may be raised, with the reason, in a commit of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in (ROOT / name for name in listed.stdout.splitlines()) if path.is_file()]


def count(paths: list[Path], pattern: str) -> int:
    return sum(len(re.findall(pattern, path.read_text(), re.MULTILINE)) for path in paths)


def measure() -> dict[str, int]:
    package, tools = files("ep_dispatcher/*.py"), files("ep_dispatcher/tools/*.py")
    code = files("csrc/*.cpp", "csrc/*.h", "csrc/*.cu", "csrc/*.cuh")
    switches = {
        name
        for path in package
        for name in re.findall(r'= Switch(?:\[.*\])?\(\s*"(EP_DISPATCHER_\w+)"', path.read_text())
    }
    glossary = re.search(r"^## Glossary$(.*?)^## ", (ROOT / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL)
    assert switches and glossary, "no switches or no glossary where this looks for them"
    return {
        "lines of ep_dispatcher without tools": count(package, "\n") - count(tools, "\n"),
        "lines of ep_dispatcher": count(package, "\n"),
        "lines of csrc": count(code, "\n"),
        "lines of tests": count(files("tests/*.py"), "\n"),
        "words of documents": count(files("*.md"), r"\S+"),
        "rows of the glossary": len(re.findall(r"^\| (?!noun|word|---)", glossary[1], re.MULTILINE)),
        "environment switches": len(switches),
        "uses of private members": count(package, "# noqa: SLF001"),
    }


def main() -> int:
    lines = (ROOT / ".ci/budget.txt").read_text().splitlines()
    budget = {name.strip(): int(most) for name, most in (line.rsplit(maxsplit=1) for line in lines if line)}
    measured = measure()
    assert budget.keys() == measured.keys(), "budget.txt and budget.py name other sizes"
    for name, value in measured.items():
        print(f"{name:40} {value:6} of {budget[name]:6}{'   too much' if value > budget[name] else ''}")
    return int(any(value > budget[name] for name, value in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
