"""The time of one operation from what it moves. docs/estimate.md says what each constant was fitted to.

    busy(wire) = bytes of the rank / (peak * efficiency)        for every rank, the larger of in and out
    inside     = the longest of NVLink, multiprocessors, HBM, staging
    time       = fixed + plan + hops or messages + longest of (staging, NIC, inside) + (the other two) / chunks
    operation  = the slowest rank

Staging, NIC and ``inside`` are stages of a pipeline of chunks: the longest costs its whole time, the others that of one
chunk. On one node time = fixed + plan + inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_dispatcher.tools.estimate.routing import Sizes
from ep_dispatcher.tools.estimate.traffic import Messages, Traffic

DISPATCH, COMBINE = "dispatch", "combine"

# Fitted to medians of 4 H200 (build 6dd7af9, benchmarks/results); tests/test_estimate.py fits them again.
NVLINK_EFFICIENCY = {DISPATCH: 0.694, COMBINE: 0.726}  # slope from 4096 to 32768 tokens; cached dispatch
FIXED_US = {DISPATCH: 34.0, COMBINE: 40.0}  # least largest error at 128 to 32768 tokens; cached dispatch
GB_PER_S_PER_SM = {DISPATCH: 47.8, COMBINE: 40.7}  # of expert rows; mean of 8, 12 and 16 multiprocessors
STAGING_GB_PER_S_PER_SM = 12.2  # top-1, cached dispatch, 24 multiprocessors
PLAN_US, PLAN_US_PER_TOKEN = 16.7, 0.0034  # dispatch less cached dispatch; the larger of the two counts
# Measured: a copy of 58.7 MB inside an H200 takes 31 us (read and written: 3.79 of 4.8 TB/s).
HBM_EFFICIENCY = 0.79
# Fitted to one published figure: DeepEP V1, EP 64, combine, 50 GB/s.
NIC_EFFICIENCY = 0.93
# Assumed, not measured: a signal from GPU to GPU through two NICs.
HOP_US = 5.0
NCCL_MESSAGE_US = 20.0  # a message of the NCCL wire, besides its bytes: these come one after the other
HOPS = {"dispatch": 3, "cached dispatch": 2, "combine": 1}  # successive waits for another node: Call, lists, data

# Tokens that share a flag between nodes (``Shape.token_chunk`` of memory.py).
CHUNK_TOKENS = 256

WIRES = ("NIC", "NVLink", "multiprocessors", "staging", "HBM")


@dataclass(frozen=True)
class Machine:
    """One GPU with a NIC of its own. GB/s are 1e9 bytes per second in each direction."""

    name: str
    nvlink_gb_per_s: float
    hbm_gb_per_s: float
    nic_gbit_per_s: float = 400.0
    num_sms: int = 24
    nic_efficiency: float = NIC_EFFICIENCY


# Peaks of the data sheets; H800: 400 GB/s of NVLink in both directions together. The efficiencies above are of H200.
MACHINES = {
    "H200": Machine("H200", 450.0, 4800.0),
    "H100": Machine("H100", 450.0, 3350.0),
    "H800": Machine("H800", 200.0, 3350.0),
    "GB200": Machine("GB200", 900.0, 8000.0),
}


@dataclass(frozen=True)
class Time:
    """The time of one operation in microseconds, and its parts on the slowest rank."""

    us: float
    bottleneck: str  # one of WIRES, or "fixed cost" if that is longer than each of them
    busy_us: dict[str, float]  # by WIRES
    fixed_us: float  # fixed + plan + hops or messages
    filling_us: float  # one chunk of each shorter stage


def estimate_time(
    operation: str,
    sizes: Sizes,
    traffic: Traffic,
    machine: Machine,
    new_plan: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    messages: Messages | None = None,
) -> Time:
    """Return the time of ``operation``, "dispatch" or "combine", that moves ``traffic``.

    ``new_plan``: the dispatch makes a plan. Without it a dispatch is called cached. ``messages``: those of the NCCL
    wire, whose bytes ``traffic`` has; None: another wire.
    """

    def us(moved: Tensor, gb_per_s: float) -> Tensor:
        return moved / (gb_per_s * 1e3)

    nvlink = machine.nvlink_gb_per_s * NVLINK_EFFICIENCY[operation]
    nic = machine.nic_gbit_per_s / 8 * machine.nic_efficiency
    busy = {
        "NIC": us(torch.maximum(traffic.nic_in, traffic.nic_out), nic),
        "NVLink": us(torch.maximum(traffic.nvlink_in, traffic.nvlink_out), nvlink),
        "multiprocessors": us(traffic.expert_rows, machine.num_sms * GB_PER_S_PER_SM[operation]),
        "staging": us(traffic.staged, machine.num_sms * STAGING_GB_PER_S_PER_SM),
        "HBM": us(traffic.hbm, machine.hbm_gb_per_s * HBM_EFFICIENCY),
    }
    inside = torch.stack([busy[wire] for wire in WIRES if wire != "NIC"]).amax(0)
    stages = torch.stack([busy["staging"], busy["NIC"], inside])
    if operation == COMBINE or sizes.nodes == 1:
        stages = stages[1:]
    longest = stages.amax(0)
    chunks = -(-sizes.tokens // (messages.tokens if messages else chunk_tokens))
    filling = (stages.sum(0) - longest) / max(1, chunks)
    fixed = FIXED_US[operation]
    if new_plan:
        fixed += max(PLAN_US, PLAN_US_PER_TOKEN * sizes.tokens)
    if messages is not None:
        fixed += NCCL_MESSAGE_US * messages.number
    elif sizes.nodes > 1:
        cached = operation == DISPATCH and not new_plan
        fixed += HOP_US * HOPS["cached dispatch" if cached else operation]
    total = fixed + longest + filling
    slowest = int(total.argmax())
    busy_us = {wire: float(busy[wire][slowest]) for wire in WIRES}
    bottleneck = max(WIRES, key=busy_us.__getitem__)
    if fixed > busy_us[bottleneck]:
        bottleneck = "fixed cost"
    return Time(float(total[slowest]), bottleneck, busy_us, fixed, float(filling[slowest]))
