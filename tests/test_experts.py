"""moe_mlp: results and gradients of a dense layer of the same experts, whatever the ranks, dtypes and routings."""

from functools import partial

import pytest
import torch
from conftest import exhaustive, on_ranks
from lib.dispatch_combine import make_buffer
from lib.errors import assert_refused
from lib.experts import (
    CLOSE,
    INTERMEDIATE,
    MAX_RECV_ROWS,
    MAX_TOKENS,
    NAMES,
    QUANTIZE,
    SIZES,
    compare_with_dense,
    given_to,
    layer,
    make_case,
)
from lib.faults import operations_so_far

import ep_dispatcher as ep


@pytest.mark.parametrize(
    "num_ranks,ranks_per_node,dtype,how,num_parts",
    [
        (1, 1, torch.float32, "plain", 1),
        (2, 2, torch.float32, "fixed rows", 1),
        (2, 2, torch.float32, "loop", 1),
        (2, 2, torch.bfloat16, "compiled", 1),
        (3, 3, torch.float16, "plain", 1),
        (4, 2, torch.float32, "recomputed", 1),
        (1, 1, torch.bfloat16, "compiled, keeps less", 1),
        (2, 2, torch.float32, "keeps less", 1),
        (4, 1, torch.bfloat16, "fixed rows", 1),
        (1, 1, torch.float32, "plain", 2),
        (2, 2, torch.bfloat16, "plain", 2),
        (2, 1, torch.float32, "fixed rows", 2),
        (2, 1, torch.bfloat16, "compiled", 2),
        (2, 1, torch.float16, "recomputed", 2),
        (2, 1, torch.float32, "keeps less", 2),
        (4, 2, torch.float32, "plain", 2),
        (4, 2, torch.float16, "fixed rows", 2),
    ],
    ids=lambda value: str(value).removeprefix("torch.").replace(" ", "-"),
)
def test_it_is_the_dense_layer(pools, engine, num_ranks, ranks_per_node, dtype, how, num_parts):
    case, inputs = make_case(num_ranks, ranks_per_node, dtype, sizes=SIZES if num_parts == 2 else None)
    ranks = pools(num_ranks).run(partial(layer, num_parts=num_parts), engine, case, inputs, how)
    compare_with_dense(ranks, case, inputs)
    assert all(float(sum(grad.abs().sum() for grad in grads)) > 1 for grads in list(zip(*ranks))[1:])


@pytest.mark.parametrize("num_parts, dtype", [(1, torch.bfloat16), (2, torch.float32), exhaustive(2, torch.bfloat16)])
@on_ranks(2)
def test_every_way_gives_the_same_bits(rank, engine, num_parts, dtype):
    """The same operations in the same order. One part and two sum the rows of a gradient in other orders."""
    case, inputs = make_case(2, 1, dtype, sizes=SIZES if num_parts == 2 else None)
    run = partial(layer, rank, engine, case, inputs, num_parts=num_parts)
    plain = run("plain")
    for how in ("plain", "no overlap", "fixed rows", "recomputed", "keeps less"):
        assert all(map(torch.equal, plain, run(how))), how
    for name, one, other in zip(NAMES, plain, run("plain", num_parts=3 - num_parts)):
        torch.testing.assert_close(one, other, **CLOSE[dtype], msg=name)


