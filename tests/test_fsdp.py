"""ep.MoELayer under FSDP2 and DDP: all gradients of a dense model in one process, with any mesh and microbatches.

On GPUs this needs NCCL, and so a GPU for each of the 4 ranks.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.autograd import normal
from lib.errors import error_of
from lib.moe_layer import HIDDEN, NUM_EXPERTS, NUM_TOPK, LoopedExperts, dense
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ep_dispatcher as ep
from ep_dispatcher.tools.testing import RankPool, device_of

WORLD, NUM_TOKENS, INTERMEDIATE, MAX_NORM = 4, 12, 24, 0.05
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the norm of a difference, relative
ACCUMULATE = (1, 3)
replicas_of = pytest.mark.parametrize("num_replicas", [1, 2, 4])


@pytest.fixture(scope="module")
def gpu_ranks():
    """``gpu_ranks()`` is a pool of ranks with a GPU each, whose groups reduce over NCCL."""
    with contextlib.ExitStack() as stack:
        made = []

        def pool() -> RankPool:
            if torch.cuda.device_count() < WORLD:
                pytest.skip(f"fewer than {WORLD} GPUs: NCCL takes one for each rank")
            if not made or made[-1].closed:
                made.append(stack.enter_context(RankPool(WORLD, backend="cpu:gloo,cuda:nccl")))
            return made[-1]

        yield pool


@pytest.fixture
def ranks(engine, pools, gpu_ranks) -> RankPool:
    """Ranks that can reduce gradients on the engine's device."""
    return pools(WORLD) if engine == "cpu" else gpu_ranks()


def meshes(engine: str, num_replicas: int):
    """All ranks, and the same ranks as replicas x experts."""
    world = init_device_mesh(engine, (WORLD,), mesh_dim_names=("world",))
    shape = num_replicas, WORLD // num_replicas
    return world, init_device_mesh(engine, shape, mesh_dim_names=("replicas", "experts"))


def make_buffer(group, dtype: torch.dtype, num_experts: int = NUM_EXPERTS) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=num_experts, num_topk=min(NUM_TOPK, num_experts))
    return ep.Buffer(group, **sizes, max_tokens_per_rank=NUM_TOKENS, dtype=dtype, engine=group.device_type)


def make_layer(buffer: ep.Buffer, kind: str, **options) -> ep.MoELayer:
    """The parameters of all ranks are those of one seed."""
    torch.manual_seed(5)
    if kind == "own experts":
        own = LoopedExperts(buffer.num_local_experts, buffer.engine)
        layer = ep.MoELayer(buffer, experts=own, device=buffer.engine, dtype=torch.float32, **options)
        fill(own.w1, own.w2)
        return layer
    options |= dict(bias=True, activation="gelu") if kind == "biases" else {}
    layer = ep.MoELayer(buffer, INTERMEDIATE, device=buffer.engine, dtype=torch.float32, **options)
    if kind == "biases":
        fill(layer.experts.b1, layer.experts.b2)
    return layer


@torch.no_grad()
def fill(*parameters: DTensor) -> None:
    """Give parameters of experts values that replicas share."""
    for seed, p in enumerate(parameters):
        local = p.to_local()
        first = p.device_mesh.get_local_rank() * len(local)
        local.copy_(normal(tuple(p.shape), 70 + seed)[first : first + len(local)] / 4)


