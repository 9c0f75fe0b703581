"""Optimizer steps that are skipped because more rows arrive than the rank capacity has room for."""

import sys
import types
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from conftest import exhaustive, sparsely
from lib.megatron_layer import (
    Layout,
    assert_same_bits,
    environment,
    error_of,
    on_gpu,
    on_ranks,
    tokens_of,
    use_layout,
)
from lib.megatron_layer import random as random_tensor
from lib.megatron_layer import step as step_of_layer
from lib.megatron_skipped_step import ALL, ENOUGH, FACTOR, ON_CPU, SKEWED, STEPS, lines_of, run_job
from lib.megatron_training import batches, forward_step, training

from ep_dispatcher.errors import TooFewRowsError
from ep_dispatcher.integrations.megatron import skipped_steps
from ep_dispatcher.integrations.megatron.dispatcher import (
    buffers,
    graphs,
    rank_capacity,
    registration,
    skipped_step,
)
from ep_dispatcher.integrations.megatron.dispatcher.rank_capacity import Overflow

ON_GPU = pytest.mark.skipif(not on_gpu(), reason="CUDA graphs need GPUs: EP_DISPATCHER_ENGINE=cuda")

EXPERT_BIAS = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="seq_aux_loss",
)
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


# ---- steps of jobs --------------------------------------------------------------------------------------------------


@dataclass
class Case:
    layout: Layout
    factor: float = 1.35
    settings: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)


BFLOAT16 = dict(params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16)
FP16 = dict(params_dtype=torch.float16, fp16=True, pipeline_dtype=torch.float16)
OF_FP16 = dict(fp16=True, params_dtype=torch.float16, initial_loss_scale=256.0, loss_scale_window=4, hysteresis=2)
ON_4_RANKS = {
    "dp2-ep2": Case(Layout(ep=2)),
    "ep2-pp2, a stage without MoE": Case(Layout(ep=2, pp=2), 1.35, dict(dense_stages=(0,))),
}
ON_2_RANKS = {
    "expert bias, recompute": Case(Layout(ep=2), 1.35, EXPERT_BIAS | RECOMPUTE),
    "bfloat16": Case(Layout(ep=2), 1.35, BFLOAT16, dict(bf16=True, params_dtype=torch.bfloat16)),
    "float16, a dynamic loss scale": Case(Layout(ep=2), 1.35, FP16, OF_FP16),
    "distributed optimizer": Case(
        Layout(ep=2),
        1.35,
        dict(use_distributed_optimizer=True, overlap_param_gather=True),
        dict(use_distributed_optimizer=True, overlap_param_gather=True),
    ),
}


@ON_CPU
@pytest.mark.parametrize("name", sparsely(ON_2_RANKS))
@on_ranks(2)
def test_steps_with_too_many_rows_are_skipped(rank: int, name: str):
    """Everything else is as in a job with room enough in which Megatron skips these two steps, bit by bit."""
    compare(rank, ON_2_RANKS[name])


@ON_CPU
@pytest.mark.parametrize("name", sparsely(ON_4_RANKS))
@on_ranks(4)
def test_groups_and_stages_with_room_skip_too(rank: int, name: str):
    """All ranks agree. A stage without MoE layers, whose configuration has no experts, did not: the others hung."""
    compare(rank, ON_4_RANKS[name])


def compare(rank: int, case: Case) -> None:
    use_layout(case.layout)
    given = dict(optimizer=case.optimizer, **case.settings)
    wanted = run_job(rank, ENOUGH, leaves_out=SKEWED, **given)
    assert wanted.skipped == 0 and not lines_of(wanted.printed)
    got = run_job(rank, case.factor, **given)
    assert got.succeeded == wanted.succeeded == [step not in SKEWED for step in range(1, STEPS + 1)]
    assert_same_bits(got.tensors, wanted.tensors)
    lines = lines_of(got.printed)
    assert got.skipped == 2 and len(lines) == 2 * (rank == 0), lines
    assert max(got.factors) == got.factors[-1] <= case.layout.ep, got.factors
    if rank == 0:
        assert (
            f"rank capacity factor {case.factor:g} has room for" in lines[0] and "losses are not valid" in lines[0]
        ), lines
        assert f"Skipped steps: 2. Start with {FACTOR} {got.factors[-1]:g} to avoid them" in lines[1], lines


