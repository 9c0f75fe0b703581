"""DeepEP (github.com/deepseek-ai/DeepEP) behind the operations of the benchmark. Needs its package ``deep_ep``.

    python -m ep_dispatcher.bench --engine cuda --with ep_dispatcher.benchmark.deep_ep

``ElasticBuffer`` (version 2) brings rows into expert layout (``do_expand``), and no host waits. ``Buffer`` (version 1)
brings them into rank layout only. A user still has to permute them, and that is not in its times. Its layout kernel is
in them, and the host waits for the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deep_ep
import torch.distributed as dist
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.benchmark.cases import Case
from ep_dispatcher.benchmark.parts import Part

SIDE = "DeepEP"


def measure(part: Part) -> None:
    with make_side(part.group, part.case) as side:
        part.found["deep_ep"] = side.version
        calls = side.operations(*part.inputs)
        part.time({SIDE: {name: call for name, call in calls.items() if name in part.case.operations}})


@contextmanager
def make_side(group: dist.ProcessGroup, case: Case) -> Iterator[Elastic | Legacy]:
    side = (Elastic if hasattr(deep_ep, "ElasticBuffer") else Legacy)(group, case)
    try:
        yield side
    finally:
        side.buffer.destroy()


class Elastic:
    version = "DeepEP ElasticBuffer (expert layout)"

    def __init__(self, group: dist.ProcessGroup, case: Case):
        self.buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            num_topk=case.topk,
            explicitly_destroy=True,
        )
        self.case, self.sms = case, dict(num_sms=case.sms)

    def operations(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Callable[[], object]]:
        case = self.case
        options = dict(topk_idx=topk_idx.to(deep_ep.topk_idx_t), topk_weights=topk_weights, do_expand=True, **self.sms)
        options |= dict(num_experts=case.experts, num_max_tokens_per_rank=case.tokens, do_cpu_sync=False)
        cached = dict(topk_weights=topk_weights, do_expand=True, **self.sms)

        def dispatch(rows=x):
            return self.buffer.dispatch(x=rows, **options)

        def both():
            rows, _, _, handle, _ = dispatch()
            return self.buffer.combine(x=rows, handle=handle, **self.sms)

        rows, _, _, handle, _ = dispatch()
        calls = {
            "dispatch": dispatch,
            "combine": lambda: self.buffer.combine(x=rows, handle=handle, **self.sms),
            "cached dispatch": lambda: self.buffer.dispatch(x=x, handle=handle, **cached),
            "dispatch+combine": both,
        }
        if case.has_float8:
            pair = tuple(ep.quantize(x))
            calls["dispatch FP8"] = lambda: dispatch(pair)
        return calls


class Legacy:
    version = "DeepEP Buffer (rank layout, its layout kernel included in dispatch, no permutes included)"

    def __init__(self, group: dist.ProcessGroup, case: Case):
        deep_ep.Buffer.set_num_sms(case.sms)
        self.dispatch_config = deep_ep.Buffer.get_dispatch_config(group.size())
        self.combine_config = deep_ep.Buffer.get_combine_config(group.size())
        configs = (self.dispatch_config, self.combine_config)
        row_bytes = case.row_bytes("dispatch")
        most = max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs)
        self.buffer = deep_ep.Buffer(group, most, 0, explicitly_destroy=True)
        self.case = case

    def operations(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> dict[str, Callable[[], object]]:
        case, buffer = self.case, self.buffer
        topk_idx = topk_idx.to(getattr(deep_ep, "topk_idx_t", topk_idx.dtype))

        def dispatch(rows=x):
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.experts)
            return buffer.dispatch(
                rows,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                config=self.dispatch_config,
            )

        def both():
            rows, _, _, _, handle, _ = dispatch()
            return buffer.combine(rows, handle, config=self.combine_config)

        rows, _, _, _, handle, _ = dispatch()
        calls = {
            "dispatch": dispatch,
            "combine": lambda: buffer.combine(rows, handle, config=self.combine_config),
            "cached dispatch": lambda: buffer.dispatch(x, handle=handle, config=self.dispatch_config),
            "dispatch+combine": both,
        }
        if case.has_float8:
            pair = tuple(ep.quantize(x))
            calls["dispatch FP8"] = lambda: dispatch(pair)
        return calls
