"""The adapter by which CollectiveX times this library: SemiAnalysis' benchmark of expert-parallel libraries.

CollectiveX is the folder experimental/CollectiveX of https://github.com/SemiAnalysisAI/InferenceX. This file is written
for its bench/ as of commit 576fd65d (2026-08-09), which is unchanged in 843c6254 (2026-08-22), and for 850d65ea, which
has the same base class. In an environment with ep_dispatcher, copy this file to bench/, and in bench/run_ep.py

- add "ep-dispatcher" to the choices of --backend, and
- before the other branches that import a class as Backend, one for this name:
  ``from ep_ep_dispatcher import EPDispatcherBackend as Backend``.

Then each of these runs one case on 8 GPUs of a host (case-id is made of the other arguments, and checked):

    torchrun --nproc-per-node 8 bench/run_ep.py --backend ep-dispatcher --mode normal --precision bf16 \\
        --phase prefill --tokens-ladder "1024 2048 4096 8192" --hidden 7168 --topk 8 --experts 256 --seed 67 \\
        --routing uniform --warmup 32 --iters 8 --trials 256 --version 1 --suite ep-core --runner h200 \\
        --workload-name deepseek-v3 --topology-class h200-nvlink-island \\
        --case-id h200-ep-dispatcher-deepseek-v3-normal-prefill-ep8-uniform-bf16 \\
        --transport nvlink --scope scale-up --scale-up-transport nvlink --scale-out-transport "" \\
        --gpus-per-node 8 --scale-up-domain 8 --out normal-prefill-bf16.json

    --mode low-latency --phase decode --tokens-ladder "1 2 4 8 16 32 64 128 256" --precision fp8, and the same otherwise

CollectiveX's own launchers and matrix choose libraries and container images by configs/platform_config.json,
sweep_matrix.py and runtime/prepare_backend.sh, which need an entry too if they are to run this library.

What a row means:

    mode, precision      calls of this library
    normal               Buffer.dispatch(x, topk_idx, topk_weights, layout="rank") and Buffer.combine: a row for each
                         pair of a token and a rank, as with the other libraries there. Experts' weights are applied
                         before the combine
    low-latency          layout="decode", whose combine multiplies by the weights. As with the other libraries the
                         buffer has room for 256 tokens of a rank, and larger cases are left out
    bf16                 rows travel in bfloat16, in both directions
    fp8                  quantize="e4m3_1x128" in the dispatch, so its time includes the quantization; a combine is in
                         bfloat16. "stage" is ep.dequantize, which CollectiveX leaves out of roundtrip and pair_period

In low-latency mode a sum over a rank's experts is rounded to bfloat16 before it travels, which CollectiveX's expected
values do not have. For its inputs (hidden 7168, top-8 of 256, seed 67, 8 ranks of a node, 1 to 256 tokens) the largest
error of ep_dispatcher.reference is 0.028, and 0.031 is allowed. It is the same in every run, because the order of sums
is fixed. Fewer ranks round larger sums: on 2 ranks it is 0.030 for 128 tokens, and for 256 it is 0.033 and refused, so
there the largest case is 128 tokens. Smaller models may exceed the limit as well: weights of fewer experts are larger,
and what they multiply may cancel.

Environment variables; all but the defaults are named in kernel_generation of the result:

    CX_EP_DISPATCHER_NUM_SMS=32      num_sms of the buffer: multiprocessors of an operation. Default: the library's, 24
                                     in normal and 64 in low-latency mode
    CX_EP_DISPATCHER_LAYOUT=expert   normal mode in expert layout: dispatches and combines then include the permute and
                                     the unpermute, which a row of the others does not. Default: rank
    CX_EP_DISPATCHER_HOST_WAITS=0    normal mode with max_recv_rows, so that no dispatch waits for the counts on the
                                     host. It is the largest number of rows of a rank in the case. Default: 1
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ep_backend import EPBackend
from torch import Tensor

import ep_dispatcher as ep

LOW_LATENCY_TOKENS = 256
QUANTIZE = "e4m3_1x128"


@dataclass
class Received:
    """What a dispatch returned, and what its combine sends. combine_input is the harness' name."""

    out: ep.DispatchOutput
    combine_input: Tensor | None = None


