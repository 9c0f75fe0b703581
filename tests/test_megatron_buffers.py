"""The buffers of a Megatron job: shared between layers, sized, grown; and the budget of rows of an expert rank."""

import contextlib
import dataclasses
import gc
import io
import sys
import threading
import time
import types
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive
from lib.megatron_layer import (
    EXPERTS,
    HIDDEN,
    Layout,
    all_steps,
    assert_agree,
    environment,
    error_of,
    make_config,
    make_layer,
    on_gpu,
    on_ranks,
    outcome,
    random,
    tokens_of,
    use_layout,
)
from lib.megatron_recompute import MOE, Microbatch

import ep_dispatcher as ep
from ep_dispatcher.integrations import collectives, messages
from ep_dispatcher.integrations.megatron import destroy_buffers, register, unregister
from ep_dispatcher.integrations.megatron.dispatcher import buffers, megatron_config

LIMIT_S, SLACK_S = 3.0, 20.0
EP2 = Layout(ep=2)


def living() -> list[ep.Buffer]:
    return buffers.all_buffers()


def sizes() -> list[int]:
    """Tokens per rank of all buffers, in the order in which they were made."""
    return [buffer.config.max_tokens_per_rank for buffer in living()]


def forward(layer, rank: int, length: int, step: int = 0):
    return layer(tokens_of(rank, step, length).requires_grad_())[0]


def first_forward(rank: int, length: int = 12, **settings):
    """Return a layer that has made its buffer."""
    layer = make_layer(make_config(**settings))
    forward(layer, rank, length)
    return layer


def training_arguments(patch, **arguments):
    """Megatron's module of global arguments, which have been parsed."""
    module = types.ModuleType("megatron.training.global_vars")
    module._GLOBAL_ARGS = types.SimpleNamespace(**arguments)
    patch.setitem(sys.modules, module.__name__, module)
    return module


# ---- sharing and sizing ---------------------------------------------------------------------------------------------


@on_ranks()
def test_layers_share_a_buffer(rank: int):
    layers = [make_layer(make_config(), number) for number in (1, 2, 3)]
    for layer in layers:
        forward(layer, rank, 12).sum().backward()
    assert sizes() == [24], "one buffer for three layers"
    assert len({id(layer.token_dispatcher.buffer) for layer in layers}) == 1
    for settings in (dict(moe_router_topk=3), dict(num_moe_experts=4), dict(hidden_size=64)):
        layer = make_layer(make_config(**settings))
        layer(random(12, 2, layer.config.hidden_size, seed=rank))
    layer = make_layer(make_config(bf16=True, params_dtype=torch.bfloat16))
    layer(random(12, 2, HIDDEN, seed=rank, dtype=torch.bfloat16))
    assert len(sizes()) == 5, "another for other rows, experts or top-k"
    destroyed = living()
    destroy_buffers()
    assert not living() and all(buffer.is_destroyed for buffer in destroyed)
    forward(layers[0], rank, 12).sum().backward()  # and a layer goes on with a new one
    assert sizes() == [24]


@on_ranks()
def test_one_line_says_what_carries_the_tokens(rank: int):
    messages._announced.clear()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        first_forward(rank)
        first_forward(rank, moe_router_topk=3)
    assert len(living()) == 2
    if rank != 0:
        assert said.getvalue() == ""
        return
    (line,) = said.getvalue().splitlines()
    first = living()[0]
    assert repr(first) in line and first.live_engine().summary in line
    sizes = dict(hidden=HIDDEN, num_experts=EXPERTS, num_topk=first.config.num_topk, max_tokens_per_rank=24)
    memory = ep.buffer_bytes(num_ranks=2, dtype=torch.float32, engine=first.engine, **sizes)
    for words in (ep.__version__, "rank 0 of 1 node x 2", f"memory of a rank: {memory.total / 2**20:.1f} MiB"):
        assert words in line
    assert all(f"{name}={value}" in line for name, value in sizes.items())


@on_ranks()
def test_an_error_that_one_buffer_finds_late_keeps_no_other_alive(rank: int):
    first_forward(rank)
    first_forward(rank, moe_router_topk=3)
    first, second = living()
    destroy = second.destroy

    def complain():
        destroy()
        raise ValueError("found late")

    second.destroy = complain
    assert error_of(destroy_buffers) == "found late"
    assert first.is_destroyed and second.is_destroyed and not living()


