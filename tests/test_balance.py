"""Redundant experts: the results and gradients of the layer without them, with a lower fullest rank."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.autograd import normal
from lib.balance import EXPERTS_PER_RANK, HIDDEN, NUM_TOPK, fullest_over_mean, make_skewed_case
from lib.dispatch_combine import make_buffer
from lib.errors import assert_refused
from lib.experts import (
    INTERMEDIATE,
    MAX_TOKENS,
    NAMES,
    QUANTIZE,
    compare_with_dense,
    dense_results,
    given_to,
    layer,
    of_rank,
    weights_of,
)
from lib.moe_layer import gelu_experts
from lib.nodes import sent_by

import ep_dispatcher as ep
from ep_dispatcher.balance.planner import count_choices, plan_copies, rewrite
from ep_dispatcher.errors import DisagreementError
from ep_dispatcher.request import CombineRequest, DispatchRequest
from ep_dispatcher.statistics import NUM_PLAN_SUMS
from ep_dispatcher.tools.testing import balance_so_far, device_of

CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "num_ranks, ranks_per_node, redundant, dtype, how",
    [
        (2, 2, 1, torch.float32, "plain"),
        (4, 4, 1, torch.float32, "fixed rows"),
        (4, 2, 1, torch.float32, "recomputed"),
        (4, 4, 2, torch.float32, "keeps less"),
        (4, 2, 1, torch.bfloat16, "fixed rows"),
        exhaustive(3, 3, 1, torch.float16, "plain"),
        exhaustive(4, 4, 3, torch.bfloat16, "recomputed"),
        exhaustive(8, 4, 1, torch.float32, "plain"),
    ],
    ids=lambda value: str(value).removeprefix("torch.").replace(" ", "-"),
)
def test_it_is_the_dense_layer(pools, engine, num_ranks, ranks_per_node, redundant, dtype, how):
    case, inputs = make_skewed_case(num_ranks, ranks_per_node, dtype)
    run = partial(layer, redundant=redundant, max_recv_rows=300)
    ranks = pools(num_ranks).run(run, engine, case, inputs, how)
    compare_with_dense(ranks, case, inputs)
    again = pools(num_ranks).run(run, engine, case, inputs, how)
    for one, other in zip(ranks, again):
        assert all(map(torch.equal, one, other))


def test_biases_have_copies_too(pools, engine):
    case, inputs = make_skewed_case(4, 2)
    w1 = normal((case.num_experts, INTERMEDIATE, HIDDEN), 7) / HIDDEN**0.5
    w2 = normal((case.num_experts, HIDDEN, INTERMEDIATE), 8) / INTERMEDIATE**0.5
    matrices = [w1, w2, normal((case.num_experts, INTERMEDIATE), 9), normal((case.num_experts, HIDDEN), 10)]
    run = partial(layer, redundant=1, activation="gelu")
    ranks = pools(4).run(run, engine, case, inputs, "plain", matrices)
    for seen, expected in zip(ranks, dense_results(case, inputs, matrices, gelu_experts), strict=True):
        for name, value, right in zip((*NAMES, "b1", "b2"), seen, expected, strict=True):
            torch.testing.assert_close(value, right, check_dtype=False, **CLOSE, msg=name)


# ---- float8 experts --------------------------------------------------------------------------------------------------


def float8_case(num_topk: int = NUM_TOPK):
    """Experts 0 to 2 have copies on other ranks, and scales of their own. Blocks of 128 are cut."""
    case, inputs = make_skewed_case(4, 4, torch.bfloat16, tokens="even", hidden=144)
    case = dataclasses.replace(case, num_topk=num_topk)
    for given in (inputs.topk_idx, inputs.topk_weights):
        given[:] = [one[:, :num_topk].contiguous() for one in given]
    magnitudes = torch.exp2(torch.arange(case.num_experts) % 3).bfloat16()
    return case, inputs, [magnitudes[:, None, None] * w for w in weights_of(case)]


def assert_nearly_equal(name: str, seen: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a few roundings to bfloat16, each of 2**-9 of a value at most. Float8 has 2**-4."""
    assert seen.dtype == expected.dtype and seen.shape == expected.shape
    seen, expected = seen.double(), expected.double()
    assert (seen - expected).norm() <= 2**-8 * expected.norm(), name


