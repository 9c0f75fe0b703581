"""Differences between two runs of a layer, and the parity tool's report of them."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.statistics import BalanceStats
from ep_dispatcher.tools.parity.arguments import Run
from ep_dispatcher.tools.parity.dispatchers import OURS
from ep_dispatcher.tools.parity.flags import concerns_moe

LIMIT_FLOAT32, LIMIT_QUANTIZED = 1e-5, 1 / 8
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SLACK, SLACK_ROUNDINGS = 1.25, 0.25
WITHOUT_EXPERTS = "without its experts"  # router, dispatcher and the weighting of the rows
WHOLE = "the whole layer"
TIMED = (WHOLE, WITHOUT_EXPERTS)
ALSO_SHOWN = {"activation_func", "gated_linear_unit", "bias_activation_fusion", "num_moe_experts", "params_dtype"}


class Part(NamedTuple):
    """The difference of one tensor in one step on one rank. An expert's gradients have a part per expert."""

    shape: tuple[int, ...]
    where: str
    expert: int | None
    largest: float = 0.0  # of the reference's absolute values
    difference: float = math.inf  # if only one of them has this gradient
    # Sums: the reference's values; the distances from float32 of what is tested, of the reference, and of the reference
    # unquantized.
    squares: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)


def part_of(
    tested: Tensor, reference: Tensor, exact: Tensor | None, plain: Tensor | None, where: str, expert: int | None
) -> Part:
    """Compare a tensor of both layers. exact: in float32; plain: unquantized, if the two are quantized"""
    shape = tuple(reference.shape)
    if tested.shape != reference.shape:
        return Part(shape, where, expert)
    tested, reference = tested.double(), reference.double()
    largest, difference = _largest(reference), _largest(tested - reference)
    if exact is None:
        return Part(shape, where, expert, largest, difference)
    exact = exact.double()
    plain = exact if plain is None else plain.double()
    squares = tuple(float(t.square().sum()) for t in (reference, tested - exact, reference - exact, plain - exact))
    return Part(shape, where, expert, largest, difference, squares)


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; infinity if a value is not finite."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


@dataclass
class Row:
    """A row of the table: one tensor over all steps, experts and ranks. All figures are relative to its size."""

    name: str
    parts: list[Part]
    config: Any
    reference: str  # the dispatcher

    @property
    def limit(self) -> float:
        return 0.0 if self.name == "routing map" else limit_of(self.config)

    @property
    def relative(self) -> float:
        return _ratio(max((part.difference for part in self.parts), default=0.0), self.largest)

    @property
    def largest(self) -> float:
        return max((part.largest for part in self.parts), default=0.0)

    def _distance(self, side: int) -> float:
        """Return a root mean square distance from float32, by the index of its sum in Part.squares."""
        return math.sqrt(_ratio(*(sum(part.squares[i] for part in self.parts) for i in (side, 0))))

    @property
    def distances(self) -> tuple[float, float, float] | None:
        """Root mean square distances from float32: tested, reference, and what is allowed. None in float32."""
        if self.config.params_dtype == torch.float32:
            return None
        tested, reference = self._distance(1), self._distance(2)
        return tested, reference, SLACK * reference + SLACK_ROUNDINGS * ROUNDING[self.config.params_dtype]

    @property
    def unquantized(self) -> float | None:
        """The reference's distance from float32 without FP8 and FP4. None if there is nothing to compare it with."""
        return None if self.distances is None or not quantizes(self.config) else self._distance(3)

    @property
    def ok(self) -> bool:
        is_near = self.distances is None or self.distances[0] <= self.distances[2]
        return self.relative <= self.limit and is_near

    @property
    def title(self) -> str:
        if self.name in ("routing map", "output", "input gradient"):
            return self.name
        return "gradient of " + self.name.replace("local_experts.*", "*")

    def cells(self) -> list[str]:
        """Return title, shape, largest value, difference, relative, limit, all distances, and the verdict."""
        experts = {part.expert for part in self.parts} - {None}
        shape = [max(sizes) for sizes in zip(*(part.shape for part in self.parts))]  # the number of tokens may differ
        worst = max(self.parts, key=lambda part: part.difference, default=None)
        difference = worst.difference if worst else 0.0
        verdict = "ok" if worst else "ok, neither has one"
        if not self.ok:
            verdict = f"DIFFERENT ({worst.where})" if worst and difference else "DIFFERENT"
        numbers = [self.largest, difference, self.relative, self.limit, *(self.distances or ())]
        numbers += [] if self.unquantized is None else [self.unquantized]
        shown = ["0" if number == 0 else f"{number:.1e}" for number in numbers]
        sizes = (f"{len(experts)} x " if experts else "") + str(shape)
        return [self.title, sizes, *shown, *[""] * (8 - len(shown)), verdict]


