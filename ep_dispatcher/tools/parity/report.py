"""Differences between two runs of a layer, and the parity tool's report of them."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_dispatcher.tools.parity.arguments import Given, Machine, Run, concerns_moe

LIMIT_FLOAT32, LIMIT_QUANTISED = 1e-5, 1 / 8
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SLACK, SLACK_ROUNDINGS = 1.25, 0.25
WIDTH = 100
WITHOUT_EXPERTS = "without its experts"  # router, dispatcher and the weighting of the rows
TIMED = ("the whole layer", WITHOUT_EXPERTS)


@dataclass
class Difference:
    """A row of the table: the difference of one tensor over steps, over the experts of a rank, then over ranks."""

    name: str
    shape: tuple[int, ...] = ()
    largest: float = 0.0
    difference: float = 0.0
    where: str = ""  # of the largest difference
    count: int = 0  # of elements, for the means
    squares: float = 0.0  # sums: of Megatron's values, and of both distances from float32
    our_squares: float = 0.0
    their_squares: float = 0.0
    experts: set[str] = field(default_factory=set)

    def add(self, ours: Tensor | None, theirs: Tensor | None, exact: Tensor | None, where: str) -> None:
        either = theirs if theirs is not None else ours
        if either is None:
            return
        self._grow(either.shape)
        if "expert" in where:
            self.experts.add(where.partition("expert ")[2])
        if ours is None or theirs is None or ours.shape != theirs.shape:
            self._note(math.inf, where)  # only one of them has this gradient
            return
        ours, theirs = ours.double(), theirs.double()
        self.largest = max(self.largest, _largest(theirs))
        self._note(_largest(ours - theirs), where)
        if exact is not None:
            exact = exact.double()
            self.count += exact.numel()
            self.squares += float(theirs.square().sum())
            self.our_squares += float((ours - exact).square().sum())
            self.their_squares += float((theirs - exact).square().sum())

    def merge(self, other: Difference) -> None:
        self._grow(other.shape)
        self.largest = max(self.largest, other.largest)
        self._note(other.difference, other.where)
        self.count += other.count
        self.squares += other.squares
        self.our_squares += other.our_squares
        self.their_squares += other.their_squares
        self.experts |= other.experts

    def _grow(self, shape: tuple[int, ...]) -> None:
        """Steps and ranks may differ in the number of tokens."""
        self.shape = tuple(map(max, zip(self.shape, shape))) if self.shape else tuple(shape)

    def _note(self, difference: float, where: str) -> None:
        if difference > self.difference:
            self.difference, self.where = difference, where

    @property
    def relative(self) -> float:
        if self.difference == 0:
            return 0.0
        return self.difference / self.largest if 0 < self.largest < math.inf else math.inf

    def limit(self, config) -> float:
        return 0.0 if self.name == "routing map" else _limit(config)

    def distance(self, squares: float) -> float:
        """Return the root mean square, divided by that of the tensor."""
        if squares == 0:
            return 0.0
        return math.sqrt(squares / self.squares) if 0 < self.squares < math.inf else math.inf

    def allowed_distance(self, config) -> float:
        return SLACK * self.distance(self.their_squares) + SLACK_ROUNDINGS * ROUNDING[config.params_dtype]

    def ok(self, config) -> bool:
        near = not self.count or self.distance(self.our_squares) <= self.allowed_distance(config)
        return self.relative <= self.limit(config) and near


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; infinity if a value is not finite."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())
    return largest if math.isfinite(largest) else math.inf


def _limit(config) -> float:
    if config.params_dtype == torch.float32:
        return LIMIT_FLOAT32
    if config.fp8 or getattr(config, "fp4", None):
        return LIMIT_QUANTISED
    return (config.moe_router_topk * config.expert_tensor_parallel_size + 2) * ROUNDING[config.params_dtype]


# ---- what is shown --------------------------------------------------------------------------------------------------


def opening(given: Given, run: Run, machine: Machine, config, versions: str) -> str:
    ranks = f"{machine.num_ranks} rank{'s' if machine.num_ranks > 1 else ''}"
    place = "the CPU (gloo)" if machine.cpu else f"{torch.cuda.get_device_name()} (NCCL)"
    tokens = f"{'up to ' if given.uneven_tokens else ''}{run.tokens * run.batch} tokens a rank"
    parts = [
        f"One MoE layer, Megatron's {run.reference} and ep_dispatcher: {ranks} on {place}, {tokens}",
        versions,
        "",
        wrap("Settings that differ from Megatron's defaults: ", ", ".join(_settings(config))),
        wrap("Not given, so chosen here: ", ", ".join(f"{flag} {value}" for flag, value in run.assumed.items())),
        wrap("Not as given: ", "; ".join(run.changes)),
        wrap("Given, and of no effect here: ", ", ".join(given.unused)),
    ]
    return "\n".join(part for i, part in enumerate(parts) if part or i == 2)


def _settings(config) -> list[str]:
    """Return the settings to show, by the names of TransformerConfig's fields."""
    shown = []
    graphs, recompute = config.cuda_graph_impl != "none", config.recompute_granularity is not None
    for one in fields(config):
        if one.name.startswith("cuda_graph") and not graphs or one.name.startswith("recompute") and not recompute:
            continue  # Megatron has filled them in, without effect
        value = getattr(config, one.name)
        chosen = one.name in ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
        if chosen or value == one.default or not (concerns_moe(one.name) or one.name in _ALSO_SHOWN):
            continue
        value = getattr(value, "__name__", value)
        value = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).removeprefix("torch.")
        shown.append(f"{one.name} {value}")
    return shown


