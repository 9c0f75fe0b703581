"""Makes ep_dispatcher a backend of Megatron's flex dispatcher: register() and unregister().

This file and moe_layer.py join the packages dispatcher and grouped_experts. The functions of Megatron that are replaced
stand in two tables, ``_dispatcher_patches`` and ``_experts_patches``. dispatcher/megatron_bridge.py replaces functions
of Megatron-Bridge. On a machine without a GPU, dispatcher/cpu.py replaces for good what Megatron takes from CUDA.

Megatron is imported inside functions only, and so are our modules that import it. Until register() is called, a
launcher may therefore still choose which Megatron is imported.

The integration uses these private names of others, because there is no public form:

    argparse     ArgumentParser._option_string_actions        arguments.py: whether a parser is one of Megatron's
    Megatron     DistributedDataParallel._make_*_hook         gradients.py, eligibility.py: what autograd would call
                 _capture_finished of TECudaGraphHelper       graphs.py: a second capture
                 _GLOBAL_ARGS, _GLOBAL_*_WRITER               buffers.py, stats_log.py: sizes and logs of its training
                 trackers of auxiliary losses (_LOGS)         skipped_step.py: what a skipped step has added to them
    Transformer  _fp8_workspaces of a layer                   experts.py: quantized weights that become outdated
    Engine       fields of Float8BlockwiseQTensor             float8.py: quantized weights, read in place
    PyTorch      _parameters, _modules, _*_hooks of modules   module_snapshot.py, megatron_experts.py: what modules have
                 _global_*_hooks                              module_snapshot.py: hooks of all modules
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

from ep_dispatcher.integrations.megatron.dispatcher import arguments, megatron_bridge, registration
from ep_dispatcher.integrations.megatron.dispatcher.patch import Patch, why_not
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
    node_capacity_factor: float | None = None,
    overlap: bool | None = None,
    redundant_experts_per_rank: int | None = None,
    num_sms: int | None = None,
    max_tokens_per_rank: int | None = None,
    stats_interval: int | None = None,
    gemm_sm_margin: bool | None = None,
) -> Registration:
    """Let ``moe_token_dispatcher_type="flex"`` with ``moe_flex_dispatcher_backend="ep_dispatcher"`` choose ours.

    Call it on every rank with the same arguments, before Megatron parses its own. A second call changes only the
    settings that it is given. ``unregister()`` undoes it.

    The arguments are defaults for the job: ``arguments.py`` says what they mean, and what takes precedence over them.

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
    """Replace everything that has to be replaced, or nothing if something fails."""
    try:
        import megatron.core
    except ImportError as error:
        raise ImportError(registration.why_not_importable(error), name=error.name) from error
    version = megatron.core.__version__
    _check_version(version)
    patches, why_no_grouped = _patches()
    from ep_dispatcher.integrations.megatron.dispatcher import skipped_step, stats_log
    from ep_dispatcher.integrations.megatron.grouped_experts.experts import forget_agreements
    from ep_dispatcher.integrations.megatron.grouped_experts.wrappers import note_ddp

    forget_agreements()  # those that ranks came to before the patches
    replaced = [*map(str, patches)]
    with contextlib.ExitStack() as undo:  # it undoes everything if something fails
        undo.callback(forget_agreements)
        undo.callback(stats_log.forget)
        for patch in patches:
            undo.callback(patch.apply())
        undo.callback(register_optimizer_step_pre_hook(skipped_step.refuse_other_optimizers).remove)
        if not why_no_grouped:
            undo.callback(register_module_module_registration_hook(note_ddp).remove)
        if megatron_bridge.is_installed():
            undo.callback(megatron_bridge.watch())
            replaced.append(megatron_bridge.TEXT)
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
    numbers = registration.version_numbers(version)
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
    modules = _import_modules()
    patches = _dispatcher_patches(modules)
    problems = [patch.why_not() for patch in patches] + _layout_problems(modules)
    if found := "; ".join(filter(None, problems)):
        raise UnknownMegatronError(f"{_UNKNOWN}: {found}")
    experts_patches = _experts_patches(modules)
    problems = [patch.why_not() for patch in experts_patches] + _ddp_problems(modules)
    why_no_grouped = "; ".join(filter(None, problems))
    if not why_no_grouped:
        modules.eligibility.known_forwards()  # remember them as they are now
        patches += experts_patches
    return patches, why_no_grouped


