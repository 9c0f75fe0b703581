"""Experts that change after the first forward pass: seen at once, on one rank alone too, and seen when it is undone."""

import contextlib
import gc
import weakref

import pytest
import torch
from conftest import exhaustive
from lib.megatron_experts import GROUPED, GROUPED_GEMMS, TWO_PARTS, make_grouped_layer, said, switched_on
from lib.megatron_layer import (
    Layout,
    assert_agree,
    assert_same_bits,
    environment,
    error_of,
    make_config,
    make_layer,
    on_ranks,
    outcome,
    random,
    tokens_of,
)
from lib.megatron_main_grad import IN_BUCKETS, ddp_of, iterations
from torch.nn.modules import module as torch_module

from ep_dispatcher.integrations.megatron.grouped_experts.experts import decide_grouped

EP2 = Layout(ep=2)


def doubled(result):
    return result[0] * 2, result[1]


class Wrapper(torch.nn.Module):
    """What puts LoRA on a linear layer: it calls the layer, and adds something of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given):
        return doubled(self.inner(*given))


# Each changes the linear_fc1 of a module by a patch, or returns the handle of a hook.


def add_lora(patch, owner):
    linear = owner.linear_fc1
    rows, columns = next(linear.parameters()).shape
    patch.setitem(linear._parameters, "lora", torch.nn.Parameter(random(columns, rows, seed=3) * 0.1))
    return linear.register_forward_hook(lambda _, given, result: (result[0] + given[0] @ linear.lora, result[1]))


def replace_forward(patch, owner):
    old = owner.linear_fc1.forward
    patch.setitem(vars(owner.linear_fc1), "forward", lambda *given: doubled(old(*given)))


def swap_class(patch, owner):
    old = type(owner.linear_fc1)
    methods = {"forward": lambda self, *given: doubled(old.forward(self, *given))}
    patch.setattr(owner.linear_fc1, "__class__", type(old.__name__, (old,), methods))


def replace_class_forward(patch, owner):
    linear, old = owner.linear_fc1, type(owner.linear_fc1).forward

    def forward(self, *given):
        return doubled(old(self, *given)) if self is linear else old(self, *given)

    patch.setattr(type(linear), "forward", forward)


def hook_forward(patch, owner):
    return owner.linear_fc1.register_forward_hook(lambda _, given, result: doubled(result))


def hook_input(patch, owner):
    return owner.linear_fc1.register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))


def hook_gradient(patch, owner):
    def double(_, of_inputs, of_results):
        return tuple(None if grad is None else grad * 2 for grad in of_inputs)

    return owner.linear_fc1.register_full_backward_hook(double)


def hook_all_modules(patch, owner):
    def double(module, given, result):
        return doubled(result) if module is owner.linear_fc1 else None

    return torch_module.register_module_forward_hook(double)


def replace_module(patch, owner):
    patch.setitem(owner._modules, "linear_fc1", Wrapper(owner.linear_fc1))


def add_parameter(patch, owner):
    patch.setitem(owner.linear_fc1._parameters, "scale", torch.nn.Parameter(torch.ones(1)))


CHANGES = {
    add_lora: "has other parameters than weight",
    replace_forward: "was replaced",
    swap_class: " are ",
    replace_module: "are Wrapper",
    replace_class_forward: "was replaced",
    hook_forward: "hooks (forward_hooks)",
    hook_input: "hooks (forward_pre_hooks)",
    hook_gradient: "hooks (backward_hooks)",
    hook_all_modules: "all modules have a hook",
    add_parameter: "has other parameters than weight",
}


# Further kinds, which either have no effect on what Megatron's experts compute, or one that it shares with others.


def parametrize(patch, owner):
    torch.nn.utils.parametrize.register_parametrization(owner.linear_fc1, name_of_weight(owner), Doubled())


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def name_of_weight(owner) -> str:
    return next(iter(owner.linear_fc1._parameters))


def normalise_weight(patch, owner):
    name = name_of_weight(owner)
    torch.nn.utils.weight_norm(owner.linear_fc1, name, dim=None)
    with torch.no_grad():
        getattr(owner.linear_fc1, f"{name}_g").mul_(2)


def new_parameter(patch, owner):
    name = name_of_weight(owner)
    setattr(owner.linear_fc1, name, torch.nn.Parameter(getattr(owner.linear_fc1, name).detach() * 2))


def hook_by_hand(patch, owner):
    """Hooks in a dictionary that takes the place of the module's own: PyTorch gives no number."""
    owner.linear_fc1._forward_hooks = {0: lambda _, given, result: doubled(result)}


