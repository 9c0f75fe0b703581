"""Expert slots: a push brings the weights of the home rank, a pull adds the gradients in the documented order."""

import os
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import exhaustive, on_ranks
from lib.errors import assert_refused, error_of
from lib.faults import mappings, open_files
from lib.round_trip import device, make_buffer, round_trip
from torch import Tensor

import ep_dispatcher as ep
from ep_dispatcher.balance.slot_layout import slot_layout
from ep_dispatcher.balance.slots import Slots
from ep_dispatcher.tools.testing import same_bits

EXPERTS, SLOTS = 3, 2  # of each rank; make_buffer has 12 experts
SHAPES = [(24, 16), (8, 24), (24,), (7,)]  # w1, w2, and biases; the last one is no multiple of 16 bytes
DTYPES = [torch.bfloat16, exhaustive(torch.float32), exhaustive(torch.float16)]
NODES = [4, 2]  # ranks of a node: one node, and two
# By ranks of a node: (rank, slot) -> expert. Expert e's home is rank e // 3, of the same node. Expert 0 has several
# copies, expert 5 two on one rank; rank 2 has one behind a free slot, and with two nodes no copy at all leaves a node.
COPIES = {
    4: {(1, 0): 0, (2, 1): 0, (3, 0): 0, (0, 0): 5, (0, 1): 5, (1, 1): 9, (3, 1): 4},
    2: {(1, 0): 0, (1, 1): 2, (0, 1): 3, (2, 1): 11, (3, 0): 6, (3, 1): 6},
}


def copies_of(places: dict[tuple[int, int], int], at: str, num_slots: int = SLOTS) -> Tensor:
    copies = torch.full((4, num_slots, 3), -1, dtype=torch.int32)
    for (rank, slot), expert in places.items():
        copies[rank, slot] = torch.tensor([expert, 5, 300])
    return copies.to(at)


def random(shape, name: str, dtype=torch.float32) -> Tensor:
    """The same numbers on every rank for the same name. Their sums depend on the order."""
    generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    numbers = torch.randn(shape, generator=generator)
    return (numbers * 10 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)


def make_slots(
    buffer: ep.Buffer, dtype=torch.bfloat16, shapes=SHAPES, num_slots=SLOTS, number=0, weights=None, gradients=None
) -> Slots:
    """weights, gradients: as in Slots; None: the shapes, with the dtype"""
    weights = [(shape, dtype) for shape in shapes] if weights is None else weights
    gradients = shapes if gradients is None else gradients
    return Slots(buffer.config, device(buffer), num_slots, weights, gradients, number)


