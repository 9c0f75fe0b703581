"""The README says what is true: its example is the file it names and prints what it shows.

That its figures are those of a file: test_bench_report.py.
"""

import re

import pytest
from lib.commands import ROOT, torchrun

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; the parts between fences alternate between text and code."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    return [code for name, code in zip(parts[1::4], parts[2::4]) if name == language]


@pytest.mark.exhaustive
def test_the_example_is_the_file_and_prints_what_is_shown():
    (example,) = blocks("python")
    path = ROOT / "examples" / "quickstart.py"
    assert path.read_text().endswith(example)
    (shown,) = [block for block in blocks("") if block.startswith("rank 0:")]
    code, output, errors = torchrun(4, str(path))
    assert code == 0, errors
    assert sorted(output.splitlines()) == shown.splitlines()
