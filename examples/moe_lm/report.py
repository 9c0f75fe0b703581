"""Prints figures during training, and keeps them for the JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy
import torch

import ep_dispatcher
from moe_lm.step import StepResult

WARM_UP = 5  # first steps, which allocate, load kernels and compile: times leave them out
COLUMNS = 120  # equal stretches of the run, over each of which the tokens per expert are summed
HEADER = """
             tokens per    bits per byte      busiest expert
 time   step   second    training  held-out    over mean      left"""


def imbalance(tokens_per_expert: torch.Tensor) -> float:
    """Return the busiest expert's tokens over the mean, averaged over layers; 1 is balanced. [..., layers, experts]"""
    counts = tokens_per_expert.reshape(-1, *tokens_per_expert.shape[-2:]).sum(0).double()
    return (counts.amax(-1) / counts.mean(-1)).mean().item()


def median_step(seconds: list[float], since: int = 0) -> float:
    """Return the median of the steps' seconds from step ``since`` on, without WARM_UP steps, at most half of all."""
    return statistics.median(seconds[max(since, min(WARM_UP, len(seconds) // 2)) :])


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Recorder:
    """Collects the figures of a run on every rank; prints on rank 0."""

    def __init__(self, printing: bool, tokens_per_step: int, unigram: float, bigram: float):
        self.printing, self.tokens_per_step = printing, tokens_per_step
        self.unigram, self.bigram = unigram, bigram
        self.training: list[float] = []  # of each step, in bits per byte; so are the next three
        self.grad_norms: list[float] = []
        self.counts: list[torch.Tensor] = []
        self.step_seconds: list[float] = []
        self.held_out: list[dict[str, Any]] = []
        self.final: dict[str, Any] = {}

    def say(self, text: str) -> None:
        if self.printing:
            print(text, flush=True)

    def step(self, result: StepResult, seconds: float) -> None:
        self.training.append(result.loss / math.log(2))
        self.grad_norms.append(result.grad_norm)
        self.counts.append(result.tokens_per_expert)
        self.step_seconds.append(seconds)

    def line(self, seconds: float, done: float, held_out: float) -> str:
        """Return a line about the steps since the last line. ``done``: share of the run, 0 to 1."""
        header = "" if self.held_out else f"{HEADER}\n"
        last = self.held_out[-1]["step"] if self.held_out else 0
        steps = len(self.training) - last
        speed = self.tokens_per_step / median_step(self.step_seconds, last)
        training = sum(self.training[-steps:]) / steps
        balance = imbalance(torch.stack(self.counts[-steps:]))
        left = seconds * (1 - done) / done
        self.held_out.append({"step": len(self.training), "seconds": seconds, "bits_per_byte": held_out})
        return header + (
            f"{clock(seconds):>5}  {len(self.training):5}  {speed:7,.0f}  {training:8.3f}  {held_out:8.3f}"
            f"  {balance:11.2f}      {clock(left):>5}"
        )

    def finish(self, seconds: float, held_out: float) -> None:
        steps = len(self.training)
        tenth = max(1, steps // 10)
        step_seconds = median_step(self.step_seconds)
        self.final = {
            "steps": steps,
            "training_seconds": seconds,
            "tokens": steps * self.tokens_per_step,
            "step_seconds": step_seconds,  # the median, as in the next line
            "tokens_per_second": self.tokens_per_step / step_seconds,
            "training_bits_per_byte": sum(self.training[-tenth:]) / tenth,
            "held_out_bits_per_byte": held_out,
            "unigram_bits_per_byte": self.unigram,
            "bigram_bits_per_byte": self.bigram,
            "busiest_expert_over_mean": imbalance(torch.stack(self.counts[-tenth:])),
        }

    def tokens_per_expert(self) -> dict:
        """Return ``counts[stretch][layer][expert]``, and the first step of each stretch."""
        stretches = torch.stack(self.counts).tensor_split(min(COLUMNS, len(self.counts)))
        sizes = torch.tensor([len(s) for s in stretches])
        return {
            "first_step": (sizes.cumsum(0) - sizes + 1).tolist(),
            "counts": [s.sum(0).tolist() for s in stretches],
        }

    def table(self, wall_seconds: float) -> str:
        f = self.final
        rows = (
            ("bits per byte, held out", f"{f['held_out_bits_per_byte']:.3f}"),
            ("bits per byte, training", f"{f['training_bits_per_byte']:.3f}   last tenth of the steps"),
            ("  unigram entropy", f"{f['unigram_bits_per_byte']:.3f}   held out, byte frequencies alone"),
            ("  bigram entropy", f"{f['bigram_bits_per_byte']:.3f}   held out, with the byte before known"),
            ("busiest expert over mean", f"{f['busiest_expert_over_mean']:.2f}    last tenth of the steps"),
            ("steps, tokens", f"{f['steps']:,}, {f['tokens']:,}"),
            ("tokens per second", f"{f['tokens_per_second']:,.0f}   median step: {1e3 * f['step_seconds']:,.1f} ms"),
            ("seconds, of them training", f"{wall_seconds:.0f}, {f['training_seconds']:.0f}"),
        )
        return "\n".join(f"  {name:28}{value}" for name, value in rows)

    def verdict(self) -> str:
        """Say whether the model knows more than which byte follows which."""
        held_out, bigram = self.final["held_out_bits_per_byte"], self.final["bigram_bits_per_byte"]
        if held_out < bigram:
            return f"LEARNED: {held_out:.2f} bits per byte, below the {bigram:.2f} of a model of byte pairs"
        after = f"{held_out:.2f} bits per byte after {self.final['steps']:,} steps"
        return f"NOT ENOUGH: {after}, and a model of byte pairs has {bigram:.2f}: more --steps"

    def write(self, path: Path, config: dict, device: str, text: dict, sample: str, wall_seconds: float) -> dict:
        report = {
            "config": config,
            "versions": {
                "ep_dispatcher": ep_dispatcher.__version__,
                "torch": torch.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
            },
            "machine": {
                "platform": platform.platform(),
                "cores": len(os.sched_getaffinity(0)),
                "device": device,
                "gpus": torch.cuda.device_count(),
            },
            "text": text,
            "final": {**self.final, "wall_seconds": wall_seconds},
            "training_bits_per_byte": [round(loss, 5) for loss in self.training],
            "step_seconds": [round(seconds, 6) for seconds in self.step_seconds],
            "grad_norm": [round(norm, 5) for norm in self.grad_norms],
            "held_out": self.held_out,
            "tokens_per_expert": self.tokens_per_expert(),
            "sample": sample,
        }
        path.write_text(json.dumps(report))
        return report