@pytest.mark.parametrize("how", ["plain", "fixed rows", "recomputed", "keeps less"])
def test_float8_experts_with_copies(pools, engine, how):
    """What a buffer without copies gives, up to the roundings of a combine and of gradients in parts."""
    case, inputs, matrices = float8_case()
    run = partial(layer, max_recv_rows=300, quantize=QUANTIZE)
    without, ranks, again = (
        pools(4).run(partial(run, redundant=redundant), engine, case, inputs, how, matrices) for redundant in (0, 2, 2)
    )
    for one, other, right in zip(ranks, again, without, strict=True):
        assert all(map(torch.equal, one, other))
        for name, seen, expected in zip(NAMES, one, right, strict=True):
            assert_nearly_equal(name, seen, expected)
    assert any(not torch.equal(seen[0], right[0]) for seen, right in zip(ranks, without)), "there are copies"


def test_a_float8_copy_computes_every_bit_of_a_row_as_its_home(pools, engine):
    """With one expert a token no sum has another order, so only the gradients of weights may differ."""
    case, inputs, matrices = float8_case(num_topk=1)
    run = partial(layer, quantize=QUANTIZE)
    without, ranks = (
        pools(4).run(partial(run, redundant=redundant), engine, case, inputs, "plain", matrices) for redundant in (0, 2)
    )
    for one, right in zip(ranks, without, strict=True):
        for name, seen, expected in zip(NAMES[:3], one, right):
            assert torch.equal(seen, expected), name
    assert any(not torch.equal(one[4], right[4]) for one, right in zip(ranks, without)), "there are copies"


def test_float8_experts_have_copies_of_biases_too(pools, engine):
    case, inputs, (w1, w2) = float8_case()
    biases = normal((case.num_experts, INTERMEDIATE), 9), normal((case.num_experts, case.hidden), 10)
    matrices = [w1[:, :INTERMEDIATE], w2, *(bias.bfloat16() for bias in biases)]
    run = partial(layer, activation="gelu", quantize=QUANTIZE)
    without, ranks = (
        pools(4).run(partial(run, redundant=redundant), engine, case, inputs, "plain", matrices) for redundant in (0, 2)
    )
    for one, right in zip(ranks, without, strict=True):
        for name, seen, expected in zip((*NAMES, "b1", "b2"), one, right, strict=True):
            assert_nearly_equal(name, seen, expected)


@on_ranks(2)
def test_the_module_with_float8_experts(rank, engine):
    """ep.MoELayer has the bits of ep.moe_mlp, also in another dtype of parameters, and slots for both dtypes."""
    case, inputs = make_skewed_case(2, 2, torch.bfloat16, tokens="even")
    given = given_to(rank, engine, case, inputs)
    x, (w1, w2) = given[0], given[3:]
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        one = ep.MoELayer(buffer, INTERMEDIATE, device=buffer.engine, quantize=QUANTIZE)
        with torch.no_grad():
            one.router.weight.mul_(torch.linspace(4, 0.1, 6, device=buffer.engine)[:, None])
            for p, w in zip(one.experts.parameters(), (w1, w2)):
                p.to_local().copy_(w)
        y = one(x)
        assert torch.equal(y, ep.moe_mlp(buffer, x, *one.router(x), w1, w2, quantize=QUANTIZE))
        bytes_of_float8 = buffer.balancer().slot_bytes
        assert not torch.equal(y, ep.moe_mlp(buffer, x, *one.router(x), w1, w2))
        assert buffer.balancer().slot_bytes > bytes_of_float8
        y.square().sum().backward()
        assert all(local(p.grad).isfinite().all() and local(p.grad).any() for p in one.parameters())


