"""ep_dispatcher.integrations.torchtitan: torchtitan's own trainer with this dispatcher and with its own ones."""

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, launched_operations, planned_dispatches
from lib.in_use import lines_in_use
from torch.distributed.device_mesh import init_device_mesh

from ep_dispatcher.tools.testing import RankError, RankPool, make_routing, same_bits

pytest.importorskip("torchtitan", reason="no torchtitan: it brings 1.5 GB (Triton, pyarrow), which .ci/run installs")

MODULE = "ep_dispatcher.integrations.torchtitan"
OURS, KEEP, FULL, LOG = (f"{MODULE}.{name}" for name in ("token_dispatcher", "selective_ac", "full_ac", "metrics"))
EP4 = dict(expert_parallel_degree=4)
COMPILE_S = 300  # of a run that compiles, on a busy machine
HIDDEN, NUM_EXPERTS, TOP_K = 32, 8, 3


def run(rank: int, overrides: tuple[str, ...], options: dict) -> tuple[list[tuple[float, float]], list[str]]:
    """The losses and norms of a rank, and the operations of this engine that have run."""
    from lib.torchtitan_case import train

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


def said_in_use(rank: int) -> list[str]:
    with lines_in_use() as said:
        run(rank, (OURS,), dict(parallel=EP4))
    return said


def test_one_line_says_that_it_is_in_use():
    with RankPool(4, timeout_s=COMPILE_S) as pool:  # fresh ranks: buffers of earlier tests would be used again
        (line, *more), *others = pool.run(said_in_use)
    assert more == [] and others == [[]] * 3
    assert "carries the tokens of torchtitan 0.3" in line and "First buffer: Buffer(rank 0 of 1 node x 4, " in line


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
        ('={"non_blocking_capacity_factor": 1.5}', EP4, "non_blocking_capacity_factor is 1.5"),
        ('={"capacity": 1}', EP4, "capacity"),
        ("", {}, "expert_parallel_degree is 1"),
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

    with pytest.raises(ValueError, match="^activation_checkpoint is "):
        selective_ac(Own.Config())


