#!/usr/bin/env python3
"""Measures the English of the comments in C++ and CUDA sources, and fails where it is hard to read.

    comments.py FOLDER         print the figures; where a limit is broken also the worst files and lines; exit 1 then
    comments.py --all FOLDER   print the figures of every file, the worst first

Two figures over all files: relative pronouns per 100 words, and the share of function comments that open with a clause
(`What ...`, `Where ...`) instead of a verb. The count is naive on purpose: every "that" counts, whatever it does.
Comments of fewer than three words (units, shapes, the ends of namespaces) do not count.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

MAX_PRONOUNS = 1.2  # per 100 words of comments
MAX_CLAUSES = 3.0  # % of function comments
MIN_WORDS = 3  # of a comment that counts
SUFFIXES = (".h", ".cuh", ".cu", ".cpp")

PRONOUN = re.compile(r"\b(which|that|who|whose|whom|what|whoever|whatever)\b", re.I)
CLAUSE = re.compile(r"(\[\w+\] )*(what|where|whether|of|until|how|as)\b", re.I)  # after [thread], [warp], ...
WORD = re.compile(r"[A-Za-z]\w*(?:['-]\w+)*")

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"   # a raw string
      | "(?:\\.|[^"\\\n])*"
      | \d[\w']*                                  # a number: its ' begins no character
      | '(?:\\.|[^'\\\n])+'""",
    re.S | re.X,
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
SCOPE = re.compile(r"(inline )?(namespace|struct|class|union|enum|extern)\b")
NO_FUNCTION = re.compile(r"(static_assert|using|typedef|namespace|struct|class|union|enum)\b")


class Comment(NamedTuple):
    line: int
    text: str  # of consecutive lines, without the slashes
    of_function: bool

    def num_words(self) -> int:
        return len(WORD.findall(self.text))

    def num_pronouns(self) -> int:
        return len(PRONOUN.findall(self.text))

    def opens_with_clause(self) -> bool:
        return self.of_function and CLAUSE.match(self.text) is not None


class Figures(NamedTuple):
    pronouns: float  # per 100 words
    clauses: float  # % of function comments
    num_words: int
    num_functions: int

    def excess(self) -> float:
        """Pronouns above the limit: a long file with many comes before a short one with two."""
        return (self.pronouns - MAX_PRONOUNS) * self.num_words


def comments_of(source: str) -> list[Comment]:
    """The comments of a file that count. Lines that follow each other in one column are one comment."""
    code = DIRECTIVE.sub(blank, TOKEN.sub(blank, source))
    bodies = bodies_in(code)
    comments = []
    for group in adjacent_comments(source):
        start, end = group[0].start(), group[-1].end()
        lines = [re.sub(r"^\s*(//+|/\*+|\*(?!/))|\*/$", "", match[0], flags=re.M) for match in group]
        text = " ".join(" ".join(lines).split())
        in_body = any(first < start < last for first, last in bodies)
        of_function = not in_body and is_function(code_beside(code, start, end))
        comment = Comment(source.count("\n", 0, start) + 1, text, of_function)
        if comment.num_words() >= MIN_WORDS:
            comments.append(comment)
    return comments


def blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def adjacent_comments(source: str) -> list[list[re.Match]]:
    def column(match):
        return match.start() - source.rfind("\n", 0, match.start())

    groups = []
    for match in TOKEN.finditer(source):
        if not match["comment"]:
            continue
        last = groups[-1][-1] if groups else None
        between = source[last.end() : match.start()] if last else ""
        if between.strip(" \t") == "\n" and column(last) == column(match):
            groups[-1].append(match)
        else:
            groups.append([match])
    return groups


def bodies_in(code: str) -> list[tuple[int, int]]:
    """Begin and end of each outermost pair of braces that is no namespace, struct, class or enum."""
    bodies, open_braces, begin = [], [], 0  # open: (position, whether a function can stand inside)
    for match in re.finditer(r"[{};]", code):
        if match[0] == "{":
            is_scope = SCOPE.match(without_template(code[begin : match.start()])) is not None
            open_braces.append((match.start(), is_scope))
        elif match[0] == "}" and open_braces:
            start, is_scope = open_braces.pop()
            if not is_scope and all(scope for _, scope in open_braces):
                bodies.append((start, match.end()))
        begin = match.end()
    return bodies


def code_beside(code: str, start: int, end: int) -> str:
    """The code that a comment at [start, end) speaks of: before it on its line, else behind it."""
    before = code[code.rfind("\n", 0, start) + 1 : start].strip()
    return re.split(r"[{};]", before or code[end:], maxsplit=1)[0]


def without_template(head: str) -> str:
    """`head` without labels (`public:`) and `template <...>` in front, with single spaces."""
    head = " ".join(re.sub(r"\b(public|private|protected)\s*:", " ", head).split())
    while head.startswith("template"):
        depth, end = 1, head.find("<") + 1
        while depth and end < len(head):
            depth += (head[end] == "<") - (head[end] == ">")
            end += 1
        head = head[end:].lstrip()
    return head


def is_function(head: str) -> bool:
    """Whether `head`, code outside of bodies up to a brace or semicolon, declares or defines a function."""
    head = without_template(head)
    return "(" in head.split("=")[0] and NO_FUNCTION.match(head) is None


def figures_of(comments: list[Comment]) -> Figures:
    num_words = sum(c.num_words() for c in comments)
    num_functions = sum(c.of_function for c in comments)
    pronouns = 100 * sum(c.num_pronouns() for c in comments) / max(1, num_words)
    clauses = 100 * sum(c.opens_with_clause() for c in comments) / max(1, num_functions)
    return Figures(pronouns, clauses, num_words, num_functions)


def print_worst(by_file: dict[Path, list[Comment]], num_files: int, num_comments: int) -> None:
    worst_first = sorted(by_file.items(), key=lambda item: -figures_of(item[1]).excess())
    for path, comments in worst_first[:num_files]:
        figures = figures_of(comments)
        print(f"  {path}: {figures.pronouns:.2f} per 100 words, {figures.clauses:.0f} % clauses")
        weight = {c: c.num_pronouns() + c.opens_with_clause() for c in comments}
        for c in sorted(comments, key=lambda c: -weight[c])[:num_comments]:
            if weight[c]:
                print(f"    line {c.line}: {c.text}")


def main(arguments: list[str]) -> int:
    show_all = arguments[:1] == ["--all"]
    folders = arguments[show_all:]
    if len(folders) != 1 or not Path(folders[0]).is_dir():
        print(__doc__.strip())
        return 2
    paths = sorted(path for path in Path(folders[0]).rglob("*") if path.suffix in SUFFIXES)
    by_file = {path: comments_of(path.read_text()) for path in paths}
    figures = figures_of([comment for comments in by_file.values() for comment in comments])
    print(
        f"{folders[0]}: {figures.pronouns:.2f} relative pronouns per 100 words of comments (at most {MAX_PRONOUNS}), "
        f"{figures.clauses:.1f} % of {figures.num_functions} function comments open with a clause "
        f"(at most {MAX_CLAUSES:g} %)"
    )
    failed = figures.pronouns > MAX_PRONOUNS or figures.clauses > MAX_CLAUSES
    if failed or show_all:
        print_worst(by_file, len(by_file) if show_all else 5, 3)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
