"""``deep_ep.EPBuffer.lb_prefetch_weights`` and ``lb_reduce_grads`` of DeepEP 2.5, against loops over all ranks."""

import contextlib
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.deep_ep_case import EXPERTS, HIDDEN, TOPK, Case
from lib.deep_ep_elastic import opened_as
from lib.errors import assert_refused, error_of
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.balance.cpu_slots import CpuSlots
from ep_dispatcher.integrations.deep_ep import BufferAllocator, destroy_buffers
from ep_dispatcher.integrations.deep_ep.redundant_experts import ALLOCATION_ALIGNMENT
from ep_dispatcher.tools.testing import device_of, same_bits

LOCAL, SLOTS = 3, 4  # experts and slots of a rank
SIZES = [(2, None), (4, None), (4, 2)]  # ranks, and those of a node; None: all
SENTINEL = 0xA5
# (of a slot, of an expert): shapes and dtypes may differ if the bytes are the same.
WEIGHTS = [
    (((24, 16), torch.bfloat16), ((24, 16), torch.bfloat16)),
    (((96,), torch.uint8), ((6, 8), torch.float16)),
    (((64,), torch.float8_e4m3fn), ((64,), torch.float8_e4m3fn)),
    (((4, 4), torch.float32), ((16,), torch.int32)),
    (((2,), torch.float64), ((16,), torch.bool)),
    (((4100,), torch.float32), ((8200,), torch.bfloat16)),
]
WEIGHTS += 12 * [(((8,), torch.float32), ((16,), torch.bfloat16))]  # more than one launch of a kernel on GPUs
N = 1028  # elements of a gradient

sizes = pytest.mark.parametrize("num_ranks, ranks_per_node", SIZES, ids=lambda one: str(one))


def opened(rank: int, engine: str, ranks_per_node: int | None, plan, **options):
    case = Case(engine, ranks_per_node)
    return opened_as("deep_ep_v25", "EPBuffer", case, rank, lb_allocation_plan_or_num_bytes=plan, **options)


def random_bytes(shape, dtype: torch.dtype, *key: int) -> Tensor:
    """The same on all ranks for the same key. Bools are 0 or 1."""
    generator = torch.Generator().manual_seed(sum(k * 31**i for i, k in enumerate(key)))
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return numbers.view(dtype).view(shape)


def random(key: int) -> Tensor:
    """float32 [N], whose sums depend on the order."""
    generator = torch.Generator().manual_seed(key)
    return torch.randn(N, generator=generator) * 10 ** torch.randint(-3, 4, (N,), generator=generator)


def make_mapping(node: int, ranks_per_node: int, seed: int) -> Tensor:
    """int32 [ranks_per_node, SLOTS]: experts of other ranks, also twice on a rank, and free slots; another by node."""
    generator = torch.Generator().manual_seed(1000 * node + seed)
    mapping = torch.randint(0, (ranks_per_node - 1) * LOCAL, (ranks_per_node, SLOTS), generator=generator)
    own = torch.arange(ranks_per_node)[:, None] * LOCAL
    mapping += (mapping >= own) * LOCAL
    mapping[torch.rand(mapping.shape, generator=generator) < 0.25] = -1
    mapping[0, :2] = LOCAL  # one expert in two slots of a rank
    mapping[1:, 3] = 0  # and one in slots of all other ranks
    return mapping.int()


class Place:
    """A rank in its node, and the mapping there."""

    def __init__(self, rank: int, ranks_per_node: int | None):
        self.size = ranks_per_node or dist.get_world_size()
        self.node, self.local_rank = divmod(rank, self.size)
        self.first = self.node * self.size  # rank of the node

    def mapping(self, seed: int = 0) -> Tensor:
        return make_mapping(self.node, self.size, seed)

    def key(self, expert: int) -> tuple[int, int]:
        """What tells an expert of the node from all others of the group: its rank, and its number there."""
        return self.first + expert // LOCAL, expert % LOCAL


