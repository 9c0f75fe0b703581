"""A layer of experts as a module: a router, experts sharded over the ranks of a buffer, dispatch and combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ep_dispatcher import checks
from ep_dispatcher.autograd import check_buffer, combine, dispatch
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.moe import activation as activations
from ep_dispatcher.moe.mlp import moe_mlp

Device = torch.device | str | int | None
Dtype = torch.dtype | None


class MoELayer(nn.Module):
    """y = the sum over a token's top-k experts of weight * expert(x), each expert on the rank that owns it.

        buffer = ep.Buffer(mesh["ep"], hidden=2048, num_experts=64, num_topk=6, max_tokens_per_rank=4096)
        layer = ep.MoELayer(buffer, intermediate=1408)
        y = layer(x)                            # x and y: [..., hidden], of all tokens of this rank

    buffer        any number of layers may share it. For fully_shard make it from a dimension of a named mesh
    intermediate  width inside an expert of ep.moe_mlp, with w1 and w2 as there. None if `experts` is given
    bias          whether these experts have b1 and b2 too, which begin as zeros
    router        a module: rows [num_tokens, hidden] -> topk_idx, topk_weights as ep.dispatch takes them. None: the
                  num_topk largest of softmax(rows @ weight.T), divided by their sum, computed in float32
    experts       a module or function: out.x, out.tokens_per_expert of ep.dispatch -> results of the rows, before they
                  are weighted. None: those of ep.moe_mlp
    device, dtype of new parameters, as for torch.nn.Linear. Without autocast or FSDP2's policy use the buffer's dtype
    options       of ep.moe_mlp: activation, max_recv_rows, overlap, num_parts, keep_activated, quantize; with `experts`
                  only max_recv_rows

    ``layer.experts`` has DTensors of all experts, Shard(0) over the buffer's ranks. So fully_shard over the replicas of
    the experts and torch.distributed.checkpoint work, also with another number of ranks. Each parameter of a given
    module becomes one: it begins with a dimension of num_local_experts, and ``forward`` uses its ``to_local()``.
    The gradient of an expert sums over the tokens of all ranks of the buffer, so divide it by their number where other
    gradients are means over the ranks (docs/pytorch.md).

    y has the buffer's dtype. Operations of all ranks, their errors and torch.autocast are as in ep.moe_mlp. A copy
    shares the buffer. Pickling is a TypeError: save the state_dict().

    Raises ValueError for arguments that are not allowed.
    """

    def __init__(
        self,
        buffer: Buffer,
        intermediate: int | None = None,
        *,
        bias: bool = False,
        router: nn.Module | None = None,
        experts: Callable[[Tensor, Tensor], Tensor] | None = None,
        device: Device = None,
        dtype: Dtype = None,
        **options: Any,
    ):
        super().__init__()
        check_buffer(buffer)
        allowed = {*(moe_mlp.__kwdefaults__ or {})} - {"b1", "b2"} if experts is None else {"max_recv_rows"}
        if unknown := {*options} - allowed:
            checks.fail("options", sorted(unknown), f"{sorted(allowed)}{' with experts' if experts else ''}")
        if experts is not None and (intermediate is not None or bias):
            checks.fail("intermediate, bias", f"{intermediate}, {bias} with experts", "None, False with experts")
        checks.boolean("bias", bias)
        for name, part in (("router", router), ("experts", experts)):
            if part is not None and not callable(part):
                checks.fail(name, type(part).__name__, "a module")
        self.buffer, self.options = buffer, options
        self._own_experts = experts is not None
        self.router = router if router is not None else TopKRouter(buffer, device, dtype)
        if experts is None:
            intermediate = checks.integer("intermediate", intermediate, 1)
            experts = MLPExperts(buffer, intermediate, bias, options, device, dtype)
        elif isinstance(experts, nn.Module):
            shard_by_expert(experts, buffer)
        self.experts: Callable[..., Tensor] = experts

    def reset_parameters(self) -> None:
        """Draw new values with the methods of this name that the router and the experts have."""
        for part in self.children():
            if next(part.parameters(), None) is not None:
                part.reset_parameters()  # type: ignore[operator]  # an AttributeError says which module has none

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(rows)
        if not self._own_experts:
            y = self.experts(rows, topk_idx, topk_weights)
        else:
            out = dispatch(self.buffer, rows, topk_idx, topk_weights, **self.options)
            assert isinstance(out.x, Tensor) and out.topk_weights is not None  # as rows and topk_weights were given
            y = self.experts(out.x, out.tokens_per_expert) * out.topk_weights[:, None]
            y = combine(self.buffer, y.to(self.buffer.config.dtype), out.handle)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        return repr(self.buffer)


class TopKRouter(nn.Module):
    """The largest probabilities of each row and their experts; the probabilities are divided by their sum."""

    def __init__(self, buffer: Buffer, device: Device, dtype: Dtype):
        super().__init__()
        config, self.num_topk = buffer.config, buffer.config.num_topk
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_normal(self.weight)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):  # in bfloat16 many probabilities would be equal
            logits = F.linear(rows.float(), self.weight.float())
            topk_weights, topk_idx = logits.softmax(-1).topk(self.num_topk)
            return topk_idx, topk_weights / topk_weights.sum(-1, keepdim=True)


class MLPExperts(nn.Module):
    """The experts of ep.moe_mlp. It calls moe_mlp, because FSDP2 gathers parameters for the ``forward`` of a module."""

    def __init__(
        self, buffer: Buffer, intermediate: int, bias: bool, options: dict[str, Any], device: Device, dtype: Dtype
    ):
        super().__init__()
        self.buffer, self.options = buffer, options
        hidden, pair = buffer.config.hidden, activations.checked(options.get("activation", "swiglu")).pair

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(buffer.num_local_experts, *shape, device=device, dtype=dtype))

        self.w1, self.w2 = parameter(pair * intermediate, hidden), parameter(hidden, intermediate)
        self.b1: Any = parameter(pair * intermediate) if bias else None
        self.b2: Any = parameter(hidden) if bias else None
        shard_by_expert(self, buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            fill_normal(p) if p.ndim == 3 else nn.init.zeros_(p)

    def forward(self, rows: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        given: tuple[Any, ...] = (self.w1, self.w2, self.b1, self.b2)
        w1, w2, b1, b2 = (p.to_local() if isinstance(p, DTensor) else p for p in given)
        return moe_mlp(self.buffer, rows, topk_idx, topk_weights, w1, w2, b1=b1, b2=b2, **self.options)


def shard_by_expert(experts: nn.Module, buffer: Buffer) -> None:
    """Make each parameter, which has this rank's experts, a DTensor of all experts. ValueError for another shape."""
    device, num_local = buffer.live_engine().device, buffer.num_local_experts
    mesh = buffer.mesh if buffer.mesh is not None else DeviceMesh.from_group(buffer.config.group, device)
    if mesh.device_type != device:
        checks.fail("buffer", f"one made with a mesh of device {mesh.device_type!r}", f"a mesh of {device!r}")
    for prefix, module in experts.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            if isinstance(p, DTensor):
                continue  # a layer made of another layer's experts
            if p.ndim == 0 or p.shape[0] != num_local:
                checks.fail("experts", f"a parameter {name} of {[*p.shape]}", f"[num_local_experts = {num_local}, ...]")
            sharded = DTensor.from_local(p.detach(), mesh, [Shard(0)], run_check=False)
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(sharded, p.requires_grad))


@torch.no_grad()
def fill_normal(p: Tensor) -> None:
    """Draw from a normal distribution whose deviation is the root of 1 / the last dimension.

    Ranks with the same torch.manual_seed draw the same values for the same part of a parameter, and others for other
    parts. PyTorch itself draws so on GPUs only.
    """
    seed, local = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")), p
    if isinstance(p, DTensor):
        local, mesh, part = p.to_local(), p.device_mesh, 0
        for dim, placement in enumerate(p.placements):
            if not placement.is_replicate():
                part = part * mesh.size(dim) + mesh.get_local_rank(dim)
        seed += part
    if not local.is_meta:
        generator = torch.Generator(local.device).manual_seed(seed)
        local.normal_(0, p.shape[-1] ** -0.5, generator=generator)
