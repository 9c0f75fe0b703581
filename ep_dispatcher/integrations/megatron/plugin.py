"""Makes ep_dispatcher a backend of Megatron's flex dispatcher.

All patches of ``register()`` are here, except that of Megatron-Bridge (``bridge.py``). ``unregister()`` takes them
back. On a machine without a GPU ``cpu.py`` patches what Megatron takes from CUDA, for good.

Megatron is imported in functions alone, and so are our modules that import it: until register() is called, a launcher
may still choose which Megatron that is.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ep_dispatcher.integrations.megatron import arguments, bridge, limits, registration
from ep_dispatcher.integrations.megatron.registration import NAME, Registration, UnknownMegatronError, is_ours

OLDEST, NEWEST_RUN = (0, 16), (0, 20)
STEPS = (
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")  # others use the steps of these
_UNKNOWN = "this Megatron is not laid out as ep_dispatcher needs it, and nothing was replaced"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Patch:
    module: Any
    path: str  # of the value in the module
    make: Callable[[Any], Any]  # the old value -> the new one
    what: str  # what the new value does
    parameters: tuple[str, ...] = ()  # the first ones that the old value has to take

    @property
    def shown(self) -> str:
        return self.path if "." in self.path else f"{self.module.__name__.removeprefix('megatron.core.')}.{self.path}"

    def find(self) -> tuple[Any, str, Any]:
        """Return the value's owner, its name there, and the value: None if this Megatron does not have it."""
        owner, (*classes, name) = self.module, self.path.split(".")
        for one in classes:
            owner = getattr(owner, one, None)
        return owner, name, None if owner is None else getattr(owner, name, None)

    def why_not(self) -> str | None:
        """Say what this Megatron lacks for the patch."""
        return _why_not(self.shown, self.find()[2], self.parameters)


def _why_not(shown: str, found: Any, parameters: tuple[str, ...], *, exactly: bool = False) -> str | None:
    """Say that a function is missing, or begins with other parameters. exactly: it may have no others."""
    if found is None:
        return f"{shown} is missing"
    given = tuple(inspect.signature(found).parameters) if parameters else ()
    given = given if exactly else given[: len(parameters)]
    return None if given == parameters else f"{shown} takes {list(given)}, not {list(parameters)}"


_undo: list[Callable[[], None]] = []


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
        try:
            import megatron.core
        except ImportError as error:
            raise ImportError(registration.cannot_import(error), name=error.name) from error
        version = megatron.core.__version__
        _check_version(version)
        patches, why_no_grouped = _patches()
        from ep_dispatcher.integrations.megatron.experts import forget_agreements

        forget_agreements()  # what ranks agreed on before the patches
        _undo.append(forget_agreements)
        for patch in patches:
            _replace(patch)
        from ep_dispatcher.integrations.megatron import stats_log
        from ep_dispatcher.integrations.megatron.skipped_step import refuse_others

        _undo.append(stats_log.forget)
        _undo.append(register_optimizer_step_pre_hook(refuse_others).remove)
        texts = [f"{patch.shown}: {patch.what}" for patch in patches]
        if bridge.is_installed():
            _undo.append(bridge.watch())
            texts.append(bridge.TEXT)
        active = Registration(version, tuple(texts), why_no_grouped=why_no_grouped)
        registration.set_active(active)
        logger.info("%s", active)
    active.settings |= settings
    return active


def _replace(patch: _Patch) -> None:
    """Replace the value, and note how to undo it."""
    owner, name, old = patch.find()
    stored = vars(owner).get(name) if isinstance(owner, type) else old  # None: it is inherited
    if old is object.__new__:
        stored = _plain_new
    inherit = functools.partial(delattr, owner, name)
    _undo.append(inherit if stored is None else functools.partial(setattr, owner, name, stored))
    new = patch.make(old)
    if inspect.isfunction(new):
        functools.update_wrapper(new, old)
    setattr(owner, name, staticmethod(new) if isinstance(stored, staticmethod) else new)


def unregister() -> None:
    """Put everything back. Layers that were built keep their dispatcher, and the buffers live on.

    Experts in grouped GEMMs run Megatron's way again.
    """
    while _undo:
        _undo.pop()()
    registration.set_active(None)