def logged(rank: int, overrides: tuple[str, ...], folder: str, options: dict, log_freq: int) -> dict:
    """What TensorBoard got from a rank: {name: {step: value}}."""
    from lib.torchtitan_case import trained
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch._dynamo.reset()
    where = f"{folder}/{rank}"
    metrics = dict(enable_tensorboard=True, save_tb_folder=where, log_freq=log_freq)
    trained(rank, overrides, parallel=EP4, metrics=metrics, **options).metrics_processor.close()
    seen = {}
    for path in Path(where).glob("*"):
        events = EventAccumulator(str(path)).Reload()
        seen |= {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return seen


def logged_and_counted(rank: int, overrides: tuple[str, ...], folder: str, skewed: bool, log_freq: int):
    """What `logged` returns, and the tokens of all ranks: int64 [steps, MoE layers, experts].

    skewed: all tokens of the second MoE layer go to the first experts
    """
    import lib.torchtitan_case  # noqa: F401  # before torchtitan

    from ep_dispatcher.integrations.torchtitan import EPTokenDispatcher

    counts: list[torch.Tensor] = []
    dispatch = EPTokenDispatcher.dispatch

    def counting(self, x, scores, ids, num_local_tokens_per_expert):
        if skewed and len(counts) % 2 == 1:
            ids = torch.arange(self.top_k).repeat(len(ids), 1)
        counts.append(torch.bincount(ids.flatten(), minlength=self.num_experts))
        return dispatch(self, x, scores, ids, num_local_tokens_per_expert)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EPTokenDispatcher, "dispatch", counting)
        seen = logged(rank, overrides, folder, {}, log_freq)
    tokens = torch.stack(counts)
    dist.all_reduce(tokens)
    return seen, tokens.view(len(counts) // 2, 2, -1)


def ours_in(seen: dict) -> dict:
    prefix = "ep_dispatcher/"
    return {name.removeprefix(prefix): found for name, found in seen.items() if name.startswith(prefix)}


def figures(tokens: torch.Tensor) -> dict[str, float]:
    """What is to be logged of some steps, of which each of 4 ranks has as many of the experts."""
    experts = tokens.sum(0).double()
    ranks = experts.view(len(experts), 4, -1).sum(2)
    imbalance = ranks.amax(1) / ranks.mean(1)
    return {
        "busiest_rank_over_mean": float(imbalance.mean()),
        "busiest_rank_over_mean_worst_layer": float(imbalance.max()),
        "worst_layer": 1 + int(imbalance.argmax()),  # layer 0 has no experts
        "busiest_expert_over_mean": float((experts.amax(1) / experts.mean(1)).mean()),
    }


@pytest.mark.parametrize(
    "skewed, log_freq, steps_of",
    [(True, 1, {2: slice(0, 1), 3: slice(1, 2), 4: slice(2, 3)}), (False, 2, {2: slice(0, 1), 4: slice(1, 3)})],
    ids=["skewed", "every second step"],
)
def test_metrics_are_logged(pools, tmp_path, skewed, log_freq, steps_of):
    """At each log step come those of the steps since the log step before, without the newest step."""
    ranks = pools(4).run(logged_and_counted, (OURS, LOG), str(tmp_path / "on"), skewed, log_freq)
    without = pools(4).run(logged_and_counted, (OURS,), str(tmp_path / "off"), skewed, log_freq)
    (everything, tokens), off = ranks[0], without[0][0]
    assert [seen for seen, _ in ranks[1:]] == [{}] * 3, "torchtitan logs on rank 0 alone"
    seen = ours_in(everything)
    assert len(seen) == 7 and all([*found] == [*steps_of] for found in seen.values())
    for step, steps in steps_of.items():
        expected = figures(tokens[steps])
        assert {name: seen[name][step] for name in expected} == pytest.approx(expected)
        if skewed:
            top_k, experts_of_rank = tokens[0, 1].count_nonzero(), tokens.shape[2] // 4
            assert seen["worst_layer"][step] == 2 and seen["busiest_rank_over_mean"][step] > 1
            worst = seen["busiest_rank_over_mean_worst_layer"][step]
            assert worst == pytest.approx(float(experts_of_rank / (top_k / 4)))
        assert seen["waits_ms_per_rank"][step] > 0 and seen["most_waited_for_rank"][step] in range(4)
    assert off.keys() == {name for name in everything if "ep_dispatcher" not in name}
    for name in ("loss_metrics/global_avg_loss", "grad_norm", "n_tokens_seen"):
        assert off[name] == everything[name]


@pytest.mark.parametrize(
    "overrides, options",
    [
        ((), dict(ac="full")),
        exhaustive((KEEP,), dict(ac="selective")),
        exhaustive((), dict(compiles=True)),
        exhaustive((KEEP,), dict(compiles=True, ac="selective")),
        exhaustive((FULL,), dict(compiles=True, ac="full")),
        exhaustive((KEEP,), dict(compiles=True, ac="selective", **CAPACITY)),
    ],
)
def test_metrics_with_checkpoints_and_compiled_layers(pools, tmp_path, overrides, options):
    """Compiled layers share a graph, and checkpoints may send again."""
    expected = pools(4).run(logged, (OURS, LOG), str(tmp_path / "plain"), {}, 1)[0]
    given = ((OURS, LOG, *overrides), str(tmp_path / "other"), options, 1)
    found = pools(4).run(logged, *given, timeout_s=COMPILE_S)[0]
    for name, by_step in ours_in(expected).items():
        if "wait" not in name:
            assert ours_in(found)[name] == pytest.approx(by_step), name


def labels(rank: int, compiles: bool) -> dict[int, int]:
    """The tokens by label of two layers, the second of which runs twice. It is a copy, as in pipeline stages."""
    from ep_dispatcher.integrations.job_stats import JobSums

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sums, (first, second) = JobSums(), make_dispatchers("ours")
    mesh, second.ep_mesh = second.ep_mesh, None
    second = copy.deepcopy(second)
    second.wire_meshes(ep_mesh=mesh)
    for label, dispatcher in ((3, first), (7, second)):
        dispatcher.count(label, sums)
    step = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    ids, scores = make_routing("uniform", 20, NUM_EXPERTS, TOP_K, seed=rank)
    for dispatcher in (second, first, second):
        step(dispatcher, torch.randn(20, HIDDEN, requires_grad=True), scores, ids).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiles)
    sums.grow(8, NUM_EXPERTS)
    sums.begin(steps=1)
    return {label: int(count) for label, count in enumerate(sums.newest().rows.sum(1)) if count}


@pytest.mark.parametrize("compiles", [False, True])
def test_layers_that_share_a_buffer_and_a_graph_count_apart(pools, compiles):
    tokens = 2 * 20 * TOP_K
    assert pools(2).run(labels, compiles, timeout_s=COMPILE_S) == [{3: tokens, 7: 2 * tokens}] * 2


