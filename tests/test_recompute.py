"""ep.recompute_contexts: the recompute of a checkpoint makes no plan, and changes no bit."""

import contextlib
import gc
from functools import partial

import pytest
import torch
from conftest import exhaustive, on_ranks, planned_dispatches
from lib.autograd import normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import ep_dispatcher as ep
from ep_dispatcher import recompute
from ep_dispatcher.tools.testing import device_of, same_bits

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 16, 24, 8, 3, 20
ALL_ROWS = 2 * NUM_TOKENS * NUM_TOPK
OPS = torch.ops.ep_dispatcher


def make_buffer(engine: str, **changes) -> ep.Buffer:
    sizes = dict(hidden=HIDDEN, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens_per_rank=NUM_TOKENS)
    return ep.Buffer(**(sizes | dict(dtype=torch.float32, engine=engine, timeout_s=60) | changes))


class Layer(nn.Module):
    """Experts of one matrix each, called in one of these ways."""

    def __init__(self, buffer: ep.Buffer, how: str = "user code"):
        super().__init__()
        torch.manual_seed(5)
        self.buffer, self.how = buffer, how
        device = buffer.engine
        options = {"parts": dict(num_parts=2), "limited rows": dict(max_recv_rows=ALL_ROWS)}.get(how, {})
        self.moe = ep.MoELayer(buffer, INTERMEDIATE, device=device, **options)
        if how in ("user code", "by rank", "plan"):
            self.moe.experts.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(HIDDEN, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("layer", "parts", "limited rows"):
            return torch.tanh(self.moe(x) * self.scale)
        idx, weights = self.moe.router(x)
        if self.how == "plan":
            out = ep.dispatch(self.buffer, x, topk_weights=weights, handle=self.buffer.plan(idx))
        elif self.how == "by rank":
            out = ep.dispatch(self.buffer, x, idx.int(), weights, layout="rank")
        else:
            out = ep.dispatch(self.buffer, x, idx, weights, expert_alignment=4)
        weights = out.topk_weights if out.topk_weights.dim() == 1 else out.topk_weights.sum(1)
        y = ep.combine(self.buffer, torch.tanh(out.x * self.scale) * weights[:, None].to(x.dtype), out.handle)
        return torch.tanh(y * self.scale)


def tokens(rank: int, number: int, device: str) -> Tensor:
    num = (NUM_TOKENS, NUM_TOKENS - 7, 0)[(rank + number) % 3]
    return normal((num, HIDDEN), 10 * number + rank).to(device)


class Microbatch:
    """A forward pass whose backward comes later."""

    def __init__(self, model: nn.Module, x: Tensor, run=lambda model, x: model(x)):
        self.model, self.x = model, x.clone().requires_grad_()
        self.y = run(model, self.x)

    def backward(self, retain_graph: bool = False) -> list[Tensor]:
        """The result, and all gradients of this microbatch alone."""
        leaves = [self.x, *(p for p in self.model.parameters() if p.requires_grad)]
        factors = normal(tuple(self.y.shape), 7).to(self.y.device)
        grads = torch.autograd.grad(
            (self.y * factors).sum(), leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        return [self.y.detach(), *(getattr(grad, "to_local", lambda grad=grad: grad)() for grad in grads)]


checkpointed = partial(checkpoint, use_reentrant=False, context_fn=ep.recompute_contexts)


@contextlib.contextmanager
def no_counts():
    """No host waits for counts of a GPU."""

    def refuse(*_):
        raise AssertionError("a host waits for counts")

    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            from ep_dispatcher.engines.cuda.engine import CudaEngine

            patch.setattr(CudaEngine, "_wait_for_counts", refuse)
        yield


def plans_kept() -> int:
    gc.collect()
    return sum(type(one) is recompute.SavedPlan for one in gc.get_objects())


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and all(map(same_bits, found, expected))
    assert expected[0].numel() == 0 or all(t.abs().sum() > 0 for t in expected)


HOWS = ["user code", "by rank", "plan", "layer", "parts", "limited rows"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("order", ["AaBbCc", exhaustive("ABaCbc"), exhaustive("ABCcba"), exhaustive("ABCbca")])
@on_ranks(2)
def test_a_recompute_uses_the_plan_of_its_forward_pass(rank, engine, how, order):
    """``order``: microbatches by letter, a capital for the forward pass. Numbers of tokens differ, or are 0."""
    with make_buffer(engine) as buffer:
        model = Layer(buffer, how)
        xs = [tokens(rank, number, device_of(engine, rank)) for number in range(3)]
        expected = [Microbatch(model, x).backward() for x in xs]
        found, flying = {}, {}
        with planned_dispatches() as seen:
            for letter in order:
                number, before = "abc".index(letter.lower()), len(seen)
                if letter.isupper():
                    flying[number] = Microbatch(model, xs[number], checkpointed)
                    assert "plan" in seen[before:] and not set(seen[before:]) & {"reuse"} or how == "plan"
                else:
                    with no_counts():
                        found[number] = flying.pop(number).backward()
                    assert seen[before:] and "plan" not in seen[before:]
        for number in range(3):
            assert_same(found[number], expected[number])
        assert not plans_kept()
        buffer.check()


class Three(nn.Module):
    """Two layers, the second one twice, each in a checkpoint of its own or not."""

    def __init__(self, buffer: ep.Buffer, run):
        super().__init__()
        self.layers = nn.ModuleList(Layer(buffer, how) for how in ("layer", "user code"))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = x + self.run(layer, x)
        return x


def plain(model, x):
    return model(x)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("outer, inner", [(checkpointed, plain), (plain, checkpointed), (checkpointed, checkpointed)])
@on_ranks(2)
def test_layers_in_one_checkpoint_and_checkpoints_in_checkpoints(rank, engine, outer, inner, early_stop):
    with make_buffer(engine) as buffer, set_checkpoint_early_stop(early_stop):
        x = tokens(rank, 0, device_of(engine, rank))
        expected = Microbatch(Three(buffer, plain), x).backward()
        flying = Microbatch(Three(buffer, inner), x, outer)
        with planned_dispatches() as seen:
            found = flying.backward()
        assert_same(found, expected)
        assert seen and "plan" not in seen


@on_ranks(2)
def test_a_retained_graph_recomputes_again(rank, engine):
    with make_buffer(engine) as buffer:
        flying = Microbatch(Layer(buffer), tokens(rank, 0, device_of(engine, rank)), checkpointed)
        with planned_dispatches() as seen:
            assert_same(flying.backward(retain_graph=True), flying.backward())
        assert seen == ["reuse"] * 4


OF_PASS = r"checkpointed forward pass \d+"
OTHER_OPTIONS = dict(layout=dict(layout="rank"), limit=dict(max_recv_rows=ALL_ROWS), alignment=dict(expert_alignment=2))


class Changed(nn.Module):
    """A layer whose recompute differs from its forward pass, in one of these ways."""

    def __init__(self, layer: Layer, other: ep.Buffer, how: str):
        super().__init__()
        self.layer, self.other, self.how, self.num_runs = layer, other, how, 0

    def forward(self, x: Tensor) -> Tensor:
        again, self.num_runs = self.num_runs > 0, self.num_runs + 1
        how = self.how if again else ""
        y = self.layer(x)
        if how == "fewer":
            return y + self.layer.scale
        idx, weights = self.layer.moe.router(x)
        if how == "experts":
            idx = (idx + 1) % NUM_EXPERTS
        if how == "tokens":
            x, idx, weights = x[1:], idx[1:], weights[1:]
        buffer = self.other if how == "buffer" else self.layer.buffer
        out = ep.dispatch(buffer, x, idx, weights, **OTHER_OPTIONS.get(how, {}))
        if how == "more":
            with torch.no_grad():
                ep.dispatch(buffer, x, idx)
        return y + (out.x * self.layer.scale).sum()


@pytest.mark.parametrize(
    "how, text",
    [
        ("experts", rf"{OF_PASS}, dispatch 2, recompute: topk_idx\[\d+, \d\] is \d, but has to be \d, "),
        ("tokens", rf"{OF_PASS}, dispatch 2, recompute: topk_idx is 19 tokens, but has to be 20 "),
        ("more", f"the number of dispatches is 3 in a recompute, but has to be 2, as in {OF_PASS}"),
        ("fewer", f"the number of dispatches is 1 in a recompute, but has to be 2, as in {OF_PASS}"),
        ("buffer", "buffer is Buffer.*, but has to be Buffer"),
        ("layout", "layout is rank, but has to be expert, as in the forward pass"),
        ("limit", "max_recv_rows is 120, but has to be None, as in the forward pass"),
        ("alignment", "expert_alignment is 2, but has to be 1, as in the forward pass"),
    ],
)
@on_ranks(2)
def test_a_recompute_that_differs_is_an_error(rank, engine, how, text):
    """At once, before anything is sent, but other experts on a GPU are found later."""
    with make_buffer(engine) as buffer, make_buffer(engine) as other, set_checkpoint_early_stop(False):
        x = normal((NUM_TOKENS, HIDDEN), rank).to(device_of(engine, rank))
        flying = Microbatch(Changed(Layer(buffer), other, how), x, checkpointed)

        def act() -> None:
            flying.backward()
            buffer.check()

        with pytest.raises(ValueError, match=f"^{text}"):
            act()
        if engine == "cpu":
            assert_same(*[Microbatch(flying.model.layer, x, run).backward() for run in (checkpointed, plain)])


@on_ranks(2)
def test_an_exception_leaves_nothing_behind(rank, engine):
    """In a forward pass, in a recompute, and one that the function itself catches."""
    with make_buffer(engine) as buffer:
        layer, x = Layer(buffer), normal((NUM_TOKENS, HIDDEN), rank).to(device_of(engine, rank))
        fails = True

        def run(model: Layer, x: Tensor) -> Tensor:
            if engine == "cpu":  # on a GPU this error comes late, and ends the buffer
                with pytest.raises(ValueError, match="^max_recv_rows"):
                    ep.dispatch(buffer, x, model.moe.router(x)[0], max_recv_rows=1)
            if fails:
                raise KeyError
            return model(x)

        with pytest.raises(KeyError):
            checkpointed(partial(run, layer), x.clone().requires_grad_())
        assert not plans_kept() and not recompute.is_running()
        fails = False
        flying = Microbatch(layer, x, lambda model, x: checkpointed(partial(run, model), x))
        fails = True
        with pytest.raises(KeyError):
            flying.backward(retain_graph=True)
        assert not recompute.is_running()
        fails = False
        assert_same(flying.backward(), Microbatch(layer, x).backward())
        assert not plans_kept()


@on_ranks(2)
def test_a_pass_without_gradients_keeps_no_plans(rank, engine):
    with make_buffer(engine) as buffer:
        layer, x = Layer(buffer), tokens(rank, 0, device_of(engine, rank))
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                y = checkpointed(layer, x)
        flying = Microbatch(layer, x, checkpointed)
        with torch.no_grad():
            assert same_bits(checkpointed(layer, x), y)
        assert plans_kept() == 1
        with planned_dispatches() as seen:
            flying.backward()
        assert "plan" not in seen and not plans_kept()


@contextlib.contextmanager
def both(first, second):
    with first, second:
        yield


@pytest.mark.parametrize("how", ["by rank", "layer", "plan"])
@pytest.mark.parametrize("policy", ["keeps nothing", "keeps tanh", "keeps rows"])
@pytest.mark.parametrize("order", [1, -1])
@on_ranks(2)
def test_with_a_policy_of_selective_checkpoints(rank, engine, how, policy, order):
    rows = [OPS.dispatch.default, OPS.combine.default]
    kept = {"keeps nothing": [], "keeps tanh": [torch.ops.aten.tanh.default], "keeps rows": rows}[policy]

    def contexts():
        pairs = ep.recompute_contexts(), create_selective_checkpoint_contexts(kept)
        return tuple(both(*contexts[::order]) for contexts in zip(*pairs))

    with make_buffer(engine, dtype=torch.bfloat16) as buffer:
        layer = Layer(buffer, how).bfloat16()
        x = tokens(rank, 0, device_of(engine, rank)).bfloat16()
        expected = Microbatch(layer, x, partial(checkpoint, use_reentrant=False)).backward()
        flying = Microbatch(layer, x, partial(checkpoint, use_reentrant=False, context_fn=contexts))
        with planned_dispatches() as seen:
            found = flying.backward()
        assert seen == ["reuse"] * (1 if policy == "keeps rows" else 2)
        for t, of in zip(found, expected):  # moe_mlp runs PyTorch's grouped GEMMs under a policy
            torch.testing.assert_close(t, of, rtol=5e-2, atol=5e-2) if how == "layer" else assert_same([t], [of])


@pytest.mark.parametrize("where", ["around", exhaustive("inside")])
@on_ranks(2, timeout_s=300)
def test_torch_compile_plans_again(rank, engine, where):
    """As it does without the contexts."""
    with make_buffer(engine, dtype=torch.bfloat16, timeout_s=300) as buffer:
        layer = Layer(buffer, "limited rows").bfloat16()
        x = normal((NUM_TOKENS, HIDDEN), rank).to(device_of(engine, rank)).bfloat16()
        results = []
        for context in ({}, dict(context_fn=ep.recompute_contexts)):
            torch._dynamo.reset()
            compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
            run = partial(checkpoint, compiled(layer) if where == "inside" else layer, use_reentrant=False, **context)
            run = compiled(lambda x, run=run: run(x)) if where == "around" else run
            with planned_dispatches() as seen:
                results.append((Microbatch(layer, x, lambda _, x, run=run: run(x)).backward(), seen))
        (expected, planned), (found, planned_again) = results
        assert_same(found, expected)
        assert planned == planned_again and "plan" in planned
