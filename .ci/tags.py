#!/usr/bin/env python3
"""The flags and the faults of the CUDA engine, from tags in the comments of the kernels.

tags.py    print the table of docs/protocol.md (flags), then that of docs/protocol_faults.md (faults); .ci/docs.py
           compares both with the pages

A function that waits for flags, raises some, or reports a fault to the host says so in the last lines of its comment.
In brackets: the phase that a PeerTimeoutError shows (a wait for other blocks of this rank has none), or what exactly is
wrong.

    // waits: items_arrived (lists), listed of this rank
    // raises: listed
    // reports: kWrongCounts (tokens of an expert)

A fault is an Error or a Phase from kWrongCall on (state.h), or a field of the report that no enum names.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ep_dispatcher import checks  # noqa: E402

CUDA = ROOT / "csrc/cuda"
STATE = (CUDA / "state.h").read_text()
# The functions by which kernels raise flags. Whoever calls one needs a tag, except these functions themselves.
RAISERS = {"raise_on_node", "team_raises", "signal", "signal_alone", "finish_sending", "raise"}
# The same for faults. None: the line of the call names an Error or a wrong number, or it is about a late rank.
REPORTERS = {
    "record_bad_topk_idx": "kBadEntry",
    "abort_for_counts": "kWrongCounts",
    "try_record_error": None,
    "atomicCAS": None,
    "abort_because_of": None,
    "abort_rank": None,
}
# Written by the host too, or read without a wait; or of the NCCL wire's messages alone.
NOT_WAITED_FOR = {"aborted", "excluded"}
OF_MESSAGES = {"ready", "message_epochs"}
# Faults that are fields of Report or ReportArrays.
FIELDS = {
    "late": "`PeerTimeoutError` with the phase of the wait",
    "out_of_step": "the error of `kDiffer`; the buffer ends",
}
TAGS = ("waits", "raises", "reports")


class Function(NamedTuple):
    """A function with its tags: the text behind `waits:`, `raises:` and `reports:`."""

    name: str
    file: str
    tags: dict[str, list[str]]
    body: list[str]

    def __str__(self) -> str:
        return f"`{self.name}` ({self.file})"

    def named(self, kind: str) -> list[tuple[str, str]]:
        """What the tags of a kind name, each with the text in its brackets."""
        found = [
            re.match(r"(\w+)(?: of this rank| \((.*)\))?(?: .*)?$", one)
            for tag in self.tags[kind]
            for one in re.split(r", (?![^(]*\))", tag)
        ]
        return [(one[1], one[2] or "") for one in found]

    def code(self) -> list[str]:
        return [line for line in self.body if not line.lstrip().startswith("//")]


def functions() -> list[Function]:
    found = []
    for path in sorted(CUDA.rglob("*.cu*")):
        owner, tags = "", {kind: [] for kind in TAGS}
        found.append(Function("", path.name, {kind: [] for kind in TAGS}, []))
        is_bounded = False  # the line before ends in __launch_bounds__(...): the name follows
        for line in path.read_text().splitlines():
            if struct := re.match(r"struct (\w+) (?::.*)?\{", line):
                owner = f"{struct[1]}::"
            elif line.startswith("}"):
                owner = ""
            if tag := re.match(rf" *// ({'|'.join(TAGS)}): (.*)$", line):
                tags[tag[1]].append(tag[2])
            elif name := re.match(r" *(?:static |inline )*(?:__device__|__global__) .*?(\w+)\(", line) or (
                is_bounded and re.match(r"    (\w+)\(", line)
            ):
                if name[1] != "__launch_bounds__" and not line.endswith(";"):
                    found.append(Function(owner + name[1], path.name, tags, []))
                    tags = {kind: [] for kind in TAGS}
            is_bounded = "__launch_bounds__" in line
            found[-1].body.append(line)
    return found


def region() -> dict[str, str]:
    """The flags and tagged words of region.h, and what is true once one is seen."""
    text = re.search(r"\nstruct Region \{\n(.*?)\n\};", (CUDA / "region.h").read_text(), re.DOTALL)[1]
    flags, comment = {}, []
    lines = re.sub(r"\*\n +(\w+;)", r"* \1", text).splitlines()
    for i, line in enumerate(lines):
        if alone := re.match(r"  // (.*)", line):
            comment = [*comment, alone[1]]
        elif field := re.match(r"  (?:uint64_t|Tagged)\* (\w+); *(?:// (.*))?$", line):
            said = [field[2]] if field[2] else comment
            for more in lines[i + 1 :] if field[2] else []:
                if not (continued := re.match(r"    +// (.*)", more)):
                    break
                said.append(continued[1])
            flags[field[1]] = " ".join(said).partition("] ")[2]  # behind the shape
            comment = []
        elif not re.match(r"    +//", line):
            comment = []
    return {name: meaning for name, meaning in flags.items() if name not in OF_MESSAGES}


def names(array: str) -> list[str]:
    """The words in an array of names of state.h."""
    return re.findall(r'"([^"]+)"', re.search(rf"{array}\[\] = \{{(.*?)\}}", STATE, re.DOTALL)[1])


def members(enum: str) -> dict[str, str]:
    """The members of an enum of state.h, a line each, with their comments."""
    text = re.search(rf"enum class {enum} : int32_t \{{\n(.*?)\n\}}", STATE, re.DOTALL)[1]
    found = [re.match(r" *(k\w+),? *(?:// (.*))?$", line) for line in text.splitlines()]
    return {member[1]: member[2] or "" for member in found}


def faults() -> dict[str, tuple[str, str]]:
    """The faults that kernels report: what is wrong, and what the caller gets."""
    text = (ROOT / "ep_dispatcher/engines/cuda/kernel_reports.py").read_text()
    # KernelReports._error_of has a function of checks.py for each kind of error, and "differ" last, without an `if`.
    worded = dict(re.findall(r'if kind == "(\w+)":.*?return checks\.(\w+)\(', text, re.DOTALL))
    worded["differ"] = "disagreement_error"
    found = {}
    for (error, meaning), kind in zip(members("Error").items(), names("kErrorNames")):
        if error != "kNone":
            raised = inspect.signature(getattr(checks, worded[kind])).return_annotation
            found[error] = meaning, f"`{raised}`"
    phases = list(zip(members("Phase").items(), names("kPhaseNames")))
    first = [*members("Phase")].index("kWrongCall")
    for (phase, meaning), words in phases[first:]:
        found[phase] = meaning, f'`RuntimeError`: "{words}"'
    for field, raised in FIELDS.items():
        meaning = re.search(rf" {field}; +// (?:\[\w+\] |\d: )?(.*)", STATE)[1]
        found[field] = meaning, raised
    return found


def flag_table() -> str:
    every = functions()
    rows = ["| flag | true once it is seen | raised in | waited for in |", "|---|---|---|---|"]
    for flag, meaning in region().items():
        raised = [str(f) for f in every if flag in (name for name, _ in f.named("raises"))]
        waited = [
            f"{f}: {f'*{phase}*' if phase else 'this rank alone'}"
            for f in every
            for name, phase in f.named("waits")
            if name == flag
        ]
        rows.append(f"| `{flag}` | {meaning} | {', '.join(raised)} | {'; '.join(waited)} |")
    return "\n".join(rows)


def fault_table() -> str:
    every = functions()
    rows = ["| fault | what is wrong | found in | raised |", "|---|---|---|---|"]
    for fault, (meaning, raised) in faults().items():
        found = [
            f"{f}{f': {what}' if what else ''}" for f in every for name, what in f.named("reports") if name == fault
        ]
        rows.append(f"| `{fault}` | {meaning} | {'; '.join(found)} | {raised} |")
    return "\n".join(rows)


def reported(line: str) -> set[str]:
    """The faults that a line of code reports to the host."""
    if "out_of_step) = 1" in line:
        return {"out_of_step"}
    called = re.search(rf"\b({'|'.join(REPORTERS)})\(", line)
    if called is None or "__device__" in line:
        return set()
    named = {error or phase for error, phase in re.findall(r"Error::(k\w+)|Phase::(kWrong\w+)", line)}
    if named:
        return named
    if called[1] == "atomicCAS":  # of something else than an error
        return set()
    return {REPORTERS[called[1]] or "late"}


def mistakes() -> Iterator[str]:
    """Waits, raised flags and reported faults without a tag, and tags of something else."""
    phases, words = names("kPhaseNames"), dict(zip(members("Phase"), names("kPhaseNames")))
    flags, known, every = region(), faults(), functions()
    for function in every:
        where, name = f"{function.file}: {function.name}", function.name.rpartition(":")[2]
        waits, reports = " ".join(function.tags["waits"]), {fault for fault, _ in function.named("reports")}
        for line in function.code():
            called = re.search(r"\b(?:wait\w*|is_too_late|poll\w*)\([^;]*Phase::(k\w+)", line)
            if called and words[called[1]] not in waits:
                yield f"{where} waits in phase {words[called[1]]}, and has no tag for it"
            raises = re.search(rf"\b(?:{'|'.join(RAISERS)})(?:<\w+>)?\(", line) and "__device__" not in line
            if raises and not function.tags["raises"] and name not in RAISERS:
                yield f"{where} raises a flag, and has no tag for it"
        if name not in REPORTERS:
            found = set().union(*(reported(line) for line in function.code()))
            yield from (f"{where} reports {fault}, and has no tag for it" for fault in sorted(found - reports))
            yield from (
                f"{where} is tagged with {fault}, which it does not report" for fault in sorted(reports - found)
            )
        for flag, phase in [*function.named("waits"), *function.named("raises")]:
            if flag not in flags:
                yield f"{where} is tagged with {flag}, which is no flag of Region"
            if phase and phase.partition(",")[0] not in phases:
                yield f"{where} is tagged with the phase {phase}, which is not in kPhaseNames"
    for flag in flags:
        if not any(flag == name for f in every for name, _ in f.named("raises")):
            yield f"region.h: no function is tagged to raise {flag}"
        if flag not in NOT_WAITED_FOR and not any(flag == name for f in every for name, _ in f.named("waits")):
            yield f"region.h: no function is tagged to wait for {flag}"
    for fault, (meaning, _) in known.items():
        if not meaning:
            yield f"state.h: {fault} has no comment that says what is wrong"
        if not any(fault == name for f in every for name, _ in f.named("reports")):
            yield f"state.h: no function is tagged to report {fault}"


if __name__ == "__main__":
    print(flag_table(), "", fault_table(), *mistakes(), sep="\n")
