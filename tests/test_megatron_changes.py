"""Experts that change after the first forward pass: seen at once, on one rank alone too, and seen when it is undone."""

import contextlib
import gc

import pytest
import torch
from conftest import exhaustive
from megatron_layer import (
    NO_MEGATRON,
    Layout,
    assert_agree,
    environment,
    error_of,
    grads_of,
    make_config,
    make_layer,
    megatron_pool,
    random,
    tokens_of,
    use_layout,
)
from test_megatron_experts import GROUPED, SWITCH, make_grouped_layer, step, switched_on
from test_megatron_experts import OVERLAP as WAVES
from test_megatron_waves import two_parts
from torch.nn.modules import module as torch_module

pytest.importorskip("megatron.core", reason=NO_MEGATRON)

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


# Each changes the linear_fc1 of a module, and returns what undoes it.


def add_lora(owner):
    linear = owner.linear_fc1
    rows, columns = next(linear.parameters()).shape
    linear.lora = torch.nn.Parameter(random(columns, rows, seed=3) * 0.1)
    handle = linear.register_forward_hook(lambda _, given, result: (result[0] + given[0] @ linear.lora, result[1]))
    return lambda: (handle.remove(), delattr(linear, "lora"))


def replace_forward(owner):
    linear = owner.linear_fc1
    old = linear.forward
    linear.forward = lambda *given: doubled(old(*given))
    return lambda: delattr(linear, "forward")


def swap_class(owner):
    linear = owner.linear_fc1
    old = type(linear)
    forward = lambda self, *given: doubled(old.forward(self, *given))  # noqa: E731
    linear.__class__ = type(old.__name__, (old,), {"forward": forward})
    return lambda: setattr(linear, "__class__", old)


def replace_class_forward(owner):
    linear = owner.linear_fc1
    kind, old = type(linear), type(linear).forward
    kind.forward = lambda self, *given: doubled(old(self, *given)) if self is linear else old(self, *given)
    return lambda: setattr(kind, "forward", old)


def hook_forward(owner):
    return owner.linear_fc1.register_forward_hook(lambda _, given, result: doubled(result)).remove


def hook_input(owner):
    return owner.linear_fc1.register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:])).remove


def hook_gradient(owner):
    linear = owner.linear_fc1

    def double(_, of_inputs, of_results):
        return tuple(None if grad is None else grad * 2 for grad in of_inputs)

    return linear.register_full_backward_hook(double).remove


def hook_all_modules(owner):
    linear = owner.linear_fc1

    def double(module, given, result):
        return doubled(result) if module is linear else None

    return torch_module.register_module_forward_hook(double).remove


def replace_module(owner):
    linear = owner.linear_fc1
    owner.linear_fc1 = Wrapper(linear)
    return lambda: setattr(owner, "linear_fc1", linear)


def add_parameter(owner):
    linear = owner.linear_fc1
    linear.scale = torch.nn.Parameter(torch.ones(1))
    return lambda: delattr(linear, "scale")


CHANGES = {
    add_lora: "has other parameters than weight",
    replace_forward: "was replaced",
    swap_class: " are ",
    replace_module: "are Wrapper",
    replace_class_forward: "was replaced",
    hook_forward: "hooks (forward_hooks)",
    hook_input: "hooks (forward_pre_hooks)",
    hook_gradient: "hooks (backward_hooks)",
    hook_all_modules: "all modules have a hook: hook_all_modules.<locals>.double",
    add_parameter: "has other parameters than weight",
}


def owner_of(layer):
    """The module with the linear layer that changes: one of its experts."""
    experts = layer.experts
    return experts if hasattr(experts, "linear_fc1") else experts.local_experts[1]


def outcome(layer, rank: int) -> dict[str, torch.Tensor]:
    layer.zero_grad(set_to_none=True)
    return step(layer, tokens_of(rank)) | grads_of(layer)


def changed_lines(printed) -> list[str]:
    return [line for line in printed.getvalue().splitlines() if "experts have changed" in line]


