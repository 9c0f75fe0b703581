"""DeepEP (github.com/deepseek-ai/DeepEP) as a side of the benchmark. Needs its package ``deep_ep``.

    python -m ep_dispatcher.bench --engine cuda --with ep_dispatcher.tools.benchmark.deep_ep

``ElasticBuffer`` (version 2) delivers expert layout (``do_expand``), and no host waits. ``Buffer`` (version 1) delivers
rank layout only, and its host waits for the counts. Its times include its layout kernel, but not the permute that a
user still has to add.
"""

from __future__ import annotations

import deep_ep
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.tools.benchmark.cases import Case
from ep_dispatcher.tools.benchmark.measurements import Calls, Measurement

SIDE = "DeepEP"


def measure(measurement: Measurement) -> None:
    x, topk_idx, topk_weights = measurement.inputs
    make = Elastic if hasattr(deep_ep, "ElasticBuffer") else Legacy
    side = make(measurement.group, measurement.case, topk_idx, topk_weights)
    try:
        measurement.found["deep_ep"] = side.version
        measurement.time({SIDE: operations_of(side, measurement.case, x)})
    finally:
        side.buffer.destroy()


def operations_of(side: Elastic | Legacy, case: Case, x: Tensor) -> Calls:
    rows, handle = side.dispatch(x)
    calls = {
        "dispatch": lambda: side.dispatch(x),
        "combine": lambda: side.combine(rows, handle),
        "cached dispatch": lambda: side.cached_dispatch(x, handle),
        "dispatch+combine": lambda: side.combine(*side.dispatch(x)),
    }
    if case.has_float8:
        pair = tuple(ep.quantize(x))
        calls["dispatch FP8"] = lambda: side.dispatch(pair)
    return {name: call for name, call in calls.items() if name in case.operations}


class Elastic:
    version = "DeepEP ElasticBuffer (expert layout)"

    def __init__(self, group: dist.ProcessGroup, case: Case, topk_idx: Tensor, topk_weights: Tensor):
        sizes = dict(num_max_tokens_per_rank=case.tokens, hidden=case.hidden, num_topk=case.topk)
        self.buffer = deep_ep.ElasticBuffer(group, **sizes, explicitly_destroy=True)
        self.sms = dict(num_sms=case.sms)
        self.cached = dict(topk_weights=topk_weights, do_expand=True, **self.sms)
        self.options = dict(topk_idx=topk_idx.to(deep_ep.topk_idx_t), num_experts=case.experts, **self.cached)
        self.options |= dict(num_max_tokens_per_rank=case.tokens, do_cpu_sync=False)

    def dispatch(self, x):
        rows, _, _, handle, _ = self.buffer.dispatch(x=x, **self.options)
        return rows, handle

    def cached_dispatch(self, x: Tensor, handle):
        return self.buffer.dispatch(x=x, handle=handle, **self.cached)

    def combine(self, rows: Tensor, handle):
        return self.buffer.combine(x=rows, handle=handle, **self.sms)


class Legacy:
    version = "DeepEP Buffer (rank layout, its layout kernel included in dispatch, no permutes included)"

    def __init__(self, group: dist.ProcessGroup, case: Case, topk_idx: Tensor, topk_weights: Tensor):
        deep_ep.Buffer.set_num_sms(case.sms)
        self.dispatch_config = deep_ep.Buffer.get_dispatch_config(group.size())
        self.combine_config = deep_ep.Buffer.get_combine_config(group.size())
        configs = (self.dispatch_config, self.combine_config)
        row_bytes = case.row_bytes("dispatch")
        most = max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs)
        self.buffer = deep_ep.Buffer(group, most, 0, explicitly_destroy=True)
        self.num_experts = case.experts
        self.topk_idx = topk_idx.to(getattr(deep_ep, "topk_idx_t", topk_idx.dtype))
        self.options = dict(topk_idx=self.topk_idx, topk_weights=topk_weights, config=self.dispatch_config)

    def dispatch(self, x):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.topk_idx, self.num_experts)
        layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        rows, _, _, _, handle, _ = self.buffer.dispatch(x, **layout, **self.options)
        return rows, handle

    def cached_dispatch(self, x: Tensor, handle):
        return self.buffer.dispatch(x, handle=handle, config=self.dispatch_config)

    def combine(self, rows: Tensor, handle):
        return self.buffer.combine(rows, handle, config=self.combine_config)
