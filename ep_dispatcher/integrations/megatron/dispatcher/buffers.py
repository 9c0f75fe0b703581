"""The buffers of a training job. All layers with the same group and the same kind of rows share one."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import ep_dispatcher as ep
from ep_dispatcher import checks, envs
from ep_dispatcher.gather import Gather, History
from ep_dispatcher.integrations.collectives import all_reduce
from ep_dispatcher.integrations.job_stats import JobSums
from ep_dispatcher.integrations.megatron.dispatcher import (
    arguments,
    megatron_config,
    rank_capacity,
    registration,
    routing,
)
from ep_dispatcher.integrations.messages import announce
from ep_dispatcher.memory import MAX_TOKENS, bytes_of, default_sms
from ep_dispatcher.topology import registered_group
from ep_dispatcher.wording import Wording

logger = logging.getLogger(__name__)


class MegatronWording(Wording):
    """Errors that speak of Megatron's routing map."""

    router_topk = 0  # of the first layer
    capacities: rank_capacity.Capacities | None = None  # if a rank capacity factor limits rows

    def reword(self, error: ep.PeerTimeoutError | ValueError) -> ep.PeerTimeoutError | ValueError:
        if isinstance(error, ValueError):
            if self.capacities is not None:
                error = rank_capacity.explained(error, self.capacities)
            error = routing.explained(error, self.router_topk)
        return super().reword(error)


class MegatronBuffer(ep.Buffer):
    """A buffer of Megatron's layers. The dispatcher itself keeps the plans that a recompute uses."""

    wording: MegatronWording
    caller_keeps_plans = caller_uses_anchors = True
    growth: History  # of the attempts to agree on a larger buffer
    capacities: rank_capacity.Capacities

    def make_wording(self) -> MegatronWording:
        return MegatronWording("layer {}, microbatch {}")

    def capacities_of(self, config) -> rank_capacity.Capacities:
        """Return what capacity factors multiply in this buffer, for layers of a TransformerConfig."""
        sizes = self.config
        share = rank_capacity.share_of_node(
            sizes.num_nodes,
            config.num_moe_experts,
            config.moe_router_topk,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
        )
        max_tokens = sizes.max_tokens_per_rank
        return rank_capacity.Capacities(max_tokens * sizes.num_topk, sizes.num_ranks, max_tokens, share)


@dataclass
class Buffers:
    """The buffers of this process, by group and kind of rows.

    Only the last buffer of a list is in use. The older and smaller ones stay for three reasons: replays of CUDA graphs
    write to their memory, code that torch.compile has compiled names them, and check_buffers raises errors that their
    last operations have found late. All old ones together take at most as much memory as the last one.
    """

    made: dict[tuple, list[MegatronBuffer]] = field(default_factory=dict)
    sums: JobSums = field(default_factory=JobSums)  # of their statistics, if these are to be logged
    has_warned: bool = False  # whether the warning that no size was given has been printed


_SIZE = arguments.flag("max_tokens_per_rank")


