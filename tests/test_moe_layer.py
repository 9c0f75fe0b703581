"""ep.MoELayer: a dense layer of the same parameters, with FSDP2, DDP, checkpoints and other numbers of ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from conftest import on_ranks
from test_autograd import normal
from test_errors import assert_refused, error_of
from test_experts import swiglu_experts
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of, same_bits

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 16, 24, 8, 3, 20
ALL_ROWS = 4 * NUM_TOKENS * NUM_TOPK  # of any routing of up to 4 ranks
CLOSE = dict(rtol=1e-4, atol=1e-5)


def make_buffer(group, dtype=torch.float32, **options) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=NUM_TOKENS)
    return ep.Buffer(group, **sizes, dtype=dtype, **options)


def mesh_of(engine: str, num_replicas: int = 1):
    shape = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh(engine, shape, mesh_dim_names=("replicas", "ep"))


def make_layer(buffer: ep.Buffer, **options) -> ep.MoELayer:
    torch.manual_seed(5)
    return ep.MoELayer(buffer, INTERMEDIATE, device=buffer.engine, **options)


def whole(t: Tensor) -> Tensor:
    if not isinstance(t, DTensor):
        return t.detach().clone()
    if not t.is_cuda:
        return t.full_tensor().detach().clone()
    group = t.device_mesh.get_group()  # full_tensor() would need NCCL, and so a GPU per rank
    parts: list[Tensor] = [t] * group.size()
    dist.all_gather_object(parts, t.to_local().detach().cpu(), group)
    return torch.cat(parts).to(t.device)


def tokens(rank: int, device: str) -> Tensor:
    return normal((2, NUM_TOKENS // 2, HIDDEN), 30 + rank).to(device)


def loss_of(y: Tensor, rank: int) -> Tensor:
    return (y.float() * normal(tuple(y.shape), 60 + rank).to(y.device)).sum()


def gelu_experts(rows: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    hidden = F.gelu(torch.einsum("th,eih->tei", rows, w1) + b1)
    return torch.einsum("tei,ehi->teh", hidden, w2) + b2


def dense(x: Tensor, gate: Tensor, *experts: Tensor) -> Tensor:
    """The layer in one process that has all experts; those with biases have GELU."""
    rows = x.flatten(0, 1)
    weights, chosen = F.linear(rows, gate).softmax(-1).topk(NUM_TOPK)
    run = swiglu_experts if len(experts) == 2 else gelu_experts
    of_chosen = run(rows, *experts).gather(1, chosen[:, :, None].expand(-1, -1, HIDDEN))
    return (of_chosen * (weights / weights.sum(1, keepdim=True))[:, :, None]).sum(1).view(x.shape)


def assert_dense(layer: nn.Module, y: Tensor, x: Tensor, divisor: int) -> None:
    """Results and all gradients are those of the sum of all ranks' losses, divided."""
    parameters = dict(layer.named_parameters())
    leaves = [whole(p).requires_grad_() for p in parameters.values()]
    inputs = [tokens(rank, x.device.type).requires_grad_() for rank in range(dist.get_world_size())]
    results = [dense(one, *leaves) for one in inputs]
    (sum(map(loss_of, results, range(len(results)))) / divisor).backward()
    torch.testing.assert_close(y, results[dist.get_rank()], **CLOSE)
    torch.testing.assert_close(x.grad / divisor, inputs[dist.get_rank()].grad, **CLOSE)
    for (name, p), leaf in zip(parameters.items(), leaves):
        assert leaf.grad.abs().sum() > 0.1, name
        torch.testing.assert_close(whole(p.grad), leaf.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


class LoopedExperts(nn.Module):
    """Experts of a user."""

    def __init__(self, num_local: int, device: str):
        super().__init__()
        self.w1 = nn.Parameter(normal((num_local, 2 * INTERMEDIATE, HIDDEN), 1 + dist.get_rank()).to(device) / 4)
        self.w2 = nn.Parameter(normal((num_local, HIDDEN, INTERMEDIATE), 9 + dist.get_rank()).to(device) / 4)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        groups = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        matrices = zip(self.w1.to_local()[:, None], self.w2.to_local()[:, None])
        y = [swiglu_experts(x, w1, w2)[:, 0] for x, (w1, w2) in zip(groups, matrices)]
        return torch.cat([*y, groups[-1]])


@pytest.mark.parametrize("how", ["mesh", "group", "own experts", "limited rows", "biases"])
@on_ranks(2)
def test_it_is_the_dense_layer(rank, engine, how):
    device = device_of(engine, rank)
    with make_buffer(None if how == "group" else mesh_of(engine)["ep"], engine=engine) as buffer:
        options = {"max_recv_rows": ALL_ROWS} if how == "limited rows" else {}
        options |= dict(bias=True, activation="gelu") if how == "biases" else {}
        layer = make_layer(buffer, **options)
        if how == "biases":
            for seed, bias in enumerate((layer.experts.b1, layer.experts.b2)):
                assert not whole(bias).any()
                bias.data.to_local().copy_(normal(tuple(bias.to_local().shape), 2 * rank + seed))
        if how == "own experts":
            layer = ep.MoELayer(buffer, router=layer.router, experts=LoopedExperts(buffer.num_local_experts, device))
        x = tokens(rank, device).requires_grad_()
        y = layer(x)
        loss_of(y, rank).backward()
    dist.all_reduce(layer.router.weight.grad)
    assert_dense(layer, y, x, divisor=1)


@on_ranks(2)
def test_autocast_and_compile_keep_results(rank, engine):
    device = device_of(engine, rank)
    with make_buffer(mesh_of(engine)["ep"], torch.bfloat16, engine=engine) as buffer:
        layer = make_layer(buffer, max_recv_rows=ALL_ROWS)  # of float32
        x = tokens(rank, device)
        assert_refused("x", layer, x)
        torch._dynamo.reset()
        with torch.autocast(device.partition(":")[0], torch.bfloat16):
            eager, compiled = layer(x), torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
            layer.experts = torch.compile(layer.experts, backend="aot_eager")
            assert same_bits(layer(x), compiled)
        half = copy.deepcopy(make_layer(buffer)).to(torch.bfloat16)(x.bfloat16())
    assert eager.dtype == half.dtype == torch.bfloat16 and eager.abs().mean() > 0.01
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(half, eager, rtol=5e-2, atol=5e-2)


def draw_again(layer: ep.MoELayer) -> None:
    layer.to_empty(device=layer.buffer.engine)
    torch.manual_seed(5)
    layer.reset_parameters()


@on_ranks(4)
def test_parameters_made_on_meta_are_those_made_at_once(rank, engine):
    device_of(engine, rank)
    mesh = mesh_of(engine, 2)
    with make_buffer(mesh["ep"], engine=engine) as buffer:
        made = make_layer(buffer)
        with torch.device("meta"):
            layer = ep.MoELayer(buffer, INTERMEDIATE)
        assert all(p.is_meta for p in layer.parameters())
        draw_again(layer)
        assert "Buffer(rank" in repr(layer)
    for one, other in zip(made.parameters(), layer.parameters(), strict=True):
        assert same_bits(whole(one).cpu(), whole(other).cpu())
        assert abs(float(whole(one).std()) * one.shape[-1] ** 0.5 - 1) < 0.25
    of_experts = whole(layer.experts.w1).flatten(1)
    assert len(of_experts.unique(dim=0)) == NUM_EXPERTS


def sharded_layer(mesh, buffer: ep.Buffer) -> ep.MoELayer:
    """As docs/pytorch.md has it."""
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        layer = ep.MoELayer(buffer, INTERMEDIATE)
    fully_shard(layer.experts, mesh=mesh["replicas"])
    layer.experts.set_gradient_divide_factor(world.size())
    layer.experts.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    fully_shard(layer, mesh=world)
    draw_again(layer)
    return layer


# FSDP2, DDP and checkpoints are PyTorch's alone, and on GPUs they need NCCL, so a GPU per rank: examples/moe_layer.py.


@on_ranks(4)
def test_fsdp2_around_it(rank):
    mesh = mesh_of("cpu", 2)
    with make_buffer(mesh["ep"], engine="cpu") as buffer:
        layer, x = sharded_layer(mesh, buffer), tokens(rank, "cpu").requires_grad_()
        y = layer(x)
        loss_of(y, rank).backward()
    assert layer.experts.w1.to_local().shape[0] == NUM_EXPERTS // 4
    assert_dense(layer, y, x, divisor=4)
    for part in (layer.router, layer.experts):  # norms of all ranks, each expert counted once
        grads = [p.grad for p in part.parameters()]
        expected = torch.cat([whole(grad).flatten() for grad in grads]).norm()
        torch.testing.assert_close(nn.utils.get_total_norm(grads).full_tensor(), expected)


@on_ranks(4)
def test_ddp_around_it(rank):
    mesh = mesh_of("cpu", 2)

    def mean(grad: DTensor) -> DTensor:
        """Of all ranks, as docs/pytorch.md has it."""
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad.to_local(), group=mesh["replicas"].get_group())
        return grad

    with make_buffer(mesh["ep"], engine="cpu") as buffer:
        layer, x = make_layer(buffer), tokens(rank, "cpu").requires_grad_()
        names = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names)
        for p in layer.experts.parameters():
            p.register_hook(mean)
        parallel = DistributedDataParallel(layer)
        y = parallel(x)
        loss_of(y, rank).backward()
        assert_dense(layer, y, x, divisor=4)


