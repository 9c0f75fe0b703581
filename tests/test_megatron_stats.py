"""What Megatron's logs get from the buffers of a job."""

import math
import sys
import types

import pytest
import torch
import torch.distributed as dist
from lib.megatron_layer import Layout, environment, on_gpu, on_ranks
from lib.megatron_training import BATCH, LENGTH, MICROBATCHES, training

from ep_dispatcher.integrations.job_stats import JobStats
from ep_dispatcher.integrations.megatron import job_stats, skipped_steps
from ep_dispatcher.integrations.megatron.dispatcher import buffers, stats_log

ON_CPU = pytest.mark.skipif(on_gpu(), reason="Megatron's training loop on GPUs needs more than these ranks have")
CHOICES = BATCH * LENGTH * MICROBATCHES * 2  # of a rank in a step and layer: top-k is 2
ALL, LAYERS, EXPERTS = 1.0, 2, 8


class Log:
    """Stands for Megatron's TensorBoard and W&B writers. ``values`` has what each got, by name."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.board: dict[str, list] = {}
        self.wandb: list[tuple] = []
        self.args = types.SimpleNamespace(curr_iteration=0)
        names = dict(_GLOBAL_ARGS=self.args, _GLOBAL_TENSORBOARD_WRITER=self, _GLOBAL_WANDB_WRITER=self)
        patch.setitem(sys.modules, "megatron.training.global_vars", types.SimpleNamespace(**names))

    def add_scalar(self, name, value, step):
        self.board.setdefault(name, []).append((step, value))

    def log(self, *given):
        self.wandb.append(given)


def train(of, log: Log, shares) -> None:
    for step, share in enumerate(shares):
        log.args.curr_iteration = step
        of.skew.share = share
        of.model.zero_grad_buffer()
        of.optimizer.zero_grad()
        of.schedule()
        of.optimizer.step()


@ON_CPU
@pytest.mark.parametrize("factor", [None, 2], ids=["counted rows", "capacity"])
@on_ranks(4, Layout(ep=2))
def test_figures_of_a_job(rank: int, factor: float | None, monkeypatch):
    """Two groups of two ranks. In the second of two steps the first group sends all tokens to its first two experts."""
    log = Log(monkeypatch)
    with environment(stats_interval=1), training(factor, is_skewed=rank < 2) as of:
        train(of, log, (0.0, ALL, 0.0, 0.0))
        found = job_stats()
    assert isinstance(found, JobStats) and found.steps == 1
    assert found.groups.tolist() == [0, 0, 1, 1]
    assert found.rows.shape == (LAYERS + 1, 4) and found.experts.shape == (LAYERS + 1, EXPERTS)
    assert found.rows.sum(1).tolist() == found.experts.sum(1).tolist() == [0, 4 * CHOICES, 4 * CHOICES]
    of_group = [found.rows[:, :2].sum(1).tolist(), found.rows[:, 2:].sum(1).tolist()]
    assert of_group == 2 * [[0, 2 * CHOICES, 2 * CHOICES]], "tokens stay in their group"
    assert (found.waited > 0).any() and (found.waited_for > 0).any()
    imbalance = log.board["ep_dispatcher/busiest_rank_over_mean"]
    assert [step for step, _ in imbalance] == [1, 2, 3], "each in the step after"
    even, skewed, after = (value for _, value in imbalance)
    assert 1 <= even < 1.6 and 1 <= after < 1.6
    assert skewed == pytest.approx((2 + even) / 2, abs=0.3), "the first group's first rank has all, the other as before"
    worst = log.board["ep_dispatcher/busiest_rank_over_mean_worst_layer"]
    assert worst[1] == (2, 2.0)
    of_experts = [value for _, value in log.board["ep_dispatcher/busiest_expert_over_mean"]]
    assert of_experts[1] > 2 > of_experts[0] >= 1
    assert log.board["ep_dispatcher/worst_layer"][1][1] in (1, 2)
    assert [step for _, step in log.wandb] == [1, 2, 3]
    assert {**log.wandb[1][0]} == {name: values[1][1] for name, values in log.board.items()}
    assert skipped_steps() == 0


@ON_CPU
@on_ranks(2, Layout(ep=2))
def test_several_steps_together(rank: int, monkeypatch):
    log = Log(monkeypatch)
    with environment(stats_interval=3), training(None) as of:
        train(of, log, 8 * (0.0,))
        assert [step for step, _ in log.board["ep_dispatcher/busiest_rank_over_mean"]] == [3, 6]
        assert job_stats().steps == 3 and int(job_stats().rows[1].sum()) == 3 * 2 * CHOICES


@ON_CPU
@on_ranks(2, Layout(ep=2))
def test_evaluations_are_not_steps_and_nothing_is_logged_unasked(rank: int, monkeypatch):
    log = Log(monkeypatch)
    with training(None) as of:
        train(of, log, 3 * (0.0,))
        assert log.board == {} and log.wandb == [] and job_stats() is None
        assert all(one.totals is None for one in buffers.all_buffers()), "nothing is counted"
    with environment(stats_interval=1), training(None) as of:
        with torch.no_grad():
            of.schedule(forward_only=True)
            of.schedule(forward_only=True)
        assert job_stats() is None and log.board == {}
        train(of, log, (0.0, 0.0))
        with torch.no_grad():
            of.schedule(forward_only=True)
        train(of, log, (0.0, 0.0))
        assert job_stats().rows[1].sum() == 2 * CHOICES, "without the evaluation"
        assert len(log.wandb) == 2, "of the second step: the buffer of the first job began to count after the first"


@ON_CPU
@pytest.mark.parametrize("settings", [dict(dense_stages=(1,))], ids=["a stage without MoE layers"])
@on_ranks(4, Layout(ep=2, pp=2))
def test_pipeline_stages(rank: int, settings: dict, monkeypatch):
    """A stage without MoE layers takes part in the sums, although its configuration asks for none."""
    log = Log(monkeypatch)
    with environment(stats_interval=1), training(None, pipeline_dtype=torch.float32, **settings) as of:
        train(of, log, 2 * (0.0,))
        found = job_stats()
    has_experts = [group >= 0 for group in found.groups.tolist()]
    assert sum(has_experts) == 2 and found.rows.sum(0).gt(0).tolist() == has_experts
    numbers = [None] * 4
    dist.all_gather_object(numbers, found.rows.tolist())
    assert all(one == numbers[0] for one in numbers), "every rank has them"


@ON_CPU
@on_ranks(2, Layout(ep=2))
def test_a_skipped_step_counts_and_is_logged(rank: int, monkeypatch):
    """Its first dispatch with too many rows brings none, so its figures are those of the other dispatches."""
    log = Log(monkeypatch)
    with environment(stats_interval=1), training(1.35) as of:
        train(of, log, (0.0, ALL, 0.0, 0.0))
        assert skipped_steps() == 1
    assert log.board["ep_dispatcher/skipped_steps"] == [(1, 1)]
    values = [value for _, value in log.board["ep_dispatcher/busiest_rank_over_mean"]]
    assert all(map(math.isfinite, values)) and max(values) < 1.6, "rows that did not arrive do not count"


def test_values_go_to_megatrons_logs(monkeypatch):
    log = Log(monkeypatch)
    log.args.curr_iteration = 7
    stats_log.write({"ep_dispatcher/skipped_steps": 3})
    assert log.board == {"ep_dispatcher/skipped_steps": [(7, 3)]}
    assert log.wandb == [({"ep_dispatcher/skipped_steps": 3}, 7)]