def switch(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(f"CX_EP_DISPATCHER_{name}", default)
    if value not in allowed:
        raise ValueError(f"CX_EP_DISPATCHER_{name} is {value!r}, allowed: {', '.join(allowed)}")
    return value


class EPDispatcherBackend(EPBackend):
    """ep.Buffer under CollectiveX: ``args`` as its command line has them, one buffer for all token counts of a case."""

    name = "ep-dispatcher"
    maturity = "candidate"
    library_version = ep.__version__
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device):
        super().__init__(args, rank, world_size, local_rank, device)
        self.buffer: ep.Buffer | None = None
        self.num_local_experts = args.experts // world_size
        num_sms = os.environ.get("CX_EP_DISPATCHER_NUM_SMS")
        if num_sms is not None and not num_sms.isdecimal():
            raise ValueError(f"CX_EP_DISPATCHER_NUM_SMS is {num_sms!r}, allowed: a whole number")
        self.num_sms = None if num_sms is None else int(num_sms)
        self.host_waits = switch("HOST_WAITS", "1", ("0", "1")) == "1"
        self.layout = switch("LAYOUT", "rank", ("rank", "expert"))
        self.quantize, self.dequantize = None, ep.dequantize
        if self.precision == "fp8":
            self._take_float8()
        if self.mode == "low-latency":
            self._take_decode_layout()
        self.kernel_generation = self._describe()

    def _take_float8(self) -> None:
        self.quantize = QUANTIZE
        self.stage_device_work = True
        self.dispatch_dtype = "fp8-e4m3fn"
        self.dispatch_value_bytes = 1
        self.dispatch_scale_bytes_per_copy = 4 * -(-self.args.hidden // 128)

    def _take_decode_layout(self) -> None:
        self.layout, self.host_waits = "decode", True
        self.receive_layout = "token-expert"
        self.combine_weight_semantics = "weighted-kernel-sum"
        # A handle of this library may be combined more than once. With this flag every timed combine follows a
        # dispatch, as with all libraries whose low-latency mode has this receive layout.
        self.requires_fresh_pair = True
        if self.quantize and self.device.type == "cuda":
            # All rows that an expert may get are dequantized, which takes one kernel instead of several passes.
            self.dequantize = torch.compile(ep.dequantize, dynamic=False)

    def _describe(self) -> str:
        sms = "" if self.num_sms is None else f"-{self.num_sms}sms"
        return f"ep-dispatcher-{self.layout}{sms}{'' if self.host_waits else '-max-recv-rows'}"

    def buffer_cap(self, args: Any) -> int | None:
        return LOW_LATENCY_TOKENS if self.mode == "low-latency" else None

    def create_buffer(self, spec: Any) -> None:
        self.buffer = ep.Buffer(
            dist.group.WORLD,
            hidden=self.args.hidden,
            num_experts=self.args.experts,
            num_topk=self.args.topk,
            max_tokens_per_rank=self.buffer_cap(self.args) or spec.max_tokens_per_rank,
            engine="cuda" if self.device.type == "cuda" else "cpu",
            num_sms=self.num_sms,
        )

    def semantic_payload(self, x: Tensor) -> Tensor:
        """Return bfloat16 [n, hidden]: what the receiver of these rows has, after the round trip through float8."""
        return ep.dequantize(ep.quantize(x, self.quantize)) if self.quantize else x

    def make_problem(self, T: int, idx: Tensor, weights: Tensor, x: Tensor) -> Any:
        problem = super().make_problem(T, idx, weights, x)
        problem.options = {"layout": self.layout, "quantize": self.quantize}
        if not self.host_waits:
            num_rows = self.buffer.plan(problem.topk_idx, layout=self.layout).num_rows
            needed = torch.tensor([num_rows], device=self.device)
            dist.all_reduce(needed, op=dist.ReduceOp.MAX)
            problem.options["max_recv_rows"] = int(needed)
        return problem

    # ---- What is timed -----------------------------------------------------------------------------------------------

    def dispatch(self, problem: Any) -> Received:
        weights = None if self.layout == "decode" else problem.topk_weights
        return Received(self.buffer.dispatch(problem.dispatch_x, problem.topk_idx, weights, **problem.options))

    def stage(self, problem: Any, received: Received) -> None:
        received.combine_input = self.dequantize(received.out.x) if self.quantize else received.out.x

    def combine(self, problem: Any, received: Received) -> Tensor:
        return self._combine(problem, received, received.combine_input)

    def _combine(self, problem: Any, received: Received, y: Tensor) -> Tensor:
        weights = problem.topk_weights if self.layout == "decode" else None
        return self.buffer.combine(y, received.out.handle, weights=weights).x

    # ---- What is checked ---------------------------------------------------------------------------------------------

    def recv_tokens(self, received: Received) -> int:
        if self.layout == "rank":
            return int((received.out.topk_idx >= 0).any(1).sum())
        return int(received.out.tokens_per_expert.sum())

    def inspect_dispatch(self, problem: Any, received: Received) -> SimpleNamespace:
        """Return the received rows for the check: payload bfloat16 [n, hidden], and by global number their experts.

        low-latency  n rows by (local expert, place), expert_ids [n]
        normal       a row for each token, expert_ids and weights [n, topk], -1 and 0 where an expert is not local
        """
        out = received.out
        if self.layout == "decode":
            expert, _ = self._places(out).nonzero(as_tuple=True)
            payload, expert_ids, weights = self._rows(out.x, self._places(out)), self._global(expert), None
        else:
            local_idx, row_of = self._tokens(problem, out)
            payload, expert_ids = self._payload(out.x, local_idx, row_of), self._global(local_idx)
            weights = self._weights(out, local_idx, row_of)
        return SimpleNamespace(
            payload=payload, expert_ids=expert_ids, weights=weights, local_expert_counts=out.tokens_per_expert
        )

    def combine_transformed(self, problem: Any, received: Received, transformed: Tensor) -> Tensor:
        """Combine what the check made of the payload: bfloat16 [n, hidden], in the order of inspect_dispatch."""
        out = received.out
        rows = out.x[0] if self.quantize else out.x
        y = torch.zeros_like(rows, dtype=torch.bfloat16)
        if self.layout == "decode":
            y[self._places(out)] = transformed
        else:  # one row of each token has the sum over its experts; in expert layout the others are zeros
            y[self._tokens(problem, out)[1].amax(1)] = transformed
        return self._combine(problem, received, y)

    def _global(self, local_idx: Tensor) -> Tensor:
        return torch.where(local_idx >= 0, local_idx.long() + self.rank * self.num_local_experts, -1)

    def _rows(self, x: Tensor | tuple[Tensor, Tensor], index: Tensor) -> Tensor:
        return ep.dequantize((x[0][index], x[1][index])) if isinstance(x, tuple) else x[index]

    def _places(self, out: ep.DispatchOutput) -> Tensor:
        """Return bool [num_local_experts, places]: where the rows of decode layout are."""
        places = torch.arange(out.handle.num_rows // self.num_local_experts, device=self.device)
        return places < out.tokens_per_expert[:, None]

    def _tokens(self, problem: Any, out: ep.DispatchOutput) -> tuple[Tensor, Tensor]:
        """Return int64 [n, topk] each, for n received tokens: their local experts and their rows, -1 for none."""
        if self.layout == "rank":
            local_idx = out.topk_idx[(out.topk_idx >= 0).any(1)]  # zero rows of max_recv_rows are behind them
            rows = torch.arange(local_idx.shape[0], device=self.device)[:, None]
            return local_idx, torch.where(local_idx >= 0, rows, -1)
        # Tokens are in the same order in both layouts, and so the n-th row of an expert is that of its n-th token.
        by_rank = self.buffer.dispatch(problem.dispatch_x, problem.topk_idx, problem.topk_weights, layout="rank")
        local_idx, experts = by_rank.topk_idx, torch.arange(self.num_local_experts, device=self.device)
        earlier = (local_idx[:, :, None] == experts).any(1).cumsum(0) - 1
        first = out.rows_per_expert.cumsum(0) - out.rows_per_expert
        row_of = (first + earlier).gather(1, local_idx.clamp_min(0))
        return local_idx, torch.where(local_idx >= 0, row_of, -1)

    def _payload(self, x: Tensor | tuple[Tensor, Tensor], local_idx: Tensor, row_of: Tensor) -> Tensor:
        """Return a row of each token. Raise RuntimeError if a token's rows differ, which are equal in every layout."""
        payload = self._rows(x, row_of.amax(1))
        token, k = (local_idx >= 0).nonzero(as_tuple=True)
        if not torch.equal(self._rows(x, row_of[token, k]), payload[token]):
            raise RuntimeError("the rows of a token differ between its experts")
        return payload

    def _weights(self, out: ep.DispatchOutput, local_idx: Tensor, row_of: Tensor) -> Tensor:
        weights = out.topk_weights
        if self.layout == "rank":
            return weights[: local_idx.shape[0]]
        return torch.where(local_idx >= 0, weights[row_of.clamp_min(0)], 0)

    def finalize(self, rc: int) -> int:
        """Destroy the buffer, which raises what operations found late, and the process group."""
        if self.buffer is not None:
            self.buffer.destroy()
        return super().finalize(rc)