def _import_modules() -> SimpleNamespace:
    """Import the modules of Megatron in which something is replaced, and ours that import Megatron."""
    try:
        from megatron.core import distributed, full_cuda_graph
        from megatron.core.models.common import model_chunk_schedule_plan
        from megatron.core.models.gpt import fine_grained_callables
        from megatron.core.optimizer import optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import cuda_graphs, transformer_config
        from megatron.core.transformer.moe import experts, moe_layer, token_dispatcher

        from ep_dispatcher.integrations.megatron import moe_layer as our_moe_layer
        from ep_dispatcher.integrations.megatron.dispatcher import (
            backend_name,
            gemm_sm_margin,
            graphs,
            recompute,
            skipped_step,
        )
        from ep_dispatcher.integrations.megatron.grouped_experts import eligibility, wrappers

        fields = SimpleNamespace(**transformer_config.TransformerConfig.__dataclass_fields__)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and error.name == "triton":
            raise ImportError(registration.why_not_importable(error), name=error.name) from error
        raise UnknownMegatronError(f"{_UNKNOWN}: {error}") from error

    # The schedule that overlaps microbatches frees inputs by the backend's name. 0.19 moved that function.
    scheduler = fine_grained_callables
    if not hasattr(scheduler, "should_free_input"):
        with contextlib.suppress(ImportError):
            from megatron.core.models.common import utils

            scheduler = utils
    return SimpleNamespace(
        # Megatron's
        cuda_graphs=cuda_graphs,
        distributed=distributed,
        experts=experts,
        fields=fields,
        full_cuda_graph=full_cuda_graph,
        model_chunk_schedule_plan=model_chunk_schedule_plan,
        moe_layer=moe_layer,
        optimizer=optimizer,
        random=random,
        scheduler=scheduler,
        schedules=schedules,
        token_dispatcher=token_dispatcher,
        transformer_config=transformer_config,
        # ours
        backend_name=backend_name,
        eligibility=eligibility,
        gemm_sm_margin=gemm_sm_margin,
        graphs=graphs,
        our_moe_layer=our_moe_layer,
        recompute=recompute,
        skipped_step=skipped_step,
        wrappers=wrappers,
    )


def _dispatcher_patches(m: SimpleNamespace) -> list[Patch]:
    """Return what the dispatcher replaces. m: the modules of ``_import_modules``."""
    choice, capacity = "the choice of ep_dispatcher", "rank capacity"
    patches = [
        Patch(
            m.moe_layer,
            "MoELayer.__init__",
            m.our_moe_layer.wrap_init,
            choice,
            "a layer gets our dispatcher, and reads its settings",
        ),
        Patch(
            argparse,
            "ArgumentParser.parse_known_args",
            arguments.wrap_parse_known_args,
            choice,
            "Megatron's parsers allow our name, and have our arguments",
        ),
        Patch(
            m.fields,
            "moe_flex_dispatcher_backend.type",
            m.backend_name.add_to_type,
            choice,
            "tools that read it allow our name",
        ),
        Patch(
            m.transformer_config,
            "TransformerConfig.__post_init__",
            m.backend_name.wrap_post_init,
            choice,
            "our name with another dispatcher type is an error; the features of other backends that ours has too are "
            "allowed; CUDA graphs of Transformer Engine before 2.14 keep all gradients",
        ),
        Patch(
            m.scheduler,
            "should_free_input",
            m.backend_name.wrap_should_free_input,
            "1F1B overlap",
            "ours counts as hybridep: inputs that it reads later are not freed",
            parameters=("name", "is_moe", "config"),
        ),
        Patch(
            m.model_chunk_schedule_plan,
            "TransformerLayerSchedulePlan.run",
            m.gemm_sm_margin.wrap_schedule_plan_run,
            "GEMM margins",
            "GEMMs can leave multiprocessors to communication beside them",
            parameters=("f_layer", "b_layer"),
        ),
        Patch(
            m.random,
            "CheckpointFunction.forward",
            m.recompute.wrap_checkpoint_forward,
            "recompute",
            "a recompute uses the plans of its forward pass",
            parameters=("ctx", "run_function"),
        ),
        Patch(
            m.schedules,
            "get_forward_backward_func",
            m.skipped_step.wrap_get_schedule,
            capacity,
            "schedules look for late errors when a step is over, and whether the rank capacity was too small",
            is_imported_by_name=True,
        ),
        Patch(
            m.full_cuda_graph,
            "FullCudaGraphWrapper.__call__",
            m.skipped_step.wrap_schedule,
            capacity,
            "the same where a CUDA graph contains the whole schedule",
        ),
        Patch(
            m.optimizer,
            "MegatronOptimizer.__init__",
            m.skipped_step.wrap_optimizer_init,
            capacity,
            "a step with more rows than the rank capacity is skipped, like one with gradients that are not finite",
            parameters=("self",),
        ),
        Patch(
            m.cuda_graphs,
            "TECudaGraphHelper.create_cudagraphs",
            m.graphs.wrap_create_cudagraphs,
            "CUDA graphs",
            "a capacity that grows needs new graphs",
        ),
    ]
    te = sys.modules.get("transformer_engine.pytorch.distributed")  # Megatron has imported it, if it is there
    if te is not None:
        patches.append(
            Patch(
                te,
                "checkpoint",
                m.recompute.wrap_te_checkpoint,
                "recompute",
                "the same in checkpoints of layers in FP8 and FP4",
            )
        )
    return patches