_ALSO_SHOWN = {"activation_func", "gated_linear_unit", "bias_activation_fusion", "num_moe_experts", "params_dtype"}


def table(rows: dict[str, Difference], config, low: bool) -> str:
    """Return a table with a line per tensor; with ``low`` also the distances from float32."""
    heads = ["tensor", "shape", "largest", "difference", "relative", "limit"]
    heads += ["from f32", "Megatron's", "allowed"] if low else []
    lines = [[*heads, ""]]
    for name, row in rows.items():
        times = f"{len(row.experts)} x " if row.experts else ""
        line = [title(name), times + str(list(row.shape)), *(_number(x) for x in (row.largest, row.difference))]
        line += [_number(row.relative), _number(row.limit(config))]
        if low and row.count:
            distances = (row.distance(row.our_squares), row.distance(row.their_squares), row.allowed_distance(config))
            line += [_number(x) for x in distances]
        elif low:
            line += ["", "", ""]
        lines.append([*line, _verdict(row, config)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (0, 1, len(widths) - 1)
    shown = [
        "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in shown)


def title(name: str) -> str:
    if name in ("routing map", "output", "input gradient"):
        return name
    return "gradient of " + name.replace("local_experts.*", "*")


def _verdict(row: Difference, config) -> str:
    if not row.ok(config):
        return f"DIFFERENT ({row.where})" if row.where else "DIFFERENT"
    return "ok" if row.shape else "ok, neither has one"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def rule(config, steps: int) -> str:
    dtype = str(config.params_dtype).removeprefix("torch.")
    limit = f"{_limit(config):.1e}"
    if config.params_dtype == torch.float32:
        why = "float32, sums in another order"
    elif _limit(config) == LIMIT_QUANTISED:
        why = "FP8 or FP4, whose scales depend on the order of the rows"
    else:
        roundings = round(_limit(config) / ROUNDING[config.params_dtype])
        why = f"{roundings} roundings of {dtype}: top-k x expert tensor parallel size + 2"
    over = f"Over all ranks and {steps} step{'s' if steps > 1 else ''}"
    text = f"{over}. ok: difference <= limit x largest; limit {limit} ({why})"
    if config.params_dtype != torch.float32:
        text += (
            f". And: root mean square distance from a float32 run of Megatron's layer (from f32, as a part of the "
            f"tensor's own) <= {SLACK} x Megatron's + {SLACK_ROUNDINGS} roundings"
        )
    return wrap("", text + ".", indent="")


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
        f"Forward + backward of one layer, median of {num_steps} steps, the slowest rank of each. In brackets: until",
        "the host has launched the forward, and all:",
    ]
    width = max(map(len, times))
    for what, of_what in times.items():
        shown = [
            f"{name} {1e3 * s.step:.2f} ms ({1e3 * s.host_forward:.2f}, {1e3 * s.host:.2f})"
            for name, s in of_what.items()
        ]
        theirs, ours = of_what.values()
        lines.append(f"  {what:{width}}  {', '.join(shown)}: {theirs.step / ours.step:.2f} times as fast")
    return "\n".join(lines)


def different(rows: dict[str, Difference], config) -> list[str]:
    """Return the tensors that differ, by their names in the table."""
    return [title(name) for name, row in rows.items() if not row.ok(config)]


def verdict(rows: dict[str, Difference], config) -> str:
    names = different(rows, config)
    return wrap("DIFFERENT: ", ", ".join(names)) if names else "the same within rounding"


def figures(
    given: Given,
    run: Run,
    machine: Machine,
    config,
    versions: str,
    rows: dict[str, Difference],
    times: dict[str, dict[str, Seconds]],
) -> dict[str, Any]:
    """Return the content of the JSON."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": "CPU" if machine.cpu else torch.cuda.get_device_name(),
        "ranks": machine.num_ranks,
        "versions": versions,
        "reference": run.reference,
        "settings": _settings(config),
        "tokens_per_rank": run.tokens * run.batch,
        "uneven_tokens": given.uneven_tokens,
        "changes": run.changes,
        "steps": given.steps,
        "timed_steps": given.timed_steps,
        "same": not different(rows, config),
        "tensors": {
            title(name): {
                "relative_difference": _json_number(row.relative),
                "limit": row.limit(config),
                "distance_from_float32": _json_number(row.distance(row.our_squares)) if row.count else None,
                "reference_distance_from_float32": _json_number(row.distance(row.their_squares)) if row.count else None,
                "ok": row.ok(config),
            }
            for name, row in rows.items()
        },
        "milliseconds": _milliseconds(times, "step"),
        "host_milliseconds": _milliseconds(times, "host"),
        "host_milliseconds_forward": _milliseconds(times, "host_forward"),
    }


def _milliseconds(times: dict[str, dict[str, Seconds]], field: str) -> dict[str, dict[str, float]]:
    return {what: {name: 1e3 * getattr(s, field) for name, s in of.items()} for what, of in times.items()}


def _json_number(value: float) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def wrap(head: str, text: str, indent: str = "  ") -> str:
    if not text:
        return ""
    return textwrap.fill(head + text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