# ---- all experts -----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_statistics_show_what_balancing_does(rank, engine):
    """The same numbers on all ranks; the fullest rank has fewer rows than without copies."""
    case, inputs = make_skewed_case(4, 4, tokens="some")
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, inputs.most_tokens, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 16
        assert buffer.stats() is None
        for _ in range(2):
            ep.moe_mlp(buffer, *given)
        buffer.check()
        stats = buffer.stats()
    assert stats is not None and stats.balance is not None
    found = stats.balance
    assert (found.num_microbatches, found.num_ranks) == (2, 4)
    assert found.rows == 2 * sum(int((idx >= 0).sum()) for idx in inputs.topk_idx)
    assert found.num_copies > 0
    assert found.imbalance_before == pytest.approx(fullest_over_mean(case, inputs.topk_idx))
    assert found.imbalance_after < 1.1 < 1.5 < found.imbalance_before, found
    everyone = [None] * 4
    dist.all_gather_object(everyone, (found[:NUM_PLAN_SUMS], int(stats.tokens_per_expert.sum())))
    assert [one for one, _ in everyone] == [found[:NUM_PLAN_SUMS]] * 4
    assert max(tokens for _, tokens in everyone) == found.fullest_after


@pytest.mark.parametrize("dtype, quantize", [(torch.float32, None), (torch.bfloat16, QUANTIZE)])
@on_ranks(4)
def test_a_balanced_routing_has_the_bits_of_a_buffer_without_redundant_experts(rank, engine, dtype, quantize):
    case, inputs = make_skewed_case(4, 2, dtype, tokens="even")
    num_tokens = len(inputs.x[rank])
    in_turn = torch.arange(num_tokens * NUM_TOPK).view(num_tokens, NUM_TOPK) + rank
    inputs.topk_idx[:] = [in_turn % case.num_experts] * 4
    given = given_to(rank, engine, case, inputs)
    results = []
    for redundant in (1, 0):
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
        with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=redundant) as buffer:
            if redundant or quantize:
                y = ep.moe_mlp(buffer, *leaves, num_parts=1, quantize=quantize)
            else:
                y = _without_operators(buffer, leaves)
            y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for name, one, other in zip(NAMES, *results, strict=True):
        assert torch.equal(one, other), name


def _without_operators(buffer: ep.Buffer, leaves: list[torch.Tensor]) -> torch.Tensor:
    """The layer in one part, and in grouped_mlp on every engine, as redundant experts run it."""
    from ep_dispatcher.moe.grouped_mlp import Parameters
    from ep_dispatcher.moe.mlp import run_grouped_nodes

    x, topk_idx, topk_weights, w1, w2 = leaves
    return run_grouped_nodes(buffer, x, topk_idx, topk_weights, Parameters(w1, w2), None, 1)


@pytest.mark.parametrize("dtype, quantize", [(torch.float32, None), (torch.bfloat16, QUANTIZE)])
@on_ranks(4)
def test_several_microbatches_in_flight_keep_their_own_copies(rank, engine, dtype, quantize):
    """Four layers on one buffer, three microbatches with other routings, backwards in the orders of schedules.

    Every layer, microbatch and order has the gradients of that microbatch alone, bit by bit.
    """
    num_layers, seeds = 4, (3, 40, 77)
    cases = [make_skewed_case(4, 2, dtype, tokens="even", seed=seed) for seed in seeds]
    case = cases[0][0]
    inputs = [given_to(rank, engine, *one) for one in cases]
    for number, one in enumerate(inputs):  # other experts are hot in each microbatch
        one[1] = torch.where(one[1] >= 0, (one[1] + 5 * number) % case.num_experts, -1)
    device = device_of(engine, rank)
    matrices = [[t.to(device) for t in of_rank(case, rank, [(1 + n / 4) * w for w in weights_of(case)])]
                for n in range(num_layers)]  # fmt: skip

    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1

        def forward(given, layers):
            x = given[0].detach().clone().requires_grad_()
            y = x
            for w1, w2 in layers:
                y = ep.moe_mlp(buffer, y, given[1], given[2], w1, w2, quantize=quantize)
            return x, y

        def fresh():
            return [[w.detach().clone().requires_grad_() for w in one] for one in matrices]

        alone = []
        for given in inputs:
            layers = fresh()
            x, y = forward(given, layers)
            y.square().sum().backward()
            alone.append([x.grad, *(w.grad for one in layers for w in one)])
        # "f0": forward of microbatch 0, "b0": its backward.
        for schedule in ("f0 f1 f2 b0 b1 b2", "f0 f1 b0 f2 b1 b2", "f0 f1 f2 b2 b1 b0"):
            layers, flying, grads = [fresh() for _ in seeds], {}, {}
            for step in schedule.split():
                number = int(step[1])
                if step[0] == "f":
                    flying[number] = forward(inputs[number], layers[number])
                    continue
                x, y = flying.pop(number)
                y.square().sum().backward()
                grads[number] = [x.grad, *(w.grad for one in layers[number] for w in one)]
            for number, expected in enumerate(alone):
                assert all(map(torch.equal, grads[number], expected)), (schedule, number)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@on_ranks(4)
