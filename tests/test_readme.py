"""The README says what is true: its example is the file it names and prints what it shows; its figures are measured."""

import re

from commands import ROOT, torchrun

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; the parts between fences alternate between text and code."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    return [code for name, code in zip(parts[1::4], parts[2::4]) if name == language]


def test_the_example_is_the_file_and_prints_what_is_shown():
    (example,) = blocks("python")
    path = ROOT / "examples" / "quickstart.py"
    assert path.read_text().endswith(example)
    (shown,) = [block for block in blocks("") if block.startswith("rank 0:")]
    code, output, errors = torchrun(4, str(path))
    assert code == 0, errors
    assert sorted(output.splitlines()) == shown.splitlines()


def test_the_figures_stand_on_the_page_that_has_all():
    """Each row of the README's first table has a row there for the same operation, with the same numbers."""
    part = README.partition("## Figures")[2].partition("**A whole training step**")[0]
    rows = re.findall(r"^\| ([^|]+) \| (\d+.*) \|$", part, re.MULTILINE)
    all_rows = (ROOT / "docs" / "performance.md").read_text().splitlines()
    assert len(rows) >= 4
    for operation, figures in rows:
        wanted = set(re.findall(r"[\d.]+", figures))
        there = [set(re.findall(r"[\d.]+", row)) for row in all_rows if row.startswith(f"| {operation} |")]
        assert any(wanted <= numbers for numbers in there), (
            f"docs/performance.md has no row '{operation}' with {wanted}"
        )