@on_ranks(1)
def test_without_keep_activated_less_is_kept(rank, engine):
    """`intermediate` values less of each received row."""
    case, inputs = make_case(1, 1, torch.bfloat16)
    x, idx, weights, *matrices = given_to(rank, engine, case, inputs)
    w1, w2 = (w.requires_grad_() for w in matrices)
    sizes = []
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for keep_activated in (True, False):
            found: dict[int, int] = {}

            def keep(t: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
                found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y = ep.moe_mlp(buffer, x, idx, weights, w1, w2, max_recv_rows=100, keep_activated=keep_activated)
            y.sum().backward()
            sizes.append(sum(found.values()))
    assert sizes[0] - sizes[1] == 100 * INTERMEDIATE * x.itemsize, sizes


@on_ranks(1)
def test_why_it_does_not_overlap(rank, engine):
    """A reason where its steps run one after the other; the choice that moe_mlp makes."""
    case, _ = make_case(1, 1)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        wanted = f"its engine is {engine}" if engine == "cpu" else "its rows are torch.float32"
        assert ep.why_no_overlap(buffer) == ep.why_no_overlap(buffer, num_parts=2) == wanted
        assert_refused("num_parts", ep.why_no_overlap, buffer, num_parts=3)
        assert_refused("buffer", ep.why_no_overlap, None)
    assert_refused("buffer", ep.why_no_overlap, buffer)


@on_ranks(1)
def test_torch_compile_in_float32_breaks_the_graph_and_changes_no_bit(rank, engine):
    """A whole graph is refused."""
    case, inputs = make_case(1, 1)
    *given, w1, w2 = given_to(rank, engine, case, inputs)
    matrices = w1.requires_grad_(), w2.requires_grad_()
    with make_buffer(case, engine, MAX_TOKENS) as buffer:

        def forward(*matrices):
            return ep.moe_mlp(buffer, *given, *matrices, max_recv_rows=MAX_RECV_ROWS)

        eager, broken = (call(*matrices) for call in (forward, torch.compile(forward, backend="aot_eager")))
        assert torch.equal(broken, eager)
        grads = [torch.autograd.grad(y.sum(), matrices) for y in (eager, broken)]
        assert all(map(torch.equal, *grads))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="buffer is one of torch.float32"):
            torch.compile(forward, backend="aot_eager", fullgraph=True)(*matrices)


@on_ranks(1)
def test_wrong_arguments_are_refused_before_anything_is_sent(rank, engine):
    case, inputs = make_case(1, 1, sizes=SIZES)
    x, idx, weights, w1, w2 = given_to(rank, engine, case, inputs)
    bad = idx.clone()
    bad[-1, 1] = 77
    two_parts = dict(topk_idx=bad, num_parts=2)
    too_many = dict(x=torch.cat([x] * 4), topk_idx=torch.cat([idx] * 4), topk_weights=torch.cat([weights] * 4))
    wrong = [
        ("activation", dict(activation="relu")),
        ("activation.function", dict(activation=ep.Activation("relu"))),
        ("activation.gated", dict(activation=ep.Activation("gelu", gated=False, limit=1.0))),
        ("activation.limit", dict(activation=ep.Activation(limit=0.0))),
        ("activation.alpha", dict(activation=ep.Activation(alpha=float("nan")))),
        ("w1", dict(activation="gelu")),
        ("b1", dict(b1=w1[:, :-1, 0])),
        ("b2", dict(b2=w2[:, :, 0].double())),
        ("quantize", dict(quantize="e5m2")),
        ("quantize", dict(quantize=True)),
        ("quantize", dict(quantize=QUANTIZE)),  # of float32
        ("num_parts", dict(num_parts=3)),
        ("num_parts", dict(num_parts="2")),
        ("max_recv_rows", dict(max_recv_rows=-1)),
        ("x", too_many),
        ("w1", dict(w1=w1[:, 1:])),
        ("w1", dict(w1=w1[:2])),
        ("w1", dict(w1=w1.double())),
        ("w2", dict(w2=w2.transpose(1, 2))),
        ("w2", dict(w2=None)),
        ("x", dict(x=(x.to(torch.float8_e4m3fn), weights))),
        ("topk_weights", dict(topk_weights=None)),
        ("topk_idx", dict(topk_idx=idx[1:])),
        ("buffer", dict(buffer=None)),
    ]
    if engine == "cuda":
        wrong.append(("w2", dict(w1=w1[:, :4], w2=w2[:, :, :2])))  # intermediate is no multiple of 4
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        right = dict(buffer=buffer, x=x, topk_idx=idx, topk_weights=weights, w1=w1, w2=w2)
        epoch = operations_so_far(buffer)
        for num_parts in (1, 2):
            for argument, change in wrong:
                assert_refused(argument, ep.moe_mlp, **(right | dict(num_parts=num_parts) | change))
        with pytest.raises(ValueError, match="torch.func"):
            torch.func.grad(lambda w: ep.moe_mlp(**(right | dict(w1=w))).sum())(w1)
        assert operations_so_far(buffer) == epoch, "something was sent"
        # The host of a GPU does not read topk_idx: there a kernel finds the entry, in its part of the tokens.
        assert_refused(f"topk_idx[{18 if engine == 'cpu' else 8}, 1]", ep.moe_mlp, **(right | two_parts))
        assert engine == "cuda" or operations_so_far(buffer) == epoch, "something was sent"
        ep.moe_mlp(**right)