@on_ranks()
def test_the_first_size_is_the_most_of_all_ranks_or_what_is_given(rank: int):
    for pair in [(12, 3), (3, 12)]:  # of a sequence of microbatches of 2
        use_layout(EP2)
        first_forward(rank, pair[rank])
        assert sizes() == [24]
    with environment(max_tokens_per_rank=40):
        use_layout(EP2)
        layer = first_forward(rank)
        forward(layer, rank, (20, 3)[rank])
        assert sizes() == [40]
        text = error_of(lambda: forward(layer, rank, 21))
        assert text.startswith("hidden_states has 42") and "--ep-dispatcher-max-tokens-per-rank 40" in text
        forward(layer, rank, 12)  # nothing was sent, and nobody waits


@pytest.mark.parametrize(
    "of_ranks, lengths, words",
    [
        ((None, "40"), (12, 12), ("rank 0 gave no size, rank 1 gave 40; all ranks must give the same",)),
        (("40", "48"), (12, 12), ("rank 0 gave 40, rank 1 gave 48",)),
        (("40", "40"), (12, 21), ("hidden_states", "42 tokens on rank 1", "40")),
    ],
    ids=["one has none", "they differ", "one brings more"],
)
@on_ranks()
def test_all_ranks_refuse_a_first_size_that_does_not_fit_one_of_them(rank: int, of_ranks, lengths, words):
    """As a variable that a launcher passes to some hosts only. Both ranks waited for their limits, for each other."""
    started = time.monotonic()
    with environment(EP_DISPATCHER_MAX_TOKENS_PER_RANK=of_ranks[rank]):
        text = error_of(lambda: first_forward(rank, lengths[rank]))
    for word in (*words, "--ep-dispatcher-max-tokens-per-rank"):
        assert word in text, text
    assert time.monotonic() - started < SLACK_S and not living()
    first_forward(rank)  # nobody waits for anything
    assert sizes() == [24]


@pytest.mark.parametrize("sequence_parallel, length, size", [(False, 12, 34), (True, 3, 10), (True, 12, 24)])
@on_ranks()
def test_the_first_size_is_that_of_the_arguments_or_what_is_brought(rank, monkeypatch, sequence_parallel, length, size):
    arguments = dict(seq_length=33, micro_batch_size=2, context_parallel_size=2, tensor_model_parallel_size=4)
    module = training_arguments(monkeypatch, **arguments, sequence_parallel=sequence_parallel)
    first_forward(rank, length)
    assert sizes() == [size]
    module._GLOBAL_ARGS = None  # before they are parsed
    use_layout(EP2)
    first_forward(rank, length)
    assert sizes() == [2 * length]


@on_ranks()
def test_the_size_can_be_given_at_registration(rank: int):
    registration = register(max_tokens_per_rank=40)
    assert "'max_tokens_per_rank': 40" in str(registration) and register() is registration
    layer = make_layer(make_config())
    with environment(EP_DISPATCHER_MAX_TOKENS_PER_RANK="64"):  # a default, which what a caller passes overrides
        forward(layer, rank, 3)
    assert sizes() == [40]
    forward(layer, rank, (3, 20)[rank]).sum().backward()  # one rank alone brings more than at first
    assert sizes() == [40]
    assert error_of(lambda: forward(layer, rank, 21)).startswith("hidden_states has 42")
    register(max_tokens_per_rank=50)
    forward(layer, rank, (21, 3)[rank])
    assert sizes() == [40, 50]
    unregister()
    assert register().settings == {}, "the size goes with the registration"