@ON_CPU
@pytest.mark.parametrize(
    "shares", [exhaustive((0.0, 1.0)), exhaustive((1.0, 0.0)), (1.0, 1.0)], ids=["the second", "the first", "both"]
)
@on_ranks(4, Layout(ep=2))
def test_two_schedules_before_one_optimizer_step(rank: int, shares: tuple[float, ...]):
    """Whichever of them has too many rows, by the tokens of one rank: one step is skipped, with the gradients of both.

    Running a schedule again lost the gradients of an earlier one.
    """
    given = dict(shares=shares, ranks=(3,), skewed={4: ALL}, num_microbatches=1, overlap_grad_reduce=False)
    given |= EXPERT_BIAS
    wanted = run_job(rank, ENOUGH, leaves_out=(4,), **given)
    got = run_job(rank, 1.35, **given)
    assert got.succeeded == [step != 4 for step in range(1, STEPS + 1)] and got.skipped == 1
    assert len(lines_of(got.printed)) == (rank == 0)
    assert_same_bits(got.tensors, wanted.tensors)


@ON_CPU
@on_ranks(4, Layout(ep=4))
def test_two_skips_in_a_row_double_the_factor(rank: int):
    """It is at most the expert parallel size, with which nothing can overflow. It grew to 1.1 times that."""
    got = run_job(rank, 2, skewed={2: 0.45, 3: 0.75, 5: ALL}, num_microbatches=1)
    assert got.succeeded == [step not in (2, 3) for step in range(1, STEPS + 1)] and got.skipped == 2
    assert got.factors[0] == 0 and 2 < got.factors[1] < 3 and set(got.factors[2:]) == {4}, got.factors


@pytest.mark.parametrize(
    "needed, room, was_skipped, grown",
    [(1.3, 1.2, False, 1.43), (1.3, 1.2, True, 2.4), (3, 1.2, True, 3.3), (7.9, 1.2, False, 8), (5, 4.2, True, 8)],
)
def test_the_factor_grows(needed: float, room: float, was_skipped: bool, grown: float):
    assert skipped_step.larger_factor(Overflow(needed, rows=9, layer=1, most=8), room, was_skipped) == grown


@ON_CPU
@on_ranks(4, Layout(ep=2))
def test_evaluations_and_loops_of_ones_own(rank: int):
    """They have no step to skip: an error on all ranks of the job, also of groups that had room, names a factor.

    So do optimizers that are not Megatron's, before they change a weight.
    """

    def run(schedule, **given) -> str:
        with pytest.raises(TooFewRowsError) as caught:
            schedule(**given)
        assert caught.value.needed_rows == 256 and caught.value.label in (1, 2)
        return str(caught.value)

    with training(is_skewed=rank < 2) as of:
        of.skew.share = ALL
        with torch.no_grad():
            text = run(of.schedule, forward_only=True)
        assert "evaluation" in text and f"{FACTOR} 2 is enough" in text
        assert (
            rank_capacity.state().pending_error is None
            and rank_capacity.state().grown_factor == 0
            and skipped_steps() == 0
        )
        other = torch.optim.SGD(of.model.parameters(), lr=1.0)
        of.schedule()
        weights = [weight.detach().clone() for weight in of.model.parameters()]
        assert "not Megatron's" in run(other.step)
        assert of.optimizer.step() == (False, None, None)
        assert "not Megatron's" in run(other.step), "until the next schedule"
        assert all(map(torch.equal, weights, of.model.parameters()))
        of.skew.share = 0.0
        of.model.zero_grad_buffer()
        of.schedule()
        other.step()
    with training(is_skewed=rank < 2, has_optimizer=False) as of:
        of.skew.share = ALL
        text = run(of.schedule)
        assert "no optimizer of Megatron" in text and f"{FACTOR} 2 is enough" in text
        if rank < 2:  # without a schedule the ranks of the group alone find it
            assert f"{FACTOR} 2 is enough" in run(forward_step, batch_of=batches(), model=of.model)


@ON_CPU
@on_ranks(2)
def test_other_errors_are_raised(rank: int):
    """An error of a schedule that is not too many rows is raised, and the next too many rows skip a step."""

    class Fault(Exception):
        pass

    def broken(batch_of, model):
        next(batch_of)
        raise Fault

    with training() as of:
        error_of(lambda: of.schedule(forward_step_func=broken), Fault)
        assert rank_capacity.state().overflows is None
        of.skew.share = ALL
        of.schedule()
        assert skipped_steps() == 1 and rank_capacity.state().grown_factor == 2
        assert of.optimizer.step() == (False, None, None)


@ON_CPU
@on_ranks(2)
def test_weights_are_not_clipped_by_logits_of_a_skipped_step(rank: int):
    """Megatron's clip_qk runs after each optimizer step, also after one that was skipped."""
    with training() as of:
        attention = next(one for one in of.model.modules() if type(one).__name__ == "DotProductAttention")
        attention.current_max_attn_logits = None
        of.skew.share = ALL
        of.schedule()
        attention.current_max_attn_logits = torch.tensor([150.0, 90.0])
        of.optimizer.step()
        assert attention.current_max_attn_logits.tolist() == [0.0, 0.0]