@sizes
@on_ranks()
def test_weights_come_into_the_slots_of_the_mapping_alone(rank, engine, num_ranks, ranks_per_node):
    """Also of several dtypes, into tensors of other shapes, in inference mode, and after an event."""
    plan, place, at = BufferAllocator(), Place(rank, ranks_per_node), device_of(engine, rank)
    slots = [plan.allocate((SLOTS, *shape), dtype) for (shape, dtype), _ in WEIGHTS]
    assert all(one.is_meta for one in slots)
    with opened(rank, engine, ranks_per_node, plan) as buffer:
        assert plan.materialized and buffer.num_lb_bytes == plan.num_bytes == len(slots) * ALLOCATION_ALIGNMENT
        for seed in range(4):
            experts = [
                torch.stack([random_bytes(*kind, seed, w, rank, e) for e in range(LOCAL)]).to(at)
                for w, (_, kind) in enumerate(WEIGHTS)
            ]
            for one in slots:
                one.view(torch.uint8).fill_(SENTINEL)
            mapping, few = place.mapping(seed), seed == 3  # the last time the first tensors alone
            before = buffer.capture() if seed % 2 else None
            given = (slots[0], experts[0]) if few else (slots, tuple(experts))
            with torch.inference_mode() if seed % 2 else contextlib.nullcontext():
                event = buffer.lb_prefetch_weights(*given, mapping.to(at), num_sms=3 * seed, previous_event=before)
            assert event.wait() is None
            for w, (_, kind) in enumerate(WEIGHTS):
                for slot, expert in enumerate(mapping[place.local_rank].tolist()):
                    found = slots[w][slot].cpu().view(-1).view(torch.uint8)
                    wanted = torch.full_like(found, SENTINEL)
                    if expert >= 0 and not (few and w):
                        wanted = random_bytes(*kind, seed, w, *place.key(expert)).view(-1).view(torch.uint8)
                    assert torch.equal(found, wanted), (seed, w, slot, expert)
        del slots, one, given


@sizes
@on_ranks()
def test_gradients_are_added_in_the_order_of_ranks_and_slots(rank, engine, num_ranks, ranks_per_node):
    plan, place, at = BufferAllocator(), Place(rank, ranks_per_node), device_of(engine, rank)
    slots = plan.allocate((SLOTS, N), torch.float32)
    differs = False
    with opened(rank, engine, ranks_per_node, plan) as buffer:
        for seed in range(3):

            def of_slot(holder: int, slot: int, seed=seed) -> Tensor:
                return random(1000 * seed + 10 * holder + slot)

            slots.copy_(torch.stack([of_slot(rank, slot) for slot in range(SLOTS)]))
            own = torch.stack([random(777 + 10 * rank + e) for e in range(LOCAL)])
            gradients, mapping = own.to(at, copy=True), place.mapping(seed)
            before = buffer.capture() if seed % 2 else None
            event = buffer.lb_reduce_grads(slots, gradients, mapping.to(at), previous_event=before)
            event.current_stream_wait()
            for e in range(LOCAL):
                copies = [
                    of_slot(place.first + holder, slot)
                    for holder in range(place.size)
                    for slot in range(SLOTS)
                    if mapping[holder, slot] == place.local_rank * LOCAL + e
                ]
                total, backwards = own[e], own[e]
                for copy in copies:
                    total = total + copy
                for copy in reversed(copies):
                    backwards = backwards + copy
                assert same_bits(gradients[e].cpu(), total)
                differs |= not torch.equal(total, backwards)
            for slot in range(SLOTS):
                assert same_bits(slots[slot].cpu(), of_slot(rank, slot)), "a slot has changed"
        del slots
    assert differs or place.local_rank > 1, "the order shows"


@pytest.mark.parametrize("engine", ["cpu"])
@on_ranks(2)
def test_what_an_exchange_waits_for(rank, engine):
    """A push waits until the other rank no longer uses its slots, and the event for a slow push or pull."""
    plan = BufferAllocator()
    weights, gradients = plan.allocate((1, 8), torch.float32), plan.allocate((1, 8), torch.float32)
    mapping = torch.tensor([[1], [-1]], dtype=torch.int32)  # rank 0 has a copy of rank 1's expert

    def slowly(slots, *given, run, **options):
        time.sleep(0.3)
        run(slots, *given, **options)

    with opened(rank, engine, None, plan) as buffer, pytest.MonkeyPatch.context() as patch:
        gradients.fill_(2.0)
        if rank == 0:
            time.sleep(1.0)
            assert not weights.any(), "the other rank has written while this one was at work"
        else:
            for name in ("push", "pull"):
                old = getattr(CpuSlots, name)
                patch.setattr(CpuSlots, name, lambda slots, *a, old=old, **k: slowly(slots, *a, run=old, **k))
        buffer.lb_prefetch_weights(weights, torch.full((1, 8), 3.0), mapping).wait()
        assert (weights == (3.0 if rank == 0 else 0.0)).all(), "the event did not wait for the push"
        sums = torch.ones(1, 8)
        buffer.lb_reduce_grads(gradients, sums, mapping).wait()
        gradients.fill_(50.0)
        assert (sums == (1.0 if rank == 0 else 3.0)).all(), "the other rank has overwritten what this one was adding"
        dist.barrier()
        del weights, gradients