def shared_buffer(group: ProcessGroup, config, hidden_states: Tensor, topk_idx: Tensor, note: str) -> MegatronBuffer:
    """Return the buffer for these tokens [num_tokens, hidden]. The first use makes it, and is collective.

    Its size is max_tokens_per_rank of the arguments, else EP_DISPATCHER_MAX_TOKENS_PER_RANK. If neither is set, it is
    the larger of two numbers: the tokens by Megatron's arguments (sequence length x micro batch size), if there are
    any, and the most tokens of a rank in the first forward pass. Such a buffer grows when all ranks bring more tokens
    at once, and with ``variable_seq_lengths`` when any rank does.

    Raises ValueError on a rank that alone brings more, and PeerTimeoutError (with the note) if a rank does not arrive.
    """
    group = registered_group(group)
    num_tokens, hidden = hidden_states.shape
    num_topk = topk_idx.shape[1]
    num_experts = config.num_moe_experts * num_topk // config.moe_router_topk  # times the expert tensor parallel size
    redundant = arguments.redundant_experts_per_rank(config)
    key = (group, hidden, hidden_states.dtype, num_experts, num_topk, redundant)
    buffers = registration.process_wide(Buffers)
    made, given_size = buffers.made.get(key), arguments.max_tokens_per_rank(config)
    if made and given_size is not None:
        if num_tokens <= given_size and given_size == made[-1].config.max_tokens_per_rank:
            return made[-1]  # the usual case, with few checks
    if made is None:
        living = dist.distributed_c10d._world.pg_map
        ended = [old_key for old_key in buffers.made if old_key[0] not in living]
        for old_key in ended:  # a layer that still uses one of these buffers keeps it alive
            del buffers.made[old_key]
        made = buffers.made[key] = []
    max_tokens = _tokens_to_hold(made, group, config, num_tokens, given_size, note)
    if not made or max_tokens > made[-1].config.max_tokens_per_rank:
        try:
            buffer = MegatronBuffer(
                group,
                hidden=hidden,
                num_experts=num_experts,
                num_topk=num_topk,
                max_tokens_per_rank=max_tokens,
                dtype=hidden_states.dtype,
                num_sms=megatron_config.num_sms(config),
                redundant_experts_per_rank=redundant,
            )
        except ep.PeerTimeoutError as error:
            error.note = note
            raise
        buffer.growth = History(f"ep_dispatcher/grow/{buffer.id}")
        buffer.wording.router_topk = config.moe_router_topk
        buffer.capacities = buffer.capacities_of(config)
        if arguments.rank_capacity_factor(config) is not None:
            buffer.wording.capacities = buffer.capacities
        buffer.overlook(functools.partial(rank_capacity.note_overflow, capacities=buffer.capacities))
        if arguments.setting(config, "stats_interval"):
            buffers.sums.start(buffer)
        made.append(buffer)
        _announce(buffer)
    return made[-1]


def _tokens_to_hold(
    made: list[MegatronBuffer], group: ProcessGroup, config, num_tokens: int, given: int | None, note: str
) -> int:
    """Return the tokens per rank that the buffer has to hold. Collective for the first buffer, and if it may grow."""
    held, buffers = made[-1].config.max_tokens_per_rank if made else 0, registration.process_wide(Buffers)
    most = num_tokens
    if not made:
        most = _agree_on_first(group, num_tokens, given, note)
    if given is not None:
        if num_tokens > given:
            checks.refuse(f"hidden_states has {num_tokens} tokens, more than {_SIZE} {given} allows")
        return given
    if not made:
        by_arguments = _tokens_by_arguments()
        most = max(most, 1 if by_arguments is None else by_arguments)
        if by_arguments is None and group.rank() == 0 and not (config.variable_seq_lengths or buffers.has_warned):
            buffers.has_warned = True
            logger.warning(
                "ep_dispatcher: no size was given, so the buffers hold %d tokens per rank, the most that any rank "
                "brings in this first forward pass. It will be an error if one rank alone brings more later. Give %s, "
                "or use variable_seq_lengths where lengths vary.",
                most,
                _SIZE,
            )
    elif config.variable_seq_lengths:
        largest = torch.tensor(num_tokens, dtype=torch.int64, device="cpu")
        all_reduce(largest, dist.ReduceOp.MAX, group, about="agree on the number of tokens", note=note)
        most = int(largest)
    elif num_tokens > held:
        most = _agree_to_grow(group, made[-1], num_tokens)
    # Doubling bounds the memory of the old buffers together.
    return most if most <= held else max(most, 2 * held)


def check_buffers(note: str) -> None:
    """Wait for every buffer's operations, replays of CUDA graphs too, and raise their errors.

    Call it on all ranks at the same place, so that the buffers stay usable after a ValueError. With the note a
    PeerTimeoutError does not name the layer that was captured last.
    """
    with ExitStack() as stack:  # check all buffers, even if one raises
        for buffer in all_buffers():
            buffer.note = note
            stack.callback(buffer.check)


def max_sms_in_use() -> int:
    """Return the most multiprocessors that an operation of a buffer uses; 0 without a buffer on a GPU."""
    return max((buffer.live_engine().used_sms for buffer in all_buffers() if not buffer.is_destroyed), default=0)