@ON_CPU
@on_ranks(2)
def test_histories_of_float8_are_named(rank: int):
    """Amax histories of delayed scaling are not restored, and the line says so."""
    module = types.SimpleNamespace(config=types.SimpleNamespace(fp8="hybrid", fp8_recipe="delayed"))
    assert skipped_step._is_scaled_with_delay(module)
    module.config.fp8_recipe = "blockwise"
    assert not skipped_step._is_scaled_with_delay(module)
    with training() as of:
        of.schedule()
        rank_capacity.state().model_facts[of.model].keeps_amaxes = True
        of.skew.share = ALL
        of.schedule()
        assert rank > 0 or "amax histories of FP8 include this step" in lines_of(of.printed.getvalue())[0]


@ON_CPU
@on_ranks(2)
def test_a_capacity_that_does_not_reach_a_layer_is_an_error(rank: int, monkeypatch):
    """Where a layer keeps its rows, as in graphs that cannot be captured again, not every step is skipped."""
    with training() as of:
        of.skew.share = ALL
        monkeypatch.setattr(rank_capacity, "max_rows_by_factor", lambda *given: 150)
        of.schedule()
        of.optimizer.step()
        text = error_of(of.schedule, RuntimeError)
    assert "needs 256 rows" in text and "cannot capture again" in text


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


class Helper:
    """Stands for Megatron's TECudaGraphHelper."""

    def __init__(self, model):
        self.model, self.did, self._capture_finished = [model], [], False

    def create_cudagraphs(self):
        assert not self._capture_finished
        assert not self.model[0].remove_forward_pre_hook_handles, "graphs would contain the hooks"
        self._capture_finished = True
        self.did.append("create")

    def graphs_created(self):
        return self.did.count("create") > self.did.count("delete")

    def delete_cuda_graphs(self):
        self.did.append("delete")

    def cuda_graph_set_manual_hooks(self):
        assert self.model[0].remove_forward_pre_hook_handles
        self.did.append("hooks")


@ON_CPU
@on_ranks(2)
def test_graphs_are_captured_again(rank: int, monkeypatch):
    """A capacity that grows discards all graphs. Transformer Engine captures before the next schedule that trains."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper as Whole
    from megatron.core.transformer import cuda_graphs

    create = cuda_graphs.TECudaGraphHelper.create_cudagraphs
    assert create.__code__ is graphs.wrap_create_cudagraphs(Helper.create_cudagraphs).__code__, "registered"
    monkeypatch.setattr(registration.process_wide(graphs.Graphs), "are_used", True)
    with training(use_distributed_optimizer=True, overlap_param_gather=True, num_microbatches=1) as of:
        model = of.model
        helper, manager = Helper(model), torch.nn.Module.__new__(cuda_graphs.CudaGraphManager)
        torch.nn.Module.__init__(manager)
        model.disable_forward_pre_hook(param_sync=False)
        model.module.manager, manager.cudagraph_runners = manager, ["captured"]
        graphs.wrap_create_cudagraphs(Helper.create_cudagraphs)(helper)
        model.enable_forward_pre_hook()
        monkeypatch.setitem(Whole.cuda_graph, "training", "captured")
        monkeypatch.setitem(Whole.result, "training", "a result")
        monkeypatch.setitem(Whole.curr_iteration, "training", 9)
        monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", True)
        of.schedule()
        assert helper.did == ["create"] and manager.cudagraph_runners
        of.skew.share = ALL
        model.zero_grad_buffer()
        of.schedule()
        assert helper.did == ["create", "delete"]
        assert (Whole.cuda_graph["training"], Whole.result["training"]) == (None, None)
        assert Whole.curr_iteration["training"] == 0 and not manager.cudagraph_runners
        assert not cuda_graphs._CudagraphGlobalRecord.cudagraph_created
        of.optimizer.step()
        with torch.no_grad():
            of.schedule(forward_only=True)
        assert helper.did == ["create", "delete"], "an evaluation captures nothing"
        model.zero_grad_buffer()
        of.schedule()
        assert helper.did[2:] == ["create", "hooks"]
        graphs.capture_again()
        assert len(helper.did) == 4


class OptimizerGraph:
    """Megatron's OptimizerCudaGraphWrapper of 0.17 and newer, with a graph that notes its replays."""

    curr_iteration = 0
    cuda_graph = result = None

    def __init__(self, optimizer_step_func, cuda_graph_warmup_steps=1):
        self.optimizer_step_func, self.cuda_graph_warmup_steps = optimizer_step_func, cuda_graph_warmup_steps
        self.replays, self.num_captures = 0, 0

    def __call__(self):
        kind = OptimizerGraph
        if kind.curr_iteration == self.cuda_graph_warmup_steps:
            assert kind.cuda_graph is None
            self.num_captures += 1
            kind.result, kind.cuda_graph = self.optimizer_step_func(), self
        if kind.cuda_graph is None:
            kind.result = self.optimizer_step_func()
        else:
            self.replays += 1
        kind.curr_iteration += 1
        return kind.result


