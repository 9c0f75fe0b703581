"""Which errors of torch.distributed mean a late peer, or one that has left: provoked here, with the PyTorch there."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from ep_dispatcher.errors import is_peer_failure

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=60)


def error_of(call) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_wait_or_a_get_that_times_out(tmp_path):
    stores = [serve(), FileStore(f"{tmp_path}/store", 2), HashStore()]
    for store in (*stores, PrefixStore("prefix", stores[0])):
        store.set_timeout(SHORT)
        for call in (partial(store.wait, ["no"], SHORT), partial(store.get, "no"), partial(store.multi_get, ["no"])):
            error = error_of(call)
            assert is_peer_failure(error), (store, error)


def test_the_server_is_gone():
    server = serve()
    port = server.port
    client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False, timeout=timedelta(seconds=1))
    client.set("key", "value")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(client.wait, ["no"], LONG)
        time.sleep(0.2)
        del server
        assert is_peer_failure(waits.exception())
    time.sleep(0.2)
    operations = [lambda: client.get("key"), lambda: client.add("n", 1), lambda: client.check(["key"]), client.clone]
    for call in (*operations, lambda: TCPStore("127.0.0.1", port, None, False, timeout=SHORT)):
        error = error_of(call)
        assert is_peer_failure(error), error


def gloo_pair() -> list[ProcessGroupGloo]:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)), range(2)))


def test_gloo_times_out_and_then_its_connections_are_closed():
    one, two = gloo_pair()
    data = torch.zeros(4, dtype=torch.float32, device="cpu")
    for call in (lambda: one.recv([data], 1, 0).wait(SHORT), lambda: one.send([data], 1, 0).wait(SHORT)):
        assert is_peer_failure(error_of(call))
    assert is_peer_failure(error_of(lambda: two.recv([data], 0, 0).wait(LONG)))  # the peer's end is closed


def test_gloo_in_a_collective_and_while_it_connects():
    options = dist.AllreduceOptions()
    options.timeout = SHORT
    data = torch.zeros(4, dtype=torch.float32, device="cpu")
    one, two = gloo_pair()
    assert is_peer_failure(error_of(lambda: one.allreduce([data], options).wait()))
    one, two = gloo_pair()
    assert is_peer_failure(error_of(lambda: one.allreduce([data], dist.AllreduceOptions()).wait(SHORT)))
    assert is_peer_failure(error_of(lambda: ProcessGroupGloo(HashStore(), 0, 2, SHORT)))
    del two


class Unfinished(dist.Store):
    """A store in Python with one method."""

    def set(self, key, value):
        pass


def test_every_other_error_is_none():
    (one, _), server = gloo_pair(), serve()
    sparse = torch.zeros(4, dtype=torch.float32, device="cpu").to_sparse()
    for call in (
        Unfinished().clone,
        lambda: PrefixStore("prefix", Unfinished()).wait(["no"], SHORT),
        lambda: PrefixStore("prefix", Unfinished()).compare_set("a", "", "b"),
        lambda: one.recv([sparse], 1, 0),
        lambda: TCPStore("127.0.0.1", server.port, None, True, wait_for_workers=False),  # the port is in use
    ):
        error = error_of(call)
        assert not is_peer_failure(error), error

    class DynamoError(RuntimeError):
        pass

    for other in (DynamoError("Wait timeout"), ValueError("Wait timeout"), RuntimeError("timeout_s: given 0")):
        assert not is_peer_failure(other)
    for error in (TimeoutError("too late"), ConnectionResetError("closed")):  # of a store that is written in Python
        assert is_peer_failure(error)