def _layout_problems(m: SimpleNamespace) -> list[str | None]:
    """Return what else this Megatron lacks for the dispatcher, beside the functions that are replaced."""
    problems: list[str | None] = []
    flex = getattr(m.token_dispatcher, "MoEFlexTokenDispatcher", None)
    if flex is None or getattr(m.moe_layer, "MoEFlexTokenDispatcher", None) is not flex:
        problems.append("moe_layer does not use MoEFlexTokenDispatcher")
    parameters = ("self", "num_local_experts", "local_expert_indices", "config", "pg_collection")
    problems.append(why_not("MoEFlexTokenDispatcher", flex and flex.__init__, parameters, exactly=True))
    base = getattr(m.token_dispatcher, "MoETokenDispatcher", None)
    problems += [f"MoETokenDispatcher has no step {step}" for step in STEPS if not hasattr(base, step)]
    prepare = getattr(getattr(m.optimizer, "MegatronOptimizer", None), "prepare_grads", None)
    problems.append(why_not("MegatronOptimizer.prepare_grads", prepare, ("self",), exactly=True))
    backend = getattr(m.fields, "moe_flex_dispatcher_backend", None)
    if backend is not None and get_origin(backend.type) is not Literal:
        problems.append("moe_flex_dispatcher_backend is no Literal")
    return problems


def _experts_patches(m: SimpleNamespace) -> list[Patch]:
    """Return what experts in grouped GEMMs replace."""
    feature, why = "grouped GEMMs", "experts run in them, where that is asked for and can be"
    parameters = ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
    return [
        Patch(
            m.experts,
            "TEGroupedMLP.forward",
            m.wrappers.wrap_experts_forward,
            feature,
            f"{why}; from 0.18 on Megatron's own pad no rows that arrive padded",
            parameters=parameters,
        ),
        Patch(
            m.experts,
            "SequentialMLP.forward",
            m.wrappers.wrap_experts_forward,
            feature,
            why,
            parameters=parameters,
        ),
        Patch(
            m.experts,
            "TEGroupedMLP.backward_dw",
            m.wrappers.wrap_backward_dw,
            feature,
            "gradients of weights that were delayed are written",
        ),
    ]


def _ddp_problems(m: SimpleNamespace) -> list[str | None]:
    """Return what this Megatron's DistributedDataParallel lacks for experts in grouped GEMMs."""
    ddp = getattr(m.distributed, "DistributedDataParallel", None)
    return [
        why_not(f"DistributedDataParallel.{name}", getattr(ddp, name, None), parameters, exactly=True)
        for name, parameters in (("_make_backward_post_hook", ("self", "param")), ("_make_forward_pre_hook", ("self",)))
    ]