def test_a_microbatch_is_planned_from_the_choices_of_all_ranks(rank, engine, dtype):
    """Many times in turn, as counts of a microbatch lie where those of the last but one were."""
    case, inputs = make_skewed_case(4, 4)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        balancer = buffer.balancer()
        balancer.smallest_copy = 4
        found, expected = [], []
        for turn in range(6):
            routings = [torch.where(idx >= 0, (idx + 5 * turn) % case.num_experts, -1) for idx in inputs.topk_idx]
            routings[turn % 4] = routings[turn % 4][:turn]  # few tokens, or none
            found.append(balancer.balance(routings[rank].to(device_of(engine, rank), dtype)))
            balancer.barrier()
            counts = torch.stack([count_choices(idx, case.num_experts) for idx in routings])
            plan = plan_copies(counts, balancer.sizes)
            expected.append((plan, rewrite(routings[rank], counts, rank, plan, balancer.sizes)))
        buffer.check()
        assert any((plan.copies[..., 0] >= 0).any() for plan, _ in expected)
        for one, (plan, physical) in zip(found, expected, strict=True):
            assert torch.equal(one.plan.copies.cpu(), plan.copies) and torch.equal(one.plan.rows.cpu(), plan.rows)
            assert torch.equal(one.topk_idx.cpu(), physical)


@pytest.mark.parametrize("other", ["barrier", "dispatch", "combine"])
@on_ranks(2)
def test_ranks_a_step_apart_learn_it(rank, engine, other):
    """Rank 0 gathers counts while rank 1 is in another operation. Afterwards the buffer works."""
    case, inputs = make_skewed_case(2, 2)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        one, balancer = buffer.live_engine(), buffer.balancer()

        def dispatch():
            physical = torch.where(given[1] >= 0, given[1] // 3 * 4, -1)
            physical[:, 1:] = -1
            return one.dispatch(DispatchRequest(given[0], topk_idx=physical, num_rows=MAX_TOKENS * 2))

        received = dispatch()
        buffer.check()
        wrong = {
            "barrier": balancer.barrier,
            "dispatch": dispatch,
            "combine": lambda: one.combine(CombineRequest(received.rows, received.plan, len(given[0]))),
        }

        def run():
            balancer.balance(given[1]) if rank == 0 else wrong[other]()
            buffer.check()

        with pytest.raises(DisagreementError):
            run()
        buffer.check()
        y = ep.moe_mlp(buffer, *given)
        buffer.check()
        assert y.isfinite().all()


@pytest.mark.parametrize("max_recv_rows", [None, 300])
@on_ranks(2)
def test_the_host_pushes_inside_of_the_dispatch(rank, engine, max_recv_rows):
    """There it would only wait for counts. The backward has no counts, and pushes behind the dispatch."""
    case, inputs = make_skewed_case(2, 2)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given_to(rank, engine, case, inputs)]
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        log: list[str] = []

        def noted(owner, name: str) -> None:
            call = getattr(owner, name)

            def run(*given):
                log.append(name)
                result = call(*given)
                log.append(f"end of {name}")
                return result

            setattr(owner, name, run)

        for name in ("push", "barrier"):
            noted(buffer.balancer(), name)
        noted(buffer.live_engine(), "dispatch")
        y = ep.moe_mlp(buffer, *leaves, max_recv_rows=max_recv_rows)
        at = log.index("push")
        assert log[at - 1 : at + 4] == ["dispatch", "push", "end of push", "end of dispatch", "barrier"]
        log.clear()
        y.sum().backward()
        assert log[:5] == ["dispatch", "end of dispatch", "push", "end of push", "barrier"]