@on_ranks()
def test_a_size_that_nobody_gave_is_warned_of_once(rank: int, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(buffers.logger, "warning", lambda text, *given: lines.append(text % given))
    with environment(max_tokens_per_rank=40):
        first_forward(rank)
    use_layout(EP2)
    first_forward(rank, variable_seq_lengths=True)
    use_layout(EP2)
    arguments = dict(seq_length=12, micro_batch_size=2, context_parallel_size=1, sequence_parallel=False)
    module = training_arguments(monkeypatch, **arguments)
    first_forward(rank)
    assert not lines, "a size was given, or is not needed"
    module._GLOBAL_ARGS = None
    use_layout(EP2)
    for settings in ({}, dict(moe_router_topk=3)):  # two buffers
        first_forward(rank, (12, 3)[rank], **settings)
    assert len(lines) == (rank == 0), lines
    assert all("24 tokens per rank" in one and "--ep-dispatcher-max-tokens-per-rank" in one for one in lines), lines


@on_ranks()
def test_buffers_of_a_destroyed_group_are_forgotten(rank: int):
    layer = first_forward(rank)
    group, x = dist.new_group([0, 1]), tokens_of(rank).flatten(0, 1)
    topk_idx = torch.zeros(24, 2, dtype=torch.int64, device=x.device)
    topk_idx[:, 1] = 1
    made = buffers.shared_buffer(group, layer.config, x, topk_idx, "")
    assert len(living()) == 2
    dist.destroy_process_group(group)
    forward(layer, rank, 12)
    assert made in living(), "nobody looks while no buffer is made"
    other = first_forward(rank, moe_router_topk=3)
    assert living() == [layer.token_dispatcher.buffer, other.token_dispatcher.buffer]
    assert made.dispatch(x, topk_idx).x.shape[1] == HIDDEN, "who still has the buffer can use it"
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


# ---- multiprocessors ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class SmsOf019:
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None
    moe_hybridep_num_sms: int | None = None


@dataclasses.dataclass
class SmsOf016:
    moe_deepep_num_sms: int = 20
    moe_hybridep_num_sms: int = 16


@on_ranks()
def test_a_wrapped_group_has_one_buffer_for_each_kind_of_rows(rank: int):
    """Two kinds of rows in turn on a group in a wrapper: no pass makes a buffer again."""
    from lib.groups import Reloadable

    group = Reloadable(dist.new_group([0, 1]))
    topk_idx = torch.zeros(4, 2, dtype=torch.int64, device="cpu")
    kinds = [make_config(num_moe_experts=number) for number in (EXPERTS, 2 * EXPERTS)]
    seen = []
    for _ in range(20):
        for config in kinds:
            rows = torch.zeros(4, 64, dtype=torch.bfloat16, device="cpu")
            seen.append(buffers.shared_buffer(group, config, rows, topk_idx, "test"))
    assert len(set(seen)) == 2 == len(living())
    buffers.destroy_buffers()


@on_ranks()
def test_multiprocessors_are_those_of_the_flags(rank: int):
    for config, wanted in [
        (SmsOf016(), megatron_config.ALONE_SMS),
        (SmsOf016(20, 16), megatron_config.ALONE_SMS),
        (SmsOf016(12, 16), 12),
        (SmsOf016(20, 32), 32),
        (SmsOf016(12, 12), 12),
        (SmsOf019(), megatron_config.ALONE_SMS),
        (SmsOf019(20), 20),
        (SmsOf019(20, 20), 20),
        (SmsOf019(20, 12, 16), 20),
    ]:
        assert megatron_config.num_sms(config) == wanted, config
    for overlap in ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap", "delay_wgrad_compute"):
        config = SmsOf019()
        setattr(config, overlap, True)
        assert megatron_config.num_sms(config) is None, overlap
    for config, given in ((SmsOf016(12, 32), "'moe_hybridep_num_sms': 32"), (SmsOf016(0), "is 0")):
        text = error_of(partial(megatron_config.num_sms, config))
        assert text.startswith("--moe-deepep-num-sms") and given in text, text

    def sms_of_a_new_buffer(**settings) -> int | None:
        use_layout(EP2)
        layer = first_forward(rank, **settings)
        return layer.token_dispatcher.buffer.config.num_sms

    fields = make_config().__dataclass_fields__
    flag = next(name for name in megatron_config.SMS_FIELDS if name in fields)
    assert sms_of_a_new_buffer() == megatron_config.ALONE_SMS, "Megatron's default is another backend's"
    assert sms_of_a_new_buffer(**{flag: 12}) == 12
    with environment(num_sms=10):
        assert sms_of_a_new_buffer(**{flag: 12}) == 10, "ours wins over another backend's"


# ---- growing --------------------------------------------------------------------------------------------------------


EQUAL = [(12, 12), (20, 20), (13, 24), (30, 26), (5, 12), (99, 110)]


@pytest.mark.parametrize("settings", [{}, MOE], ids=["plain", "recompute"])
@pytest.mark.parametrize(
    "may_vary, lengths, expected",
    [
        (False, EQUAL, [24, 48, 48, 96, 96, 220]),  # doubled, or more where that is not enough
        (True, [(12, 4), (3, 20), (25, 0), (2, 90)], [24, 48, 96, 192]),
    ],
    ids=["all ranks bring more", "one rank brings more"],
)
@on_ranks()
def test_buffers_grow_under_microbatches_in_flight(rank, may_vary, lengths, expected, settings):
    with environment(max_tokens_per_rank=300):  # one buffer large enough for all
        xs = [tokens_of(rank, number, pair[rank]) for number, pair in enumerate(lengths)]
        layer = make_layer(make_config())
        wanted = [outcome(layer, x) for x in xs]
        assert sizes() == [300]
    use_layout(EP2)
    layer = make_layer(make_config(variable_seq_lengths=may_vary, **settings))
    flying = []
    for x, size in zip(xs, expected):
        flying.append(Microbatch(layer, x))
        assert sizes()[-1] == size, f"{sizes()} after microbatch {len(flying)}"
    for number, one in enumerate(flying):
        assert_agree(one.backward(), wanted[number], f"microbatch {number}")


@on_ranks()
def test_agreements_do_not_go_through_nccl(rank: int, monkeypatch):
    """With a group that takes no tensors on the CPU, as NCCL's: through one of the same ranks that does."""
    monkeypatch.setattr(collectives, "_takes_cpu_tensors", lambda group: False)
    monkeypatch.setattr(collectives, "_gloo_groups", {})
    with environment(EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S)):
        layer = make_layer(make_config(variable_seq_lengths=True))
        for lengths in [(12, 4), (3, 20)]:
            forward(layer, rank, lengths[rank])
        assert sizes() == [24, 48]
        group = layer.token_dispatcher.tp_ep_group
        assert len(collectives._gloo_groups) == 1 and collectives._gloo_groups[group] is not group
        started = time.monotonic()
        if rank == 0:
            error = error_of(lambda: forward(layer, rank, 12), ep.PeerTimeoutError)
            assert "phase 'agree on the number of tokens'" in error and "for rank 1" in error, error
            assert LIMIT_S - 0.5 < time.monotonic() - started < LIMIT_S + SLACK_S
        dist.barrier()


