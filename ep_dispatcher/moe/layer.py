"""MoELayer: a router, experts sharded over the ranks of a buffer, dispatch and combine, as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ep_dispatcher import checks
from ep_dispatcher.argument_types import ActivationName, QuantizeBlocks
from ep_dispatcher.autograd import check_buffer, combine, dispatch
from ep_dispatcher.buffer import Buffer
from ep_dispatcher.moe.activation import Activation
from ep_dispatcher.moe.gradients import scale_gradient
from ep_dispatcher.moe.mlp import check_options, moe_mlp

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy

Device = torch.device | str | int | None
Dtype = torch.dtype | None


class MoELayer(nn.Module):
    """y = the sum over a token's top-k experts of weight * expert(x), each expert on the rank that owns it.

        buffer = ep.Buffer(mesh["ep"], hidden=2048, num_experts=64, num_topk=6, max_tokens_per_rank=4096)
        layer = ep.MoELayer(buffer, intermediate=1408)
        y = layer(x)                            # x and y: [..., hidden], of all tokens of this rank

    buffer        any number of layers may share it. For fully_shard make it from a dimension of a named mesh
    intermediate  width inside an expert of ep.moe_mlp, whose w1 and w2 the layer makes. None if `experts` is given
    bias          whether these experts also have b1 and b2, which begin as zeros
    router        a module: rows [num_tokens, hidden] -> topk_idx, topk_weights as ep.dispatch takes them. None: the
                  num_topk largest of softmax(rows @ weight.T), divided by their sum, computed in float32
    experts       a module or function: out.x, out.tokens_per_expert of ep.dispatch -> results of the rows, before they
                  are weighted. None: the experts of ep.moe_mlp
    average_gradients  divide the gradients of the experts by the number of ranks of the buffer, as in ep.moe_mlp. It is
                  an attribute too, which can be set later
    activation, max_recv_rows, overlap, num_parts, keep_activated, quantize  as in ep.moe_mlp; with `experts` only
                  max_recv_rows
    device        device of new parameters. None: that of a surrounding torch.device, otherwise the buffer's
    dtype         dtype of new parameters, as for torch.nn.Linear. Weights and biases of experts with another dtype than
                  the buffer's are cast in each call, so they may be float32. FSDP2's policy casts less often

    The parameters of ``layer.experts`` are DTensors of all experts, Shard(0) over the buffer's ranks. So fully_shard
    over the replicas of the experts and torch.distributed.checkpoint work, also with another number of ranks. Each
    parameter of a given module becomes such a DTensor: its first dimension must be num_local_experts, and ``forward``
    uses its ``to_local()``. The gradient of an expert is the gradient of the sum of the ranks' losses. With
    ``fully_shard_experts`` it is the gradient of their mean, as FSDP2 makes it for other parameters. With DDP give
    ``average_gradients=True`` (docs/pytorch.md).

    y has the buffer's dtype. Collective operations, their errors and torch.autocast are as in ep.moe_mlp. A copy of the
    layer shares the buffer. Pickling is a TypeError: save the state_dict().

    Raises ValueError for arguments that are not allowed, or would have no effect.
    """

    def __init__(
        self,
        buffer: Buffer,
        intermediate: int | None = None,
        *,
        bias: bool = False,
        router: nn.Module | None = None,
        experts: Callable[[Tensor, Tensor], Tensor] | None = None,
        average_gradients: bool = False,
        activation: ActivationName | Activation = "swiglu",
        max_recv_rows: int | None = None,
        overlap: bool = True,
        num_parts: int | None = None,
        keep_activated: bool = True,
        quantize: QuantizeBlocks | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ):
        super().__init__()
        check_buffer(buffer)
        checks.boolean("bias", bias)
        for name, module in (("router", router), ("experts", experts)):
            if module is not None and not callable(module):
                checks.fail(name, f"of type {type(module).__name__}", "a module")
        if max_recv_rows is not None:
            max_recv_rows = checks.integer("max_recv_rows", max_recv_rows, 0)
        options = dict(
            activation=activation,
            overlap=overlap,
            num_parts=num_parts,
            keep_activated=keep_activated,
            quantize=quantize,
        )
        if experts is not None:
            if buffer.redundant_experts_per_rank:
                checks.refuse("buffer has redundant experts, whose copies only the layer's own experts have: give none")
            _refuse_with_experts(intermediate, bias, options)
            if router is not None and (device is not None or dtype is not None):
                raise ValueError(
                    f"device and dtype are {device} and {dtype}, but of new parameters, and with router and experts "
                    "there are none"
                )
        self.buffer, self.max_recv_rows = buffer, max_recv_rows
        self.average_gradients = checks.boolean("average_gradients", average_gradients)
        self._own_experts = experts is not None
        if device is None and torch.get_default_device().type == "cpu":
            device = buffer.engine  # engines have the names of their devices
        self.router = router if router is not None else TopKRouter(buffer, device, dtype)
        if experts is None:
            intermediate = checks.integer("intermediate", intermediate, 1)
            options["max_recv_rows"] = max_recv_rows
            experts = MLPExperts(buffer, intermediate, bias, options, device, dtype)
        elif isinstance(experts, nn.Module):
            shard_by_expert(experts, buffer)
        self.experts: Callable[..., Tensor] = experts

    if TYPE_CHECKING:  # nn.Module's own __call__ takes and returns anything

        def __call__(self, x: Tensor) -> Tensor: ...

    def reset_parameters(self) -> None:
        """Draw new values: call reset_parameters of the router and of the experts."""
        for module in self.children():
            if next(module.parameters(), None) is not None:
                module.reset_parameters()  # type: ignore[operator]  # an AttributeError says which module has none

    def forward(self, x: Tensor) -> Tensor:
        """Return y of x's shape and the buffer's dtype, for x [..., hidden] of that dtype: all tokens of this rank.

        All ranks must call it, as ep.moe_mlp. Under torch.autocast of the buffer's dtype x is cast.

        Raises ValueError before anything is sent if x has another last dimension or dtype, or more than
        max_tokens_per_rank tokens.
        """
        hidden = self.buffer.config.hidden
        checks.dtensor("x", x)
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[-1] != hidden:
            given = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"x is {given}, but must be a tensor [..., {hidden}] of the tokens of this rank")
        rows = x.reshape(-1, hidden)
        topk_idx, topk_weights = self.router(rows)
        if not self._own_experts:
            y = self.experts(rows, topk_idx, topk_weights, self.average_gradients)
        else:
            out = dispatch(self.buffer, rows, topk_idx, topk_weights, max_recv_rows=self.max_recv_rows)
            assert isinstance(out.x, Tensor) and out.topk_weights is not None  # because the arguments were tensors
            y = self._run_own_experts(out.x, out.tokens_per_expert) * out.topk_weights[:, None]
            y = combine(self.buffer, y.to(self.buffer.config.dtype), out.handle)
        # Return no view, as torch.nn.Linear does: with a view, `y += ...` would lose the hook of FSDP2's backward.
        return y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)  # noqa: SLF001

    def _run_own_experts(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Run the experts that the user gave. To average their gradients, scale the gradient that they get.

        The layer does not handle their parameters, so it divides the gradient of their results, and multiplies the
        gradient of their rows to undo that. The number of ranks is nearly always a power of two, so this is exact.
        """
        if not self.average_gradients:
            return self.experts(rows, tokens_per_expert)
        num_ranks = self.buffer.topology.num_ranks
        return scale_gradient(self.experts(scale_gradient(rows, num_ranks), tokens_per_expert), 1 / num_ranks)

    def fully_shard_experts(
        self,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        ignored_params: set[nn.Parameter] | None = None,
    ) -> FSDPModule:
        """Apply ``fully_shard`` to the experts, over their replicas. Return ``layer.experts``.

            mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("replicas", "experts"))
            layer = ep.MoELayer(ep.Buffer(mesh["experts"], ...), ...)
            layer.fully_shard_experts(mesh["replicas"])
            fully_shard(layer.router, mesh=world)       # all other parameters: over all ranks
            fully_shard(layer, mesh=world)

        mesh        the ranks with the same experts as this one, even if it is the only one: a dimension of the mesh
                    that the buffer was made from, or two dimensions for copies of the shards
        mp_policy   its param_dtype must be the buffer's dtype or None. The inputs of the layer's own experts are not
                    cast, because topk_weights stay float32: give x in the buffer's dtype
        the others  as in fully_shard. With fewer local experts than shards another dimension is sharded by default

        From here on ``average_gradients`` is True, so that all gradients are gradients of the mean of the ranks'
        losses, with any number of replicas and microbatches. No set_gradient_divide_factor is needed. If the ranks'
        losses are to be summed, set ``layer.average_gradients = False``, and that factor to 1 for experts as for all
        other parameters.

        Raises ValueError for experts without a module, for another mesh, and for a policy of another dtype.
        """
        from ep_dispatcher.moe.fsdp import shard_experts

        if self.buffer.redundant_experts_per_rank:
            checks.refuse(
                "buffer has redundant experts, whose weights have to be whole on their rank: do not shard them"
            )
        if not isinstance(self.experts, nn.Module):
            raise ValueError("experts is a function, so the layer does not know their parameters: give a module")
        sharded = shard_experts(
            self.experts,
            self.buffer,
            mesh,
            keeps_inputs=not self._own_experts,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
        )
        self.average_gradients = True
        return sharded

    def extra_repr(self) -> str:
        return f"{self.buffer!r}, average_gradients={self.average_gradients}"


