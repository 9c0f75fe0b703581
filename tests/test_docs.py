"""The pages say what is there: links lead somewhere, named files exist, tables have what the code has."""

import re
from functools import cache
from pathlib import Path

import pytest
from commands import ROOT

from ep_dispatcher import __version__, checks, envs, errors
from ep_dispatcher.engines import faults

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = "benchmarks|csrc|docs|ep_dispatcher|examples|tests"
SUFFIXES = (".py", ".h", ".cpp", ".cuh", ".cu")
OF_OTHERS = {"tests/test_internode.py"}  # DeepEP's, in docs/estimate.md
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def text(page: Path) -> str:
    return page.read_text()


def outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", outside_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(path: str) -> bool:
    """Whether a path of this repository, or a pattern of paths, leads to a file or folder."""
    return any(True for _ in ROOT.glob(path.rstrip("/")))


@pages
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", outside_code(page))
    links += re.findall(r"^\[\w+\]: (\S+)$", text(page), re.MULTILINE)
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, heading = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: no such file"
        assert not heading or heading in anchors(target), f"{link}: no such heading"


@pages
def test_files_that_pages_name_exist(page):
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./*-]*)`", text(page)))
    assert [name for name in sorted(named - OF_OTHERS) if not exists(name)] == []


@pages
def test_tests_that_pages_name_exist(page):
    named = re.findall(r"`(test_\w+\*?)(?:\.py)?`", text(page))
    assert [name for name in named if not exists(f"tests/{name}.py")] == []


def test_pages_that_sources_name_exist():
    folders = ("ep_dispatcher", "csrc", "benchmarks", "examples", "tests")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.*") if file.suffix in SUFFIXES]
    named = {(name, file) for file in sources for name in re.findall(r"docs/\w+\.md", file.read_text())}
    assert len(named) > 10
    assert [f"{file}: {name}" for name, file in sorted(named) if not exists(name)] == []


def test_the_map_names_files_that_exist():
    blocks = re.findall(r"^```\n(.*?)^```$", text(ROOT / "docs/files.md"), re.MULTILINE | re.DOTALL)
    names = re.findall(r"^(\S+) {2,}", "".join(blocks), re.MULTILINE)
    assert len(names) > 90
    assert [name for name in names if not exists(name)] == []


def test_the_readme_links_every_page():
    linked = set(re.findall(r"\]\(([\w/]+\.md)", text(ROOT / "README.md")))
    expected = {str(page.relative_to(ROOT)) for page in PAGES if page.name != "README.md"}
    assert linked == expected


def test_the_table_of_switches_is_that_of_the_code():
    page = text(ROOT / "docs/environment.md")
    assert envs.table() in page, "docs/environment.md: put in the table that `python -m ep_dispatcher.envs` prints"


def test_the_commands_that_pages_name_are_in_the_makefile():
    makefile = text(ROOT / "Makefile")
    command = re.compile(r"(?:^|`|=\w+ )make ([a-z][\w-]*)", re.MULTILINE)
    named = {name for page in PAGES for name in command.findall(text(page))}
    assert "demo" in named
    assert [name for name in sorted(named) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_changelog_has_this_version():
    versions = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == __version__ and versions == sorted(versions, reverse=True)


# ---- docs/errors.md --------------------------------------------------------------------------------------------------


def first_cells(heading: str) -> list[str]:
    """The code words in the first column of the table below a heading of docs/errors.md."""
    page = text(ROOT / "docs/errors.md")
    (section,) = re.findall(rf"^#+ {heading}\n(.*?)(?=^#)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def in_sources(pattern: str, *files: str) -> set[str]:
    """What a pattern captures in source files, each of which has some of it."""
    found = {file: set(re.findall(pattern, text(ROOT / file))) for file in files}
    assert all(found.values()), [file for file in files if not found[file]]
    return set().union(*found.values())


def test_every_phase_of_the_cpu_engine_is_explained():
    sources = [f"csrc/cpu/{name}.cpp" for name in ("plan", "dispatch", "combine")]
    waited_for = in_sources(r'(?:wait_for|meet)\([^;"]*"([^"]+)"', *sources)
    waited_for |= in_sources(r'"(\w+ between nodes)"(?!, connect)', "ep_dispatcher/engines/cpu/engine.py")
    table = first_cells("Phases of the CPU engine")
    assert sorted(table) == sorted(waited_for)


def test_every_phase_of_the_cuda_engine_is_explained():
    names = in_sources(r'\.value\("(\w+)", Phase::', "csrc/bindings_cuda.cpp")
    assert len(names) == len(in_sources(r"\bPhase::(k\w+)", "csrc/bindings_cuda.cpp"))
    assert sorted(first_cells("Phases of the CUDA engine")) == sorted(name.replace("_", " ") for name in names)


def test_every_step_of_making_a_buffer_is_explained():
    sources = [
        "ep_dispatcher/buffer.py",
        *(f"ep_dispatcher/engines/{name}.py" for name in ("cpu/engine", "cuda/engine", "cuda/regions")),
    ]
    steps = in_sources(r'gather\(\s*"([^"]+)"', *sources)
    assert sorted(first_cells("Phases of making a buffer")) == sorted(steps)


def test_every_step_of_suspend_and_resume_is_explained():
    source = "ep_dispatcher/engines/optional/suspension.py"
    steps = in_sources(r'gather\("([^"]+)"', source) | in_sources(r'\("([a-z ]+)", \w+\)', source)
    assert sorted(first_cells("Phases of suspend and resume")) == sorted(steps)


def test_every_agreement_of_the_megatron_integration_is_explained():
    sources = [f"ep_dispatcher/integrations/megatron/{name}.py" for name in ("buffers", "experts", "recompute")]
    assert sorted(first_cells("Phases of the Megatron integration")) == sorted(in_sources(r'about="([^"]+)"', *sources))


def test_every_field_that_ranks_give_alike_is_explained():
    assert first_cells("Mistakes that ranks find together")[: len(checks.AGREED)] == list(checks.AGREED)


def test_the_fields_of_a_timeout_are_explained():
    error = errors.PeerTimeoutError("combine", 2, "partial sums", 0, [3], 100.0)
    cells = first_cells("A rank is late")
    assert sorted(cells[: len(vars(error))]) == sorted(vars(error))
    assert str(error) in text(ROOT / "docs/errors.md")


def test_the_texts_of_a_timeout_are_those_of_the_code():
    make = errors.PeerTimeoutError
    late, own = make("combine", 2, "partial sums", 0, [3], 100.0), make("combine", 2, "partial sums", 3, [3], 100.0)
    making = make("buffer", 0, "configuration", 0, [3], 100.0)
    words = {0: {"waits": [3], "gone": [3], "operation": "combine", "epoch": 2}}
    left, _ = faults._judge(0, words, [3])
    words = {
        1: {"waits": [3], "gone": [], "operation": "combine", "epoch": 2},
        3: {"waits": [1], "gone": [], "operation": "dispatch", "epoch": 2},
    }
    differ, _ = faults._judge(1, words, [])
    made = " ".join(str(each) for each in (late, own, making, left.reason, differ.reason))
    shown = [cell for cell in first_cells("A rank is late") if " " in cell and not cell.startswith("in a backward")]
    assert len(shown) == 5
    assert [cell for cell in shown if cell not in made] == []


def test_versions_of_transformer_engine_and_apex_are_those_that_ran():
    """In the table of Megatron's versions, with a dash where nothing ran; the recipe installs the same."""
    page = text(ROOT / "docs" / "megatron.md")
    rows = page.partition("## What was run")[2].strip().partition("\n\n")[0].splitlines()
    head, _, *table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert head[-2:] == ["TE", "apex"] and all(len(row) == len(head) for row in table)
    assert all(cell for row in table for cell in row)
    transformer_engine, apex = ({row[-i].partition(":")[0] for row in table} - {"-"} for i in (2, 1))
    recipe = page.partition("**Transformer Engine and apex** are optional")[2].split("```")[1]
    assert set(re.findall(r"transformer_engine\S*==([\d.]+)", recipe)) == transformer_engine != set()
    assert set(re.findall(r"git checkout (\w+)", recipe)) == apex != set()