def own_tensors(make, rank: int, kind: str, at: str, shapes) -> list:
    """Per parameter the tensors of this rank's experts: one tensor, or one each, at irregular addresses too."""
    result = []
    for p, shape in enumerate(shapes):
        each = [make(EXPERTS * rank + e, p, shape) for e in range(EXPERTS)]
        if kind == "stacked":
            result.append(torch.stack(each).to(at))
        elif kind == "list":
            room = torch.zeros(4, *shape, dtype=each[0].dtype, device=at)
            result.append([room[e * (e + 1) // 2].copy_(one) for e, one in enumerate(each)])
        else:  # views that begin at no multiple of 16 bytes
            long = [torch.zeros(one.numel() + 1, dtype=one.dtype, device=at)[1:].view(one.shape) for one in each]
            result.append([view.copy_(one) for view, one in zip(long, each)])
    return result


def meet(buffer: ep.Buffer) -> None:
    """All that the ranks did before is done: as an operation of the buffer does it, without a wait of the host."""
    if buffer.engine == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["stacked", "list", "shifted"])
@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks(4)
def test_a_push_brings_the_weights_of_the_home_and_changes_nothing_else(rank, engine, ranks_per_node, kind, dtype):
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        slots, at = make_slots(buffer, dtype), device(buffer)
        assert [[one.shape for one in of_p] for of_p in slots.weights] == [[torch.Size(s)] * SLOTS for s in SHAPES]
        for one in (one for of_p in [*slots.weights, *slots.gradients] for one in of_p):
            assert one.data_ptr() % 128 == 0 and not one.any()
        expected: list[list[Tensor]] = [[torch.zeros(shape, dtype=dtype) for _ in range(SLOTS)] for shape in SHAPES]
        first = COPIES[ranks_per_node]
        second = {place: expert for place, expert in first.items() if place[1] == 1}  # slots keep what was there
        for turn, places in enumerate((first, {}, second)):

            def weight(expert: int, p: int, shape, turn=turn) -> Tensor:
                return random(shape, f"weight {turn} {expert} {p}", dtype)

            copies, parameters = copies_of(places, at), own_tensors(weight, rank, kind, at, SHAPES)
            meet(buffer)
            slots.push(copies, parameters)
            meet(buffer)
            for (holder, slot), expert in places.items():
                if holder == rank:
                    for p, shape in enumerate(SHAPES):
                        expected[p][slot] = weight(expert, p, shape)
            for p in range(len(SHAPES)):
                for slot in range(SLOTS):
                    assert same_bits(slots.weights[p][slot].cpu(), expected[p][slot])
                    assert not slots.gradients[p][slot].any()
        meet(buffer)
        slots.free()


@pytest.mark.parametrize("kind", ["stacked", "list", "shifted"])
@pytest.mark.parametrize("of_homes", [torch.float32, torch.bfloat16, exhaustive(torch.float16)])
@pytest.mark.parametrize("ranks_per_node", NODES)
@on_ranks(4)
def test_a_pull_adds_float32_in_the_order_of_ranks_and_slots(rank, engine, ranks_per_node, of_homes, kind):
    dtype = torch.bfloat16 if of_homes == torch.float32 else of_homes
    with make_buffer(engine=engine, ranks_per_node=ranks_per_node) as buffer:
        slots, at, places = make_slots(buffer, dtype), device(buffer), COPIES[ranks_per_node]
        for p, shape in enumerate(SHAPES):
            for slot in range(SLOTS):  # also where there is no copy
                slots.gradients[p][slot].copy_(random(shape, f"slot {rank} {slot} {p}"))

        def own(expert: int, p: int, shape) -> Tensor:
            return random(shape, f"home {expert} {p}", of_homes)

        gradients = own_tensors(own, rank, kind, at, SHAPES)
        meet(buffer)
        slots.pull(copies_of(places, at), gradients)
        meet(buffer)
        differs = False
        for p, shape in enumerate(SHAPES):
            for e in range(EXPERTS):
                expert = EXPERTS * rank + e
                total = own(expert, p, shape).float()
                parts = [random(shape, f"slot {r} {s} {p}") for (r, s), one in sorted(places.items()) if one == expert]
                for part in parts:
                    total = total + part
                assert same_bits(gradients[p][e].cpu(), total.to(of_homes))
                backwards = own(expert, p, shape).float()
                for part in reversed(parts):
                    backwards = backwards + part
                differs |= not torch.equal(backwards, total)
            for slot in range(SLOTS):
                assert same_bits(slots.gradients[p][slot].cpu(), random(shape, f"slot {rank} {slot} {p}"))
                assert not slots.weights[p][slot].any()
        assert differs or rank not in (0, 1) or ranks_per_node == 2, "the order shows"
        slots.free()


@on_ranks(4)
def test_weights_of_several_dtypes_of_which_a_push_brings_some(rank, engine):
    """As quantized experts have them. Their scales begin at no multiple of 16 bytes at the home."""
    of_weights = [((16, 48), torch.float8_e4m3fn), ((1, 3), torch.float32), ((48, 16), torch.float8_e4m3fn)]
    with make_buffer(engine=engine) as buffer:
        at, places = device(buffer), COPIES[4]
        slots = make_slots(buffer, weights=of_weights, gradients=[(16, 48)])
        assert [[one.dtype for one in of_w] for of_w in slots.weights] == [[dtype] * SLOTS for _, dtype in of_weights]
        assert [[one.shape for one in of_g] for of_g in slots.gradients] == [[torch.Size((16, 48))] * SLOTS]

        def weight(expert: int, w: int) -> Tensor:
            shape, dtype = of_weights[w]
            return random(shape, f"weight {expert} {w}").to(dtype)

        own = [torch.stack([weight(EXPERTS * rank + e, w) for e in range(EXPERTS)]).to(at) for w in range(3)]
        copies, pushed = copies_of(places, at), set()
        for brought in ({0, 1}, {2}):
            meet(buffer)
            slots.push(copies, [own[w] if w in brought else None for w in range(3)])
            meet(buffer)
            pushed |= brought
            for w in range(3):
                for slot in range(SLOTS):
                    seen = slots.weights[w][slot].cpu().view(torch.uint8)
                    if w in pushed and (rank, slot) in places:
                        assert torch.equal(seen, weight(places[rank, slot], w).view(torch.uint8))
                    else:
                        assert not seen.any()
        meet(buffer)
        slots.free()


@on_ranks(4)
def test_large_parameters(rank, engine):
    """More than all threads of a kernel load at a time, and a rest that not all of them share."""
    elements = (1 << 22 if engine == "cpu" else 3 << 23) + 1032
    with make_buffer(engine=engine) as buffer:
        slots, at = make_slots(buffer, shapes=[(elements,)], num_slots=1), device(buffer)
        numbers = torch.arange(elements, dtype=torch.int32, device=at)
        values = [(numbers * (7 + 2 * e) % 251 - 125).bfloat16() for e in range(12)]
        copies = copies_of({(1, 0): 0, (2, 0): 0, (3, 0): 4}, at, 1)
        meet(buffer)
        slots.push(copies, [torch.stack(values[3 * rank : 3 * rank + 3])])
        meet(buffer)
        held = {1: 0, 2: 0, 3: 4}.get(rank)
        assert not slots.weights[0][0].any() if held is None else torch.equal(slots.weights[0][0], values[held])
        slots.gradients[0][0].copy_(values[rank]).mul_(0.5)
        meet(buffer)
        gradients = torch.ones(3, elements, device=at)
        slots.pull(copies, [gradients])
        meet(buffer)
        right = torch.ones(3, elements, device=at)
        for holder, expert in ((1, 0), (2, 0), (3, 4)):
            if expert // 3 == rank:
                right[expert % 3] += values[holder].float() * 0.5
        assert torch.equal(gradients, right)
        slots.free()


@on_ranks(2)
def test_several_slots_of_a_buffer_and_its_operations(rank, engine):
    with make_buffer(engine=engine) as buffer:
        several = [
            make_slots(buffer, dtype, [shape], num_slots, number)
            for number, (dtype, shape, num_slots) in enumerate(
                [(torch.bfloat16, (16, 8), 1), (torch.float32, (32,), 3), (torch.bfloat16, (16, 8), 1)]
            )
        ]
        round_trip(buffer)
        for number, slots in enumerate(several):
            copies = torch.full((2, len(slots.weights[0]), 3), -1, dtype=torch.int32, device=device(buffer))
            copies[1 - rank, 0, 0] = 6 * rank + number  # of 6 experts of a rank
            copies[rank, 0, 0] = 6 * (1 - rank) + number
            like = slots.weights[0][0]
            own = torch.stack([torch.full_like(like, 100 * number + 6 * rank + e) for e in range(6)])
            slots.push(copies, [own])
        round_trip(buffer)  # it orders the ranks: nobody waits on the host
        for number, slots in enumerate(several):
            assert (slots.weights[0][0] == 100 * number + 6 * (1 - rank) + number).all()
            assert not any(one.any() for one in slots.weights[0][1:])
        several[0].free()
        round_trip(buffer)
        assert (several[1].weights[0][0] == 100 + 6 * (1 - rank) + 1).all()
        for slots in several[1:]:
            slots.free()


@pytest.mark.parametrize(
    "name,changes",
    [
        ("weights", dict(weights=[((8,), torch.bfloat16)])),
        ("weights", dict(dtype=torch.float32)),
        ("gradients", dict(gradients=[(8,)])),
        ("num_slots", dict(num_slots=3)),
    ],
)
@on_ranks(4)
def test_ranks_that_give_other_sizes(rank, engine, name, changes):
    with make_buffer(engine=engine, ranks_per_node=2) as buffer:
        text = error_of(make_slots, buffer, **(changes if rank == 2 else {}))
        texts: list = [None] * 4
        dist.all_gather_object(texts, text)
        assert len(set(texts)) == 1 and re.match(rf"{name} of expert slots: rank 0 gave .*, rank 2 gave ", text)
        assert_refused(name, make_slots, buffer, number=1, **{name: 0 if name == "num_slots" else []})
        slots = make_slots(buffer, number=2)
        round_trip(buffer)
        slots.free()


@on_ranks(2)
def test_slots_that_were_freed_say_so(rank, engine):
    with make_buffer(engine=engine) as buffer:
        at = device(buffer)
        slots = make_slots(buffer, shapes=[(8, 16)])
        copies = torch.full((2, SLOTS, 3), -1, dtype=torch.int32, device=at)
        w1 = torch.zeros(6, 8, 16, dtype=torch.bfloat16, device=at)
        for call in (slots.push, slots.pull):
            call(copies, [w1])
        slots.free()
        slots.free()
        assert slots.weights == slots.gradients == []
        for call in (slots.push, slots.pull):
            assert "freed" in error_of(call, copies, [w1])


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named(rank, engine):
    with make_buffer(engine=engine) as buffer:
        if rank == 0:
            hasty = replace(buffer.config, timeout_s=2.0)
            with pytest.raises(
                ep.PeerTimeoutError, match="^expert slots, phase 'sizes': rank 0 waited .* rank 1"
            ) as late:
                Slots(hasty, device(buffer), SLOTS, SHAPES, torch.bfloat16, 0)
            assert late.value.late_ranks == (1,) and late.value.epoch == 0
        dist.barrier()
        slots = make_slots(buffer, number=1)
        slots.free()


@pytest.mark.parametrize("engine", ["cpu"])  # PyTorch's symmetric memory keeps descriptors of its own on GPUs
@on_ranks(2, fresh=True)
def test_nothing_is_left(rank, engine):
    """Not of slots that were freed, nor where a rank has no memory for them; and no descriptor while they live."""
    from ep_dispatcher.balance import cpu_slots

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with make_buffer(engine=engine) as buffer:
        make_slots(buffer).free()
        before, mapped = descriptors(), len(mappings())
        for number in range(1, 4):
            slots = make_slots(buffer, number=number)
            assert len(mappings()) == mapped + 2 and not [one for one in open_files() if "memfd:ep_dispatcher" in one]
            view = slots.weights[0][0]
            slots.free()
            assert len(mappings()) == mapped + 1 and not view.any(), "memory lives as long as a view"
            del view
            assert (descriptors(), len(mappings())) == (before, mapped)
        with pytest.MonkeyPatch.context() as patch:
            for number, step in enumerate(("allocate", "attach"), start=4):
                old = getattr(cpu_slots.CpuSlots, step)

                def fails(slots, old=old):
                    old(slots)
                    raise OSError("no memory")

                if rank == 1:
                    patch.setattr(cpu_slots.CpuSlots, step, fails)
                with pytest.raises(RuntimeError, match="no memory"):
                    make_slots(buffer, number=number)
                assert (descriptors(), len(mappings())) == (before, mapped)
                patch.undo()
        round_trip(buffer)


def test_bytes():
    def bytes_of(shapes, num_slots: int) -> int:
        return slot_layout([(shape, torch.bfloat16) for shape in shapes], shapes, num_slots).num_bytes

    assert bytes_of([(7,)], 1) == 256
    assert bytes_of([(2048, 7168), (7168, 1024)], 2) == 2 * (2048 * 7168 + 7168 * 1024) * 6
    assert bytes_of([(16, 8, 3), (33,)], 3) == 3 * (768 + 128 + 1536 + 256)  # 768 and 66 bytes; 1536 and 132
    quantized = [((256, 128), torch.float8_e4m3fn), ((2, 1), torch.float32)]
    assert slot_layout(quantized, [(256, 128)], 2).num_bytes == 2 * (256 * 128 + 128 + 256 * 128 * 4)