def _check_version(version: str) -> None:
    numbers = registration.numbers(version)
    if numbers < OLDEST:
        raise UnknownMegatronError(f"megatron-core: given {version}, allowed: {OLDEST[0]}.{OLDEST[1]} or newer")
    if numbers > NEWEST_RUN:
        warnings.warn(
            f"megatron-core {version} is newer than {NEWEST_RUN[0]}.{NEWEST_RUN[1]}, the newest that ep_dispatcher was "
            "run with; its layout is as expected. `python -m ep_dispatcher.integrations.megatron.parity` compares.",
            stacklevel=3,
        )


def _patches() -> tuple[list[_Patch], str]:
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
        from megatron.core.transformer.moe import experts, moe_layer, moe_utils, token_dispatcher

        from ep_dispatcher.integrations.megatron import eligibility, graphs, margins, recompute, skipped_step
        from ep_dispatcher.integrations.megatron import experts as ours

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
    plans = "a recompute uses the plans of its forward pass"
    ends = "looks for late errors when a step is over, and whether the rank capacity was too small"
    skips = "a step with more rows than the rank capacity is skipped"
    checks = (
        "our name with another dispatcher type is an error; the features of other backends that ours has too are "
        "allowed; CUDA graphs of Transformer Engine before 2.14 keep all gradients"
    )
    parsers = "Megatron's parsers allow our name, and have our arguments"
    leaves = "GEMMs can leave multiprocessors to communication beside them"
    plan, helper = "TransformerLayerSchedulePlan.run", "TECudaGraphHelper.create_cudagraphs"
    checkpointed = recompute.in_megatrons_checkpoints
    patches = [
        _Patch(token_dispatcher, "MoEFlexTokenDispatcher.__new__", _choose_class, "makes our class for our backend"),
        _Patch(fields, "moe_flex_dispatcher_backend.type", _allow_name, "tools that read it allow our name"),
        _Patch(argparse, "ArgumentParser.parse_known_args", arguments.read_by_parsers, parsers),
        _Patch(transformer_config, "TransformerConfig.__post_init__", _check_config, checks),
        _Patch(moe_layer, "MoELayer.__init__", ours.note_layer, "ours reads its settings"),
        _Patch(scheduler, "should_free_input", _keep_inputs, "ours counts as hybridep", ("name", "is_moe", "config")),
        _Patch(model_chunk_schedule_plan, plan, margins.around_overlap, leaves, ("f_layer", "b_layer")),
        _Patch(random, "CheckpointFunction.forward", checkpointed, plans, ("ctx", "run_function")),
        *(_Patch(schedules, name, skipped_step.watch, ends) for name in SCHEDULES),
        _Patch(full_cuda_graph, "FullCudaGraphWrapper.__call__", skipped_step.watch, ends),
        _Patch(optimizer, "MegatronOptimizer.__init__", skipped_step.note_optimizer, "ours notes it", ("self",)),
        *(_Patch(optimizer, f"{name}.step", skipped_step.skip, skips, ("self",)) for name in OPTIMIZERS),
        _Patch(cuda_graphs, helper, graphs.note_helper, "a capacity that grows needs new graphs"),
    ]
    with contextlib.suppress(ImportError):  # 0.17 and newer
        from megatron.core.optimizer import optimizer_cuda_graph

        patches.append(_Patch(optimizer_cuda_graph, "OptimizerCudaGraphWrapper.__call__", skipped_step.skip, skips))
    if hasattr(moe_utils, "skip_routed_expert_padding"):  # 0.18 and newer
        text = "true for ours, whose rows arrive padded"
        patches.append(_Patch(experts, "skip_routed_expert_padding", _skip_padding, text))
    te = sys.modules.get("transformer_engine.pytorch.distributed")  # Megatron has imported it, if it is there
    if te is not None:
        patches.append(_Patch(te, "checkpoint", recompute.in_transformer_engines_checkpoints, plans))

    unexpected = [patch.why_not() for patch in patches]
    flex = getattr(token_dispatcher, "MoEFlexTokenDispatcher", None)
    if getattr(moe_layer, "MoEFlexTokenDispatcher", None) is not flex:
        unexpected.append("moe_layer does not use MoEFlexTokenDispatcher")
    wanted = ("self", "num_local_experts", "local_expert_indices", "config", "pg_collection")
    unexpected.append(_why_not("MoEFlexTokenDispatcher", flex and flex.__init__, wanted, exactly=True))
    base = getattr(token_dispatcher, "MoETokenDispatcher", None)
    unexpected += [f"MoETokenDispatcher has no step {step}" for step in STEPS if not hasattr(base, step)]
    backend = getattr(fields, "moe_flex_dispatcher_backend", None)
    if backend is not None and get_origin(backend.type) is not Literal:
        unexpected.append("moe_flex_dispatcher_backend is no Literal")
    if found := "; ".join(filter(None, unexpected)):
        raise UnknownMegatronError(f"{_UNKNOWN}: {found}")

    where = "in grouped GEMMs, where that is asked for and can be"
    given = ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
    grouped = [
        _Patch(experts, "TEGroupedMLP.forward", ours.forward_grouped, where, given),
        _Patch(experts, "TEGroupedMLP.backward_dw", ours.delayed_grads, "of those in grouped GEMMs"),
        _Patch(experts, "SequentialMLP.forward", ours.forward_grouped, where, given),
        _Patch(distributed, "DistributedDataParallel.__init__", ours.note_ddp, "ours notes it, and calls its hooks"),
    ]
    missing = [patch.why_not() for patch in grouped]
    ddp = getattr(distributed, "DistributedDataParallel", None)
    hooks = {"_make_backward_post_hook": ("self", "param"), "_make_forward_pre_hook": ("self",)}
    for name, parameters in hooks.items():
        hook = getattr(ddp, name, None)
        missing.append(_why_not(f"DistributedDataParallel.{name}", hook, parameters, exactly=True))
    why_no_grouped = "; ".join(filter(None, missing))
    if not why_no_grouped:
        eligibility.plain_forwards()  # remember them as they are now
        patches += grouped
    return patches, why_no_grouped


