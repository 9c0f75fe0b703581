"""Every public operation under the defaults that a user's program may set: the same bits as without them."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.deep_ep_case import Case as DeepCase
from lib.deep_ep_case import environment, make_data

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of, make_routing, same_bits

HIDDEN, EXPERTS, TOPK, MOST, INTERMEDIATE = 512, 8, 3, 24, 64
SIZES = dict(hidden=HIDDEN, num_experts=EXPERTS, num_topk=TOPK, max_tokens_per_rank=MOST)

# (dtype, device) of new tensors. "cuda" is a default of many programs; without a GPU "meta" shows the same mistakes.
DEFAULTS = {
    "bfloat16": (torch.bfloat16, None),
    "float64": (torch.float64, None),
    "meta": (torch.float32, "meta"),
    "cuda": pytest.param(
        (torch.bfloat16, "cuda"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: a default device that is not there"),
    ),
}


def defaults(*names):
    return pytest.mark.parametrize("defaults", [DEFAULTS[name] for name in names], ids=names)


@contextlib.contextmanager
def default(dtype: torch.dtype, device: str | None):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


class Given:
    """What a rank gives, made under PyTorch's own defaults."""

    def __init__(self, rank: int, device):
        generator = torch.Generator().manual_seed(rank)

        def random(*shape: int, dtype=torch.bfloat16):
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        self.topk_idx, self.weights = (t.to(device) for t in make_routing("masked", MOST, EXPERTS, TOPK, seed=rank))
        self.x, local = random(MOST, HIDDEN), EXPERTS // dist.get_world_size()
        self.w1, self.w2 = random(local, 2 * INTERMEDIATE, HIDDEN), random(local, HIDDEN, INTERMEDIATE)
        self.out = torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16, device=device)
        self.wait_ns = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def everything(engine: str, ranks_per_node: int | None, given: Given) -> dict[str, torch.Tensor]:
    """Collective: every public operation once."""
    made = {}
    x, topk_idx, weights = given.x, given.topk_idx, given.weights
    options = dict(SIZES, engine=engine, ranks_per_node=ranks_per_node, timeout_s=60)
    with ep.Buffer(**options, suspendable=True) as buffer:
        buffer.dispatch_wait_ns = buffer.combine_wait_ns = given.wait_ns
        for layout in ("expert", "rank"):
            for named, send in (("exact", x), ("pair", ep.quantize(x)), ("quantize", x)):
                name = f"{layout} {named}"
                quantize = "e4m3_1x128" if named == "quantize" else None
                out = buffer.dispatch(send, topk_idx, weights, layout=layout, quantize=quantize)
                rows = out.x if named == "exact" else ep.dequantize(out.x)
                res = buffer.combine(rows, out.handle, topk_weights=out.topk_weights)
                made |= {f"{name} rows": rows, f"{name} weights": out.topk_weights, f"{name} sums": res.x}
                made |= {f"{name} counts": out.tokens_per_expert, f"{name} weights back": res.topk_weights}
                made |= {f"{name} rows on host": out.rows_on_host}
        handle = buffer.plan(topk_idx, max_recv_rows=500)
        made["planned rows"] = buffer.dispatch(x, topk_weights=weights, handle=handle).x
        buffer.suspend()
        buffer.resume()
        for name, packed in (("float32", "float32"), ("ue8m0", "ue8m0")):
            quantize = "e4m3_1x128"
            out = buffer.dispatch(
                x, topk_idx, layout="decode", quantize=quantize, scale_format=packed, return_hook=True
            )
            out.hook()
            for expert, count in enumerate(out.tokens_per_expert.tolist()):
                made[f"decode {name} {expert}"] = out.x[0][expert, :count].view(torch.uint8)
                made[f"decode {name} scales {expert}"] = out.x[1][expert, :count].contiguous()
        out = buffer.dispatch(x, topk_idx, layout="decode")
        made["decode sums"] = buffer.combine(out.x, out.handle, weights=weights, out=given.out).x.clone()
        made["counters"] = torch.tensor([*buffer.counters().values()], dtype=torch.int64, device="cpu")

        rows, row_weights = leaves(x, weights)
        out = ep.dispatch(buffer, rows, topk_idx, row_weights, quantize="e4m3_1x128")
        y = ep.combine(buffer, ep.dequantize(out.x) * out.topk_weights[:, None].bfloat16(), out.handle)
        y.square().sum().backward()
        made |= {"layer": y, "layer grad x": rows.grad, "layer grad weights": row_weights.grad}
        for num_parts in (1, 2):
            given_here = leaves(x, weights, given.w1, given.w2)
            rows, row_weights, w1, w2 = given_here
            y = ep.moe_mlp(buffer, rows, topk_idx, row_weights, w1, w2, num_parts=num_parts)
            y.square().sum().backward()
            made[f"experts {num_parts}"] = y
            made |= {f"experts {num_parts} grad {i}": t.grad for i, t in enumerate(given_here)}
    if ranks_per_node is None:
        with ep.Buffer(**options, mask_late_ranks=True) as buffer:
            made["mask"] = buffer.mask
            buffer.unmask()
    return {name: t.detach() for name, t in made.items()}