def change_and_undo(rank: int, make, settings: dict, switch: str, parts: bool) -> None:
    """Rank 1 alone changes its experts. The results are always those of Megatron's own experts so changed."""
    from ep_dispatcher.integrations.megatron.experts import is_grouped

    use_layout(EP2)
    config = make_config(**settings)
    reference = make(config)
    before = outcome(reference, rank)
    for change, reason in CHANGES.items():
        undo = change(owner_of(reference)) if rank == 1 else lambda: None
        wanted = outcome(reference, rank)
        undo()
        with switched_on(switch) as printed, two_parts() if parts else contextlib.nullcontext():
            layer = make(config, 3)
            assert_agree(outcome(layer, rank), before)
            for _ in range(2):
                undo = change(owner_of(layer)) if rank == 1 else lambda: None
                assert_agree(outcome(layer, rank), wanted, change.__name__)
                assert is_grouped(layer.experts) is (rank == 0), change
                undo()
                assert_agree(outcome(layer, rank), before, change.__name__)
                assert is_grouped(layer.experts)
            early = make(config, 4)
            undo = change(owner_of(early)) if rank == 1 else lambda: None
            assert_agree(outcome(early, rank), wanted, f"{change.__name__} before the first pass")
            undo()
            del early, layer
            gc.collect()  # so that no later change is seen in them
        lines = changed_lines(printed)
        assert len(lines) == 2 * rank, lines
        if rank == 1:
            assert lines[0].startswith("ep_dispatcher: experts have changed on rank 1. Megatron's own way: layer 3"), (
                lines
            )
            assert reason in lines[0], (change, lines)
            assert lines[1].endswith(": in grouped GEMMs again")


@pytest.mark.parametrize(
    "make, settings, switch, parts",
    [
        (make_grouped_layer, GROUPED, SWITCH, False),
        (make_layer, {}, SWITCH, False),
        exhaustive(make_grouped_layer, GROUPED, WAVES, False),
        (make_grouped_layer, GROUPED, WAVES, True),
    ],
    ids=["TEGroupedMLP", "SequentialMLP", "overlapped", "in two parts"],
)
def test_a_change_is_seen_and_undone(make, settings, switch, parts):
    megatron_pool(2).run(change_and_undo, make, settings, switch, parts)


def change_after_the_dispatch(rank: int) -> str:
    """All ranks hook their experts while the rows are on their way, which are more than the counts say."""
    use_layout(EP2)
    with switched_on(SWITCH), environment(rank_capacity_factor=2):
        layer = make_grouped_layer(make_config(**GROUPED), 3)
        outcome(layer, rank)
        dispatch = layer.token_dispatcher.token_dispatch

        def dispatch_and_hook(*given):
            received = dispatch(*given)
            hook_forward(owner_of(layer))
            return received

        layer.token_dispatcher.token_dispatch = dispatch_and_hook
        return error_of(lambda: outcome(layer, rank), RuntimeError)


def test_a_change_after_the_dispatch_is_an_error_with_limited_rows():
    for text in megatron_pool(2).run(change_after_the_dispatch):
        assert text.startswith("layer 3: its experts have changed between the dispatch and their forward"), text


def change_of_parts(rank: int) -> list[str]:
    """All ranks have agreed on two parts, and cannot run them any more."""
    use_layout(EP2)
    texts = []
    with switched_on(WAVES), two_parts():
        for change in (
            lambda experts: setattr(experts, "forward", lambda *given: type(experts).forward(experts, *given)),
            lambda experts: experts.register_forward_hook(lambda _, given, result: doubled(result)),
        ):
            layer = make_grouped_layer(make_config(**GROUPED), 3)
            outcome(layer, rank)
            change(layer.experts)
            texts.append(error_of(lambda layer=layer: outcome(layer, rank), RuntimeError))
    return texts


def test_experts_that_cannot_run_in_two_parts_any_more_are_an_error():
    for by_forward, by_hook in megatron_pool(2).run(change_of_parts):
        assert by_forward.startswith("layer 3 has run in two parts") and "is not ep_dispatcher's" in by_forward
        assert by_hook.startswith("layer 3 has run in two parts") and "has hooks (forward_hooks)" in by_hook
