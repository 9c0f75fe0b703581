#!/usr/bin/env python3
"""Checks that the pages agree with the tree: links, lengths, names of files, commands, and tables that repeat the code.

docs.py    print what is wrong, a line each; exit 1 then
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tags  # noqa: E402

from ep_dispatcher import __version__, checks, envs  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")])
TEXTS = {page: page.read_text() for page in PAGES}
# The most words of a page, and of all pages together. Code is not counted. A list of runs may be as long as it has to.
MOST_WORDS = {"protocol.md": 3700, "RUNS.md": 10**6}
MOST_WORDS_IN_ALL = 24_200
FOLDERS = "benchmarks|csrc|docs|ep_dispatcher|examples|tests"
SUFFIXES = (".py", ".h", ".cpp", ".cuh", ".cu")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", outside_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)


def exists(path: str) -> bool:
    """Whether a path of this repository, or a pattern of paths, leads to a file or folder."""
    return any(True for _ in ROOT.glob(path.rstrip("/")))


def links():
    for page in PAGES:
        found = re.findall(r"\]\(([^)\s]+)\)", outside_code(page))
        found += re.findall(r"^\[\w+\]: (\S+)$", TEXTS[page], re.MULTILINE)
        for link in found:
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            if not link.startswith("https://") and not (
                target.exists() and (not heading or heading in anchors(target))
            ):
                yield f"{page.name}: {link} leads nowhere"
    reached, following = {ROOT / "README.md"}, [ROOT / "README.md"]
    for page in following:
        to = {(page.parent / link).resolve() for link in re.findall(r"\]\(([\w./]+\.md)", TEXTS.get(page, ""))}
        following += to - reached
        reached |= to
    yield from (f"{page.name}: no way of links from README.md leads there" for page in PAGES if page not in reached)


def lengths():
    """Pages that nobody reads in one go, and more pages than anybody reads."""
    in_all = 0
    for page in PAGES:
        text = outside_code(page).replace("|", " ")
        words, most = sum(any(map(str.isalnum, word)) for word in text.split()), MOST_WORDS.get(page.name, 2500)
        if words > most:
            yield f"{page.name}: {words} words, at most {most}: cut it, or make two pages of it"
        if page.name != "RUNS.md":
            in_all += words
    if in_all > MOST_WORDS_IN_ALL:
        yield f"all pages: {in_all} words, at most {MOST_WORDS_IN_ALL}: say each fact once"


def names():
    """Files, tests and commands that a page names, pages that a source names, and the files of docs/files.md."""
    makefile = (ROOT / "Makefile").read_text()
    for page, text in TEXTS.items():
        named = re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[\w./*-]*\w(?:/|\*)?)", text)
        named += [f"tests/{name}.py" for name in re.findall(r"`(test_\w+\*?)(?:\.py)?`", text)]
        yield from (f"{page.name}: there is no {name}" for name in named if not (exists(name) or name.endswith(".so")))
        commands = set(re.findall(r"(?:^|`|=\w+ )make ([a-z][\w-]*)", text, re.MULTILINE))
        yield from (f"{page.name}: no make {name}" for name in commands if not re.search(rf"^{name}:", makefile, re.M))
    for block in re.findall(r"^```\n(.*?)^```$", TEXTS[ROOT / "docs/files.md"], re.MULTILINE | re.DOTALL):
        listed = re.findall(r"^(\S+) {2,}", block, re.MULTILINE)
        yield from (f"files.md: there is no {name}" for name in listed if not exists(name))
    files = [file for folder in FOLDERS.split("|") for file in (ROOT / folder).rglob("*.*") if file.suffix in SUFFIXES]
    sources = {file.relative_to(ROOT): file.read_text() for file in files}
    for file, text in sources.items():
        named = set(re.findall(r"docs/\w+\.md", text))
        yield from (f"{file}: there is no {name}" for name in named if not exists(name))
    words = {word for text in sources.values() for word in re.findall(r"\w+", text)}
    for page in ("docs/protocol.md", "docs/protocol_faults.md"):
        code = "".join(re.findall(r"```\n.*?```|`[^`]+`", TEXTS[ROOT / page], re.DOTALL))
        unknown = sorted({word for word in re.findall(r"\w*[a-z]_\w+|\w+(?=::)|(?<=::)\w+", code) if word not in words})
        yield from (f"{page}: nothing is called {name}" for name in unknown)


def functions():
    """What a page names behind a link to its file, as [pull.cuh](path): `Puller::run`, is defined there."""
    for page in PAGES:
        found = re.findall(r"\]\(([\w./]+)\):((?:[ \n]+(?:and )?`[\w:.]+`,?)+)", outside_code(page))
        for link, named in ((link, named) for link, named in found if "/examples/" not in link):
            source = (page.parent / link).read_text()
            for name in re.findall(r"`([\w:.]+)`", named):
                *owners, function = re.split(r"::|\.", name)
                before = (
                    r" +" if function.endswith("_kernel") else r" *(?:def|class|struct|[\w :<>*&,]+[\w>*&]) (?:\w+::)*"
                )
                defined = re.search(rf"^{before}{function}(?:<\w+>)?[({{: ]", source, re.M)
                if not defined or any(owner not in source for owner in owners):
                    yield f"{page.name}: there is no {name} in {link}"


def tables():
    """The switches, the flags, the faults, the phases and the agreed arguments, which the code defines."""
    if envs.table() not in TEXTS[ROOT / "docs/environment.md"]:
        yield "environment.md: put in the table that `python -m ep_dispatcher.envs` prints"
    for page, table in (("protocol.md", tags.flag_table()), ("protocol_faults.md", tags.fault_table())):
        if table not in TEXTS[ROOT / "docs" / page]:
            yield f"{page}: put in the table that `python .ci/tags.py` prints"
    yield from tags.mistakes()
    released = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", TEXTS[ROOT / "CHANGELOG.md"], re.MULTILINE)
    if ".dev" not in __version__ and released[:1] != [__version__]:
        yield f"CHANGELOG.md: the newest release is {released[:1]}, the package is {__version__}"
    names = re.search(r"kPhaseNames\[\] = \{(.*?)\}", (ROOT / "csrc/cuda/state.h").read_text(), re.DOTALL)
    phases = set(re.findall(r'"([^"]+)"', names[1]))
    phases |= source(
        r'(?:wait_for|meet)\([^;"]*"([^"]+)"', *(f"csrc/cpu/{n}.cpp" for n in ("plan", "dispatch", "combine"))
    )
    explained = set(re.findall(r"^\|\s?`([^`]+)`", TEXTS[ROOT / "docs/errors.md"], re.MULTILINE))
    yield from (f"errors.md: no row for `{name}`" for name in sorted((phases | {*checks.AGREED}) - explained))


def source(pattern: str, *files: str) -> set[str]:
    """What a pattern captures in source files, each of which has some of it."""
    found = [set(re.findall(pattern, (ROOT / file).read_text())) for file in files]
    assert all(found), f"nothing like {pattern} in one of {files}"
    return set().union(*found)


if __name__ == "__main__":
    wrong = [*links(), *lengths(), *names(), *functions(), *tables()]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
