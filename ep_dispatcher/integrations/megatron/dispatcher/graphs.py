"""MoE layers inside CUDA graphs: Megatron's captures and warm-ups, and errors of replays.

- A replay runs no Python, so host work moves out of it. Gradients of experts go to main_grad inside the graph. The
  hooks of DistributedDataParallel run after it (``Gradients.after_backward`` in grouped_experts/gradients.py).
- A replay raises nothing. ``check_replays`` raises the buffers' errors at the end of a step's schedule, before the
  optimizer.
- A graph has a fixed number of rows. When the rank capacity grows, graphs are therefore discarded, and captured again
  before the next schedule that trains. Megatron captures its own ones again; those of Transformer Engine, which
  Megatron captures only once, are captured here.
- Megatron's warm-ups run on equal tokens, so one rank would get the rows of all ranks. They dispatch no rows.
- Transformer Engine before 2.14 loses gradients in its graphs. ``keep_gradients`` prevents that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import full_cuda_graph
from megatron.core.transformer import cuda_graphs

from ep_dispatcher import te_version
from ep_dispatcher.integrations.megatron.dispatcher import buffers, megatron_config, registration
from ep_dispatcher.integrations.messages import print_on_first_rank

NOTE = "a step with CUDA graphs"
NO_WARM_UP = -(10**9)  # an iteration number far from the last warm-up, after which Megatron would capture


@dataclass
class Graphs:
    """What is known of the CUDA graphs of this process."""

    are_used: bool = False  # whether graphs may contain the experts of some layer
    helpers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # Megatron's TECudaGraphHelper objects
    discarded: list[Any] = field(default_factory=list)  # helpers whose graphs were discarded
    set_aside: dict[str, Any] = field(default_factory=dict)  # state of the optimizer's graph; empty: not set aside
    has_printed_keep_gradients: bool = False  # whether the line of ``keep_gradients`` was printed


def are_used() -> bool:
    """Return whether graphs may contain the experts of some layer."""
    return registration.process_wide(Graphs).are_used


def note_layer(config) -> None:
    """Remember whether graphs may contain this layer's experts: then replays are checked."""
    registration.process_wide(Graphs).are_used |= megatron_config.can_capture_experts(config)


def is_capturing() -> bool:
    """Return whether Megatron is making the graphs of its layers: in captures, and in the warm-ups before them."""
    return cuda_graphs.is_graph_capturing()


def stream_is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_warm_up() -> bool:
    """Return whether this forward pass is a warm-up for a capture. Its tokens are equal, and its results unused.

    Megatron's own is_graph_warmup does not serve: in 0.16.1 it stays true after the first warm-up.
    """
    return is_capturing() and not stream_is_captured()


def check_replays() -> None:
    """If graphs may contain operations, wait for those of the step, and raise their errors.

    All ranks of a buffer's group raise. Ranks of other groups do not learn of it, which would take another collective.
    """
    if are_used() and not stream_is_captured():
        buffers.check_buffers(NOTE)


def wrap_create_cudagraphs(old: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TECudaGraphHelper.create_cudagraphs."""

    def create_cudagraphs(helper):
        result = old(helper)
        registration.process_wide(Graphs).helpers.add(helper)
        return result

    return create_cudagraphs


def discard(models: Iterable[torch.nn.Module]) -> None:
    """Discard all graphs that may contain experts: the number of their rows has changed."""
    graphs = registration.process_wide(Graphs)
    if not graphs.are_used:
        return
    whole = full_cuda_graph.FullCudaGraphWrapper
    for stage in whole.cuda_graph:  # Megatron captures it again after as many warm-ups as before
        whole.cuda_graph[stage] = whole.result[stage] = None
        whole.curr_iteration[stage] = 0
    managers = [m for model in models for m in model.modules() if isinstance(m, cuda_graphs.CudaGraphManager)]
    if managers:  # the next step that trains records its layers again, and captures them at its end
        cuda_graphs.delete_cuda_graphs()  # it does not forget runners that have been captured
        for manager in managers:
            manager.cudagraph_runners.clear()
    for helper in graphs.helpers:
        if helper not in graphs.discarded and helper.graphs_created():
            helper.delete_cuda_graphs()
            graphs.discarded.append(helper)


def capture_again() -> None:
    """Let Transformer Engine capture the discarded graphs again. Gradients are zero after it.

    Like Megatron's training loop, remove the hooks that gather parameters meanwhile: graphs must not contain them.
    """
    discarded = registration.process_wide(Graphs).discarded
    while discarded:
        helper = discarded.pop()
        if "_capture_finished" in vars(helper):  # newer versions refuse a second capture
            vars(helper)["_capture_finished"] = False
        hooked = [model for model in helper.model if getattr(model, "remove_forward_pre_hook_handles", None)]
        for model in hooked:
            model.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        for model in hooked:
            model.enable_forward_pre_hook()
        if hooked:
            helper.cuda_graph_set_manual_hooks()


def set_optimizer_graph_aside() -> None:
    """Let Megatron call the next optimizer step, which skips, instead of replaying its graph. 0.17 and newer."""
    wrapper, aside = _optimizer_wrapper(), registration.process_wide(Graphs).set_aside
    if wrapper is None or aside:
        return
    aside |= {name: getattr(wrapper, name) for name in ("cuda_graph", "result", "curr_iteration")}
    wrapper.cuda_graph, wrapper.curr_iteration = None, NO_WARM_UP


def put_optimizer_graph_back() -> None:
    """Undo ``set_optimizer_graph_aside``."""
    wrapper, aside = _optimizer_wrapper(), registration.process_wide(Graphs).set_aside
    for name, value in aside.items():
        setattr(wrapper, name, value)
    aside.clear()


def num_optimizer_calls() -> int:
    """Return how often Megatron has called an optimizer that may be in a graph. A replay calls no other code here."""
    return getattr(_optimizer_wrapper(), "curr_iteration", 0)


def _optimizer_wrapper() -> Any:
    """Return Megatron's OptimizerCudaGraphWrapper, whose class has the one graph; None if it is not in use."""
    return getattr(sys.modules.get("megatron.core.optimizer.optimizer_cuda_graph"), "OptimizerCudaGraphWrapper", None)


def keep_gradients(config) -> None:
    """Set ``disable_parameter_transpose_cache`` where graphs of Transformer Engine would lose gradients.

    Before 2.14 Transformer Engine tells every module before a capture that the microbatch is the first of a step.
    Megatron passes that on unless the field is set. The gradient of a weight is then captured as an overwrite instead
    of a sum, so with one graph for all microbatches only the last microbatch counts. Pipeline parallelism is not
    affected, because it has a graph for each microbatch. FP8 and FP4 are not affected either, and the field would cost
    them their cache of quantized weights. In bfloat16 the field does nothing else, so it does no harm where there is
    one microbatch only, which a config does not say.
    """
    if (
        config.cuda_graph_impl != "transformer_engine"
        or config.params_dtype not in (torch.bfloat16, torch.float16)
        or any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe"))
        or config.pipeline_model_parallel_size > 1
        or not config.gradient_accumulation_fusion
        or config.disable_parameter_transpose_cache
        or not te_version.graphs_lose_gradients()
    ):
        return
    config.disable_parameter_transpose_cache = True
    graphs = registration.process_wide(Graphs)
    if graphs.has_printed_keep_gradients:
        return
    graphs.has_printed_keep_gradients = True
    print_on_first_rank(
        "ep_dispatcher has set disable_parameter_transpose_cache in the TransformerConfig, because of Transformer "
        f"Engine {te_version.version()}: {te_version.FAULT}. Version 2.14 does not need it."
    )
