"""Megatron's routing map as columns of top-k experts, by PyTorch's operators and by the compiled kernels."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from ep_dispatcher import engines
from ep_dispatcher.integrations.megatron.dispatcher import routing
from ep_dispatcher.integrations.megatron.dispatcher.routing import Routing

needs_gpu = pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
NO_ETP = Routing(topk=3, slices=1, experts_per_rank=10, skips_zeros=False)
ETP = Routing(topk=3, slices=2, experts_per_rank=5, skips_zeros=False)


def make_map(num_tokens: int, num_experts: int, topk: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with 0 to topk experts, and probabilities of all experts."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1).argsort(1)
    routing_map = order < torch.randint(0, topk + 1, (num_tokens, 1), generator=generator)
    probs = torch.rand(num_tokens, num_experts, generator=generator) + 0.5
    return routing_map.to(device), probs.to(device)


def sorted_columns(found: tuple[torch.Tensor, torch.Tensor], topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each slice's columns in the order of experts, none at the end; weights beside none are 0."""
    idx, weights = (t.detach().cpu().unflatten(1, (-1, topk)) for t in found)
    order = torch.where(idx < 0, 1 << 40, idx).argsort(-1)
    idx, weights = idx.gather(-1, order), weights.gather(-1, order)
    return idx.flatten(1), torch.where(idx < 0, 0, weights).flatten(1)


def by_hand(how: Routing, routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[list, list]:
    """The columns of each token, from loops."""
    all_experts, all_weights = [], []
    for chosen, prob in zip(routing_map.tolist(), probs.float().tolist(), strict=True):
        mine = [e for e, is_chosen in enumerate(chosen) if is_chosen and not (how.skips_zeros and prob[e] == 0)]
        experts, weights = [], []
        for t in range(how.slices):
            first = [e // how.experts_per_rank * how.slices + t for e in mine]
            experts += [f * how.experts_per_rank + e % how.experts_per_rank for f, e in zip(first, mine, strict=True)]
            experts += [-1] * (how.topk - len(mine))
            weights += [prob[e] for e in mine] + [0.0] * (how.topk - len(mine))
        all_experts.append(experts)
        all_weights.append(weights)
    return all_experts, all_weights


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how,num_tokens,num_experts",
    [
        (NO_ETP, 7, 10),
        (NO_ETP._replace(skips_zeros=True), 33, 10),
        (ETP, 7, 10),
        (ETP._replace(skips_zeros=True), 5, 10),
        (Routing(topk=8, slices=1, experts_per_rank=32, skips_zeros=False), 65, 256),
        (Routing(topk=40, slices=1, experts_per_rank=45, skips_zeros=False), 9, 45),  # more columns than lanes
        (Routing(topk=4, slices=1, experts_per_rank=4, skips_zeros=False), 6, 4),  # every expert may be chosen
        (NO_ETP, 0, 10),
    ],
    ids=str,
)
def test_columns_and_the_gradient(how, num_tokens, num_experts, dtype, device):
    routing_map, probs = make_map(num_tokens, num_experts, how.topk, device)
    if how.skips_zeros:
        probs[:, ::3] = 0
    probs = probs.to(dtype).requires_grad_()
    idx, weights = routing.columns(how, routing_map, probs)
    assert idx.dtype == torch.int64 and weights.dtype == torch.float32
    assert idx.shape == weights.shape == (num_tokens, how.slices * how.topk)
    found_idx, found_weights = sorted_columns((idx, weights), how.topk)
    experts, expected = by_hand(how, routing_map, probs)
    assert found_idx.tolist() == experts
    assert found_weights.tolist() == expected
    # Beside -1 the engine gives the gradient 0.
    grad = torch.where(idx < 0, 0, torch.arange(idx.numel(), device=device).view_as(idx) % 7 + 1.0)
    weights.backward(grad)
    wanted = torch.zeros(num_tokens, num_experts)
    first_slice = idx[:, : how.topk].cpu()
    sums = grad.cpu().unflatten(1, (how.slices, how.topk)).sum(1)
    per_group = how.experts_per_rank * how.slices
    for token, column in (first_slice >= 0).nonzero().tolist():
        of_group = int(first_slice[token, column])
        expert = of_group // per_group * how.experts_per_rank + of_group % how.experts_per_rank
        wanted[token, expert] += sums[token, column]
    assert probs.grad.dtype == dtype
    assert torch.equal(probs.grad.cpu().float(), wanted.to(dtype).float())


@needs_gpu
@pytest.mark.parametrize("how", [NO_ETP, ETP])
def test_kernel_marks_what_operators_mark(how):
    routing_map, probs = make_map(40, 10, how.topk, "cuda")
    routing_map[11], routing_map[17, :4] = True, True  # more than topk
    found = routing.columns(how, routing_map, probs)
    expected = routing._by_operators(how, routing_map, probs)
    assert not routing.can_host_look(routing_map)
    for token in (11, 17):
        assert int(found[0][token, -1]) == int(expected[0][token, -1]) == 10 * how.slices, "an unknown expert"
    rest = [t for t in range(40) if t not in (11, 17)]
    for one, other in zip(sorted_columns(found, how.topk), sorted_columns(expected, how.topk), strict=True):
        assert torch.equal(one[rest], other[rest])
    probs.requires_grad_()
    routing.columns(how, routing_map, probs)[1].sum().backward()  # what it gives there is any; it ends nothing
    assert torch.isfinite(probs.grad).all()


@needs_gpu
def test_columns_of_tensors_that_are_not_contiguous():
    routing_map, probs = make_map(10, 12, 3, "cuda")
    how = Routing(topk=3, slices=1, experts_per_rank=12, skips_zeros=False)
    expected = routing.columns(how, routing_map, probs)
    probs = probs.t().contiguous().t().requires_grad_()
    found = routing.columns(how, routing_map.t().contiguous().t(), probs)
    assert all(map(torch.equal, found, expected))
    grad = torch.arange(30.0, device="cuda").view(3, 10).t()  # whole numbers: sums in any order are the same
    found[1].backward(grad)
    assert torch.equal(probs.grad.sum(1), torch.where(found[0] < 0, 0, grad).sum(1))


@needs_gpu
def test_no_gradient_is_wanted_or_none_comes():
    routing_map, probs = make_map(10, 12, 3, "cuda")
    how = Routing(topk=3, slices=1, experts_per_rank=12, skips_zeros=False)
    assert not routing.columns(how, routing_map, probs)[1].requires_grad
    probs.requires_grad_()
    idx, weights = routing.columns(how, routing_map, probs)
    assert weights.requires_grad and not idx.requires_grad
    (weights * 0 + probs[:, :3]).sum().backward()
    assert torch.equal(probs.grad[:, :3], torch.ones_like(probs[:, :3]))
