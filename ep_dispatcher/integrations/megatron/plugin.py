"""Makes ep_dispatcher a backend of Megatron's flex dispatcher: register() and unregister().

This file and moe_layer.py join the packages dispatcher and grouped_experts. ``_patches`` has the table of all functions
of Megatron that are replaced; those of Megatron-Bridge are in dispatcher/bridge.py. On a machine without a GPU
dispatcher/cpu.py replaces what Megatron takes from CUDA, for good.

Megatron is imported in functions alone, and so are our modules that import it: until register() is called, a launcher
may still choose which Megatron that is.

Private names of others that the integration uses, because there is no public form:

    argparse     ArgumentParser._option_string_actions        arguments.py: whether a parser is one of Megatron's
    Megatron     DistributedDataParallel._make_*_hook         gradients.py, eligibility.py: what autograd would call
                 _capture_finished of TECudaGraphHelper       graphs.py: a second capture
                 _GLOBAL_ARGS, _GLOBAL_*_WRITER               buffers.py, stats_log.py: sizes and logs of its training
                 trackers of auxiliary losses (_LOGS)         skipped_step.py: what a skipped step has added to them
    Transformer  _fp8_workspaces of a layer                   experts.py: quantised weights that grow old
    Engine       fields of Float8BlockwiseQTensor             float8.py: quantised weights, read where they lie
    PyTorch      _parameters, _modules, _*_hooks of modules   changes.py, layer.py: what modules have, without copies
                 _global_*_hooks                              changes.py: hooks of all modules
                 Tensor._version                              float8.py: whether weights were written to
                 torch._C, c10d._world                        sizes, streams and groups that have no other name
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Literal, get_origin

from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ep_dispatcher.integrations.megatron.dispatcher import arguments, bridge, registration
from ep_dispatcher.integrations.megatron.dispatcher.patches import Patch, why_not
from ep_dispatcher.integrations.megatron.dispatcher.registration import Registration, UnknownMegatronError

OLDEST, NEWEST_RUN = (0, 16), (0, 20)
STEPS = (
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)
_UNKNOWN = "this Megatron is not laid out as ep_dispatcher needs it, and nothing was replaced"
logger = logging.getLogger(__name__)


def register(
    *,
    experts: str | None = None,
    rank_capacity_factor: float | None = None,
    overlap: bool | None = None,
    num_sms: int | None = None,
    max_tokens_per_rank: int | None = None,
    stats_interval: int | None = None,
    gemm_sm_margin: bool | None = None,
) -> Registration:
    """Let ``moe_token_dispatcher_type="flex"`` with ``moe_flex_dispatcher_backend="ep_dispatcher"`` choose ours.

    Call it on every rank, alike, before Megatron parses its arguments. A second call only changes the settings that it
    gives. ``unregister()`` undoes it.

    The arguments are defaults for the job: ``arguments.py`` says what they mean, and what wins over them.

    Raises UnknownMegatronError, and changes nothing, if Megatron is older than 0.16 or not laid out as expected;
    ImportError if it is missing, or Triton, which 0.19 imports; ValueError for a wrong argument. Warns if Megatron is
    newer than the newest version that the tests ran with.
    """
    settings = {name: value for name, value in locals().items() if value is not None}
    for name, value in settings.items():
        arguments.ARGUMENTS[name].check(name, value)
    active = registration.active()
    if active is None:
        active = _register()
        registration.set_active(active)
        logger.info("%s", active)
    active.settings |= settings
    return active


def _register() -> Registration:
    """Replace all that has to be replaced."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError(registration.cannot_import(error), name=error.name) from error
    version = megatron.core.__version__
    _check_version(version)
    patches, why_no_grouped = _patches()
    from ep_dispatcher.integrations.megatron.dispatcher import skipped_step, stats_log
    from ep_dispatcher.integrations.megatron.grouped_experts.experts import forget_agreements
    from ep_dispatcher.integrations.megatron.grouped_experts.replaced import note_ddp

    forget_agreements()  # what ranks agreed on before the patches
    replaced = [*map(str, patches)]
    with contextlib.ExitStack() as undo:  # all of it, if something fails
        undo.callback(forget_agreements)
        undo.callback(stats_log.forget)
        for patch in patches:
            undo.callback(patch.apply())
        undo.callback(register_optimizer_step_pre_hook(skipped_step.refuse_others).remove)
        if not why_no_grouped:
            undo.callback(register_module_module_registration_hook(note_ddp).remove)
        if bridge.is_installed():
            undo.callback(bridge.watch())
            replaced.append(bridge.TEXT)
        return Registration(version, tuple(replaced), why_no_grouped=why_no_grouped, undo=undo.pop_all())


