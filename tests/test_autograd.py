"""Gradients: against a dense layer of experts, and bit by bit against the definition's own combine and dispatch."""

import contextlib
import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from conftest import on_ranks
from lib.autograd import dense_moe_layer, normal
from lib.dispatch_combine import Case, Inputs, assert_same, expert_rows, make_buffer, make_inputs, to
from lib.errors import assert_refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ep_dispatcher as ep
from ep_dispatcher import PeerTimeoutError, reference
from ep_dispatcher.engines.cuda.engine import StreamEvent
from ep_dispatcher.tools.testing import device_of

SPLITS = [(1, 1), (2, 2), (3, 3), (4, 2), (4, 1)]
LAYOUTS = ["expert", "rank"]
MAX_TOKENS = 64


def expert_matrices(case: Case) -> torch.Tensor:
    return normal((case.num_experts, case.hidden, case.hidden), 7) / case.hidden**0.5


def own_experts(case: Case, rank: int) -> slice:
    return slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)


def local_experts(out, case: Case, matrices: torch.Tensor) -> torch.Tensor:
    """Every expert's tanh(x @ matrix), weighted, in the rows that combine takes."""
    if case.layout == "expert":
        rows = out.x.split([*out.rows_per_expert.tolist(), out.x.shape[0] - int(out.rows_per_expert.sum())])
        y = [torch.tanh(part @ matrix) for part, matrix in zip(rows, matrices)]
        return torch.cat([*y, rows[-1]]) * out.topk_weights[:, None]
    y = torch.zeros_like(out.x)
    for e, matrix in enumerate(matrices):
        weight = torch.where(out.topk_idx == e, out.topk_weights, 0).sum(1, keepdim=True)
        y = y + weight * torch.tanh(out.x @ matrix)
    return y


def moe_layer(rank: int, engine: str, case: Case, inputs: Inputs, options: dict, recompute: bool):
    """Forward and backward of a layer of experts; loss = sum of outputs times fixed random numbers."""
    device = device_of(engine, rank)
    x, topk_idx, weights = inputs.on(rank, device)
    leaves = [t.requires_grad_() for t in (x, weights, expert_matrices(case)[own_experts(case, rank)].to(device))]

    def forward(x, weights, matrices):
        out = ep.dispatch(buffer, x, topk_idx, weights, layout=case.layout, **options)
        return ep.combine(buffer, local_experts(out, case, matrices), out.handle)

    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        result = checkpoint(forward, *leaves, use_reentrant=False) if recompute else forward(*leaves)
        (result * normal(result.shape, 50 + rank).to(device)).sum().backward()
    return result.detach(), *(leaf.grad for leaf in leaves)


def tanh_experts(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.einsum("th,ehd->ted", x, matrices))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
@pytest.mark.parametrize(
    "options,recompute",
    [({}, False), ({"expert_alignment": 8}, True), ({"max_recv_rows": 200}, False)],
    ids=["plain", "aligned-recomputed", "fixed-rows"],
)
def test_moe_layer_is_the_dense_one(pools, engine, num_ranks, ranks_per_node, layout, options, recompute):
    if layout == "rank":
        options = {key: value for key, value in options.items() if key != "expert_alignment"}
    case = Case(num_ranks, ranks_per_node, num_topk=3, experts_per_rank=3, hidden=16, layout=layout, tokens="uneven")
    inputs = make_inputs(dataclasses.replace(case, routing="masked"))
    inputs.x[:] = [normal(x.shape, 20 + rank) for rank, x in enumerate(inputs.x)]
    ranks = pools(num_ranks).run(moe_layer, engine, case, inputs, options, recompute)
    results, x_grads, weight_grads, (grads,) = dense_moe_layer(case, inputs, [expert_matrices(case)], tanh_experts)
    assert sum(float(g.abs().sum()) for g in x_grads) > 1
    for rank, seen in enumerate(ranks):
        right = (results[rank], x_grads[rank], weight_grads[rank], grads[own_experts(case, rank)])
        torch.testing.assert_close(seen, right, rtol=1e-4, atol=1e-5, check_dtype=False)