def hook_gradient_of_result(patch, owner):
    owner.linear_fc1.register_full_backward_pre_hook(lambda _, grads: tuple(g if g is None else g * 2 for g in grads))


def replace_activation(patch, owner):
    owner.activation_func = torch.nn.functional.gelu


FURTHER = [parametrize, normalise_weight, new_parameter, hook_by_hand, hook_gradient_of_result, replace_activation]


@contextlib.contextmanager
def changed(layer, change, rank: int):
    """Rank 1 alone changes its experts meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        handle = change(patch, owner_of(layer)) if rank == 1 else None
        yield
        if handle is not None:
            handle.remove()


def owner_of(layer):
    """The module with the linear layer that changes: one of its experts."""
    experts = layer.experts
    return experts if hasattr(experts, "linear_fc1") else experts.local_experts[1]


@pytest.mark.parametrize(
    "make, settings, mode",
    [
        (make_grouped_layer, GROUPED, GROUPED_GEMMS),
        exhaustive(make_layer, {}, GROUPED_GEMMS),
        exhaustive(make_grouped_layer, GROUPED, TWO_PARTS),
    ],
    ids=["TEGroupedMLP", "SequentialMLP", "in two parts"],
)
@on_ranks()
def test_a_change_is_seen_and_undone(rank: int, make, settings: dict, mode: str):
    """The results are always those of Megatron's own experts so changed."""
    gc.collect()
    config, x = make_config(**settings), tokens_of(rank)
    reference = make(config)
    before = outcome(reference, x)
    for change, reason in CHANGES.items():
        with changed(reference, change, rank):
            wanted = outcome(reference, x)
        with switched_on(mode) as printed:
            layer = make(config, 3)
            assert_agree(outcome(layer, x), before)
            for _ in range(2):
                with changed(layer, change, rank):
                    assert_agree(outcome(layer, x), wanted, change.__name__)
                    assert decide_grouped(layer.experts) is (rank == 0), change
                assert_agree(outcome(layer, x), before, change.__name__)
                assert decide_grouped(layer.experts)
            early = make(config, 4)
            with changed(early, change, rank):
                assert_agree(outcome(early, x), wanted, f"{change.__name__} before the first pass")
            del early, layer
            gc.collect()  # so that no later change is seen in them
        lines = [line for line in printed.getvalue().splitlines() if "experts have changed" in line]
        assert len(lines) == 2 * rank, lines
        if rank == 1:
            # Layers of earlier tests would see changes of all modules too, if anything kept them alive.
            assert "on rank 1. Megatron's own way: layer 3: " in lines[0], (change, lines)
            assert reason in lines[0], (change, lines)
            assert lines[1].endswith(": in grouped GEMMs again")


@pytest.mark.parametrize(
    "make, settings", [(make_grouped_layer, GROUPED), (make_layer, {})], ids=["TEGroupedMLP", "SequentialMLP"]
)
@on_ranks()
def test_further_changes_give_what_megatrons_experts_so_changed_give(rank: int, make, settings: dict):
    """In the pass after the change: results and gradients, those of a new parameter too."""
    config, x = make_config(gated_linear_unit=False, **settings), tokens_of(rank)  # gated ones call config's
    for change in FURTHER:
        reference = make(config)
        before = outcome(reference, x)
        change(None, owner_of(reference))
        wanted = outcome(reference, x)
        assert any(not torch.equal(wanted[name], before[name]) for name in before.keys() & wanted.keys()), change
        with switched_on():
            layer = make(config)
            assert_agree(outcome(layer, x), before)
            change(None, owner_of(layer))
            assert_agree(outcome(layer, x), wanted, change.__name__)
            assert decide_grouped(layer.experts) is (change is new_parameter), change


