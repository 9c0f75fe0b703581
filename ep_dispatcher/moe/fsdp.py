"""FSDP2 around the experts of ep.MoELayer: ``layer.fully_shard_experts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ep_dispatcher.buffer import Buffer


def shard_experts(
    experts: nn.Module,
    buffer: Buffer,
    mesh: DeviceMesh,
    *,
    keeps_inputs: bool,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
    ignored_params: set[nn.Parameter] | None,
) -> FSDPModule:
    """Apply fully_shard to the experts. ValueError for a mesh or a policy that cannot be right for this buffer.

    keeps_inputs: FSDP2 must not cast the inputs of the experts, because topk_weights are among them
    """
    _check_mesh(buffer, mesh)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        if mp_policy.param_dtype not in (None, buffer.config.dtype):
            raise ValueError(
                f"mp_policy.param_dtype is {mp_policy.param_dtype}, but the rows of the buffer are "
                f"{buffer.config.dtype}: give both the same dtype"
            )
        options["mp_policy"] = dataclasses.replace(mp_policy, cast_forward_inputs=False) if keeps_inputs else mp_policy
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    if ignored_params is not None:
        options["ignored_params"] = ignored_params
    num_shards = mesh.size(mesh.ndim - 1)  # with two dimensions, the first one is for copies
    if shard_placement_fn is None and buffer.num_local_experts < num_shards:
        shard_placement_fn = _shard_other_dimension(num_shards)
    return fully_shard(experts, mesh=mesh, shard_placement_fn=shard_placement_fn, **options)


def _shard_other_dimension(num_shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a placement for fewer experts than shards: sharded by expert, some shards would be empty."""

    def placement(p: nn.Parameter) -> Shard | None:
        local: Tensor = p.to_local() if isinstance(p, DTensor) else p
        for dim in range(1, local.ndim):
            if local.shape[dim] % num_shards == 0:
                return Shard(dim)
        return None

    return placement


def _check_mesh(buffer: Buffer, mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, but must be the DeviceMesh of the replicas of the experts")
    if buffer.mesh is None:
        raise ValueError(
            "buffer was made from a process group, but FSDP2 needs to know the mesh of its ranks: make it from a "
            'dimension of a named mesh, as ep.Buffer(mesh["experts"], ...), and give another dimension of it here'
        )
    rank = dist.get_rank()
    shared = set(dist.get_process_group_ranks(buffer.config.group)) & set(mesh.mesh.flatten().tolist())
    if shared != {rank}:
        raise ValueError(
            f"mesh has the ranks {sorted(shared)} of the buffer, and they have different experts: give the mesh of the "
            f"ranks with the experts of rank {rank}, its replicas"
        )
