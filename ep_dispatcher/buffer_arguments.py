"""Checks the arguments of ep.Buffer, compares them between all ranks, and makes the configuration of the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, PrefixStore, ProcessGroup

from ep_dispatcher import checks, engines, envs
from ep_dispatcher._version import __version__
from ep_dispatcher.argument_types import EngineName
from ep_dispatcher.balance.balancer import MAX_SLOTS, check_redundant_experts
from ep_dispatcher.engines.base import EngineConfig
from ep_dispatcher.gather import Gather
from ep_dispatcher.memory import DEFAULT_NCCL_SMS, MAX_NCCL_SMS, check_masks, check_size
from ep_dispatcher.nvlink import find_nodes
from ep_dispatcher.topology import GroupReference, host_id, registered_group
from ep_dispatcher.wording import Wording


@dataclass(frozen=True)
class BufferArguments:
    """The arguments of ep.Buffer except the group, as the caller gave them."""

    hidden: int
    num_experts: int
    num_topk: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    engine: str
    ranks_per_node: int | str | None
    timeout_s: float | None
    num_sms: int | None
    nccl_sms: int | None
    suspendable: bool
    mask_late_ranks: bool
    redundant_experts_per_rank: int
    max_tokens_to_node: int | None

    @property
    def limit_s(self) -> float:
        """The limit of each step of making the buffer.

        If timeout_s is wrong this is the default, so that all ranks meet and learn of the error.
        """
        try:
            return self._checked_timeout_s()
        except ValueError:
            return envs.timeout_s.default

    def own_settings(self, num_ranks: int) -> dict[str, Any]:
        """Check the arguments. Return this rank's settings as plain data. Entries of "same" must agree on all ranks."""
        envs.warn_of_unknown()
        engine = engines.choose(envs.engine() if self.engine == "auto" else self.engine)
        ranks_per_node = self._checked_ranks_per_node(engine)
        timeout_s = self._checked_timeout_s()
        sizes = checks.buffer_sizes(
            num_ranks, self.hidden, self.num_experts, self.num_topk, self.max_tokens_per_rank, self.dtype
        )
        dtype = str(sizes.pop("dtype"))  # plain data
        nccl_sms = DEFAULT_NCCL_SMS
        if self.nccl_sms is not None:
            nccl_sms = checks.integer("nccl_sms", self.nccl_sms, 1, MAX_NCCL_SMS)
        redundant = checks.integer("redundant_experts_per_rank", self.redundant_experts_per_rank, 0, MAX_SLOTS)
        if redundant and (self.suspendable is not False or self.mask_late_ranks is not False):
            checks.refuse(
                f"redundant_experts_per_rank is {redundant}, which does not go with suspendable=True or "
                "mask_late_ranks=True"
            )
        same = dict(
            **sizes,
            engine=engine,
            ranks_per_node=ranks_per_node,
            wire=envs.wire(),
            nccl_sms=nccl_sms,
            suspendable=checks.boolean("suspendable", self.suspendable),
            mask_late_ranks=checks.boolean("mask_late_ranks", self.mask_late_ranks),
            redundant_experts_per_rank=redundant,
            max_tokens_to_node=checks.tokens_to_node(self.max_tokens_to_node),
            version=__version__,
            dtype=dtype,
        )
        return dict(
            sizes=sizes,
            same=same,
            timeout_s=timeout_s,
            num_sms=None if self.num_sms is None else checks.integer("num_sms", self.num_sms, 1),
            host=host_id(),
            buffer_id=secrets.randbits(62),
        )

    def _checked_ranks_per_node(self, engine: str) -> int | str | None:
        ranks_per_node = envs.ranks_per_node() if self.ranks_per_node is None else self.ranks_per_node
        if ranks_per_node is None:
            return None
        if isinstance(ranks_per_node, str):
            if ranks_per_node != "nvlink" or engine != "cuda":
                allowed = "an integer of at least 1, or 'nvlink' with engine='cuda'"
                checks.fail("ranks_per_node", repr(ranks_per_node), allowed)
            return ranks_per_node
        return checks.integer("ranks_per_node", ranks_per_node, 1)

    def _checked_timeout_s(self) -> float:
        timeout_s = envs.timeout_s() if self.timeout_s is None else self.timeout_s
        checks.seconds("timeout_s", timeout_s)
        return timeout_s


def checked_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """Return the group of a buffer, the default one for None. ValueError if this process cannot have a buffer there."""
    if not dist.is_initialized():
        given = "None" if group is None else type(group).__name__
        checks.refuse(
            f"group is {given}, but torch.distributed is not initialised: call torch.distributed.init_process_group "
            "first"
        )
    return registered_group(dist.group.WORLD if group is None else group)


def agree_on_config(
    gather: Gather, group: ProcessGroup, arguments: BufferArguments, wording: Wording
) -> tuple[EngineName, EngineConfig]:
    """Exchange the settings of all ranks. Return the engine's name and its configuration, or one error on all ranks."""
    rank = group.rank()
    all_settings = gather("configuration", lambda: arguments.own_settings(group.size()))
    own, same = all_settings[rank], all_settings[rank]["same"]
    buffer_id = str(all_settings[0]["buffer_id"])
    hosts = [settings["host"] for settings in all_settings]
    with gather.same_on_all_ranks():
        checks.require_same([settings["same"] for settings in all_settings])
    topology, why_hosts = find_nodes(gather, rank, hosts, same["ranks_per_node"], same["engine"])
    redundant = same["redundant_experts_per_rank"]
    with gather.same_on_all_ranks():
        if redundant:
            check_redundant_experts(topology, redundant, own["sizes"], arguments.dtype)
        num_physical = same["num_experts"] + redundant * topology.num_ranks
        config = EngineConfig(
            num_nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_node,
            **own["sizes"] | dict(num_experts=num_physical),
            redundant_experts_per_rank=redundant,
            dtype=arguments.dtype,
            mask_late_ranks=same["mask_late_ranks"],
            group_reference=GroupReference(group),
            topology=topology,
            hosts=tuple(hosts),
            why_hosts=why_hosts,
            buffer_id=buffer_id,
            wording=wording,
            timeout_s=own["timeout_s"],
            num_sms=own["num_sms"],
            nccl_sms=same["nccl_sms"],
            suspendable=same["suspendable"],
            store=PrefixStore(f"ep_dispatcher/{buffer_id}", dist.distributed_c10d._get_default_store()),
            gather=gather,
        )
        check_size(config)
        check_masks(config, config.suspendable)
    return same["engine"], config