def _ratio(value: float, of: float) -> float:
    if value == 0:
        return 0.0
    return value / of if 0 < of < math.inf else math.inf


def limit_of(config) -> float:
    if config.params_dtype == torch.float32:
        return LIMIT_FLOAT32
    if quantizes(config):
        return LIMIT_QUANTIZED
    return (config.moe_router_topk * config.expert_tensor_parallel_size + 2) * ROUNDING[config.params_dtype]


def quantizes(config) -> bool:
    return bool(config.fp8 or getattr(config, "fp4", None))


# ---- what is shown --------------------------------------------------------------------------------------------------


def opening(run: Run, config, versions: str) -> str:
    place = "the CPU (gloo)" if run.cpu else f"{torch.cuda.get_device_name()} (NCCL)"
    tokens = f"{'up to ' if run.args.uneven_tokens else ''}{run.tokens * run.batch} tokens per rank"
    lists = {
        "Settings that differ from Megatron's defaults: ": settings_of(config),
        "Not given, so chosen here: ": [f"{flag} {value}" for flag, value in run.assumed.items()],
        "Not as given: ": run.changes,
        "Given, but not of an MoE layer: ": run.others.of_job,
        "Given, but unknown to this tool and this Megatron, and so ignored: ": run.others.unknown,
    }
    title = f"One MoE layer, {run.tested} against {run.reference}: {run.num_ranks} rank(s) on {place}, {tokens}"
    shown = [wrap(head + ("; " if of is run.changes else ", ").join(of)) for head, of in lists.items() if of]
    return "\n".join([title, versions, "", *shown])


def settings_of(config) -> list[str]:
    """Return the settings to show, by the names of TransformerConfig's fields."""
    # The first two differ between the layers. Megatron has filled in the others, without effect.
    hidden = ["moe_token_dispatcher_type", "moe_flex_dispatcher_backend"]
    hidden += ["cuda_graph"] if config.cuda_graph_impl == "none" else []
    hidden += ["recompute"] if config.recompute_granularity is None else []
    shown = []
    for one in fields(config):
        value = getattr(config, one.name)
        concerns = concerns_moe(one.name) or one.name in ALSO_SHOWN
        if value == one.default or not concerns or one.name.startswith(tuple(hidden)):
            continue
        value = getattr(value, "__name__", value)
        value = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).removeprefix("torch.")
        shown.append(f"{one.name} {value}")
    return shown


def table(rows: list[Row]) -> str:
    """Return a table with a line per tensor; below float32 also the distances from float32."""
    heads = ["tensor", "shape", "largest", "difference", "relative", "limit"]
    heads += ["from f32", f"{rows[0].reference}'s", "allowed", "without FP8", ""]
    cells = [row.cells() for row in rows]
    empty = {i for i in range(6, 10) if not any(line[i] for line in cells)}
    lines = [[cell for i, cell in enumerate(line) if i not in empty] for line in (heads, *cells)]
    name, shape, *widths = (max(map(len, column)) for column in zip(*lines))
    formats = [f"{{:{name}}}", f"{{:{shape}}}", *(f"{{:>{width}}}" for width in widths[:-1]), "{}"]
    return "\n".join("  ".join(formats).format(*line).rstrip() for line in lines)


def copies_line(copies: BalanceStats) -> str:
    """Return a line on what redundant copies of experts have done in the compared steps."""
    before, after = f"{copies.imbalance_before:.2f}", f"{copies.imbalance_after:.2f}"
    return wrap(
        f"{copies.num_copies} redundant copies of experts in {copies.num_microbatches} step(s); rows of the fullest "
        f"rank over the mean: {before} without, {after} with them. A copy changes which experts share a rounding, and "
        "the gradient of its weights is a sum of parts.",
        indent="",
    )


def rule(run: Run, config) -> str:
    limit = limit_of(config)
    text = f"Over all ranks and {run.args.steps} step(s). ok: difference <= limit x largest, with limit {limit:.1e} ("
    if config.params_dtype == torch.float32:
        return wrap(f"{text}float32, because sums may be in another order).", indent="")
    if limit == LIMIT_QUANTIZED:
        text += "FP8 or FP4, whose scales depend on the order of the rows"
    else:
        text += f"{round(limit / ROUNDING[config.params_dtype])} roundings: top-k x expert tensor parallel size + 2"
    text += (
        f"). In addition, the root mean square distance of {run.tested} from a float32 run with {run.exact} (from f32, "
        f"relative to the tensor's own) <= {SLACK} x {run.reference}'s + {SLACK_ROUNDINGS} roundings."
    )
    return wrap(text, indent="")


class Seconds(NamedTuple):
    """Seconds of one step. ``host_forward`` and ``host``: until the host has launched the forward, and everything.

    The host may wait in between.
    """

    step: float
    host_forward: float
    host: float