@on_ranks(4)
def test_a_checkpoint_fits_any_number_of_ranks(rank, tmp_path):
    """Saved by 2 x 2 ranks with FSDP2 after a step of AdamW; loaded by 4 ranks, and by single ones."""
    x, mesh = tokens(rank, "cpu"), mesh_of("cpu", 2)
    with make_buffer(mesh["ep"], engine="cpu") as buffer:
        layer = sharded_layer(mesh, buffer)
        loss_of(layer(x), rank).backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1).step()
        y, saved = layer(x).detach(), {name: whole(p) for name, p in layer.named_parameters()}
        dcp.save(layer.state_dict(), checkpoint_id=tmp_path)
    for num_replicas in (1, 4):
        with make_buffer(mesh_of("cpu", num_replicas)["ep"], engine="cpu") as buffer:
            layer = ep.MoELayer(buffer, INTERMEDIATE)
            state = layer.state_dict()
            dcp.load(state, checkpoint_id=tmp_path)
            layer.load_state_dict(state)
            assert layer.experts.w1.to_local().shape[0] == NUM_EXPERTS * num_replicas // 4
            torch.testing.assert_close(layer(x), y, **CLOSE)
            for name, p in layer.named_parameters():
                assert same_bits(whole(p), saved[name]), name


@on_ranks(1)
def test_wrong_arguments(rank, engine):
    device = device_of(engine, rank)
    with make_buffer(None, engine=engine) as buffer:
        own = LoopedExperts(NUM_EXPERTS, device)
        assert_refused("buffer", ep.MoELayer, dist.group.WORLD, 8)
        assert_refused("intermediate", ep.MoELayer, buffer)
        assert_refused("intermediate", ep.MoELayer, buffer, 0)
        assert_refused("intermediate, bias", ep.MoELayer, buffer, 8, experts=own)
        assert_refused("intermediate, bias", ep.MoELayer, buffer, experts=own, bias=True)
        assert_refused("bias", ep.MoELayer, buffer, 8, bias=1)
        assert_refused("router", ep.MoELayer, buffer, 8, router=3)
        assert_refused("experts", ep.MoELayer, buffer, experts=3)
        assert_refused("experts", ep.MoELayer, buffer, experts=nn.Linear(HIDDEN, HIDDEN))
        assert_refused("options", ep.MoELayer, buffer, 8, max_rows=3)
        assert_refused("options", ep.MoELayer, buffer, experts=own, overlap=False)
        assert_refused("activation", ep.MoELayer, buffer, 8, activation="relu")
        layer, x = make_layer(buffer), tokens(0, device)
        assert_refused("x", layer, x.double())
        with pytest.raises(TypeError, match="Buffer"):
            pickle.dumps(layer)
        assert copy.deepcopy(layer).buffer is buffer
        routed = ep.MoELayer(buffer, INTERMEDIATE, router=lambda rows: (rows, rows))
        assert error_of(routed, x)
    other = init_device_mesh("meta", (1,)) if engine == "cpu" else init_device_mesh("cpu", (1,))
    with make_buffer(other, engine=engine) as buffer:
        assert_refused("buffer", ep.MoELayer, buffer, 8)