@on_ranks()
def test_an_agreement_ends_where_making_its_group_hangs(rank: int, monkeypatch):
    """A call to a store whose host hangs never returns, and the first agreement with NCCL makes a group."""
    hangs = threading.Event()
    monkeypatch.setattr(collectives, "_takes_cpu_tensors", lambda group: False)
    monkeypatch.setattr(collectives, "_gloo_groups", {})
    monkeypatch.setattr(collectives.dist, "new_group", lambda *_, **__: hangs.wait(60))
    tokens, started = torch.ones(1), time.monotonic()
    with environment(EP_DISPATCHER_TIMEOUT_S="1"):
        reduce = partial(collectives.all_reduce, tokens, dist.ReduceOp.MAX, dist.group.WORLD, about="agree")
        assert "phase 'agree'" in error_of(reduce, ep.PeerTimeoutError)
    assert time.monotonic() - started < SLACK_S
    hangs.set()


@pytest.mark.parametrize("greedy", [0, exhaustive(1)])
@on_ranks()
def test_one_rank_alone_that_brings_more_is_an_error(rank: int, greedy: int):
    with environment(EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S)):
        layer = first_forward(rank)
        started = time.monotonic()
        if rank == greedy:
            text = error_of(lambda: forward(layer, rank, 20))
            words = ("hidden_states", f"40 tokens on rank {greedy}", f"at most 24 on rank {1 - greedy}")
            for word in (*words, "--ep-dispatcher-max-tokens-per-rank", "variable_seq_lengths"):
                assert word in text, text
        else:
            text = error_of(lambda: forward(layer, rank, 12), ep.PeerTimeoutError)
            assert text.startswith("layer 1, microbatch 2: dispatch") and f"for rank {greedy}" in text
        assert LIMIT_S - 0.5 < time.monotonic() - started < LIMIT_S + SLACK_S
        dist.barrier()  # the ranks gave up at different times
        use_layout(EP2)  # with new buffers all goes on
        forward(layer, rank, 20)
        assert sizes() == [40]