def gradients(rank: int, engine: str, case: Case, inputs: Inputs, z_grads: list, max_recv_rows: int | None):
    """Two dispatches and two combines on one handle, one backward: the gradients of x, topk_weights and y of each."""
    device = device_of(engine, rank)
    leaves, outputs, output_grads, handle = [], [], [], None
    options = dict(layout=case.layout, expert_alignment=case.alignment, max_recv_rows=max_recv_rows)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for z_grad in z_grads:
            x, topk_idx, weights = inputs.on(rank, device)
            x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = ep.dispatch(buffer, x, None if handle else topk_idx, weights, handle=handle, **options)
            handle, options = out.handle, {}
            rows, row_weights = to(device, expert_rows(case, out, rank))  # serve as values and as gradients
            y = rows.clone().requires_grad_()
            leaves += [x, weights, y]
            outputs += [out.x, out.topk_weights, ep.combine(buffer, y, handle)]
            output_grads += [rows, row_weights, z_grad[rank].to(device)]
        return torch.autograd.grad(outputs, leaves, output_grads)


def expected_gradients(case: Case, inputs: Inputs, **placed):
    """What the ranks receive, and by rank (the gradient of x, that of topk_weights) if those of outputs are random.

    placed: options of the dispatch
    """
    options = dict(num_experts=case.num_experts, layout=case.layout)
    received = reference.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **options, **placed)
    rows, row_weights = zip(*(expert_rows(case, out, rank) for rank, out in enumerate(received)))
    arguments = list(rows), received, inputs.topk_idx, list(row_weights) if case.weighted else None
    return received, reference.combine(*arguments, node_of=case.node_of, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_gradients_have_the_bits_of_the_definition(pools, engine, num_ranks, ranks_per_node, dtype, layout):
    """The backward of dispatch is the definition's combine and the reverse; NaN in padding rows stays there."""
    max_recv_rows, alignment = (300, 8) if layout == "expert" else (None, 1)
    shape = dict(num_topk=3, experts_per_rank=3, layout=layout, alignment=alignment, routing="masked", tokens="uneven")
    case = Case(num_ranks, ranks_per_node, dtype, **shape)
    inputs = make_inputs(case)
    z_grads = [[normal(x.shape, 40 + 10 * i + r, dtype) for r, x in enumerate(inputs.x)] for i in range(2)]
    ranks = pools(num_ranks).run(gradients, engine, case, inputs, z_grads, max_recv_rows)
    placed = dict(expert_alignment=alignment, max_recv_rows=max_recv_rows)
    _, dispatch_grads = expected_gradients(case, inputs, **placed)
    placed |= dict(num_experts=case.num_experts, layout=layout)
    for use, z_grad in enumerate(z_grads):
        combine_grads = reference.dispatch(z_grad, inputs.topk_idx, None, **placed)
        for rank, seen in enumerate(ranks):
            right = (*dispatch_grads[rank], combine_grads[rank].x)
            assert_same(seen[3 * use : 3 * use + 3], right, f"rank {rank}, use {use}: gradients of x, topk_weights, y")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "wanted,used,weighted",
    [
        (("x", "topk_weights"), ("x",), True),
        (("x", "topk_weights"), ("topk_weights",), True),
        (("x",), ("x", "topk_weights"), True),
        (("topk_weights",), ("x", "topk_weights"), True),
        (("x",), ("x",), False),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
@on_ranks(2)
def test_partial_gradients(rank, engine, wanted, used, weighted, layout):
    """Only ``wanted`` asks for a gradient, and the loss only looks at ``used`` of the outputs."""
    case = Case(2, 1, layout=layout, weighted=weighted)
    inputs = make_inputs(case)
    x, topk_idx, weights = inputs.on(rank, device_of(engine, rank))
    leaves = {"x": x, "topk_weights": weights}
    for name in wanted:
        leaves[name].requires_grad_()
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        out = ep.dispatch(buffer, x, topk_idx, weights, layout=layout)
        rows, row_weights = to(x.device, expert_rows(case, out, rank))
        terms = {"x": (out.x, torch.nan_to_num(rows)), "topk_weights": (out.topk_weights, row_weights)}
        sum((output * factor).sum() for output, factor in (terms[name] for name in used)).backward()
    for (name, leaf), right in zip(leaves.items(), expected_gradients(case, inputs)[1][rank]):
        grad = None if leaf is None else leaf.grad
        if name not in wanted:
            assert grad is None
        elif name not in used:
            assert grad is None or not grad.any()
        else:
            assert_same(to("cpu", grad), right, f"gradient of {name}")


@on_ranks(2)
def test_no_graph_without_a_need(rank, engine):
    case = Case(2, 2)
    x, topk_idx, weights = make_inputs(case).on(rank, device_of(engine, rank))
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        out = ep.dispatch(buffer, x, topk_idx, weights)
        assert not out.x.requires_grad and not ep.combine(buffer, out.x, out.handle).requires_grad


class Operators(TorchDispatchMode):
    """Collects the names of our operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ep_dispatcher":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_dispatch_modes_see_the_operators_and_change_no_bit(rank, engine):
    case, mode = Case(2, 2, dtype=torch.float32), Operators()
    x, topk_idx, weights = make_inputs(case).on(rank, device_of(engine, rank))
    leaves = x.requires_grad_(), weights.requires_grad_()

    def derivatives() -> tuple[torch.Tensor, ...]:
        """Gradients, and that of the sum of their squares."""
        out = ep.dispatch(buffer, x, topk_idx, weights)
        y = ep.combine(buffer, out.x**3 * out.topk_weights[:, None], out.handle)
        first = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        expected = derivatives()
        assert all(right.any() for right in expected) and not mode.seen
        with mode:
            observed = derivatives()
    assert mode.seen == ["dispatch", "combine"] * 3  # forward, backward, and the backward of that
    assert_same(to("cpu", observed), to("cpu", expected), "derivatives")


@pytest.mark.parametrize("layout, hidden", list(zip(LAYOUTS, (256, 304), strict=True)))
@pytest.mark.parametrize("ranks_per_node", [2, 1])
@pytest.mark.parametrize(
    "payload,used",
    [
        ("quantize", ("topk_weights", "x")),
        ("quantize_pow2", ("x",)),
        ("quantize_mx", ("x",)),
        ("quantize", ("topk_weights",)),
        ("pair", ("topk_weights",)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value,
)
@on_ranks(2)
def test_gradients_pass_straight_through_float8(rank, engine, payload, ranks_per_node, layout, hidden, used):
    """The loss looks at ``used`` of (dequantized rows, topk_weights)."""
    case = Case(2, ranks_per_node, torch.bfloat16, payload=payload, hidden=hidden, layout=layout)
    inputs, device = make_inputs(case), device_of(engine, rank)
    x, topk_idx, weights = inputs.on(rank, device)
    leaves = [weights.requires_grad_(), *([x.requires_grad_()] if "x" in used else [])]
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        out = ep.dispatch(buffer, x, topk_idx, weights, layout=case.layout, quantize=case.quantize)
        values = ep.dequantize(out.x)
        rows, row_weights = to(device, expert_rows(case, out, rank))
        outputs = {"topk_weights": (out.topk_weights, row_weights), "x": (values, rows)}
        given, grads_of = zip(*(outputs[name] for name in used))
        weight_grad, *x_grad = to("cpu", torch.autograd.grad(given, leaves, grads_of, allow_unused=True))
    received, expected = expected_gradients(case, inputs)
    if case.quantize:
        exact = received[rank].x.float()
        blocks = exact.split(128, 1)
        block_max = torch.cat([block.abs().amax(1, keepdim=True).expand_as(block) for block in blocks], 1)
        error = (to("cpu", values).float() - exact).abs()
        assert (error <= exact.abs() / 16 + block_max / 448 / 32).all()  # 3 bits of mantissa, smallest step 2**-9
        assert error.any(), "nothing was quantized"
    if "x" in used:
        assert_same(x_grad[0], expected[rank][0], "gradient of x")
    if "topk_weights" in used:
        assert_same(weight_grad, expected[rank][1], "gradient of topk_weights")
    else:
        assert weight_grad is None or not weight_grad.any()


@on_ranks(2)
def test_the_memory_of_an_anchor_may_be_freed(rank, engine):
    """Megatron's schedule of 1F1B frees inputs after use. Other dispatches have anchors of their own."""
    case = Case(2, 2, torch.bfloat16, payload="quantize")
    x, topk_idx, weights = make_inputs(case).on(rank, device_of(engine, rank))
    x.requires_grad_()
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        pairs = [ep.dispatch(buffer, x, topk_idx, weights, quantize=case.quantize).x for _ in range(2)]
        right = ep.dequantize(pairs[1]).detach()
        pairs[0].anchor.untyped_storage().resize_(0)
        pairs.append(ep.dispatch(buffer, x, topk_idx, weights, quantize=case.quantize).x)
        for pair in pairs[1:]:
            assert_same(ep.dequantize(pair).detach(), right, "rows")


@on_ranks(2)
def test_a_caller_of_anchors_gets_rows_without_a_gradient(rank, engine):
    """As Megatron's dispatcher, which passes the anchor on. Gradients and values are the same."""
    case, found = Case(2, 2, torch.bfloat16, payload="quantize"), []
    x, topk_idx, weights = make_inputs(case).on(rank, device_of(engine, rank))
    x.requires_grad_()
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for buffer.caller_uses_anchors in (False, True):
            pair = ep.dispatch(buffer, x, topk_idx, weights, quantize=case.quantize).x
            assert pair.rows.requires_grad != buffer.caller_uses_anchors and pair.anchor.requires_grad
            values = ep.dequantize(pair)
            found.append((values.detach(), *torch.autograd.grad(values, [x], torch.ones_like(values))))
    for seen, right in zip(*found):
        assert_same(seen, right, "rows, and the gradient of x")


@pytest.mark.parametrize("idle", [0, 1])
@on_ranks(2)
def test_a_rank_whose_loss_does_not_use_the_layer_adds_nothing_times_its_sum(rank, engine, idle):
    """Two layers in a row; the loss of rank ``idle``, which has no tokens, uses them only by ``0 * y.sum()``."""
    case, device = Case(2, 2), device_of(engine, rank)
    x, topk_idx, _ = (t[: 0 if rank == idle else None] for t in make_inputs(case).on(rank, device))
    y = x.float().requires_grad_()
    x, other = y, torch.ones(3, requires_grad=True)
    with make_buffer(case, engine, MAX_TOKENS) as buffer:
        for _ in range(2):
            out = ep.dispatch(buffer, y, topk_idx)
            y = ep.combine(buffer, 3 * out.x, out.handle)
        loss = other.sum().to(device) + 0 * y.sum() if rank == idle else y.sum()
        loss.backward()
    chosen = (topk_idx >= 0).sum(1, keepdim=True)
    assert torch.equal(x.grad, (3.0 * chosen).square().expand(x.shape))
    assert (other.grad is not None) == (rank == idle) and x.grad.any() == (rank != idle)


def late(*_):
    raise PeerTimeoutError("combine", 1, "partial sums", rank=0, late_ranks=[1], waited_s=1.0)


def note_of(call) -> str:
    with pytest.raises(PeerTimeoutError) as caught:
        call()
    return caught.value.note


@on_ranks(1)
def test_an_error_of_a_late_peer_has_the_note_of_the_buffer_or_says_that_it_was_in_a_backward(rank):
    inputs = make_inputs(Case(1, 1))
    with make_buffer(Case(1, 1), "cpu", MAX_TOKENS) as buffer:
        out = ep.dispatch(buffer, inputs.x[0].requires_grad_(), inputs.topk_idx[0])
        buffer._engine.check = late  # at the start of each operation
        for buffer.note in ("", "layer 3"):
            assert note_of(lambda: ep.combine(buffer, out.x, out.handle)) == buffer.note
            note = note_of(lambda: out.x.sum().backward(retain_graph=True))
            assert note == (buffer.note or "in a backward, which every rank must run")


@on_ranks(1)
def test_a_late_report_has_the_note_too(rank):
    inputs, buffer = make_inputs(Case(1, 1)), make_buffer(Case(1, 1), "cpu", MAX_TOKENS)
    engine, buffer.note = buffer._engine, "layer 3"
    destroy = engine.destroy
    engine.event = lambda: StreamEvent(SimpleNamespace(synchronize=late, config=buffer.config))
    event = buffer.dispatch(inputs.x[0], inputs.topk_idx[0]).event
    engine.check = engine.destroy = late
    for call in (buffer.check, event.synchronize, buffer.destroy):
        assert note_of(call) == "layer 3"
    destroy()


@contextlib.contextmanager
def layer_of_one_rank():
    """layer(x, topk_weights, scale), which is differentiable, and x and topk_weights."""
    case = Case(1, 1, torch.float32)
    inputs = make_inputs(case)
    with make_buffer(case, "cpu", MAX_TOKENS) as buffer:

        def layer(x, topk_weights=None, scale=1.0):
            out = ep.dispatch(buffer, x, inputs.topk_idx[0], topk_weights)
            y = out.x if topk_weights is None else out.x * out.topk_weights[:, None]
            return ep.combine(buffer, y * scale, out.handle)

        yield layer, inputs.x[0].float(), inputs.topk_weights[0]


def tangent_of_duals(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@on_ranks(1, timeout_s=300)
def test_other_ways_to_differentiate_are_refused(rank):
    """PyTorch would drop the tangents of a custom operator without a word."""
    with layer_of_one_rank() as (layer, x, weights):
        tangent = lambda x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))  # noqa: E731
        gradient = torch.func.grad(lambda x: layer(x).sum())
        one = torch.ones(())
        for argument, call in [
            ("x", lambda: tangent(x)),
            ("x", lambda: torch.func.jacfwd(layer)(x)),
            ("x", lambda: tangent_of_duals(layer, x)),
            ("x", lambda: torch.compile(tangent, backend="eager")(x)),
            ("topk_weights", lambda: torch.func.jvp(lambda w: layer(x, w), (weights,), (torch.ones_like(weights),))),
            ("y", lambda: torch.func.jvp(lambda s: layer(x, scale=s), (one,), (one,))),
            ("x", lambda: gradient(x)),
            ("x", lambda: torch.func.jacrev(layer)(x)),
            ("x", lambda: torch.vmap(gradient)(x[None])),
        ]:
            assert "backward()" in assert_refused(argument, call)


@on_ranks(1)
def test_transforms_of_something_else_go_on(rank):
    """Also vmap, in which nothing of the layer is differentiated."""
    with layer_of_one_rank() as (layer, x, weights):
        right, scale = layer(x), torch.tensor(2.0)
        _, tangent = torch.func.jvp(lambda s: (layer(x) * s).sum(), (scale,), (torch.ones(()),))
        gradient = torch.func.grad(lambda s: (layer(x) * s).sum())(scale)
        assert torch.equal(tangent, right.sum()) and torch.equal(gradient, right.sum()) and right.any()
        assert torch.equal(torch.vmap(layer)(torch.stack([x, 2 * x])), torch.stack([right, 2 * right]))


@on_ranks(1)
def test_hooks_that_convert_a_saved_plan_are_found(rank):
    with layer_of_one_rank() as (layer, x, weights):
        for dtype in (torch.bfloat16, torch.int64):
            x.requires_grad_().grad = None
            with torch.autograd.graph.saved_tensors_hooks(lambda t, dtype=dtype: t.to(dtype), lambda t: t):
                y = layer(x)
            assert_refused("saved plan", y.sum().backward)
        with torch.autograd.graph.save_on_cpu():
            y = layer(x)
        y.sum().backward()
        assert x.grad.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_the_outputs_are_the_callers_own(rank, engine, layout):
    """After the caller has overwritten all of them, the handle gives the same counts, rows and sums."""
    device, inputs, seen = device_of(engine, rank), make_inputs(Case(2, 1, layout=layout)), []
    with make_buffer(Case(2, 1, layout=layout), engine, MAX_TOKENS) as buffer:
        x, topk_idx, _ = inputs.on(rank, device)
        out = ep.dispatch(buffer, x, topk_idx, layout=layout)
        handle = out.handle
        for _ in range(2):
            combined = ep.combine(buffer, out.x, handle)
            outputs = (out.tokens_per_expert, out.rows_per_expert, out.x, combined, handle.rows_on_host)
            seen.append([t.cpu().clone() for t in outputs])
            for output in (out.x, out.tokens_per_expert, out.rows_per_expert):
                output.fill_(-1)
            out = ep.dispatch(buffer, x, handle=handle)
    assert seen[0][0].any() and all(map(torch.equal, *seen))
    tensors = [name for name, value in vars(handle).items() if isinstance(value, torch.Tensor)]
    assert tensors == ["plan", "rows_on_host"]


@pytest.mark.parametrize(
    "name,of_decode_layout",
    [("dispatch", ["scale_format", "return_hook"]), ("combine", ["weights", "out", "return_hook"])],
)
def test_the_arguments_are_those_without_gradients_but_for_async_finish(name, of_decode_layout):
    """A backward would have to know the streams; whoever wants to overlap calls the function in a stream."""
    given = dict(inspect.signature(getattr(ep, name)).parameters)
    plain = dict(inspect.signature(getattr(ep.Buffer, name)).parameters)
    del given["buffer"], plain["self"], plain["async_finish"]
    for argument in of_decode_layout:
        del plain[argument]
    if name == "dispatch":  # its type has decode layout too
        plain["layout"] = plain["layout"].replace(annotation=given["layout"].annotation)
    assert list(given.values()) == list(plain.values())