def log_of_stages(rank: int) -> list[dict]:
    """What the log of each step gets where ranks 2 and 3 are a pipeline stage without MoE layers."""
    from lib.torchtitan_case import MetricsProcessor

    from ep_dispatcher.integrations.torchtitan import EPMetricsProcessor

    class Log(EPMetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(EPMetricsProcessor.Config):
            pass

    seen: list[dict] = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))["ep"]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"5": torch.nn.Module()})})
    if rank < 2:
        (dispatcher,) = make_dispatchers("ours", mesh=mesh)[:1]
        model["layers"]["5"].token_dispatcher = dispatcher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsProcessor, "__init__", lambda self, config, **_: setattr(self, "config", config))
        patch.setattr(MetricsProcessor, "log", lambda self, *given: seen.append(given[-1]))
        processor = Log.Config(log_freq=1).build(parallel_dims=None)
        processor.model_parts = [model]
        for step in (1, 2, 3):
            assert processor.should_log(step) and processor.should_log(step)
            if rank < 2:
                ids = torch.arange(TOP_K).repeat(20, 1)
                layer(dispatcher, torch.randn(20, HIDDEN), torch.rand(20, TOP_K), ids)
            processor.log(step, 0.0, 0.0, 0.0, {"lr": 0.1})
    return seen


def test_a_pipeline_stage_without_moe_layers_takes_part(pools):
    for first, *others in pools(4).run(log_of_stages):
        assert first == {"lr": 0.1}
        for seen in map(ours_in, others):
            assert seen["busiest_rank_over_mean"] == 2 and seen["worst_layer"] == 5
            assert seen["busiest_expert_over_mean"] == pytest.approx(NUM_EXPERTS / TOP_K)


def test_it_refuses_to_replace_a_metrics_processor_of_ones_own(pools):
    from lib.torchtitan_case import Losses

    from ep_dispatcher.integrations.torchtitan import metrics

    with pytest.raises(ValueError, match="^metrics is "):
        metrics(Losses.Config())


def test_metrics_without_the_dispatcher_are_an_error_of_all_ranks(pools, tmp_path):
    with pytest.raises(RankError) as raised:
        pools(4).run(logged, (LOG,), str(tmp_path), {}, 1)
    assert len(raised.value.failures) == 4
    assert all("token_dispatcher" in message for _, message, _ in raised.value.failures.values())


def make_dispatchers(kind: str, mesh=None, **options) -> list:
    """Two dispatchers, torchtitan's of this kind or ours, with the ranks of the mesh or of the default group."""
    from lib import torchtitan_case as case
    from torchtitan.distributed.utils import set_spmd_backend

    from ep_dispatcher.integrations import torchtitan

    set_spmd_backend("partial_dtensor")
    config = dict(num_experts=NUM_EXPERTS, top_k=TOP_K)
    owner = torchtitan.EPTokenDispatcher if kind == "ours" else case.AllToAllTokenDispatcher
    made = [owner.Config(**config, **options).build() for _ in range(2)]
    if mesh is None:
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


def gradients(
    rank: int, kind: str, options: dict, sizes: tuple[tuple[int, int], ...], compiles: bool, crowds: bool
) -> list:
    """Outputs and gradients of layers with so many tokens on ranks 0 and 1, one after the other.

    crowds: all tokens choose experts of rank 0
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dispatchers, seen = make_dispatchers(kind, **options), []
    step = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    for size, dispatcher in [(sizes[0], dispatchers[1]), *((size, dispatchers[0]) for size in sizes)]:
        num_tokens = size[rank]
        ids, scores = make_routing("uniform", num_tokens, NUM_EXPERTS, TOP_K, seed=10 * num_tokens + rank)
        if crowds:
            ids = (ids[:, :1] + torch.arange(TOP_K)) % (NUM_EXPERTS // 2)
        x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        scores.requires_grad_()
        out = step(dispatcher, x, scores, ids)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        seen.append((out.detach(), x.grad, scores.grad))
        if len(seen) == 2:  # two layers of one size
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiles)
    return seen


SIZES = ((20, 20), (8, 8), (12, 12))


@pytest.mark.parametrize(
    "options, sizes, compiles",
    [
        ({}, SIZES, False),
        (dict(pad_multiple=16), SIZES, False),
        ({}, SIZES, True),
        (dict(non_blocking_capacity_factor=1.0), SIZES, True),
        (dict(num_max_tokens_per_rank=32), ((8, 8), (32, 32), (12, 12)), True),
        ({}, ((0, 20), (20, 0), (3, 7)), False),
        exhaustive({}, ((0, 20), (20, 0), (3, 7)), True),
        (dict(non_blocking_capacity_factor=1.0), ((1, 40), (40, 0), (3, 7)), False),
        (dict(non_blocking_capacity_factor=1.0, num_max_tokens_per_rank=41), ((1, 40), (0, 41), (3, 7)), True),
    ],
)
def test_outputs_and_gradients_are_those_of_all_to_all(pools, options, sizes, compiles):
    """A rank without tokens in the first pass failed. A factor of 1.0 had room for this rank's tokens alone."""
    crowds = options.get("non_blocking_capacity_factor") == 1.0
    everyone = pools(2).run(gradients, "ours", options, sizes, compiles, crowds, timeout_s=COMPILE_S)
    for ours, theirs in zip(everyone, pools(2).run(gradients, "all-to-all", {}, sizes, False, crowds)):
        for seen, expected in zip(ours, theirs):
            for a, b in zip(seen, expected):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    most = {name: number for name, number in options.items() if name == "num_max_tokens_per_rank"}
    again = pools(2).run(gradients, "ours", most, sizes, False, crowds)
    assert all(same_bits(a, b) for r, s in zip(everyone, again) for t, u in zip(r, s) for a, b in zip(t, u))