class Interleaved(dist.Store):
    """The default store, with a call when a rank finds no decision, and one before and after it decides."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self._store = store
        self.on_wait = self.before_decision = self.after_decision = lambda: None

    def check(self, keys):
        is_there = self._store.check(keys)
        if not is_there and keys[0].endswith("/decision"):
            self.on_wait()
        return is_there

    def compare_set(self, key, expected, desired):
        if key.endswith("/round"):  # from here on nobody can join
            self.before_decision()
        decided = self._store.compare_set(key, expected, desired)
        if key.endswith("/decision"):
            self.after_decision()
        return decided


for name in ("set", "get", "add", "multi_get", "delete_key"):
    setattr(Interleaved, name, lambda self, *given, name=name: getattr(self._store, name)(*given))


def too_late() -> None:
    time.sleep(LIMIT_S)


ORDERS = ["it has come", "it comes first", "it comes too late", "it comes afterwards"]


@pytest.mark.parametrize("order", ORDERS)
@on_ranks()
def test_a_rank_that_gives_up_and_one_that_comes_decide_alike(rank: int, order: str):
    """Rank 0 gave up while rank 1 came. Rank 1 began to make the buffer, waited in vain, and blamed rank 0.

    Either both grow, or both raise.
    """
    real = dist.distributed_c10d._get_default_store()

    def tell(what: str) -> None:
        real.set(f"{order}/{what}", "")

    def wait(what: str) -> None:
        real.wait([f"{order}/{what}"], timedelta(seconds=60))

    with environment(max_tokens_per_rank=8):
        first_forward(rank, 4)
    (buffer,), store, grow = living(), Interleaved(real), partial(buffers._agree_to_grow, dist.group.WORLD)
    if rank == 0 and order == "it has come":
        store.on_wait = lambda: (tell("go"), wait("decided"), too_late())
    elif rank == 0:
        store.on_wait, store.after_decision = too_late, lambda: tell("given up")
        waits_for = {"it comes first": "decided", "it comes too late": "come"}.get(order)
        if waits_for is not None:
            store.before_decision = lambda: (tell("go"), wait(waits_for))
    else:
        wait("given up" if order == "it comes afterwards" else "go")
        store.after_decision = lambda: tell("decided")
        if order == "it comes too late":
            store.before_decision = lambda: (tell("come"), wait("given up"))
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, environment(EP_DISPATCHER_TIMEOUT_S=str(LIMIT_S)):
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        if order in ("it has come", "it comes first"):
            assert grow(buffer, 10 + rank) == 11
        else:
            text = error_of(lambda: grow(buffer, 10 + rank))
            assert f"{10 + rank} tokens on rank {rank}" in text and "at most 8 on " in text, text
            blamed = "given up waiting for this one" if order == "it comes too late" else f"on rank {1 - rank}"
            assert (f"on rank {1 - rank}" if rank == 0 else blamed) in text, text
    assert time.monotonic() - started < LIMIT_S + SLACK_S
    dist.barrier()
    assert grow(buffer, 20 - rank) == 20  # with the next attempt all goes on


@pytest.mark.parametrize("wrong", [-5, 8, 2**40, 12.5])
@on_ranks()
def test_a_number_of_tokens_in_the_store_is_checked(rank: int, wrong):
    """All ranks raise the same error, before they begin to make a buffer of that size."""
    with environment(max_tokens_per_rank=8):
        first_forward(rank, 4)
    (buffer,) = living()
    text = error_of(lambda: buffers._agree_to_grow(dist.group.WORLD, buffer, wrong if rank else 10), RuntimeError)
    assert f"rank 1 brings {wrong} tokens" in text and "more than 8" in text, text


# ---- the budget of an expert rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(ep=1, etp=2)], ids=str)
@on_ranks()
def test_rows_of_an_expert_rank_are_its_budget(rank: int, layout: Layout):
    config = make_config()
    layer = make_layer(config)
    x, probs = tokens_of(rank), random(24, EXPERTS, seed=rank).sigmoid() + 0.1
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(2).indices, True)
    results = []
    for factor, alignment in [(None, 1), (3.0, 1), (2.51, 16)]:
        config.moe_expert_rank_capacity_factor = factor
        layer.token_dispatcher.expert_alignment = alignment
        tokens, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        rows, counts, permuted_probs, output = all_steps(layer.token_dispatcher, tokens, routing_map, weights)
        (output * random(*x.shape, seed=5)).sum().backward()
        # A token's experts' probabilities add up over the slices of expert tensor parallelism.
        expected = x * layout.etp * (probs * routing_map).sum(1).view(12, 2, 1)
        torch.testing.assert_close(output, expected)
        results.append(dict(output=output.detach(), tokens=tokens.grad, probs=weights.grad))
        used, size = int(counts.sum()), rows.shape[0]
        if factor is None:
            assert size == used
        else:
            wanted = int(24 * 2 * layout.etp * factor)
            wanted = -(-wanted // alignment) * alignment
            assert size == permuted_probs.shape[0] == wanted and used <= wanted
            assert not rows[used:].any() and not permuted_probs[used:].any()
    for result in results[1:]:
        assert_agree(result, results[0])

    if on_gpu():
        return  # no host waits for the counts: the error comes from a later operation
    # All ranks hear what was needed; what arrived before is unharmed, and the next step is right again.
    config.moe_expert_rank_capacity_factor, layer.token_dispatcher.expert_alignment = 0.25, 1
    text = error_of(lambda: all_steps(layer.token_dispatcher, x, routing_map, probs))
    allowed = int(24 * 2 * layout.etp * 0.25)
    assert "max_recv_rows" in text and str(allowed) in text
    config.moe_expert_rank_capacity_factor = None
    rows, *_, output = all_steps(layer.token_dispatcher, x, routing_map, probs)
    assert str(rows.shape[0]) in text, "it says how many rows this rank needs"
    assert torch.equal(output, results[0]["output"])
