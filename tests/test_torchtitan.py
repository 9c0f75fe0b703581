"""ep_dispatcher.integrations.torchtitan: torchtitan's own trainer with this dispatcher and with its own ones."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, launched_operations, planned_dispatches
from torch.distributed.device_mesh import init_device_mesh

from ep_dispatcher.tools.testing import RankError, make_routing, same_bits

pytest.importorskip("torchtitan", reason="no torchtitan: it brings 1.5 GB (Triton, pyarrow), which .ci/run installs")

MODULE = "ep_dispatcher.integrations.torchtitan"
OURS, KEEP, FULL = (f"{MODULE}.{name}" for name in ("token_dispatcher", "selective_ac", "full_ac"))
EP4 = dict(expert_parallel_degree=4)
COMPILE_S = 300  # of a run that compiles, on a busy machine
HIDDEN, NUM_EXPERTS, TOP_K = 32, 8, 3


def run(rank: int, overrides: tuple[str, ...], options: dict) -> tuple[list[tuple[float, float]], list[str]]:
    """The losses and norms of a rank, and the operations of this engine that have run."""
    from torchtitan_case import train

    torch._dynamo.reset()
    with launched_operations() as launched:
        return train(rank, overrides, **options), sorted(launched)


@pytest.mark.parametrize(
    "options, first",
    [
        (dict(parallel=EP4), 1e-6),
        (dict(parallel=dict(expert_parallel_degree=4, tensor_parallel_degree=2)), 1e-6),
        exhaustive(dict(parallel=dict(expert_parallel_degree=2, tensor_parallel_degree=2)), 1e-6),
        exhaustive(dict(parallel=dict(expert_parallel_degree=2)), 1e-6),
        exhaustive(dict(parallel=EP4, dtype="bfloat16"), 1e-4),
    ],
)
def test_it_trains_as_torchtitan_alone_does(pools, options, first):
    """With FSDP2 and tensor parallelism around: the experts' weights are sharded over the other ranks.

    The first step shows the gradients: its norm is before any update. AdamW then makes differences of rounding larger.
    """
    for (seen, launched), (expected, none) in zip(pools(4).run(run, (OURS,), options), pools(4).run(run, (), options)):
        assert none == [] and len(launched) == 4 * 2 * 4  # steps, MoE layers, two operations forward and two backward
        assert seen[0] == pytest.approx(expected[0], rel=first)
        assert torch.tensor(seen).allclose(torch.tensor(expected), rtol=1e-3)
        assert seen[-1][0] < seen[0][0] - 1


@pytest.fixture(scope="module")
def plain(pools):
    return pools(4).run(run, (OURS,), dict(parallel=EP4))


CAPACITY = dict(moe_comm_backend="hybridep", non_blocking_capacity_factor=0.8)  # torchtitan allows CUDA graphs with it


@pytest.mark.parametrize(
    "overrides, options",
    [
        ((OURS,), {}),
        ((OURS, KEEP), dict(ac="selective")),
        ((OURS,), CAPACITY),
        exhaustive((OURS + '={"non_blocking_capacity_factor": 0.9, "num_max_tokens_per_rank": 1000}',), {}),
        exhaustive((OURS,), dict(moe_comm_backend="deepep")),
        exhaustive((OURS, KEEP), dict(ac="selective", compiles=True)),
        exhaustive((OURS, KEEP), dict(ac="selective", compiles=True, **CAPACITY)),
    ],
)
def test_these_change_no_bit_and_move_nothing_twice(pools, plain, overrides, options):
    """The same run again, checkpoints that keep rows, a limit of rows, torch.compile, another backend replaced."""
    assert pools(4).run(run, overrides, dict(parallel=EP4) | options, timeout_s=COMPILE_S) == plain


def planned(rank: int, *given):
    """What `run` returns, and the number of plans made."""
    with planned_dispatches() as seen:
        return *run(rank, *given), seen


@pytest.mark.parametrize(
    "overrides, compiles, num_plans",
    [((OURS,), False, 16), ((OURS, FULL), False, 8), exhaustive((OURS, FULL), True, 16)],
)
def test_full_checkpoints_move_rows_again_and_may_keep_plans(pools, plain, overrides, compiles, num_plans):
    ranks = pools(4).run(planned, overrides, dict(parallel=EP4, ac="full", compiles=compiles), timeout_s=COMPILE_S)
    assert {seen.count("plan") for *_, seen in ranks} == {num_plans}  # steps, MoE layers, recomputes
    for (seen, launched, _), (expected, once) in zip(ranks, plain):
        assert seen == expected and len(launched) == len(once) * 3 / 2


def test_padding_for_float8_experts(pools, plain):
    """The converters to float8 want padding, and say so by another Config, which this one replaces too."""
    for (seen, _), (expected, _) in zip(pools(4).run(run, (OURS,), dict(parallel=EP4, pad_multiple=16)), plain):
        assert seen[0] == pytest.approx(expected[0], rel=1e-6)
        assert torch.tensor(seen).allclose(torch.tensor(expected), rtol=1e-3)


@pytest.mark.parametrize(
    "options, parallel, text",
    [
        ('={"non_blocking_capacity_factor": 0.1}', EP4, "non_blocking_capacity_factor is too small"),
        ('={"non_blocking_capacity_factor": 1.5}', EP4, "non_blocking_capacity_factor: given 1.5"),
        ('={"capacity": 1}', EP4, "capacity"),
        ("", {}, "expert_parallel_degree: given 1"),
    ],
)
def test_mistakes_are_errors_on_every_rank(pools, options, parallel, text):
    with pytest.raises(RankError) as raised:
        pools(4).run(run, (OURS + options,), dict(parallel=parallel))
    assert len(raised.value.failures) == 4
    assert all(text in message for _, message, _ in raised.value.failures.values())


def test_it_refuses_to_replace_a_policy_of_checkpoints_of_ones_own():
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    from ep_dispatcher.integrations.torchtitan import selective_ac

    class Own(SelectiveAC):
        @dataclass(kw_only=True, slots=True)
        class Config(SelectiveAC.Config):
            pass

    with pytest.raises(ValueError, match="^activation_checkpoint: "):
        selective_ac(Own.Config())


def make_dispatchers(kind: str, **options) -> list:
    """Two dispatchers, torchtitan's of this kind or ours, with the ranks of the default group."""
    import torchtitan_case as case
    from torchtitan.distributed.utils import set_spmd_backend

    from ep_dispatcher.integrations import torchtitan

    set_spmd_backend("partial_dtensor")
    config = dict(num_experts=NUM_EXPERTS, top_k=TOP_K)
    owner = torchtitan.EPTokenDispatcher if kind == "ours" else case.AllToAllTokenDispatcher
    made = [owner.Config(**config, **options).build() for _ in range(2)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))["ep"]
    for one in made:
        one.wire_meshes(ep_mesh=mesh)
    return made


