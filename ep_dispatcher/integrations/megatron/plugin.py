"""Makes ep_dispatcher a backend of Megatron's flex dispatcher.

All patches of ``register()`` are here, except that of Megatron-Bridge (``bridge.py``). ``unregister()`` takes them
back. Two others stay: the launcher patches argparse (``__main__.py``), and on a machine without a GPU ``cpu.py``
patches what Megatron takes from CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from ep_dispatcher import checks, envs

NAME = "ep_dispatcher"
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
_UNKNOWN = "this Megatron is not laid out as ep_dispatcher needs it, and nothing was replaced"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registration:
    """What register() did: Megatron's version, a line for each replacement, and the size that it was given."""

    megatron_version: str
    replaced: tuple[str, ...]
    max_tokens_per_rank: int | None = None

    def __str__(self) -> str:
        size = (
            "" if self.max_tokens_per_rank is None else f" Its buffers hold {self.max_tokens_per_rank} tokens per rank."
        )
        head = f"ep_dispatcher is a backend of Megatron-core {self.megatron_version}'s flex dispatcher.{size} Replaced:"
        return "\n  ".join([head, *self.replaced])


class UnknownMegatronError(RuntimeError):
    """This Megatron is not laid out as register() needs it; nothing was replaced."""


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    make: Callable[[Any], Any]  # the old value -> the new one
    text: str


_active: Registration | None = None
_undo: list[Callable[[], None]] = []


def is_ours(config) -> bool:
    return config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == NAME


def active() -> Registration | None:
    """Return what register() did, or None before it and after unregister()."""
    return _active


def registered_size() -> int | None:
    """Return the tokens per rank that register() was given for the buffers, or None."""
    return None if _active is None else _active.max_tokens_per_rank


def register(*, max_tokens_per_rank: int | None = None) -> Registration:
    """Let ``moe_token_dispatcher_type="flex"`` with ``moe_flex_dispatcher_backend="ep_dispatcher"`` choose ours.

    Call it on every rank before Megatron parses its arguments. A second call only changes the size, if it gives one.
    ``unregister()`` undoes it.

    max_tokens_per_rank  the most tokens that a rank brings to an MoE layer in one microbatch, the same on all ranks:
                         sequence length x micro batch size / (context parallel size, with sequence parallel x tensor
                         parallel size). None: the first that is there of EP_DISPATCHER_MAX_TOKENS_PER_RANK,
                         Megatron's arguments, the first forward pass

    It reads three switches. With EP_DISPATCHER_GROUPED_EXPERTS=1 the experts of layers that are built later run in
    grouped GEMMs where they can, whichever dispatcher brings their rows. With EP_DISPATCHER_EXPERT_WAVES=1 they also
    overlap with dispatch and combine, where they can. EP_DISPATCHER_GEMM_SM_MARGIN: margins.py.

    Raises UnknownMegatronError, and changes nothing, if Megatron is older than 0.16 or not laid out as expected. Warns
    if it is newer than the newest version that the tests ran with.
    """
    global _active
    if max_tokens_per_rank is not None:
        checks.integer("max_tokens_per_rank", max_tokens_per_rank, 1)
    if _active is None:
        import megatron.core

        version = megatron.core.__version__
        _check_version(version)
        patches = _patches()
        if envs.grouped_experts():  # forget what ranks agreed on before the patches
            from ep_dispatcher.integrations.megatron.experts import forget_parts

            forget_parts()
            _undo.append(forget_parts)
        for patch in patches:
            old = getattr(patch.owner, patch.name)
            _undo.append(_undoing(patch.owner, patch.name, old))
            setattr(patch.owner, patch.name, patch.make(old))
        texts = [patch.text for patch in patches]
        from ep_dispatcher.integrations.megatron import bridge

        if bridge.is_installed():
            _undo.append(bridge.watch())
            texts.append(bridge.TEXT)
        _active = Registration(version, tuple(texts))
        logger.info("%s", _active)
    if max_tokens_per_rank is not None:
        _active = replace(_active, max_tokens_per_rank=max_tokens_per_rank)
    return _active