def too_many(rank: int, options: dict, sizes: tuple[tuple[int, int], ...], compiles: bool) -> tuple[str, str, float]:
    """Kind and text of the error of layers with so many tokens, and the seconds of the last one."""
    dispatcher = make_dispatchers("ours", **options)[0]
    step = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    for size in sizes:
        ids, scores = make_routing("uniform", size[rank], NUM_EXPERTS, TOP_K, seed=rank)
        x = torch.randn(size[rank], HIDDEN, requires_grad=True)
        dist.barrier()
        started = time.monotonic()
        try:
            step(dispatcher, x, scores, ids).sum().backward()
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


GIVEN = dict(num_max_tokens_per_rank=16)


@pytest.mark.parametrize(
    "options, sizes, compiles",
    [
        (GIVEN, ((16, 16), (16, 17)), False),
        ({}, ((16, 4), (16, 17)), False),
        ({}, ((16, 4), (8, 8), (4, 12), (16, 17)), True),  # the second growth ended in a SpeculationLogDivergence
        exhaustive(GIVEN, ((16, 16), (16, 17)), True),
        exhaustive(dict(non_blocking_capacity_factor=0.5, **GIVEN), ((4, 4), (16, 17)), False),
    ],
)
def test_a_rank_that_alone_brings_too_many_tokens_says_so_at_once(options, sizes, compiles):
    """It waited for the others with a larger buffer, until all gave up and named healthy ranks."""
    with RankPool(2, timeout_s=COMPILE_S) as pool:
        (kind, text, waited), (own_kind, own_text, own_waited) = pool.run(too_many, options, sizes, compiles)
    assert own_kind == "TooManyTokensError" and "17 tokens" in own_text and "num_max_tokens_per_rank" in own_text
    assert kind == "PeerTimeoutError" and "for rank 1." in text, text
    limit_s = 60 if compiles else 10  # the limit of an operation is 100 s
    assert max(waited, own_waited) < limit_s


@pytest.mark.parametrize("sizes", [(16, 17), (17, 0), (17, 18)])
def test_too_many_tokens_in_the_first_pass_are_an_error_of_all_ranks(pools, sizes):
    most = max(sizes)
    for kind, text, waited in pools(2).run(too_many, GIVEN, (sizes,), False):
        assert kind == "TooManyTokensError" and waited < 10
        assert f"{most} tokens" in text and "num_max_tokens_per_rank is 16" in text


def leave_and_build_again(rank: int) -> tuple[str, str]:
    """The errors of a model in which rank 1 brings too many tokens, and of the next model of the same processes."""
    (first, *_), (second, *_) = (too_many(rank, GIVEN, sizes, False) for sizes in (((16, 16), (16, 17)), ((16, 16),)))
    return first, second


def test_the_next_model_gets_a_buffer_of_its_own():
    """Rank 1 has dropped the buffer that it left, and rank 0 has one that ended."""
    with RankPool(2, timeout_s=COMPILE_S) as pool:
        assert pool.run(leave_and_build_again) == [("PeerTimeoutError", ""), ("TooManyTokensError", "")]