@pytest.mark.parametrize("ranks_per_node", [None, exhaustive(1)])
@defaults(*DEFAULTS)
@on_ranks(2)
def test_operations_make_the_same_bits(rank, engine, ranks_per_node, defaults):
    given = Given(rank, device_of(engine, rank))
    right = everything(engine, ranks_per_node, given)
    with default(*defaults):
        found = everything(engine, ranks_per_node, given)
    for name, tensor in right.items():
        assert found[name].device == tensor.device and same_bits(found[name], tensor), name


def deep_ep(case: DeepCase, data, rank: int) -> dict[str, torch.Tensor]:
    """Collective: the operations of the DeepEP stand-in once."""
    from ep_dispatcher.integrations.deep_ep import Buffer

    x, topk_idx, weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
    made = {}
    buffer = Buffer(dist.group.WORLD, 1 << 20, low_latency_mode=True, explicitly_destroy=True)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.experts)
    made |= {"per rank": per_rank, "per expert": per_expert, "in rank": in_rank}
    rows, idx, row_weights, counts, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    sums, back, _ = buffer.combine(rows, handle, topk_weights=row_weights)
    made |= {"rows": rows, "idx": idx, "row weights": row_weights, "sums": sums, "weights back": back}
    made["counts"] = torch.tensor(counts, dtype=torch.int64, device="cpu")
    most = max(case.lengths)
    packed, count, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, most, case.experts, use_fp8=False)
    sums, _, _ = buffer.low_latency_combine(packed, topk_idx, weights, handle)
    made |= {"low latency counts": count, "low latency sums": sums}
    buffer.destroy()
    return made


@pytest.mark.parametrize("exact", [False, exhaustive(True)])
@defaults(*DEFAULTS)
@on_ranks(4)
def test_deep_ep_gives_the_same_bits(rank, engine, exact, defaults):
    case = DeepCase(engine, exact=exact)
    with environment(case):
        data = make_data(case, rank)
        right = deep_ep(case, data, rank)
        with default(*defaults):
            found = deep_ep(case, data, rank)
    assert not [name for name in right if not same_bits(found[name], right[name])]


def both_of_megatron(rank: int, defaults) -> list[str]:
    from lib.megatron_layer import Layout, make_config, make_layer, tokens_of, use_layout

    use_layout(Layout(ep=2))
    layer = make_layer(make_config())
    x = tokens_of(rank)
    results = []
    for kind in ((torch.float32, None), defaults):
        leaf = x.detach().clone().requires_grad_()
        layer.zero_grad()
        with default(*kind):
            y, _ = layer(leaf)
            y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    return [i for i, (right, found) in enumerate(zip(*results)) if not same_bits(right, found)]


@defaults("bfloat16", "float64")
def test_a_megatron_layer_gives_the_same_bits(defaults):
    from lib.megatron_layer import megatron_pool  # skips without megatron-core

    assert megatron_pool(2).run(both_of_megatron, defaults) == [[], []]