def _undoing(owner: Any, name: str, old: Any) -> Callable[[], None]:
    if old is object.__new__:
        old = _plain_new
    elif isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod):
        old = vars(owner)[name]
    elif isinstance(owner, type) and name not in vars(owner):  # inherited
        return functools.partial(delattr, owner, name)
    return functools.partial(setattr, owner, name, old)


def unregister() -> None:
    """Put everything back. Layers that were built keep their dispatcher, and the buffers live on.

    Experts in grouped GEMMs run Megatron's way again.
    """
    global _active
    while _undo:
        _undo.pop()()
    _active = None


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number. If there are none to read, return (), which is older than all."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else ()


def _check_version(version: str) -> None:
    numbers = _numbers(version)
    if numbers < OLDEST:
        raise UnknownMegatronError(f"megatron-core: given {version}, allowed: {OLDEST[0]}.{OLDEST[1]} or newer")
    if numbers > NEWEST_RUN:
        warnings.warn(
            f"megatron-core {version} is newer than {NEWEST_RUN[0]}.{NEWEST_RUN[1]}, the newest that ep_dispatcher was "
            "run with; its layout is as expected. `python -m ep_dispatcher.integrations.megatron.parity` compares.",
            stacklevel=3,
        )


def _patches() -> list[_Patch]:
    """Return what has to be replaced in this Megatron, after checking everything that the patches rely on."""
    try:
        from megatron.core import full_cuda_graph
        from megatron.core.models.gpt import fine_grained_callables
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.moe import experts, moe_layer, moe_utils, token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise UnknownMegatronError(f"{_UNKNOWN}: {error}") from error

    unexpected: list[str] = []

    def expect(true: Any, text: str) -> None:
        if not true:
            unexpected.append(text)

    flex = getattr(token_dispatcher, "MoEFlexTokenDispatcher", None)
    expect(flex is not None, "token_dispatcher.MoEFlexTokenDispatcher is missing")
    expect(getattr(moe_layer, "MoEFlexTokenDispatcher", None) is flex, "moe_layer does not use MoEFlexTokenDispatcher")
    wanted = ["self", "num_local_experts", "local_expert_indices", "config", "pg_collection"]
    given = list(inspect.signature(flex.__init__).parameters) if flex else []
    expect(given == wanted, f"MoEFlexTokenDispatcher takes {given}, not {wanted}")
    base = getattr(token_dispatcher, "MoETokenDispatcher", None)
    for step in STEPS:
        expect(hasattr(base, step), f"MoETokenDispatcher has no step {step}")
    backend = TransformerConfig.__dataclass_fields__.get("moe_flex_dispatcher_backend")
    expect(backend is not None, "TransformerConfig has no moe_flex_dispatcher_backend")
    expect(backend and get_origin(backend.type) is Literal, "moe_flex_dispatcher_backend is no Literal")
    # The schedule that overlaps microbatches frees inputs by the backend's name. 0.19 moved that function.
    scheduler = fine_grained_callables
    if not hasattr(scheduler, "should_free_input"):
        with contextlib.suppress(ImportError):
            from megatron.core.models.common import utils

            scheduler = utils
    free = getattr(scheduler, "should_free_input", None)
    given = list(inspect.signature(free).parameters)[:3] if free else []
    expect(given == ["name", "is_moe", "config"], f"should_free_input takes {given}, not ['name', 'is_moe', 'config']")
    expect(hasattr(moe_layer.MoELayer, "set_layer_number"), "MoELayer has no set_layer_number")
    skips = hasattr(moe_utils, "skip_routed_expert_padding")  # 0.18 and newer
    if skips:
        expect(hasattr(experts, "skip_routed_expert_padding"), "experts does not use skip_routed_expert_padding")
    for name in SCHEDULES:
        expect(hasattr(schedules, name), f"schedules has no {name}")
    wrapper = getattr(full_cuda_graph, "FullCudaGraphWrapper", None)
    expect(wrapper is not None, "full_cuda_graph.FullCudaGraphWrapper is missing")
    grouped = _patches_for_grouped_experts(experts, moe_layer, expect) if envs.grouped_experts() else []
    overlap = _patches_for_margins(expect) if envs.gemm_sm_margin() != 0 else []
    if unexpected:
        raise UnknownMegatronError(f"{_UNKNOWN}: {'; '.join(unexpected)}")

    shown = scheduler.__name__.removeprefix("megatron.core.")
    patches = [
        _Patch(flex, "__new__", _choose_class, "MoEFlexTokenDispatcher.__new__: makes our class for our backend"),
        _Patch(
            backend, "type", _allow_name, "the type of moe_flex_dispatcher_backend: --help and parsers allow our name"
        ),
        _Patch(
            TransformerConfig,
            "__post_init__",
            _check_config,
            "TransformerConfig.__post_init__: our name with another dispatcher type is an error; the features of other "
            "backends that ours has too are allowed; CUDA graphs of Transformer Engine before 2.14 keep all gradients",
        ),
        _Patch(moe_layer.MoELayer, "set_layer_number", _pass_number_on, "MoELayer.set_layer_number: ours gets it too"),
        _Patch(scheduler, "should_free_input", _keep_inputs, f"{shown}.should_free_input: ours counts as hybridep"),
    ]
    if skips:
        text = "experts.skip_routed_expert_padding: true for ours, whose rows arrive padded"
        patches.append(_Patch(experts, "skip_routed_expert_padding", _skip_padding, text))
    from ep_dispatcher.integrations.megatron import graphs

    text = "looks for errors of replayed CUDA graphs when a step is over"
    patches += [_Patch(schedules, name, graphs.check_after, f"schedules.{name}: {text}") for name in SCHEDULES]
    patches.append(_Patch(wrapper, "__call__", graphs.check_after, f"FullCudaGraphWrapper.__call__: {text}"))
    return patches + grouped + overlap