@pytest.mark.parametrize("wants", ["weights", "x"])
@on_ranks(2)
def test_only_some_gradients(rank, engine, wants):
    """Where only weights, or only rows want a gradient, it is the one of a pass where both do."""
    case, inputs = make_skewed_case(2, 2)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        found = []
        for wanted in ((0, 3, 4), (0,) if wants == "x" else (3, 4)):
            leaves = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(given)]
            ep.moe_mlp(buffer, *leaves).square().sum().backward()
            found.append([leaf.grad for leaf in leaves])
    for both, some in zip(*found):
        assert some is None or torch.equal(both, some)
    assert any(grad is not None for grad in found[1])


@pytest.mark.parametrize("passes", ["forward", "backward"])
@on_ranks(2, fresh=True)
def test_a_late_rank_is_named(rank, engine, passes):
    """Rank 1 does not come: rank 0 learns who is late, as in every operation."""
    case, inputs = make_skewed_case(2, 2)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1, timeout_s=2.0) as buffer:
        buffer.balancer().smallest_copy = 1
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
        y = ep.moe_mlp(buffer, *leaves)
        buffer.check()
        dist.barrier()
        if rank == 0:
            with pytest.raises(ep.PeerTimeoutError) as late:
                y.sum().backward() if passes == "backward" else ep.moe_mlp(buffer, *given)
                buffer.check()
            assert late.value.late_ranks == (1,)
        dist.barrier()


@on_ranks(2)
def test_an_evaluation_comes_before_the_training(rank, engine):
    """What the first pass makes under inference mode serves a backward too."""
    case, inputs = make_skewed_case(2, 2)
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        with torch.inference_mode():
            evaluated = ep.moe_mlp(buffer, *given)
        leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
        y = ep.moe_mlp(buffer, *leaves)
        y.square().sum().backward()
        assert torch.equal(y, evaluated)
        assert all(leaf.grad.isfinite().all() for leaf in leaves if leaf.requires_grad)


@on_ranks(2)
def test_a_layer_with_redundant_experts_learns_as_one_without(rank, engine):
    """ep.MoELayer: gradients and a step of an optimizer, and the state_dict that a layer without them has."""
    sizes = dict(hidden=HIDDEN, num_experts=6, num_topk=NUM_TOPK, max_tokens_per_rank=MAX_TOKENS, dtype=torch.float32)
    found = []
    for redundant in (0, 1):
        with ep.Buffer(None, engine=engine, redundant_experts_per_rank=redundant, **sizes) as buffer:
            if redundant:
                buffer.balancer().smallest_copy = 1
            torch.manual_seed(5)
            one = ep.MoELayer(buffer, INTERMEDIATE, device=buffer.engine)
            with torch.no_grad():  # some experts are chosen more often
                one.router.weight.mul_(torch.linspace(4, 0.1, 6, device=buffer.engine)[:, None])
            optimizer = torch.optim.SGD(one.parameters(), lr=0.05, foreach=False)  # of DTensors and others
            one(normal((40, HIDDEN), 30 + rank).to(buffer.device)).square().sum().backward()
            grads = {f"grad of {name}": local(p.grad) for name, p in one.named_parameters()}
            optimizer.step()
            found.append(grads | {name: local(t) for name, t in one.state_dict().items()})
    assert list(found[0]) == list(found[1])
    for name, t in found[0].items():
        torch.testing.assert_close(found[1][name], t, rtol=1e-3, atol=1e-3, msg=name)