@on_ranks(2)
def test_memory_by_bytes(rank, engine):
    """Without a plan a program divides runtime.lb_storage itself. It ends with the buffer, or with all buffers."""
    at, one = device_of(engine, rank), torch.ones
    mapping = torch.tensor([[1], [0]], dtype=torch.int32, device=at)
    for ends in ("destroy", "destroy_buffers"):
        with opened(rank, engine, None, 2 * ALLOCATION_ALIGNMENT) as buffer:
            storage = buffer.runtime.lb_storage
            assert storage.dtype == torch.uint8 and storage.shape == (buffer.num_lb_bytes,) and not storage.any()
            assert buffer.runtime.context is buffer.context
            slots = storage[48 : 48 + 64].view(torch.float32).view(1, 16)
            call = partial(buffer.lb_prefetch_weights, slots, one(1, 16, device=at) * (5 + rank), mapping)
            call().wait()
            assert (slots == 6 - rank).all() and storage.count_nonzero() == 2 * 16  # 5.0 and 6.0 have two bytes
            assert buffer.lb_get_theoretical_num_sms() == 32
            if ends == "destroy_buffers":
                destroy_buffers()
                assert "was freed" in error_of(call)
            del storage, slots
        assert buffer.runtime is None and "buffer was destroyed" in error_of(call)
        del call


@on_ranks(2)
def test_wrong_arguments_are_named(rank, engine):
    at, plan = device_of(engine, rank), BufferAllocator()
    slots, grads = plan.allocate((2, 8), torch.bfloat16), plan.allocate((2, 8), torch.float32)
    mapping = torch.tensor([[-1, 3], [0, -1]], dtype=torch.int32, device=at)
    own, own_grads = torch.zeros(3, 8, dtype=torch.bfloat16, device=at), torch.zeros(3, 8, device=at)
    with opened(rank, engine, None, plan) as buffer:
        push, pull = buffer.lb_prefetch_weights, buffer.lb_reduce_grads
        for call, given in ((push, (slots, own)), (pull, (grads, own_grads))):
            for wrong in (mapping.long(), mapping[:1], mapping[0], mapping[:, :0]):
                assert_refused("redundancy_mapping", call, *given, wrong)
            assert_refused("num_sms", call, *given, mapping, num_sms=-1)
        strange = own_grads.new_zeros(2, 8)
        for wrong in (slots[:1], slots.t().contiguous().t(), strange.bfloat16(), slots.view(2, 2, 4)[:, :1]):
            assert_refused("redundant_expert_weights", push, wrong, own, mapping)
        for wrong in (own[:, :4], own[:0], own.t().contiguous().t(), own[0, 0], own[:, :0].contiguous()):
            assert_refused("expert_weights", push, slots, wrong, mapping)
        assert_refused("expert_weights[1]", push, [slots, slots], [own, own[:2]], mapping)
        assert_refused("expert_weights[1]", push, [slots, slots], [own, None], mapping)
        assert_refused("redundant_expert_weights[1]", push, [slots, strange.bfloat16()], [own, own], mapping)
        for wrong in (([], []), ([slots], []), ([slots, slots], [own])):
            assert_refused("redundant_expert_weights", push, *wrong, mapping)
        odd = grads.view(-1)[:4].view(2, 2)
        for wrong in (own, own_grads[0], own_grads.double(), own_grads.t().contiguous().t()):
            assert_refused("expert_grads", pull, grads, wrong, mapping)
        for wrong in (slots, grads[:1], strange, grads[:, :4]):
            assert_refused("redundant_expert_grads", pull, wrong, own_grads[:, : wrong.shape[1]].contiguous(), mapping)
        assert_refused("expert_grads", pull, odd, own_grads[:, :2].contiguous(), mapping)
        shifted = grads.view(-1)[1:9].view(1, 8)
        assert_refused("redundant_expert_grads", pull, shifted, own_grads, mapping[:, :1])
        assert "multiple of 16" in error_of(pull, shifted, own_grads, mapping[:, :1])
        push(slots, own, mapping).wait()
        del slots, grads, odd, shifted, wrong, given
        with pytest.raises(NotImplementedError, match=r"runtime.dispatch: .*EPBuffer"):
            buffer.runtime.dispatch()
    with opened(rank, engine, None, 0) as buffer:
        assert buffer.runtime.lb_storage is None
        for call in (partial(buffer.lb_prefetch_weights, own, own), partial(buffer.lb_reduce_grads, own, own)):
            assert_refused("lb_allocation_plan_or_num_bytes", call, mapping)
    for wrong in (plan, 4096, -1, True, None, "2MB"):
        make = partial(type(buffer), dist.group.WORLD, lb_allocation_plan_or_num_bytes=wrong)
        assert_refused("lb_allocation_plan_or_num_bytes", make)


