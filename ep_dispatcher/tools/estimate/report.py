"""The tables that an estimate prints, and its charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ep_dispatcher.tools.benchmark import harness
from ep_dispatcher.tools.estimate.compared import EARLIER, LARGER, RUNS, SHIPPED, Compared, compare_run
from ep_dispatcher.tools.estimate.model import WIRES
from ep_dispatcher.tools.estimate.run import WIRE_BYTES, Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 1.1  # times the wire's own time: the limit at 50 GB/s (benchmarks/paced_wire.py)
GIB = 2**30  # bytes; memory is in GiB, what moves in MB and GB
OVER_NCCL = {"nccl": "NCCL", "nccl_all_tokens": "NCCL, all"}  # where hosts wait for counts, and where one does not
OVER_NCCL_HEAD = "".join(f"{name:>12}" for name in OVER_NCCL.values())
COLOURS = {"dispatch": "#1f77b4", "dispatch FP8": "#2ca02c", "combine": "#d95f02"}


def title(job: Job) -> list[str]:
    """Return a line for the job and one for the machine, and a warning if no measurement is near them."""
    sizes, routing, machine = job.sizes, job.routing, job.machine
    limit = ""
    if routing.topk_groups is not None:
        groups = "a group per node" if routing.groups is None else f"{routing.groups} groups"
        limit = f" in at most {routing.topk_groups} groups ({groups}, score {routing.group_score})"
    compared = machine.name != "GB200" and sizes.gpus_per_node <= 8
    return [
        f"{sizes.tokens} tokens per rank, hidden {sizes.hidden}, {sizes.experts} experts, top-{sizes.topk}{limit}, "
        f"{str(job.dtype).removeprefix('torch.')}, {routing.kind} routing, {job.seeds} seed(s)",
        f"{machine.name}: NVLink {machine.nvlink_gb_per_s:g} GB/s, HBM {machine.hbm_gb_per_s:g} GB/s, a NIC of "
        f"{machine.nic_gbit_per_s:g} Gb/s per GPU, {machine.num_sms} multiprocessors, chunks of {job.chunk_tokens} "
        "tokens",
        *([] if compared else ["Times are compared with no measurement: rates are shares of the peaks as on 8 H200."]),
    ]


def nodes_table(job: Job, found: dict) -> str:
    """Return all figures of one number of nodes."""
    received, rows = found["tokens_received"], found["expert_rows"]
    lines = [
        f"{found['nodes']} x {job.sizes.gpus_per_node} GPUs: a rank receives {received['mean']:.0f} tokens "
        f"(at most {received['max']:.0f}) for {rows['mean']:.0f} rows of its experts (at most {rows['max']:.0f})",
        "",
        "MB of a rank: mean (largest)".ljust(30)
        + "".join(f"{name:>19}" for name in (*WIRE_BYTES, *OVER_NCCL.values())),
    ]
    for name, operation in found["operations"].items():
        of_wires = (f"{b['mean'] / 1e6:.1f} ({b['max'] / 1e6:.1f})" for b in operation["bytes"].values())
        nccl = (
            f"{operation[key]['bytes']['NIC out']['mean'] / 1e6:.1f}" if operation[key] else "-" for key in OVER_NCCL
        )
        lines.append(name.ljust(30) + "".join(f"{cell:>19}" for cell in (*of_wires, *nccl)))
    columns = "".join(f"{name:>17}" for name in (*WIRES, "fixed", "filling"))
    lines += ["", f"{'microseconds':<18}{'time':>8}{OVER_NCCL_HEAD}  {'bottleneck':<16}{columns}"]
    for name, operation in found["operations"].items():
        parts = (*operation["busy_us"].values(), operation["fixed_us"], operation["filling_us"])
        cells = "".join(f"{part:17.0f}" for part in parts)
        lines.append(f"{name:<18}{operation['us']:8.0f}{_over_nccl(operation)}  {operation['bottleneck']:<16}{cells}")
    largest = sorted(found["memory_parts"].items(), key=lambda part: -part[1])[:3]
    most = ", ".join(f"{name} {size / GIB:.2f}" for name, size in largest)
    total = found["memory_bytes"]
    lines += ["", f"memory of a rank's buffer: {total / GIB:.2f} GiB ({total / 1e9:.2f} GB), most of it {most} GiB"]
    return "\n".join(lines)


def growth_table(results: list[dict]) -> str:
    """Return a line for each number of nodes: times with their bottlenecks, and memory."""
    operations = [name for name in results[0]["operations"] if name != "cached dispatch"]
    columns = "".join(f"{name + ', us':>18}{OVER_NCCL_HEAD}  {'bottleneck':<15}" for name in operations)
    lines = [f"{'nodes':>5}{'ranks':>7}{columns}{'memory, GiB':>13}"]
    for found in results:
        cells = "".join(
            f"{operation['us']:18.0f}{_over_nccl(operation)}  {operation['bottleneck']:<15}"
            for operation in (found["operations"][name] for name in operations)
        )
        lines.append(f"{found['nodes']:5}{found['ranks']:7}{cells}{found['memory_bytes'] / GIB:13.2f}")
    return "\n".join(lines)


def compared_table(heading: str, compared: list[Compared]) -> str:
    """Return the model beside given figures; "fitted" marks those that a constant was fitted to."""
    width = max(len(c.name) for c in compared)
    lines = [f"{heading:<{width}}{'given':>9}{'model':>9}{'error':>9}  bottleneck"]
    for c in compared:
        note = ", fitted" if c.fitted else ""
        lines.append(
            f"{c.name:<{width}}{c.given:9.1f}{c.predicted:9.1f}{c.error:9.1%}  {c.time.bottleneck} ({c.unit}{note})"
        )
    rest = [c for c in compared if not c.fitted]
    if rest:
        worst = max(rest, key=lambda c: abs(c.error))
        lines.append(f"largest error of the {len(rest)} that nothing was fitted to: {worst.error:+.1%} ({worst.name})")
    return "\n".join(lines)


def draw(job: Job, results: list[dict], path: Path) -> bool:
    """Draw times and bytes against the number of nodes. Return False without matplotlib."""
    nodes = [found["nodes"] for found in results]

    def fill(figure: Figure) -> None:
        times, moved = figure.subplots(1, 2)
        for name, colour in COLOURS.items():
            operations = [found["operations"][name] for found in results if name in found["operations"]]
            if not operations:
                continue
            times.plot(nodes, [o["us"] for o in operations], "o-", color=colour, label=name)
            for wire, style in (("NIC", "--"), ("NVLink", ":")):
                busy = [o["busy_us"][wire] for o in operations]
                times.plot(nodes, busy, style, color=colour, alpha=0.6, label=f"{name}, {wire} alone")
            for wire, style in (("NIC out", "o--"), ("NVLink in", "o:")):
                if name != "combine":
                    largest = [o["bytes"][wire]["max"] / 1e6 for o in operations]
                    moved.plot(nodes, largest, style, color=colour, label=f"{name}, {wire}")
        times.set_ylabel("microseconds (less is better), modelled")
        moved.set_ylabel("MB of the busiest rank, counted")
        for axes in (times, moved):
            axes.set_xscale("log", base=2)
            axes.set_xticks(nodes, [str(n) for n in nodes])
            axes.set_xlabel(f"nodes of {job.sizes.gpus_per_node} GPUs")
        _finish(figure)
        figure.suptitle("\n".join(title(job)), fontsize=9)

    return harness.draw(path, (13.0, 5.5), fill)


def draw_virtual_nodes(path: Path) -> bool:
    """Draw our runs on a paced wire and the model: times against multiprocessors, ratios against the rate of the wire.

    Return False without matplotlib.
    """

    def fill(figure: Figure) -> None:
        *of_sms, of_rates = figure.subplots(2, 2).flat
        for axes, operation in zip(of_sms, COLOURS):
            _draw_against_sms(axes, operation)
        _draw_against_rate(of_rates)
        _finish(figure)
        about = (
            "2 virtual nodes of 1 on 2 x H200, paced peer wire: 4096 tokens per rank, hidden 7168, 256 experts, top-8"
        )
        figure.suptitle(f"{about}; measured, and dotted the model", fontsize=10)

    return harness.draw(path, (13.0, 9.5), fill, dpi=90)


def _finish(figure: Figure) -> None:
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _draw_against_sms(axes, operation: str) -> None:
    at = sorted((run for run in RUNS if run.gb_per_s == 50 and not run.kernels), key=lambda run: run.sms)
    series = [(layout, chunks) for chunks in (LARGER, SHIPPED) for layout in ("expert", "rank")]
    for n, (layout, chunks) in enumerate(series):
        runs = [run for run in at if (run.layout, run.chunks) == (layout, chunks)]
        found = [compare_run(run)[operation] for run in runs]
        sms = [run.sms for run in runs]
        label = f"{layout} layout, chunks of {chunks[operation == 'combine']}"
        axes.plot(sms, [c.given for c in found], "o-", color=f"C{n}", label=label)
        axes.plot(sms, [c.predicted for c in found], "x:", color=f"C{n}", label=f"{label}, model")
    wire_us = compare_run(at[0])[operation].time.busy_us["NIC"]
    axes.axhline(LIMIT * wire_us, linestyle="--", linewidth=1, color="grey", label=f"{LIMIT:g} x the wire alone")
    axes.set_title(f"{operation}, 50 GB/s")
    axes.set_xticks(sorted({run.sms for run in at}))
    axes.set_xlabel("multiprocessors, those of the wire too")
    axes.set_ylabel("microseconds (less is better)")


def _draw_against_rate(axes) -> None:
    runs = [run for run in RUNS if run.kernels]
    rates = [run.gb_per_s for run in runs]
    for operation, colour in COLOURS.items():
        found = [compare_run(run)[operation] for run in runs]
        alone = [c.time.busy_us["NIC"] for c in found]
        axes.plot(rates, [c.given / us for c, us in zip(found, alone)], "o-", color=colour, label=operation)
        predicted = [c.predicted / us for c, us in zip(found, alone)]
        axes.plot(rates, predicted, "x:", color=colour, label=f"{operation}, model")
    axes.axhline(LIMIT, linestyle="--", linewidth=1, color="grey")
    axes.set_title(f"24 multiprocessors, expert layout, {EARLIER}")
    axes.set_xticks(rates)
    axes.set_xlabel("GB/s of the wire, per rank")
    axes.set_ylabel("times the wire alone (1 is best)")


def _over_nccl(operation: dict) -> str:
    return "".join(f"{operation[key]['us']:12.0f}" if operation[key] else f"{'-':>12}" for key in OVER_NCCL)
