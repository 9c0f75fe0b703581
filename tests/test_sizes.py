"""What a buffer says of itself, and the most rows that a rank can get."""

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from lib.errors import assert_refused
from lib.round_trip import CONFIG, HIDDEN, MAX_TOKENS, NUM_EXPERTS, NUM_TOPK, device, make_buffer
from torch.distributed.device_mesh import init_device_mesh

import ep_dispatcher as ep


@on_ranks(2)
def test_a_buffer_has_its_sizes_as_properties_that_nobody_can_set(rank, engine):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))["ep"]
    groups = (None, dist.group.WORLD, None), (mesh, mesh.get_group(), mesh)
    for given, group, given_mesh in groups:
        buffer = make_buffer(given, dtype=torch.float16, engine=engine)
        found = {name: getattr(buffer, name) for name in CONFIG}
        assert found == CONFIG
        with pytest.raises(AttributeError):
            buffer.hidden = 2
        buffer.destroy()
        # They stay, because programs that print them may have destroyed the buffer.
        assert (buffer.rank, buffer.num_ranks, buffer.num_local_experts) == (rank, 2, NUM_EXPERTS // 2)
        assert (buffer.dtype, buffer.engine, buffer.device) == (torch.float16, engine, torch.device(device(buffer)))
        assert buffer.group is group and buffer.mesh is given_mesh and buffer.topology.num_ranks == 2


def crowded(experts: list[int]) -> torch.Tensor:
    """topk_idx of as many tokens as a rank may have, all of which choose these experts."""
    chosen = experts[:NUM_TOPK] + [-1] * (NUM_TOPK - len(experts))
    return torch.tensor([chosen] * MAX_TOKENS, dtype=torch.int64)


def spread(experts: list[int]) -> torch.Tensor:
    """The same, but one token after another leaves out another one of these experts: counts are no multiples."""
    rows = [[e for e in experts if e != experts[t % len(experts)]][:NUM_TOPK] for t in range(MAX_TOKENS)]
    return torch.tensor([row + [-1] * (NUM_TOPK - len(row)) for row in rows], dtype=torch.int64)


@pytest.mark.parametrize("num_ranks", [2, 6])  # 6 local experts, more than top-k, and 2, fewer
@on_ranks()
def test_no_routing_exceeds_the_safe_limit(rank, num_ranks, engine):
    with make_buffer(dtype=torch.float32, engine=engine) as buffer:
        local = list(range(NUM_EXPERTS // num_ranks))  # of rank 0
        x = torch.ones(MAX_TOKENS, HIDDEN, device=buffer.device)
        for layout, alignment in (("expert", 1), ("expert", 5), ("expert", 64), ("rank", 1)):
            limit = buffer.max_recv_rows(layout, expert_alignment=alignment)
            most = 0
            for topk_idx in (crowded(local).to(buffer.device), spread(local).to(buffer.device)):
                options = dict(layout=layout, expert_alignment=alignment)
                most = max(most, buffer.dispatch(x, topk_idx, **options).x.shape[0])
                out = buffer.dispatch(x, topk_idx, max_recv_rows=limit, **options)
                assert out.x.shape[0] == limit
                buffer.check()
            of_all = torch.tensor(most)
            dist.all_reduce(of_all, dist.ReduceOp.MAX)
            if alignment == 1:  # this very number is needed
                assert limit == of_all
                with pytest.raises(ep.TooFewRowsError):
                    buffer.dispatch(x, crowded(local).to(buffer.device), layout=layout, max_recv_rows=limit - 1)
                    buffer.check()
            else:
                assert of_all <= limit < of_all + len(local) * alignment


@on_ranks(2)
def test_the_safe_limit_of_two_parts_is_half(rank):
    with make_buffer(dtype=torch.float32) as buffer:
        x, local = torch.ones(MAX_TOKENS, HIDDEN), NUM_EXPERTS // 2
        w1, w2 = torch.ones(local, 2 * 16, HIDDEN), torch.ones(local, HIDDEN, 16)
        given = buffer, x, crowded(list(range(local))), torch.ones(MAX_TOKENS, NUM_TOPK), w1, w2
        y = ep.moe_mlp(*given)
        for num_parts, part in ((1, 1), (2, 2)):
            rows = buffer.max_recv_rows() // part
            assert torch.equal(ep.moe_mlp(*given, num_parts=num_parts, max_recv_rows=rows), y)


@on_ranks(1)
def test_the_limit_of_a_huge_buffer_is_a_number_that_dispatch_takes(rank):
    with make_buffer() as buffer:
        assert_refused("layout", buffer.max_recv_rows, "decode")
        assert_refused("expert_alignment", buffer.max_recv_rows, expert_alignment=0)
        assert buffer.max_recv_rows(expert_alignment=2**31 - 1) == 2**31 - 1