def destroy_buffers() -> None:
    """Destroy every buffer of this process. Collective, like ``Buffer.destroy``. New ones are made when needed.

    Raises late errors of the buffers' last operations after all are destroyed.
    """
    with ExitStack() as stack:
        for buffer in all_buffers():
            stack.callback(buffer.destroy)
        registration.process_wide(Buffers).made.clear()


atexit.register(destroy_buffers)


def all_buffers() -> list[MegatronBuffer]:
    return [buffer for made in registration.process_wide(Buffers).made.values() for buffer in made]


def _announce(buffer: MegatronBuffer) -> None:
    import megatron.core

    active, config = registration.active(), buffer.config
    replaced = 0 if active is None else len(active.replaced)
    memory = bytes_of(config, buffer.engine, max(default_sms(config.num_sms).values())).total
    facts = f" ({replaced} of its functions and fields are replaced; memory of a rank: {memory / 2**20:.1f} MiB)"
    announce(f"megatron-core {megatron.core.__version__}", buffer, facts)


def _tokens_by_arguments() -> int | None:
    """Return the tokens of a rank in a microbatch by megatron.training's arguments; None if it is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    if args is None:
        return None
    ways = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return -(-args.seq_length // ways) * args.micro_batch_size


@torch.compiler.disable(reason="ranks agree on their hosts, with a time limit")
def _agree_on_first(group: ProcessGroup, num_tokens: int, given: int | None, note: str) -> int:
    """Return the most tokens of any rank, before the first buffer is made. Collective.

    Raises ValueError on all ranks if they were given different sizes, for example because an environment variable is
    set on some hosts only, or if any rank brings more than the size.
    """
    own: dict[str, Any] = dict(tokens=num_tokens, given=given)
    try:
        with Gather(group, envs.timeout_s()) as gather:
            everyone = gather("agree on the number of tokens", lambda: own)
    except ep.PeerTimeoutError as error:
        error.note = note
        raise
    sizes = [{_SIZE: one["given"]} for one in everyone]
    checks.require_same(sizes, none="no size", more=" (also by EP_DISPATCHER_MAX_TOKENS_PER_RANK)")
    for rank, one in enumerate(everyone):
        if given is not None and one["tokens"] > given:
            checks.refuse(f"hidden_states has {one['tokens']} tokens on rank {rank}, more than {_SIZE} {given} allows")
    return max(one["tokens"] for one in everyone)


@torch.compiler.disable(reason="ranks agree on their hosts, with a time limit")
def _agree_to_grow(group: ProcessGroup, buffer: MegatronBuffer, num_tokens: int) -> int:
    """Return the most tokens of any rank if every rank brings more than the buffer holds; otherwise raise ValueError.

    All ranks that have come here make the same decision (gather.py): all grow, or all raise. A rank that alone brings
    more waits out its limit, because the others may come a little later.
    """
    rank, limit_s, held = group.rank(), envs.timeout_s(), buffer.config.max_tokens_per_rank
    buffer.growth.attempts = 0  # do not count calls that only some ranks made
    try:
        with Gather(group, limit_s, history=buffer.growth) as gather:
            everyone = gather("agree on a larger size", lambda: num_tokens)
    except ep.PeerTimeoutError as late:
        if late.reason:  # the store does not answer, so nobody knows what the others bring
            raise
        others = [r for r in late.late_ranks if r != rank]
        if others:
            found = f"in {limit_s:g} s at most {held} on rank {', '.join(map(str, others))}"
        else:
            found = f"at most {held} on another rank, which has given up waiting for this one"
        checks.refuse(
            f"hidden_states has {num_tokens} tokens on rank {rank}, and {found}; the buffers hold {held}. Where ranks "
            f"bring different numbers of tokens, give the largest to {_SIZE}, or use variable_seq_lengths"
        )
    for r, tokens in enumerate(everyone):  # the store may hold anything
        if type(tokens) is not int or not held < tokens <= MAX_TOKENS:
            raise RuntimeError(
                f"the store says that rank {r} brings {tokens} tokens, but a rank that agrees to grow brings more than "
                f"{held} and at most {MAX_TOKENS}"
            )
    return max(everyone)