def local(t: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, which may be a DTensor."""
    return (t.to_local() if hasattr(t, "to_local") else t).detach().clone()


@on_ranks(2)
def test_what_does_not_go_with_redundant_experts_is_refused(rank, engine):
    """Each by its name, before anything is sent: the buffer works afterwards."""
    case, inputs = make_skewed_case(2, 2)
    given = given_to(rank, engine, case, inputs)
    x, topk_idx, topk_weights, w1, w2 = given
    make = partial(make_buffer, case, engine, MAX_TOKENS)
    for name, value in (("suspendable", True), ("mask_late_ranks", True), ("hidden", 4), ("ranks_per_node", 1)):
        assert_refused("redundant_experts_per_rank", make, redundant_experts_per_rank=1, **{name: value})
    for wrong in (-1, 9, 1.5, True):
        assert_refused("redundant_experts_per_rank", make, redundant_experts_per_rank=wrong)
    assert_refused("redundant_experts_per_rank", make, redundant_experts_per_rank=rank)  # differs between ranks
    with make(redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1
        for call in (buffer.dispatch, partial(ep.dispatch, buffer)):
            assert_refused("redundant experts", call, x, topk_idx, topk_weights)
        assert_refused("redundant experts", buffer.plan, topk_idx)
        assert_refused("num_parts", ep.moe_mlp, buffer, *given, num_parts=2)
        for quantize in ("mxfp8", QUANTIZE):  # the latter needs bfloat16
            assert_refused("quantize", ep.moe_mlp, buffer, *given, quantize=quantize)
        assert_refused("redundant experts", ep.MoELayer, buffer, experts=lambda rows, counts: rows)
        assert ep.why_no_overlap(buffer) == "its experts have redundant copies"
        assert (buffer.num_experts, buffer.num_local_experts) == (case.num_experts, EXPERTS_PER_RANK)
        assert f"num_experts={case.num_experts}, redundant_experts_per_rank=1" in repr(buffer)
        ep.moe_mlp(buffer, *given)
    with make() as buffer:
        assert_refused("redundant_experts_per_rank", buffer.balancer)


@pytest.mark.parametrize("wrong", ["unknown", "twice"])
@on_ranks(2)
def test_a_wrong_expert_is_named_as_the_router_knows_it(rank, engine, wrong):
    case, inputs = make_skewed_case(2, 2, tokens="even")
    given = given_to(rank, engine, case, inputs)
    given[1] = given[1].clone()
    given[1][2] = torch.tensor([0, 1, 6 if wrong == "unknown" else 0])
    with make_buffer(case, engine, MAX_TOKENS, redundant_experts_per_rank=1) as buffer:
        buffer.balancer().smallest_copy = 1

        def run():
            ep.moe_mlp(buffer, *given, max_recv_rows=300)
            buffer.check()

        text = assert_refused("topk_idx[2, 2]", run)
    assert wrong == "twice" or "is 6" in text and "0 to 5" in text, text


@on_ranks(4)
def test_copies_change_no_bytes_of_rows_between_nodes(rank, engine):
    """Rows and sums that cross are those of a pass without copies: a copy stays in the node of its home."""
    case, inputs = make_skewed_case(4, 2, tokens="few chunks")
    given = given_to(rank, engine, case, inputs)
    with make_buffer(case, engine, inputs.most_tokens, redundant_experts_per_rank=1) as buffer:
        balancer = buffer.balancer()

        def run():
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
            ep.moe_mlp(buffer, *leaves).square().sum().backward()
            buffer.check()

        run()  # makes the slots
        buffer.stats()
        found = []
        for smallest in (1, 10**6):
            balancer.smallest_copy = smallest
            _, rows, _ = sent_by(buffer, run)
            found.append((balance_so_far(buffer).num_copies, rows))
    (with_copies, rows), (without, right) = found
    assert with_copies > 0 == without and sum(right) > 0
    assert rows == right