def tokens(rank: int, micro: int, dtype: torch.dtype) -> Tensor:
    return normal((2, NUM_TOKENS // 2, HIDDEN), 100 + 10 * micro + rank).to(dtype)


def loss_of(y: Tensor, rank: int, micro: int) -> Tensor:
    return (y.float() * normal(tuple(y.shape), 200 + 10 * micro + rank).to(y.device)).sum() / 8


def run_microbatches(model: nn.Module, device: str, dtype: torch.dtype, count: int, before=lambda is_last: None):
    for micro in range(count):
        before(micro == count - 1)
        x = tokens(dist.get_rank(), micro, dtype).to(device)
        loss_of(model(x), dist.get_rank(), micro).backward()


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().cpu().clone()


def names_of(layer: ep.MoELayer) -> dict[str, nn.Parameter]:
    return {name.replace("module.", ""): p for name, p in layer.named_parameters()}


def dense_gradients(
    values: dict[str, Tensor], dtype: torch.dtype, count: int, num_topk: int = NUM_TOPK
) -> dict[str, Tensor]:
    """The gradients of the mean of the ranks' losses, summed over microbatches, in one process without a dispatcher."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    rounded = [leaf if name.startswith("router") else leaf.to(dtype).float() for name, leaf in leaves.items()]
    for micro in range(count):
        for rank in range(WORLD):
            y = dense(tokens(rank, micro, dtype).float(), *rounded, num_topk=num_topk)
            (loss_of(y, rank, micro) / WORLD).backward(retain_graph=True)
    return {name: leaf.grad for name, leaf in leaves.items()}


def clip(layer: ep.MoELayer) -> Tensor:
    """As docs/pytorch.md has it."""
    parts = [[*layer.router.parameters()], [*layer.experts.parameters()]]
    norms = [nn.utils.get_total_norm([p.grad for p in part]) for part in parts]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, MAX_NORM, total)
    return total


def assert_dense_gradients(
    layer: ep.MoELayer, values: dict[str, Tensor], dtype: torch.dtype, count: int, num_topk: int = NUM_TOPK
) -> None:
    """All gradients, their norm, and the gradients after clipping."""
    expected = dense_gradients(values, dtype, count, num_topk)

    def compare() -> None:
        for name, p in names_of(layer).items():
            difference = (whole(p.grad) - expected[name]).norm() / expected[name].norm()
            assert difference < TOLERANCE[dtype], (name, float(difference))

    compare()
    total = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    assert total > 2 * MAX_NORM
    assert float(clip(layer)) == pytest.approx(float(total), rel=TOLERANCE[dtype])
    for grad in expected.values():
        grad.mul_(MAX_NORM / total)
    compare()


def shard(layer: ep.MoELayer, world, replicas, dtype: torch.dtype, **options) -> None:
    """As docs/pytorch.md has it. The parameters are float32."""
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    layer.fully_shard_experts(replicas, mp_policy=policy, **options)
    fully_shard(layer.router, mesh=world)
    fully_shard(layer, mesh=world, mp_policy=policy)


def under_fsdp(rank: int, engine: str, num_replicas: int, dtype: torch.dtype, kind: str) -> None:
    device_of(engine, rank)
    world, mesh = meshes(engine, num_replicas)
    with make_buffer(mesh["experts"], dtype) as buffer:
        layer = make_layer(buffer, kind)
        values = {name: whole(p) for name, p in layer.named_parameters()}
        shard(layer, world, mesh["replicas"], dtype)
        for count in ACCUMULATE:
            for reduces_each in (True, False)[: 1 if count == 1 else 2]:
                layer.zero_grad()

                def before(is_last: bool, reduces_each=reduces_each) -> None:
                    layer.set_is_last_backward(is_last)
                    layer.set_requires_gradient_sync(is_last or reduces_each)
                    layer.set_reshard_after_backward(is_last or reduces_each)

                run_microbatches(layer, engine, dtype, count, before)
                assert_dense_gradients(layer, values, dtype, count)


@pytest.mark.parametrize("kind", ["swiglu", exhaustive("biases"), "own experts"])
@pytest.mark.parametrize("dtype", DTYPES)
@replicas_of
def test_gradients_are_those_of_the_dense_model(ranks, engine, num_replicas, dtype, kind):
    """With one replica the recipe with set_gradient_divide_factor gave experts a quarter of their gradients.

    PyTorch divides in its branch for one rank, and again after a reduction that is forced to sum.
    """
    ranks.run(under_fsdp, engine, num_replicas, DTYPES[dtype], kind)


def in_other_forms(rank: int, engine: str, form: str) -> None:
    dtype, device = torch.float32, device_of(engine, rank)
    world, mesh = meshes(engine, 2)
    options, num_experts = {}, NUM_EXPERTS
    if form == "copies of the shards":
        mesh = init_device_mesh(engine, (2, 1, 2), mesh_dim_names=("copies", "shards", "experts"))
    elif form == "gathered for the backward":
        options = dict(reshard_after_forward=False)
    elif form == "fewer experts than replicas":
        num_experts = 2
    replicas = mesh["copies", "shards"] if mesh.ndim == 3 else mesh["replicas"]
    with make_buffer(mesh["experts"], dtype, num_experts) as buffer:
        if form == "made on meta":
            with torch.device("meta"):
                layer = ep.MoELayer(buffer, INTERMEDIATE, dtype=torch.float32)
        else:
            layer = make_layer(buffer, "swiglu")
        if form == "compiled":
            layer.experts.forward = torch.compile(layer.experts.forward, backend="aot_eager")
        shard(layer, world, replicas, dtype, **options)
        if form == "made on meta":
            layer.to_empty(device=engine)
            torch.manual_seed(5)
            layer.reset_parameters()
        values = {name: whole(p) for name, p in layer.named_parameters()}
        if form == "losses are summed":
            layer.average_gradients = False
            for module in (layer, layer.router, layer.experts):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply and sum in one operation
        if num_experts == 2:
            assert [*layer.experts.w1.to_local().shape] == [1, INTERMEDIATE, HIDDEN]
        layer(tokens(rank, 0, dtype).to(device))  # without a backward
        run_microbatches(layer, engine, dtype, 1)
        if form == "losses are summed":
            for p in layer.parameters():
                p.grad /= WORLD
        assert_dense_gradients(layer, values, dtype, 1, buffer.config.num_topk)


@pytest.mark.parametrize(
    "form",
    [
        "copies of the shards",
        "gathered for the backward",
        "fewer experts than replicas",
        "made on meta",
        "losses are summed",
        exhaustive("compiled"),
    ],
)
def test_what_users_of_fsdp2_do(ranks, engine, form):
    ranks.run(in_other_forms, engine, form)


def under_a_scaler(rank: int, engine: str, num_replicas: int) -> None:
    device_of(engine, rank)
    world, mesh = meshes(engine, num_replicas)
    with make_buffer(mesh["experts"], torch.float32) as buffer:
        layer = make_layer(buffer, "swiglu")
        shard(layer, world, mesh["replicas"], torch.float32)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler(engine, init_scale=4.0)
        for overflows, scale in ((False, 4.0), (True, 2.0), (False, 2.0)):
            before = [p.to_local().detach().clone() for p in layer.parameters()]
            scaler.scale(loss_of(layer(tokens(rank, 0, torch.float32).to(engine)), rank, 0)).backward()
            if overflows and rank == 1:
                next(layer.experts.parameters()).grad.to_local().view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = [not torch.equal(p.to_local(), old) for p, old in zip(layer.parameters(), before, strict=True)]
            assert scaler.get_scale() == scale and changed == [not overflows] * len(changed)


@replicas_of
def test_a_step_that_overflows_in_experts_of_one_rank_is_skipped_on_all(ranks, engine, num_replicas):
    """A GradScaler looks at the gradients of its rank, but at those of DTensors on all."""
    ranks.run(under_a_scaler, engine, num_replicas)


def under_ddp(rank: int, engine: str, num_replicas: int, dtype: torch.dtype) -> None:
    device_of(engine, rank)
    _, mesh = meshes(engine, num_replicas)

    def mean(grad: DTensor) -> DTensor:
        """Of the replicas, as docs/pytorch.md has it."""
        grad = grad.clone()
        dist.all_reduce(grad.to_local(), dist.ReduceOp.AVG, group=mesh["replicas"].get_group())
        return grad

    with make_buffer(mesh["experts"], torch.float32) as buffer:
        layer = make_layer(buffer, "biases", average_gradients=True)
        values = {name: whole(p) for name, p in layer.named_parameters()}
        names = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names)
        for p in layer.experts.parameters():
            p.register_hook(mean)
        parallel = DistributedDataParallel(layer)
        for count in ACCUMULATE:
            layer.zero_grad()
            run_microbatches(parallel, engine, torch.float32, count)
            assert_dense_gradients(layer, values, torch.float32, count)


@replicas_of
def test_ddp_needs_no_factor(ranks, engine, num_replicas):
    ranks.run(under_ddp, engine, num_replicas, torch.float32)


@on_ranks(WORLD)
def test_gradients_are_sums_unless_asked(rank, engine):
    """ep.moe_mlp: those of parameters alone are divided, and by the ranks of the buffer."""
    device_of(engine, rank)
    _, mesh = meshes(engine, 2)
    with make_buffer(mesh["experts"], torch.float32) as buffer:
        seen = {}
        for average in (False, True):
            layer = make_layer(buffer, "biases", average_gradients=average)
            x = tokens(rank, 0, torch.float32).to(engine).requires_grad_()
            loss_of(layer(x), rank, 0).backward()
            seen[average] = [x.grad, layer.router.weight.grad], [p.grad.to_local() for p in layer.experts.parameters()]
    for summed, averaged in zip(seen[False][0], seen[True][0]):
        assert torch.equal(summed, averaged)
    for summed, averaged in zip(seen[False][1], seen[True][1], strict=True):
        assert summed.abs().sum() > 0 and torch.equal(summed / 2, averaged)


@on_ranks(WORLD)
def test_wrong_arguments(rank, engine):
    device_of(engine, rank)
    world, mesh = meshes(engine, 2)
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    with make_buffer(mesh["experts"], torch.float32) as buffer:
        layer = make_layer(buffer, "swiglu")
        for wrong in (mesh["experts"], world, dist.group.WORLD):
            assert error_of(layer.fully_shard_experts, wrong).startswith("mesh ")
        assert error_of(layer.fully_shard_experts, mesh["replicas"], mp_policy=half).startswith("mp_policy.param_dtype")
        function = ep.MoELayer(buffer, experts=lambda rows, counts: rows)
        assert error_of(function.fully_shard_experts, mesh["replicas"]).startswith("experts ")
        assert error_of(ep.MoELayer, buffer, 8, average_gradients=1).startswith("average_gradients")
        assert not layer.average_gradients
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=2, max_tokens_per_rank=4, dtype=torch.float32)
    with ep.Buffer(mesh["experts"].get_group(), **sizes, engine=engine) as buffer:
        layer = make_layer(buffer, "swiglu")
        assert error_of(layer.fully_shard_experts, mesh["replicas"]).startswith("buffer ")