@pytest.mark.parametrize("wrong", [2, 4], ids=["own", "none"])
@on_ranks(2)
def test_an_expert_that_cannot_be_in_a_slot(rank, engine, wrong):
    """On a CPU each rank raises it at once, on a GPU with a later operation, until destroy()."""
    at, plan = device_of(engine, rank), BufferAllocator()
    slots = plan.allocate((1, 8), torch.float32)
    mapping = torch.tensor([[-1], [wrong]], dtype=torch.int32, device=at)  # of two ranks of two experts

    with opened(rank, engine, None, plan) as buffer:
        with pytest.raises((ValueError, ep.PeerTimeoutError), match="redundancy_mapping|left"):
            for _ in range(1 if engine == "cpu" else 100):
                buffer.lb_prefetch_weights(slots, torch.ones(2, 8, device=at), mapping).wait()
                if engine == "cuda":
                    torch.cuda.synchronize()
        assert not slots.any()
        del slots


@pytest.mark.parametrize("kind", ["bytes", "tensors"])
@on_ranks(2)
def test_ranks_that_plan_other_tensors(rank, engine, kind):
    plan = BufferAllocator()
    plan.allocate((2, 8) if rank == 0 or kind == "bytes" else (8, 2), torch.float32)
    if kind == "bytes" and rank == 1:
        plan.allocate(1, torch.float32)

    def make():
        with opened(rank, engine, None, plan, explicitly_destroy=False):
            raise AssertionError("a buffer of other sizes")

    text = assert_refused("lb_allocation_plan_or_num_bytes", make)
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts[0] == texts[1] and "rank 0 " in text and "rank 1 " in text
    destroy_buffers()


def test_a_plan_of_tensors():
    plan = BufferAllocator()
    first, second, third = plan.allocate(3, torch.float64), plan.allocate((2 << 20) + 1, torch.uint8), None
    third = plan.allocate((0, 4), torch.bfloat16)
    assert (plan.alignment, plan.num_bytes, plan.materialized) == (2 << 20, 6 << 20, False)
    assert [(tensor.shape, begin >> 21) for tensor, begin in plan.allocations] == [
        ((3,), 0),
        (((2 << 20) + 1,), 1),
        ((0, 4), 3),
    ]
    for wrong in (torch.zeros(6 << 20), torch.zeros(5 << 20, dtype=torch.uint8)):
        assert_refused("storage", plan.materialize, wrong)
    storage = torch.zeros(6 << 20, dtype=torch.uint8)
    plan.materialize(storage)
    first.fill_(1.5), second.fill_(7)
    assert (storage[:24].view(torch.float64) == 1.5).all() and (storage[2 << 20 : (4 << 20) + 1] == 7).all()
    assert storage.count_nonzero() == 3 * 2 + (2 << 20) + 1 and third.shape == (0, 4) and plan.materialized
    for late in (partial(plan.allocate, 1, torch.uint8), partial(plan.materialize, storage)):
        assert "plan" in error_of(late)


@on_ranks(2)
def test_a_dispatch_to_copies_beside_it(rank, engine):
    """Dispatches and exchanges of one buffer take turns, also in the stream of asynchronous operations."""
    at, plan = device_of(engine, rank), BufferAllocator()
    slots = plan.allocate((1, 64), torch.bfloat16)
    mapping = torch.tensor([[EXPERTS // 2], [0]], dtype=torch.int32, device=at)
    own = torch.full((EXPERTS // 2, 64), rank + 1.0, dtype=torch.bfloat16, device=at)
    with opened(rank, engine, None, plan) as buffer:
        x = torch.full((5, HIDDEN), rank + 1.0, dtype=torch.bfloat16, device=at)
        topk_idx = torch.arange(5 * TOPK, device=at).view(5, TOPK) % EXPERTS
        for turn in range(3):
            slots.zero_()
            pushed = buffer.lb_prefetch_weights(slots, own * (turn + 1), mapping)
            rows, *_, handle, event = buffer.dispatch(
                x, topk_idx, num_experts=EXPERTS, async_with_compute_stream=bool(turn % 2)
            )
            if turn % 2:
                event.wait()
            buffer.barrier()
            sums, _, _ = buffer.combine(rows, handle)
            pushed.wait()
            assert (slots == (2 - rank) * (turn + 1)).all() and torch.equal(sums[:, :1] > 0, x[:, :1] > 0)
        del slots