def times_table(times: dict[str, dict[str, Seconds]], num_steps: int) -> str:
    """Return a table of ``times``: what was timed -> dispatcher -> seconds."""
    lines = [
        f"Forward and backward of one layer: median of {num_steps} steps, the slowest rank of each. In parentheses:",
        "until the host has launched the forward, and until it has launched everything:",
    ]
    for what, of in times.items():
        ms = {name: [f"{1e3 * one:.2f}" for one in seconds] for name, seconds in of.items()}
        shown = [f"{name} {step} ms ({forward}, {host})" for name, (step, forward, host) in ms.items()]
        reference, tested = of.values()
        lines.append(
            f"  {what:{len(WITHOUT_EXPERTS)}}  {', '.join(shown)}: {reference.step / tested.step:.2f} times as fast"
        )
    return "\n".join(lines)


def verdict(run: Run, rows: list[Row], copies: BalanceStats | None = None) -> str:
    """Return the last lines: whether the two are the same, which two, and what was not as given.

    copies: of the compared steps, if copies of experts were asked for
    """
    names = [row.title for row in rows if not row.ok]
    pair = f"{run.tested} and {run.reference}"
    lines = [wrap(f"DIFFERENT: {pair}, in {', '.join(names)}") if names else f"the same within rounding: {pair}"]
    if run.changes:
        lines.append(f"This is not the layer as given: see {len(run.changes)} point(s) above, after 'Not as given'.")
    if run.others.unknown:
        lines.append(wrap(f"Flags that were ignored because they are unknown: {', '.join(run.others.unknown)}"))
    if copies is not None and not copies.num_copies:
        lines.append(wrap(f"No expert was copied, so copies were not compared: {_WHY_NO_COPIES}"))
    if names:
        lines.append(_what_next(run, rows))
    return "\n".join(filter(None, [*lines, wrap(_errors(rows))]))


_WHY_NO_COPIES = (
    "the ranks have about the same number of rows, or experts too few for a copy. A longer --seq-length gives more."
)


def _what_next(run: Run, rows: list[Row]) -> str:
    """Return a sentence on how to find out which of the two is wrong."""
    farther = [row.distances[0] > row.distances[1] for row in rows if not row.ok and row.distances]
    if farther and all(farther):
        return f"{run.tested} is farther from float32 in all of these than {run.reference}."
    if farther and not any(farther):
        return f"{run.reference} is farther from float32 in all of these than {run.tested}."
    third = next(name for name in ("alltoall", "allgather", OURS) if name not in (run.tested, run.reference))
    return f"Which of them is wrong? Compare each with a third one: --against {third}."


def _errors(rows: list[Row]) -> str:
    """Return a sentence about the errors of quantized runs, or "" for other runs."""
    found = []
    for row in rows:
        if row.name in ("output", "input gradient") and row.distances and row.unquantized is not None:
            tested, reference, _ = row.distances
            theirs = f"{row.reference}'s {reference:.2%}, without FP8 or FP4 {row.unquantized:.2%}"
            found.append(f"{row.name} {tested:.2%} ({theirs})")
    return f"Relative error, as the distance from float32: {', '.join(found)}." if found else ""


def figures(
    run: Run,
    config,
    versions: str,
    rows: list[Row],
    times: dict[str, dict[str, Seconds]],
    copies: BalanceStats | None = None,
) -> dict[str, Any]:
    """Return the content of the JSON."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None  # JSON lacks infinity

    def milliseconds(field: str) -> dict[str, dict[str, float]]:
        return {what: {name: 1e3 * getattr(s, field) for name, s in of.items()} for what, of in times.items()}

    tensors = {}
    for row in rows:
        tested, reference, _ = map(number, row.distances) if row.distances else (None, None, None)
        tensors[row.title] = {
            "relative_difference": number(row.relative),
            "limit": row.limit,
            "distance_from_float32": tested,
            "reference_distance_from_float32": reference,
            "unquantised_distance_from_float32": None if row.unquantized is None else number(row.unquantized),
            "ok": row.ok,
        }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": "CPU" if run.cpu else torch.cuda.get_device_name(),
        "ranks": run.num_ranks,
        "versions": versions,
        "tested": run.tested,
        "reference": run.reference,
        "settings": settings_of(config),
        "tokens_per_rank": run.tokens * run.batch,
        "uneven_tokens": run.args.uneven_tokens,
        "changes": run.changes,
        "unknown_flags": run.others.unknown,
        "steps": run.args.steps,
        "timed_steps": run.args.timed_steps,
        "same": all(row.ok for row in rows),
        "copies": None if copies is None else copies._asdict(),
        "tensors": tensors,
        "milliseconds": milliseconds("step"),
        "host_milliseconds": milliseconds("host"),
        "host_milliseconds_forward": milliseconds("host_forward"),
    }


def wrap(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