def _patches_for_grouped_experts(experts, moe_layer, expect: Callable[[Any, str], None]) -> list[_Patch]:
    """Return the further patches of EP_DISPATCHER_GROUPED_EXPERTS=1 and EP_DISPATCHER_EXPERT_WAVES=1."""
    from ep_dispatcher.integrations.megatron import eligibility
    from ep_dispatcher.integrations.megatron import experts as ours

    eligibility.plain_forwards()  # remember them as they are now
    try:
        from megatron.core.distributed import DistributedDataParallel
    except ImportError as error:
        raise UnknownMegatronError(f"{_UNKNOWN}: {error}") from error
    kinds = [getattr(experts, name, None) for name in ("TEGroupedMLP", "SequentialMLP")]
    wanted = ["self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"]
    for name, kind in zip(("TEGroupedMLP", "SequentialMLP"), kinds):
        given = list(inspect.signature(kind.forward).parameters)[:4] if kind else []
        expect(given == wanted, f"{name}.forward takes {given}, not {wanted}")
        expect(hasattr(kind, "backward_dw"), f"{name} has no backward_dw")
    hook = getattr(DistributedDataParallel, "_make_backward_post_hook", None)
    given = list(inspect.signature(hook).parameters) if hook else []
    expect(given == ["self", "param"], f"DistributedDataParallel._make_backward_post_hook takes {given}")
    expect(
        hasattr(DistributedDataParallel, "_make_forward_pre_hook"),
        "DistributedDataParallel has no _make_forward_pre_hook",
    )
    grouped, sequential = kinds
    note_layer = functools.partial(ours.note_layer, may_overlap=envs.expert_waves())
    return [
        _Patch(moe_layer.MoELayer, "__init__", note_layer, "MoELayer.__init__: ours looks at its experts"),
        _Patch(grouped, "forward", ours.forward_grouped, "TEGroupedMLP.forward: in grouped GEMMs, where that can be"),
        _Patch(grouped, "backward_dw", ours.delayed_grads, "TEGroupedMLP.backward_dw: of those in grouped GEMMs"),
        _Patch(sequential, "forward", ours.forward_grouped, "SequentialMLP.forward: likewise"),
        _Patch(
            DistributedDataParallel,
            "__init__",
            ours.note_ddp,
            "DistributedDataParallel.__init__: ours notes it, and calls its hooks for experts in grouped GEMMs",
        ),
    ]


