"""DeepEP's ElasticBuffer and EPBuffer as programs make them, and what a layer of them has to give."""

import contextlib
from dataclasses import replace
from importlib import import_module

import torch
import torch.distributed as dist

from ep_dispatcher import reference
from lib import deep_ep_case
from lib.deep_ep_case import HIDDEN, LOCAL, TOPK, Case, environment, install

MOST, ALIGNMENT = 24, 16


@contextlib.contextmanager
def opened_as(module: str, name: str, case: Case, rank: int, **options):
    """A buffer of that class, in the case's environment."""
    with environment(case):
        install(rank)
        sizes = dict(num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True)
        buffer = getattr(import_module(module), name)(dist.group.WORLD, **sizes | options)
        yield buffer
        buffer.destroy()


def expected(data, rank: int, expand: bool, alignment: int = 1, x=None) -> reference.Dispatched:
    layout = dict(layout="expert" if expand else "rank", expert_alignment=alignment)
    return deep_ep_case.expected(data if x is None else replace(data, x=x), rank, **layout)


def assert_rows(given, wanted, num_rows: int):
    """The rows are the reference's, and all later ones are zeros. Pairs compare by bytes."""
    for one, other in zip(*((t if isinstance(t, tuple) else (t,)) for t in (given, wanted))):
        one, other = (t.cpu().contiguous().view(len(t), -1).view(torch.uint8) for t in (one, other))
        assert torch.equal(one[: len(other)], other) and not one[len(other) :].any() and len(one) == num_rows


def scaled(rows, recv_idx, recv_weights, handle):
    """Experts that multiply by 1, 2, ..., so that a wrong group shows, with weights: from what the handle says."""
    if recv_idx is not None:
        return rows * (recv_weights * torch.where(recv_idx >= 0, 1.0 + recv_idx, 0.0)).sum(1, keepdim=True)
    begin, scale = 0, torch.zeros(len(rows), device=rows.device)
    for expert, end in enumerate(handle.psum_num_recv_tokens_per_expert.tolist()):
        scale[begin:end], begin = 1.0 + expert, -(-end // handle.expert_alignment) * handle.expert_alignment
    return rows * (recv_weights * scale)[:, None]


def expected_layer(data, rank: int, x, weights):
    """The same layer, densely."""
    idx = data.topk_idx[rank]
    scales = torch.where(idx >= 0, 1.0 + idx % LOCAL, 0.0)
    return x * (weights * scales).sum(1, keepdim=True)
