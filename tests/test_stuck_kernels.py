"""Kernels that never end, because NVSHMEM waits in them: the host says so, waits no longer, and frees nothing."""

import logging
import time
from types import SimpleNamespace

import pytest
from lib.cuda_build import needs_module, reports_of

import ep_dispatcher as ep
from ep_dispatcher.engines import health
from ep_dispatcher.engines.cuda import stuck_kernels
from ep_dispatcher.engines.cuda.stuck_kernels import REASON, StuckKernels

GRACE_S = 0.2


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(stuck_kernels, "GRACE_S", GRACE_S)
    monkeypatch.setattr(health, "LOOK_S", 0.02)


def test_it_is_stuck_some_time_after_the_report():
    reports = []
    stuck = StuckKernels(lambda: reports or None)
    assert not stuck.found()
    time.sleep(GRACE_S)
    assert not stuck.found(), "no report, however long it takes"
    reports.append("late")
    begin = time.monotonic()
    while not stuck.found():
        time.sleep(0.01)
    assert time.monotonic() - begin >= GRACE_S


class Watched:
    def __init__(self, *answers):
        self.answers = list(answers)

    def look(self):
        return self.answers.pop(0)


def test_a_thread_looks_until_there_is_nothing_to_look_for():
    engine = Watched(False, False, True)
    thread = health.watch(engine.look, "watch")
    thread.join(5)
    assert not thread.is_alive() and not engine.answers


def test_the_thread_ends_with_the_engine():
    thread = health.watch(Watched(*[False] * 10_000).look, "watch")  # nobody keeps it
    thread.join(5)
    assert not thread.is_alive()


@pytest.fixture
def cuda(monkeypatch):
    from ep_dispatcher.engines.cuda import engine as cuda

    monkeypatch.setattr(cuda, "_stuck_engines", [])
    return cuda


@pytest.fixture
def engine(cuda):
    """An engine on the NVSHMEM wire whose stream never becomes idle. Its kernel has reported rank 2."""
    late = ("combine", "partial sums", 7, [2], 1.5)
    made = object.__new__(cuda.CudaEngine)
    made._reports, made.aborts = reports_of(late)
    made.health, made._stream = made._reports._health, SimpleNamespace(query=lambda: False)
    made._stuck = StuckKernels(lambda: late)
    made._aborts, made.config = SimpleNamespace(run=lambda: None), SimpleNamespace(timeout_s=30.0)
    return made


@needs_module
def test_a_wait_ends_with_the_names_of_late_ranks(engine, cuda, caplog):
    """Then destroy() frees nothing that the kernel may write."""
    begin = time.monotonic()
    with pytest.raises(ep.PeerTimeoutError) as caught:
        engine._wait(engine._stream)
    assert GRACE_S <= time.monotonic() - begin < GRACE_S + 2
    assert caught.value.late_ranks == (2,) and caught.value.epoch == 7
    assert REASON in str(caught.value) and caught.value.reason == REASON
    assert engine.aborts == [1] and engine.health.ended
    with caplog.at_level(logging.ERROR):
        health.watch(engine.report_stuck_kernel, "watch").join(5)  # while the program waits
    assert REASON in caplog.text
    caplog.clear()
    begin = time.monotonic()
    engine._free()  # else it would wait for the device, or free: this engine has nothing to free
    assert GRACE_S <= time.monotonic() - begin < GRACE_S + 2
    assert cuda._stuck_engines == [engine]
    engine._stream = SimpleNamespace(query=lambda: True)
    assert engine.report_stuck_kernel() and not caplog.records, "it has ended after all"


@needs_module
def test_the_thread_asks_no_stream_before_a_report(engine):
    """It could be captured."""
    engine._stuck, engine._stream = StuckKernels(lambda: None), None
    assert not engine.report_stuck_kernel()


@needs_module
def test_a_kernel_that_ends_in_time_is_not_stuck(engine, cuda, monkeypatch):
    answers = [False, False, True]
    engine._stream = SimpleNamespace(query=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    engine._wait(engine._stream)
    freed, engine._device, engine._is_sound = [], None, False
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    engine._regions, engine._aborts = SimpleNamespace(free=freed.append), SimpleNamespace(free=lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    engine._free()
    assert freed == [False] and cuda._stuck_engines == []
