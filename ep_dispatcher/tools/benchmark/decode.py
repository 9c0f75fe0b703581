"""Decode layout as further operations of the benchmark: whole ones, and the two halves of those with a hook.

    python -m ep_dispatcher.bench --engine cuda --tokens 128 --sms 64 --with ep_dispatcher.tools.benchmark.decode

Between the halves the ranks meet, so that a half includes no wait for the other half of a rank. The half that sends is
what runs before the work under the hook begins, and the half that receives is what runs once all rows are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ep_dispatcher.tools.benchmark.clock import Part
from ep_dispatcher.tools.benchmark.measurements import ENGINE, Calls, Measurement


def measure(measurement: Measurement) -> None:
    with measurement.make_buffer() as buffer:
        x, topk_idx, topk_weights = measurement.inputs
        dispatch = partial(buffer.dispatch, x, topk_idx, layout="decode")
        received = dispatch()
        combine = partial(buffer.combine, torch.zeros_like(received.x), received.handle, weights=topk_weights)
        calls: Calls = {"decode dispatch": dispatch, "decode combine": combine}
        calls |= halves("decode dispatch", partial(dispatch, return_hook=True))
        calls |= halves("decode combine", partial(combine, return_hook=True))
        measurement.found["passes"] |= dict.fromkeys(calls, 1)
        measurement.time({ENGINE: calls})


def halves(name: str, launch: Callable[[], Any]) -> Calls:
    """Return the half of an operation that sends and the half that receives. launch: returns a result with a hook"""
    sent: list[Any] = []

    def send() -> None:
        sent.append(launch())

    def receive() -> None:
        sent.pop().hook()

    return {f"{name}, send": Part(send, after=receive), f"{name}, receive": Part(receive, before=send)}