def _patches_for_margins(expect: Callable[[Any, str], None]) -> list[_Patch]:
    """Return the further patches of EP_DISPATCHER_GEMM_SM_MARGIN."""
    from ep_dispatcher.integrations.megatron import margins

    try:
        from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    except ImportError as error:
        raise UnknownMegatronError(f"{_UNKNOWN}: {error}") from error
    run = getattr(TransformerLayerSchedulePlan, "run", None)
    given = list(inspect.signature(run).parameters)[:2] if run else []
    expect(given == ["f_layer", "b_layer"], f"TransformerLayerSchedulePlan.run takes {given}")
    text = "TransformerLayerSchedulePlan.run: GEMMs leave multiprocessors to communication beside them"
    return [_Patch(TransformerLayerSchedulePlan, "run", margins.around_overlap, text)]


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

    @functools.wraps(old)
    def check(config):
        check_names(config)
        graphs.keep_gradients(config)

    def check_names(config):
        if config.moe_flex_dispatcher_backend != NAME or config.num_moe_experts is None:
            return old(config)
        if config.moe_token_dispatcher_type != "flex":
            raise ValueError(
                f"--moe-token-dispatcher-type: given {config.moe_token_dispatcher_type}, allowed with "
                f"--moe-flex-dispatcher-backend {NAME}: flex"
            )
        if getattr(config, "moe_enable_deepep", False):
            raise ValueError(
                f"--moe-enable-deepep: given with --moe-flex-dispatcher-backend {NAME}, allowed: one of them"
            )
        # Megatron's checks go by names. During them ours has the name of a backend with the same features.
        if config.moe_shared_expert_overlap and _before(0, 18):
            config.moe_token_dispatcher_type = "alltoall"
        if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
            config.moe_flex_dispatcher_backend = "hybridep"
        capacity = config.moe_expert_capacity_factor, config.moe_pad_expert_input_to_capacity
        if "moe" in _graph_names(config):  # Megatron allows it only if rows are padded to a capacity
            config.moe_expert_capacity_factor = abs(capacity[0] or 1.0)
            config.moe_pad_expert_input_to_capacity = True
        try:
            old(config)
        finally:
            config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", NAME
            factor, config.moe_pad_expert_input_to_capacity = capacity
            config.moe_expert_capacity_factor = None if factor is None or factor < 0 else factor

    return check


def _graph_names(config) -> list[str]:
    """Return what CUDA graphs contain. It may still be a name, a list of names or members of an enum."""
    if config.cuda_graph_impl == "none":
        return []
    given = [getattr(config, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope")]
    return re.findall(r"\w+", str(given))


def _before(*version: int) -> bool:
    import megatron.core

    return _numbers(megatron.core.__version__) < version


def _pass_number_on(old):
    @functools.wraps(old)
    def set_layer_number(layer, layer_number):
        old(layer, layer_number)
        if is_ours(layer.config):
            layer.token_dispatcher.layer_number = layer_number

    return set_layer_number


def _keep_inputs(old):
    @functools.wraps(old)
    def should_free_input(name, is_moe, config, *rest):
        if is_moe and is_ours(config):
            config = copy.copy(config)
            config.moe_flex_dispatcher_backend = "hybridep"
        return old(name, is_moe, config, *rest)

    return should_free_input


def _skip_padding(old):
    return functools.wraps(old)(lambda config: is_ours(config) or old(config))