def unregister() -> None:
    """Put everything back. Layers that were built keep their dispatcher, and the buffers live on.

    Experts in grouped GEMMs run Megatron's way again.
    """
    active = registration.active()
    if active is not None:
        active.undo.close()
        registration.set_active(None)


def _check_version(version: str) -> None:
    numbers = registration.numbers(version)
    if numbers < OLDEST:
        raise UnknownMegatronError(
            f"megatron-core is {version}, but ep_dispatcher needs {OLDEST[0]}.{OLDEST[1]} or newer"
        )
    if numbers > NEWEST_RUN:
        warnings.warn(
            f"megatron-core {version} is newer than {NEWEST_RUN[0]}.{NEWEST_RUN[1]}, the newest that ep_dispatcher was "
            "run with; its layout is as expected. `python -m ep_dispatcher.integrations.megatron.parity` compares.",
            stacklevel=4,
        )


def _patches() -> tuple[list[Patch], str]:
    """Return what has to be replaced in this Megatron, and why its experts cannot run in grouped GEMMs, or "".

    Everything that the patches rely on is checked first.
    """
    try:
        from megatron.core import distributed, full_cuda_graph
        from megatron.core.models.common import model_chunk_schedule_plan
        from megatron.core.models.gpt import fine_grained_callables
        from megatron.core.optimizer import optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import cuda_graphs, transformer_config
        from megatron.core.transformer.moe import experts, moe_layer, token_dispatcher

        from ep_dispatcher.integrations.megatron import moe_layer as ours
        from ep_dispatcher.integrations.megatron.dispatcher import (
            backend_name,
            graphs,
            margins,
            recompute,
            skipped_step,
        )
        from ep_dispatcher.integrations.megatron.grouped_experts import eligibility, replaced

        fields = SimpleNamespace(**transformer_config.TransformerConfig.__dataclass_fields__)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and error.name == "triton":
            raise ImportError(registration.cannot_import(error), name=error.name) from error
        raise UnknownMegatronError(f"{_UNKNOWN}: {error}") from error

    # The schedule that overlaps microbatches frees inputs by the backend's name. 0.19 moved that function.
    scheduler = fine_grained_callables
    if not hasattr(scheduler, "should_free_input"):
        with contextlib.suppress(ImportError):
            from megatron.core.models.common import utils

            scheduler = utils
    choice, capacity, graphed = "the choice of ep_dispatcher", "rank capacity", "CUDA graphs"
    patches = [
        Patch(
            moe_layer, "MoELayer.__init__", ours.build, choice, "a layer gets our dispatcher, and reads its settings"
        ),
        Patch(
            argparse,
            "ArgumentParser.parse_known_args",
            arguments.read_by_parsers,
            choice,
            "Megatron's parsers allow our name, and have our arguments",
        ),
        Patch(
            fields, "moe_flex_dispatcher_backend.type", backend_name.allow, choice, "tools that read it allow our name"
        ),
        Patch(
            transformer_config,
            "TransformerConfig.__post_init__",
            backend_name.check_config,
            choice,
            "our name with another dispatcher type is an error; the features of other backends that ours has too are "
            "allowed; CUDA graphs of Transformer Engine before 2.14 keep all gradients",
        ),
        Patch(
            scheduler,
            "should_free_input",
            backend_name.keep_inputs,
            "1F1B overlap",
            "ours counts as hybridep: inputs that it reads later are not freed",
            parameters=("name", "is_moe", "config"),
        ),
        Patch(
            model_chunk_schedule_plan,
            "TransformerLayerSchedulePlan.run",
            margins.around_overlap,
            "GEMM margins",
            "GEMMs can leave multiprocessors to communication beside them",
            parameters=("f_layer", "b_layer"),
        ),
        Patch(
            random,
            "CheckpointFunction.forward",
            recompute.in_megatrons_checkpoints,
            "recompute",
            "a recompute uses the plans of its forward pass",
            parameters=("ctx", "run_function"),
        ),
        Patch(
            schedules,
            "get_forward_backward_func",
            skipped_step.watch_schedules,
            capacity,
            "schedules look for late errors when a step is over, and whether the rank capacity was too small",
            is_imported_by_name=True,
        ),
        Patch(
            full_cuda_graph,
            "FullCudaGraphWrapper.__call__",
            skipped_step.watch,
            capacity,
            "the same where a CUDA graph contains the whole schedule",
        ),
        Patch(
            optimizer,
            "MegatronOptimizer.__init__",
            skipped_step.note_optimizer,
            capacity,
            "a step with more rows than the rank capacity is skipped, as one with gradients that are not finite",
            parameters=("self",),
        ),
        Patch(
            cuda_graphs,
            "TECudaGraphHelper.create_cudagraphs",
            graphs.note_helper,
            graphed,
            "a capacity that grows needs new graphs",
        ),
    ]
    te = sys.modules.get("transformer_engine.pytorch.distributed")  # Megatron has imported it, if it is there
    if te is not None:
        made = recompute.in_transformer_engines_checkpoints
        patches.append(Patch(te, "checkpoint", made, "recompute", "the same in checkpoints of layers in FP8 and FP4"))

    unexpected = [patch.why_not() for patch in patches]
    flex = getattr(token_dispatcher, "MoEFlexTokenDispatcher", None)
    if flex is None or getattr(moe_layer, "MoEFlexTokenDispatcher", None) is not flex:
        unexpected.append("moe_layer does not use MoEFlexTokenDispatcher")
    wanted = ("self", "num_local_experts", "local_expert_indices", "config", "pg_collection")
    unexpected.append(why_not("MoEFlexTokenDispatcher", flex and flex.__init__, wanted, exactly=True))
    base = getattr(token_dispatcher, "MoETokenDispatcher", None)
    unexpected += [f"MoETokenDispatcher has no step {step}" for step in STEPS if not hasattr(base, step)]
    prepare = getattr(getattr(optimizer, "MegatronOptimizer", None), "prepare_grads", None)
    unexpected.append(why_not("MegatronOptimizer.prepare_grads", prepare, ("self",), exactly=True))
    backend = getattr(fields, "moe_flex_dispatcher_backend", None)
    if backend is not None and get_origin(backend.type) is not Literal:
        unexpected.append("moe_flex_dispatcher_backend is no Literal")
    if found := "; ".join(filter(None, unexpected)):
        raise UnknownMegatronError(f"{_UNKNOWN}: {found}")

    feature, why = "grouped GEMMs", "experts run in them, where that is asked for and can be"
    given = ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
    grouped = [
        Patch(
            experts,
            "TEGroupedMLP.forward",
            replaced.run_grouped,
            feature,
            f"{why}; from 0.18 on Megatron's own pad no rows that arrive padded",
            parameters=given,
        ),
        Patch(experts, "SequentialMLP.forward", replaced.run_grouped, feature, why, parameters=given),
        Patch(
            experts,
            "TEGroupedMLP.backward_dw",
            replaced.write_delayed_grads,
            feature,
            "gradients of weights that were delayed are written",
        ),
    ]
    missing = [patch.why_not() for patch in grouped]
    ddp = getattr(distributed, "DistributedDataParallel", None)
    hooks = {"_make_backward_post_hook": ("self", "param"), "_make_forward_pre_hook": ("self",)}
    for name, parameters in hooks.items():
        missing.append(why_not(f"DistributedDataParallel.{name}", getattr(ddp, name, None), parameters, exactly=True))
    why_no_grouped = "; ".join(filter(None, missing))
    if not why_no_grouped:
        eligibility.plain_forwards()  # remember them as they are now
        patches += grouped
    return patches, why_no_grouped