def _plain_new(cls, *args, **kwargs):
    """Replace ``object.__new__``, which refuses arguments once a class has had a ``__new__`` of its own."""
    return object.__new__(cls)


def _choose_class(old):
    def make(cls, *args, **kwargs):
        config = kwargs.get("config", args[2] if len(args) > 2 else None)  # none: another backend's is being copied
        if config is None or not is_ours(config):
            return object.__new__(cls)
        from ep_dispatcher.integrations.megatron.dispatcher import MoEEPTokenDispatcher

        return MoEEPTokenDispatcher(*args, **kwargs)

    return make


def _allow_name(old):
    names = (*get_args(old), NAME)
    return Literal[names]


def _check_config(old):
    from ep_dispatcher.integrations.megatron import graphs

    def check(config):
        bridge.refuse_ignored_choice(config)
        with _under_another_name(config):
            old(config)
        graphs.keep_gradients(config)

    return check


@contextlib.contextmanager
def _under_another_name(config) -> Iterator[None]:
    """Give ours the name of a backend with the same features: Megatron's checks go by names."""
    if config.moe_flex_dispatcher_backend != NAME or config.num_moe_experts is None:
        yield
        return
    import megatron.core

    if config.moe_token_dispatcher_type != "flex":
        raise ValueError(
            f"--moe-token-dispatcher-type: given {config.moe_token_dispatcher_type}, allowed with "
            f"--moe-flex-dispatcher-backend {NAME}: flex"
        )
    if getattr(config, "moe_enable_deepep", False):
        raise ValueError(f"--moe-enable-deepep: given with --moe-flex-dispatcher-backend {NAME}, allowed: one of them")
    if config.moe_shared_expert_overlap and registration.numbers(megatron.core.__version__) < (0, 18):
        config.moe_token_dispatcher_type = "alltoall"
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        config.moe_flex_dispatcher_backend = "hybridep"
    factor, pads = config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity
    if config.cuda_graph_impl != "none" and "moe" in limits.graph_modules(config)[1]:
        # Megatron allows it only if rows are padded to a capacity.
        config.moe_expert_capacity_factor = abs(factor or 1.0)
        config.moe_pad_expert_input_to_capacity = True
    try:
        yield
    finally:
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", NAME
        config.moe_expert_capacity_factor = None if factor is None or factor < 0 else factor
        config.moe_pad_expert_input_to_capacity = pads


def _keep_inputs(old):
    def should_free_input(name, is_moe, config, *rest):
        if is_moe and is_ours(config):
            config = copy.copy(config)
            config.moe_flex_dispatcher_backend = "hybridep"
        return old(name, is_moe, config, *rest)

    return should_free_input


def _skip_padding(old):
    from ep_dispatcher.integrations.megatron import experts

    return lambda config: (is_ours(config) and not experts.pads_rows) or old(config)