@ON_CPU
@pytest.mark.parametrize("skipped", [0, 1, 3], ids=["a warm-up", "the step of the capture", "a replay"])
@on_ranks(2)
def test_an_optimizer_in_a_cuda_graph_skips_too(rank: int, skipped: int, monkeypatch):
    """A replay would run no Python, and a capture of a step that skips would be an empty graph."""
    module = types.SimpleNamespace(OptimizerCudaGraphWrapper=OptimizerGraph)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.optimizer_cuda_graph", module)
    for name in ("cuda_graph", "result", "curr_iteration"):
        monkeypatch.setattr(OptimizerGraph, name, getattr(OptimizerGraph, name))
    with training() as of:
        step = OptimizerGraph(of.optimizer.step)
        found = []
        for number in range(6):
            of.model.zero_grad_buffer()
            of.skew.share = ALL if number == skipped else 0.0
            kept = rank_capacity.state().saved
            of.schedule()
            assert rank_capacity.state().saved is not kept, "what this step may have to put back, not an earlier one"
            assert rank_capacity.state().last_was_skipped is (number == skipped + 1)
            found.append(step()[0])
        assert found == [number != skipped for number in range(6)]
        assert step.num_captures == 1 and step.replays == 4


@ON_GPU
@on_ranks()
def test_a_step_of_replays_is_skipped(rank: int):
    """Too many rows in a replay skip the step. New graphs are captured, and the next 5 steps are the eager layer's."""
    from lib.megatron_experts import switched_on
    from lib.megatron_graphs import Output, forget_grads, make_bfloat16_layer, take_grads
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from ep_dispatcher.moe import grouped_gemm

    class Optimizer(MegatronOptimizer):
        step_with_ready_grads = zero_grad = get_loss_scale = reload_model_params = None
        state_dict = load_state_dict = sharded_state_dict = None
        num_steps = 0

        def prepare_grads(self):
            return False

        def step(self):
            if self.prepare_grads():
                return False, None, None
            self.num_steps += 1
            return True, 0.0, 0

    class Captured:
        """Stands for Megatron's TECudaGraphHelper, with PyTorch's graphs."""

        model = ()

        def create_cudagraphs(self):
            sample = x.clone().requires_grad_()
            self.layer = torch.cuda.make_graphed_callables(Output(layer), (sample,), allow_unused_input=True)
            forget_grads(layer)

        def graphs_created(self):
            return self.layer is not None

        def delete_cuda_graphs(self):
            self.layer = None

    x = tokens_of(rank, dtype=torch.bfloat16)
    limit = dict(rank_capacity_factor=1.6, max_tokens_per_rank=x[..., 0].numel())
    with environment(**limit), switched_on(dtypes=grouped_gemm.KERNEL_DTYPES) as printed:
        eager, layer = make_bfloat16_layer(False), make_bfloat16_layer(True)
        step_of_layer(layer, x.clone())
        forget_grads(layer)
        captured, optimizer = Captured(), Optimizer(None, None)
        graphs.wrap_create_cudagraphs(Captured.create_cudagraphs)(captured)

        @skipped_step.wrap_schedule
        def schedule(model, given, forward_only=False):
            out = captured.layer(given)
            (out * random_tensor(*given.shape, seed=7, dtype=out.dtype)).sum().backward()
            return out

        run = partial(schedule, model=[layer], forward_only=False)
        run(given=x.clone().requires_grad_())
        assert optimizer.step()[0]
        weight = layer.router.weight
        kept, alike = weight.detach().clone(), torch.ones_like(x)
        with torch.no_grad():
            weight.zero_()
            weight[:2] = 1
        run(given=alike.requires_grad_())
        assert captured.layer is None and optimizer.step() == (False, None, None)
        assert skipped_steps() == 1 and rank_capacity.state().grown_factor == 2 and optimizer.num_steps == 1
        assert len(lines_of(printed.getvalue())) == (rank == 0)
        with torch.no_grad():
            weight.copy_(kept)
        forget_grads(eager)
        for number in range(1, 6):
            forget_grads(layer)
            given = tokens_of(rank, number, dtype=torch.bfloat16)
            wanted = step_of_layer(eager, given.clone())
            sent = given.clone().requires_grad_()
            out = run(given=sent)
            assert torch.equal(out, wanted["output"]) and torch.equal(sent.grad, wanted["input gradient"])
            assert_same_bits(take_grads(layer), take_grads(eager))
            assert optimizer.step()[0]
        assert optimizer.num_steps == 6 and skipped_steps() == 1
        buffers.check_buffers("the end")
