"""The store through which ranks exchange where their memory is."""

from torch.distributed import HashStore, PrefixStore

from ep_dispatcher.engines.rendezvous import Renumbered


def test_ranks_that_count_otherwise_find_each_other():
    shared = HashStore()
    stores = [Renumbered(shared) for _ in range(2)]
    ranks = [PrefixStore("exchange", store) for store in stores]  # asks as PyTorch's own code does
    for turn in range(3):
        keys = [[f"Memory/{number + turn}/{rank}" for rank in range(2)] for number in (0, 17)]
        for rank in range(2):
            ranks[rank].set(keys[rank][rank], f"{turn}, {rank}")
        for rank in range(2):
            assert ranks[rank].multi_get(keys[rank]) == [f"{turn}, {other}".encode() for other in range(2)]
            assert ranks[rank].check(keys[rank])
    assert [ranks[rank].add(f"Memory/{(3, 20)[rank]}", 1) for rank in range(2)] == [1, 2]