def _refuse_with_experts(intermediate: int | None, bias: bool, options: dict[str, Any]) -> None:
    """Refuse arguments that only the layer's own experts use."""
    if intermediate is not None or bias:
        checks.refuse(f"intermediate is {intermediate} and bias is {bias}, but a layer with experts has its own")
    for name, value in options.items():
        default = (moe_mlp.__kwdefaults__ or {})[name]
        if value is not default and value != default:
            raise ValueError(f"{name} is {value!r}, but has no effect on given experts: leave it at {default!r}")


class TopKRouter(nn.Module):
    """Chooses the experts with the largest probabilities for each row, and divides these by their sum."""

    def __init__(self, buffer: Buffer, device: Device, dtype: Dtype):
        super().__init__()
        config, self.num_topk = buffer.config, buffer.config.num_topk
        self.weight = nn.Parameter(torch.empty(buffer.num_experts, config.hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill_normal(self.weight)

    def extra_repr(self) -> str:
        num_experts, hidden = self.weight.shape
        return f"hidden={hidden}, num_experts={num_experts}, num_topk={self.num_topk}"

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):  # in bfloat16 many probabilities would be equal
            logits = F.linear(rows.float(), self.weight.float())
            topk_weights, topk_idx = logits.softmax(-1).topk(self.num_topk)
            return topk_idx, topk_weights / topk_weights.sum(-1, keepdim=True)


class MLPExperts(nn.Module):
    """The experts of ep.moe_mlp. Its forward is the whole layer, because FSDP2 gathers parameters for a ``forward``."""

    def __init__(
        self, buffer: Buffer, intermediate: int, bias: bool, options: dict[str, Any], device: Device, dtype: Dtype
    ):
        super().__init__()
        self.buffer, self.intermediate = buffer, intermediate
        self.options = check_options(buffer, intermediate, options)
        hidden, pair = buffer.config.hidden, self.options["activation"].pair

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(buffer.num_local_experts, *shape, device=device, dtype=dtype))

        self.w1, self.w2 = parameter(pair * intermediate, hidden), parameter(hidden, intermediate)
        self.b1: Any = parameter(pair * intermediate) if bias else None
        self.b2: Any = parameter(hidden) if bias else None
        shard_by_expert(self, buffer)
        self.reset_parameters()

    def extra_repr(self) -> str:
        config = self.buffer.config
        return (
            f"num_experts={self.buffer.num_experts}, num_local_experts={self.buffer.num_local_experts}, "
            f"hidden={config.hidden}, intermediate={self.intermediate}, bias={self.b1 is not None}, "
            f"activation={self.options['activation']}"
        )

    def _local_in_buffer_dtype(self, p: Tensor) -> Tensor:
        """Return the part of a parameter on this rank in the buffer's dtype. The gradient has the parameter's dtype."""
        local = p.to_local() if isinstance(p, DTensor) else p
        return local.to(self.buffer.config.dtype)

    def reset_parameters(self) -> None:
        for p in self.parameters():
            if p.ndim == 3:
                fill_normal(p)
            else:  # a bias
                nn.init.zeros_(p)

    def forward(self, rows: Tensor, topk_idx: Tensor, topk_weights: Tensor, average_gradients: bool = False) -> Tensor:
        w1, w2 = self._local_in_buffer_dtype(self.w1), self._local_in_buffer_dtype(self.w2)
        b1 = None if self.b1 is None else self._local_in_buffer_dtype(self.b1)
        b2 = None if self.b2 is None else self._local_in_buffer_dtype(self.b2)
        options = self.options | {"average_gradients": average_gradients}
        return moe_mlp(self.buffer, rows, topk_idx, topk_weights, w1, w2, b1=b1, b2=b2, **options)