def layer(dispatcher, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts that multiply by powers of their rows' places: what follows a group's order shows."""
    counts = torch.bincount(ids.view(-1), minlength=NUM_EXPERTS)
    rows, of_experts, metadata = dispatcher.dispatch(x, scores, ids, counts)
    offsets = of_experts.cumsum(0)
    expert = torch.bucketize(torch.arange(len(rows)), offsets, right=True)
    return dispatcher.combine(rows * rows * (1 + expert)[:, None], metadata, x)


def gradients(rank: int, kind: str, options: dict, sizes: tuple[int, ...], compiles: bool) -> list:
    """Outputs and gradients of layers with so many tokens, one after the other."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dispatchers, seen = make_dispatchers(kind, **options), []
    step = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    for num_tokens, dispatcher in [(sizes[0], dispatchers[1]), *((size, dispatchers[0]) for size in sizes)]:
        ids, scores = make_routing("uniform", num_tokens, NUM_EXPERTS, TOP_K, seed=10 * num_tokens + rank)
        x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        scores.requires_grad_()
        out = step(dispatcher, x, scores, ids)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        seen.append((out.detach(), x.grad, scores.grad))
        if len(seen) == 2:  # two layers of one size
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiles)
    return seen


SIZES = (8, 20, 12)  # the second does not fit in the buffer of the first


@pytest.mark.parametrize(
    "options, compiles",
    [({}, False), (dict(pad_multiple=16), False), ({}, True), (dict(non_blocking_capacity_factor=1.0), True)],
)
def test_outputs_and_gradients_are_those_of_all_to_all(pools, options, compiles):
    everyone = pools(2).run(gradients, "ours", options, SIZES, compiles)
    for ours, theirs in zip(everyone, pools(2).run(gradients, "all-to-all", {}, SIZES, False)):
        for seen, expected in zip(ours, theirs):
            for a, b in zip(seen, expected):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    again = pools(2).run(gradients, "ours", {}, SIZES, False)
    assert all(same_bits(a, b) for r, s in zip(everyone, again) for t, u in zip(r, s) for a, b in zip(t, u))
