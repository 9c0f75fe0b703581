"""ep.MoELayer: a dense layer of the same parameters, with FSDP2, checkpoints and other numbers of ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import on_ranks
from lib.autograd import normal
from lib.errors import assert_refused, error_of
from lib.moe_layer import HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, LoopedExperts, dense
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import device_of, same_bits

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


@on_ranks(2)
def test_by_default_it_works_on_a_default_buffer(rank, engine):
    """The first call was refused, because parameters are float32 and the buffer is bfloat16."""
    device = device_of(engine, rank)
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=NUM_TOKENS)
    with ep.Buffer(mesh_of(engine)["ep"], **sizes, engine=engine) as buffer:
        torch.manual_seed(5)
        layer = ep.MoELayer(buffer, INTERMEDIATE, bias=True, activation="gelu")
        x = tokens(rank, device).bfloat16()
        y = layer(x)
        loss_of(y, rank).backward()
        copied = copy.deepcopy(layer)
        copied.experts.to(torch.bfloat16)  # a rounded router may choose other experts
        torch.testing.assert_close(copied(x), y, rtol=5e-2, atol=5e-2)
        shown = repr(layer)
    for p in layer.parameters():
        assert p.dtype == p.grad.dtype == torch.float32 and p.device.type == engine and p.grad.isfinite().all()
    assert y.dtype == torch.bfloat16 and y.abs().mean() > 0.01
    sizes = dict(num_local_experts=NUM_EXPERTS // 2, hidden=HIDDEN, intermediate=INTERMEDIATE, num_topk=NUM_TOPK)
    for name, size in sizes.items():
        assert f"{name}={size}" in shown, shown


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
    layer.fully_shard_experts(mesh["replicas"])
    fully_shard(layer, mesh=world)
    draw_again(layer)
    return layer


# test_fsdp.py has all gradients under FSDP2 and DDP, on GPUs too.


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
        assert_refused("intermediate", ep.MoELayer, buffer, 8, experts=own)
        assert_refused("intermediate", ep.MoELayer, buffer, experts=own, bias=True)
        assert_refused("bias", ep.MoELayer, buffer, 8, bias=1)
        assert_refused("router", ep.MoELayer, buffer, 8, router=3)
        assert_refused("experts", ep.MoELayer, buffer, experts=3)
        assert_refused("experts", ep.MoELayer, buffer, experts=nn.Linear(HIDDEN, HIDDEN))
        with pytest.raises(TypeError, match="activaton"):
            ep.MoELayer(buffer, 8, activaton="gelu")
        for option in (dict(overlap=False), dict(activation="gelu"), dict(num_parts=1), dict(quantize="mxfp8")):
            assert error_of(ep.MoELayer, buffer, experts=own, **option).startswith(next(iter(option)))
        wrong = dict(overlap="no", keep_activated=0, num_parts=True, max_recv_rows=-1, quantize="e5m2", bias=1)
        for name, value in wrong.items():
            assert error_of(ep.MoELayer, buffer, 8, **{name: value}).startswith(name)
        assert error_of(ep.MoELayer, buffer, router=nn.Linear(8, 8), experts=own, dtype=torch.half).startswith("device")
        assert_refused("activation", ep.MoELayer, buffer, 8, activation="relu")
        layer, x = make_layer(buffer), tokens(0, device)
        assert_refused("x", layer, x.double())
        for wrong_x in (x[..., :-1], x.sum(), None, [x]):  # PyTorch's text was about mat1 and mat2
            assert error_of(layer, wrong_x).startswith("x is ")
        with pytest.raises(TypeError, match="Buffer"):
            pickle.dumps(layer)
        assert copy.deepcopy(layer).buffer is buffer
        routed = ep.MoELayer(buffer, INTERMEDIATE, router=lambda rows: (rows, rows))
        assert error_of(routed, x)
    other = init_device_mesh("meta", (1,)) if engine == "cpu" else init_device_mesh("cpu", (1,))
    with make_buffer(other, engine=engine) as buffer:
        assert_refused("buffer", ep.MoELayer, buffer, 8)