def shard_by_expert(experts: nn.Module, buffer: Buffer) -> None:
    """Replace each parameter, which holds this rank's experts, by a DTensor of all experts.

    ValueError if the first dimension of a parameter is not that of this rank's experts.
    """
    device, num_local = buffer.live_engine().device, buffer.num_local_experts
    mesh = buffer.mesh if buffer.mesh is not None else DeviceMesh.from_group(buffer.config.group, device)
    if mesh.device_type != device:
        checks.refuse(f"buffer was made with a mesh of device {mesh.device_type!r}, but its engine needs {device!r}")
    for prefix, module in experts.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            if isinstance(p, DTensor):
                continue  # a layer made of another layer's experts
            if p.ndim == 0 or p.shape[0] != num_local:
                checks.refuse(
                    f"experts has a parameter {name} of {[*p.shape]}, but its first size has to be "
                    f"num_local_experts = {num_local}"
                )
            sharded = DTensor.from_local(p.detach(), mesh, [Shard(0)], run_check=False)
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(sharded, p.requires_grad))


@torch.no_grad()
def fill_normal(p: Tensor) -> None:
    """Draw from a normal distribution whose standard deviation is 1 / sqrt(the last dimension).

    Ranks with the same torch.manual_seed draw the same values for the same part of a parameter, and different values
    for different parts. PyTorch itself does so on GPUs only.
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