@on_ranks()
def test_another_expert_in_the_list_is_seen(rank: int):
    """And one whose class has another forward since the decision, which all of its modules have then."""
    from megatron.core.transformer.mlp import MLP

    config, x = make_config(), tokens_of(rank)
    reference = make_layer(config)
    wanted = outcome(reference, x)
    with switched_on(), pytest.MonkeyPatch.context() as patch:
        layer, old = make_layer(config), MLP.forward
        outcome(layer, x)
        other = make_layer(config).experts.local_experts[1]
        with torch.no_grad():
            for linear in (other.linear_fc2, reference.experts.local_experts[1].linear_fc2):
                linear.weight.mul_(3)
        layer.experts.local_experts[1] = other
        got = outcome(layer, x)
        assert_agree(got, outcome(reference, x))
        assert decide_grouped(layer.experts) and not torch.equal(got["output"], wanted["output"])
        patch.setattr(MLP, "forward", lambda self, *given, **options: doubled(old(self, *given, **options)))
        wanted = outcome(reference, x)
        assert_agree(outcome(layer, x), wanted)
        assert not decide_grouped(layer.experts)


@on_ranks()
def test_a_quantization_that_is_set_later_is_seen(rank: int):
    with switched_on():
        layer = make_grouped_layer(make_config(**GROUPED))
        outcome(layer, tokens_of(rank))
        layer.experts.linear_fc1.te_quant_params = object()
        assert not decide_grouped(layer.experts)
        layer.experts.linear_fc1.te_quant_params = None
        assert decide_grouped(layer.experts)


@on_ranks()
def test_a_conversion_after_the_first_pass_is_no_wrong_result(rank: int):
    """Parameters stay the same objects, with other memory and another dtype: the layer is right, or it raises."""
    config, x = make_config(**GROUPED), tokens_of(rank, dtype=torch.bfloat16)
    with switched_on(dtypes=(torch.float32, torch.bfloat16)):
        wanted = outcome(make_grouped_layer(config).bfloat16(), x)
        layer = make_grouped_layer(config)
        outcome(layer, x.float())
        assert_same_bits(outcome(layer.bfloat16(), x), wanted)
        layer.experts.linear_fc2.float()
        assert error_of(lambda: outcome(layer, x)).startswith("w2 is torch.float32")


@on_ranks()
def test_a_change_after_the_dispatch_is_an_error_with_limited_rows(rank: int):
    """All ranks hook their experts while the rows are on their way, which are more than the counts say."""
    with switched_on(), environment(rank_capacity_factor=2):
        layer, x = make_grouped_layer(make_config(**GROUPED), 3), tokens_of(rank)
        outcome(layer, x)
        dispatch = layer.token_dispatcher.token_dispatch

        def dispatch_and_hook(*given):
            received = dispatch(*given)
            hook_forward(None, owner_of(layer))
            return received

        layer.token_dispatcher.token_dispatch = dispatch_and_hook
        text = error_of(lambda: outcome(layer, x), RuntimeError)
    assert text.startswith("layer 3: its experts have changed between the dispatch and their forward"), text


@pytest.mark.parametrize("has_graphs", [False, True])
@on_ranks()
def test_a_model_that_is_dropped_ends(rank: int, has_graphs: bool):
    """Its buffer lives on. Megatron's training loop leaves a function of the model in its config."""
    gc.collect()
    with switched_on() as printed:
        config = make_config(**GROUPED)
        config.gradient_accumulation_fusion = True
        layer = make_grouped_layer(config)
        ddp = ddp_of(layer, config, **IN_BUCKETS)
        config.no_sync_func = ddp.no_sync
        config.cuda_graph_impl = "transformer_engine" if has_graphs else "none"
        iterations(ddp, rank)
        assert said(printed, "1 of 1 MoE layers") or rank, "earlier layers have ended too"
        ends = [weakref.ref(one) for one in (ddp, layer, layer.experts.linear_fc1.weight0)]
        del config, layer, ddp
        gc.collect()
    assert [one() for one in ends] == [None] * 3
