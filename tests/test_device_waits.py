"""The host waits for a GPU, but not for ever: work of others there may wait for a rank that is gone."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lib.cuda_build import needs_module, reports_of

pytestmark = needs_module
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is busy until this event is set."""
    idle = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: idle.wait(30))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield idle
    idle.set()


def test_a_wait_for_a_gpu_ends(gpu):
    from ep_dispatcher.engines.cuda.streams import wait_for_device

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="cuda:0 was still busy after 0.3 s"):
        wait_for_device(DEVICE, 0.3)
    assert 0.3 <= time.monotonic() - begin < 5
    gpu.set()
    wait_for_device(DEVICE, 30)


def test_an_error_of_the_gpu_is_raised(monkeypatch):
    from ep_dispatcher.engines.cuda.streams import wait_for_device

    def fails(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        wait_for_device(DEVICE, 30)


def test_memory_is_freed_when_the_gpu_is_idle(gpu, caplog):
    """Not before, as a kernel may still write it. The caller goes on all the same."""
    from ep_dispatcher.engines.cuda.streams import free_when_idle

    freed = threading.Event()
    with caplog.at_level(logging.WARNING):
        free_when_idle(DEVICE, freed.set, 0.3)
    assert not freed.is_set() and "cuda:0 was still busy" in caplog.text
    gpu.set()
    assert freed.wait(30)
    freed.clear()
    free_when_idle(DEVICE, freed.set, 30)
    assert freed.is_set(), "at once where the GPU is idle"


@pytest.fixture
def engine():
    """An engine whose stream is busy for ever."""
    from ep_dispatcher.engines.cuda.engine import CudaEngine

    made = object.__new__(CudaEngine)
    made._reports, made.aborts = reports_of()
    made.health, made._stuck, made._trace, made._rail = made._reports._health, None, None, None
    made.config, made._device = SimpleNamespace(timeout_s=0.01), DEVICE
    made._stream = SimpleNamespace(query=lambda: False)
    made._thread = threading.get_ident()
    made._aborts = SimpleNamespace(run=lambda: None, free=lambda: None)
    made._regions = SimpleNamespace(freed=[])
    made._regions.free = made._regions.freed.append
    made._is_sound = False
    return made


def test_a_wait_for_operations_ends(engine, monkeypatch):
    """Something of the user's in the same stream never ends. Guards against a destroy() that never returns."""
    from ep_dispatcher.engines.cuda.engine import CudaEngine

    monkeypatch.setattr(CudaEngine, "_start_limit_s", 0.3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(RuntimeError, match="the stream was still busy after 0.3 s"):
        engine.synchronize()
    assert engine.aborts == [1], "the peers learn it"
    engine.destroy()
    assert engine._regions.freed == [False]


def test_destroy_ends_a_wait_in_another_thread(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    engine.config.timeout_s = 60.0
    errors = []

    def wait():
        try:
            engine.synchronize()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    engine._thread = thread.ident  # this thread did not make the buffer, so it does not wait for operations
    engine.destroy()
    thread.join(30)
    assert not thread.is_alive() and "destroyed" in errors[0]
