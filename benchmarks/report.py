"""``python benchmarks/report.py``: writes the figures of the benchmark, and their charts, from its JSON files.

``python -m ep_dispatcher.bench`` makes these files. They are in benchmarks/results and its folders. RUNS.md there gets
all figures, docs/performance.md a choice. The same files give exactly the same text. ``--check`` writes nothing, and
fails where a page is not made of the files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import charts

from ep_dispatcher.tools.benchmark.cases import OPERATIONS, Case, is_standard
from ep_dispatcher.tools.benchmark.harness import table
from ep_dispatcher.tools.benchmark.measurements import BASELINES, ENGINE, GRAPH

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: python benchmarks/report.py -->"
END = "<!-- end -->"
ALL_TO_ALL, FAST_SUM = BASELINES.values()
MEGATRON, DEEP_EP = "Megatron alltoall", "DeepEP"
COLORS = {
    ENGINE: "#1f77b4",
    GRAPH: "#9ecae1",
    ALL_TO_ALL: "#d95f02",
    FAST_SUM: "#f2b27a",
    MEGATRON: "#7a0177",
    DEEP_EP: "#2ca02c",
}
ABOUT = {
    ALL_TO_ALL: "what one writes otherwise: sort, `dist.all_to_all_single`, sort, and back with `index_add_`",
    FAST_SUM: "the same with `embedding_bag` for the sum",
    MEGATRON: "its own dispatcher, beside ours in Megatron; the host waits for the counts in both",
    DEEP_EP: "rows come in the layout that is named below; the engine's are in expert layout",
}
IN_MEGATRON = ("six steps, forward", "six steps, forward+backward")
CASES = "hot_rank: one rank receives four times the mean, or all there is if ranks are fewer."
# Tokens per rank in the choice: decoding, from latency to bandwidth, training, and long sequences.
CHOSEN_TOKENS = (128, 512, 1024, 4096, 32768)


@dataclass(frozen=True)
class Group:
    """Runs that are shown together: from one folder, with one engine, on the same number of the same processors."""

    folder: Path
    runs: list[dict]  # in ascending order of their cases

    @property
    def case(self) -> Case:
        return Case(**self.runs[0]["case"])

    @property
    def machine(self) -> dict:
        return self.runs[0]["machine"]

    @property
    def unit(self) -> tuple[str, float]:
        """Return the name of the unit, and how many of it are a second."""
        return ("milliseconds", 1e3) if self.case.engine == "cpu" else ("microseconds", 1e6)

    @property
    def standard(self) -> list[dict]:
        return [run for run in self.runs if is_standard(Case(**run["case"]))]

    @property
    def title(self) -> str:
        if self.case.engine == "cpu":
            return f"{self.case.ranks} ranks on {self.machine['cpu']}, {self.machine['cores']} cores"
        beside = f", beside {DEEP_EP}" if any("deep_ep" in run for run in self.runs) else ""
        return f"{self.case.ranks} x {processor(self.runs[0])}{beside}"

    @property
    def chart(self) -> Path:
        name = f"{self.case.engine}-{self.case.ranks}ranks-{processor(self.runs[0]).replace(' ', '-')}.png"
        return self.folder / name

    def shows(self, side: str) -> bool:
        return any(side in figures for run in self.runs for figures in run["operations"].values())

    def all_of(self, name: str, *, of: str = "machine") -> str:
        return ", ".join(sorted({str(run[of].get(name, "unknown")) for run in self.runs}))


def processor(run: dict) -> str:
    return next(iter(run["machine"]["gpus"]), run["machine"]["cpu"])


def load(folder: Path) -> list[Group]:
    """Return the groups of a folder, and of the folders in it."""
    groups = []
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        runs = [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
        runs = sorted((run for run in runs if "case" in run), key=lambda run: (machine_key(run), case_key(run)))
        groups += [Group(place, list(group)) for _, group in groupby(runs, key=machine_key)]
    return groups


def machine_key(run: dict) -> tuple:
    return run["case"]["engine"], processor(run), run["case"]["ranks"]


def case_key(run: dict) -> tuple:
    case = Case(**run["case"])
    one_node = case.ranks_per_node or case.ranks
    return case.hidden, case.experts, case.topk, case.routing, case.tokens, case.sms, -one_node


def write(page: Path, runs: Path, folder: Path, check: bool) -> int:
    """Rewrite the parts between the two marks, and draw their charts; see ``replace_part``.

    ``runs`` gets all figures, ``page`` a choice.
    """
    groups = load(folder)
    failed = replace_part(page, choice([group for group in groups if group.folder == folder]), folder, check)
    failed |= replace_part(runs, part(groups, runs.parent), folder, check)
    if failed or check:
        return failed
    print(f"{page}, {runs}: from {sum(len(group.runs) for group in groups)} files in {folder}")
    for group in groups:
        engine, torch = group.case.engine, group.machine["torch"]
        title = f"{group.title}: engine {engine}, PyTorch {torch}, {group.machine['date'][:10]}"
        charts.draw(group.runs, title, COLORS, group.unit, group.chart)
    return 0


def replace_part(page: Path, made: str, source: Path, check: bool) -> int:
    """Replace what is between two marks by ``made``, which has them. Return 1 if the page has no such marks, else 0.

    With ``check`` change nothing, and return 1 if the part is another one.
    """
    text, (begin, *_) = page.read_text() if page.exists() else "", made.splitlines()
    before, _, rest = text.partition(begin)
    if text.count(begin) != 1 or END not in rest:
        print(f"{page} has to have the lines {begin} and {END}, each of them once")
        return 1
    changed = before + made + rest.partition(END)[2]
    if not check:
        page.write_text(changed)
    elif changed != text:
        command = begin.removeprefix("<!-- begin: ").removesuffix(" -->")
        print(f"{page}: its figures are not those of {source}: {command} writes them")
        return 1
    return 0


def part(groups: list[Group], root: Path) -> str:
    """Return the part, with its marks. Links are relative to ``root``."""
    shown = {side: about for side, about in ABOUT.items() if any(group.shows(side) for group in groups)}
    blocks = [BEGIN, "\n".join(f"- {side}: {about}" for side, about in shown.items())]
    for group in groups:
        blocks += [f"### {group.title}", _machine(group)]
        only_standard = len(group.standard) == len(group.runs)
        blocks += [_operations(run, group) for run in group.standard] if only_standard else [_cases(group)]
        blocks += [f"![times]({os.path.relpath(group.chart, root)})"]
        missing = dict.fromkeys(note for run in group.runs for note in run["notes"])
        blocks += ["\n".join(["Notes:", "", *(f"- {note}" for note in missing)])] if missing else []
    return "\n\n".join([*blocks, END])


def choice(groups: list[Group]) -> str:
    """Return a short table of each group, with the marks: the standard case with CHOSEN_TOKENS, or with its own."""
    blocks = [BEGIN]
    for group in groups:
        chosen = [run for run in group.runs if is_standard(Case(**run["case"]), "tokens")]
        if group.case.engine == "cuda":
            chosen = [run for run in chosen if run["case"]["tokens"] in CHOSEN_TOKENS]
        case = Case(**chosen[0]["case"])
        about = f"{group.title}, build {group.all_of('git_commit')}, {group.machine['date'][:10]}: {group.unit[0]}"
        about += f", hidden {case.hidden}, top-{case.topk} of {case.experts}, {case.dtype}, {case.layout} layout"
        rows = []
        for run in chosen:
            case = Case(**run["case"])
            tokens = f"{case.tokens}, 2 virtual nodes" if case.ranks_per_node else str(case.tokens)
            figures = (run["operations"].get(operation, {}).get(side) for _, side, operation in CHOSEN_COLUMNS)
            rows.append((tokens, *(_time(f, group) for f in figures)))
        columns = [i for i, cells in enumerate(zip(*rows)) if any(cells)]  # FP8 has no figures on CPUs
        titles = ("tokens per rank", *(title for title, _, _ in CHOSEN_COLUMNS))
        lines = table([titles[i] for i in columns], [[row[i] for i in columns] for row in rows])
        blocks.append("\n".join([f"{about}:", "", *lines]))
    return "\n\n".join([*blocks, END])


def _machine(group: Group) -> str:
    if group.case.engine == "cuda":
        titles = {"driver": "Driver", "cuda": "CUDA", "torch": "PyTorch", "nccl": "NCCL"}
    else:
        titles = {"torch": "PyTorch", "compiler": "compiler", "load_average_at_start": "load averages at the start"}
    lines = [", ".join(f"{title} {group.all_of(name)}" for name, title in titles.items())]
    lines += sorted({run[name] for run in group.runs for name in ("megatron", "deep_ep") if name in run})
    days = sorted({run["machine"]["date"][:10] for run in group.runs})
    lines += [f"Build {group.all_of('git_commit')}, {' to '.join(days[:1] + days[1:][-1:])}"]
    lines += [f"{group.unit[0].capitalize()}, median of {group.all_of('iters', of='case')}"]
    return ".\n".join(lines) + "."


def _operations(run: dict, group: Group) -> str:
    case = Case(**run["case"])
    shown = [side for side in COLORS if side != ENGINE and any(side in f for f in run["operations"].values())]
    nodes = case.ranks // (case.ranks_per_node or case.ranks)
    about = [f"{case.tokens} tokens per rank", f"hidden {case.hidden}", f"{case.experts} experts", f"top-{case.topk}"]
    about += [case.dtype, f"{case.routing} routing", f"{case.layout} layout"]
    about += [f"at most {case.sms} multiprocessors"] if case.engine == "cuda" else []
    about += ["one node" if nodes == 1 else f"{nodes} virtual nodes of {case.ranks_per_node}"]
    titles = (side.removeprefix("engine, ") for side in shown)
    rows = []
    for operation in (*OPERATIONS, *IN_MEGATRON):
        figures = run["operations"].get(operation, {})
        engine = figures.get(ENGINE)
        if engine is None:
            continue
        name = f"in Megatron: {operation}" if operation in IN_MEGATRON else operation
        spread = f"{_number(engine['min_s'], group)} to {_number(engine['max_s'], group)}"
        speed = f"{engine['gb_per_s']:.{0 if engine['gb_per_s'] > 10 else 2}f}"
        others = (_time(figures.get(side), group) for side in shown)
        rows.append((name, _time(engine, group), spread, speed, *others))
    head = ("operation", "engine", "least to most", "GB/s", *titles)
    return "\n".join([", ".join(about) + ":", "", *table(head, rows)])


# Of the table of cases: title, side, operation.
CASE_COLUMNS = (
    ("dispatch", ENGINE, "dispatch"),
    ("dispatch FP8", ENGINE, "dispatch FP8"),
    ("combine", ENGINE, "combine"),
    ("cached dispatch", ENGINE, "cached dispatch"),
    ("dispatch+combine", ENGINE, "dispatch+combine"),
    ("in a CUDA graph", GRAPH, "dispatch+combine"),
    ("all_to_all_single", ALL_TO_ALL, "dispatch+combine"),
    ("Megatron, all steps", ENGINE, IN_MEGATRON[1]),
    ("its alltoall", MEGATRON, IN_MEGATRON[1]),
)
CHOSEN_COLUMNS = [column for column in CASE_COLUMNS if column[1] in (ENGINE, ALL_TO_ALL) and column[2] in OPERATIONS]


def _cases(group: Group) -> str:
    names = dict(tokens="tokens", hidden="hidden", experts="experts", topk="top-k", routing="routing", sms="SMs")
    titles = (*names.values(), *(title for title, _, _ in CASE_COLUMNS))
    rows = []
    for run in group.runs:
        figures = (run["operations"].get(operation, {}).get(side) for _, side, operation in CASE_COLUMNS)
        rows.append((*(run["case"][name] for name in names), *(_time(f, group) for f in figures)))
    return "\n".join([f"All cases, in {group.unit[0]}. {CASES}", "", *table(titles, rows)])


def _number(seconds: float, group: Group) -> str:
    return f"{seconds * group.unit[1]:.{1 if group.case.engine == 'cpu' else 0}f}"


def _time(figures: dict | None, group: Group) -> str:
    """Return the time; for sides other than the engine also how many times as fast the engine is."""
    if figures is None:
        return ""
    faster = f" ({figures['speedup']:.1f}x)" if "speedup" in figures else ""
    return _number(figures["median_s"], group) + faster


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="for a choice of figures")
    parser.add_argument("--runs", type=Path, default=results / "RUNS.md", help="for all figures")
    parser.add_argument("--results", type=Path, default=results, help="folder of the files")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page has other figures")
    args = parser.parse_args(argv)
    return write(args.page, args.runs, args.results, args.check)


if __name__ == "__main__":
    sys.exit(main())
