"""How programs come to our ``deep_ep``: the launcher, install and uninstall, and the names that they import."""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ep_dispatcher.integrations.deep_ep as d
from ep_dispatcher.integrations.deep_ep import Buffer, Config
from ep_dispatcher.integrations.deep_ep.buffer import Runtime
from ep_dispatcher.integrations.deep_ep.events import CommStream
from ep_dispatcher.integrations.deep_ep.import_path import FOLDER
from ep_dispatcher.integrations.run_program import run_program

ROOT = Path(__file__).parents[1]
REAL = "raise ImportError('the installed deep_ep was loaded')\n"
PROGRAM = """
import importlib.util, json, multiprocessing, sys
import deep_ep
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from deep_ep.buffer import Buffer as Same
from deep_ep.utils import EventHandle, check_nvlink_connections
import deep_ep_cpp
import beside

assert deep_ep_cpp.is_sm90_compiled() and Buffer.is_sm90_compiled()
assert deep_ep.ElasticBuffer and deep_ep.EPHandle  # of DeepEP 2, which programs look for
assert deep_ep.utils.check_nvlink_connections is check_nvlink_connections and deep_ep.buffer.Buffer is Same
import deep_ep_v25  # the name of DeepEP 2.5 in a package of its own
from deep_ep_v25.buffers.ep import EPBuffer
from deep_ep_v25.utils.event import EventOverlap as SameEvent
assert EPBuffer is deep_ep.EPBuffer is deep_ep_v25.EPBuffer and SameEvent is EventOverlap

def name_of_buffer(queue):
    import deep_ep
    queue.put(deep_ep.Buffer.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=name_of_buffer, args=(queue,))
    child.start()
    in_child = queue.get(timeout=60)
    child.join()
    print(json.dumps(dict(
        argv=sys.argv[1:],
        version=deep_ep.__version__,
        home=Buffer.__module__,
        in_child=in_child,
        found=importlib.util.find_spec("deep_ep") is not None,
        same=Same is Buffer and deep_ep_cpp.Config is Config and deep_ep_cpp.EventHandle is EventHandle,
        dtype=str(topk_idx_t),
    )))
"""
# Of DeepEP 1.2.1: the parameters in their order, with their defaults.
SIGNATURES = {
    "__init__": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False, "
    "comm=None",
    "get_dispatch_layout": "topk_idx, num_experts, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
    "dispatch": "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, "
    "config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False",
    "combine": "x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
    "low_latency_dispatch": "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, "
    "use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
    "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "get_next_low_latency_combine_buffer": "handle",
    "low_latency_update_mask_buffer": "rank_to_mask, mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "get_local_buffer_tensor": "dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_comm_stream": "",
    "destroy": "",
    "is_sm90_compiled": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "Config.__init__": "num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
    "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256",
    "Config.get_nvl_buffer_size_hint": "hidden_bytes, num_ranks",
    "Config.get_rdma_buffer_size_hint": "hidden_bytes, num_ranks",
    "EventHandle.__init__": "",
    "EventHandle.current_stream_wait": "",
    "EventOverlap.__init__": "event=None, extra_tensors=None",
    "EventOverlap.current_stream_wait": "release_handle=False",  # of DeepEP 2, and so are these
    "EventOverlap.register_hook_after_wait": "hook_after_wait",
    "ElasticBuffer.__init__": "group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, "
    "num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "ElasticBuffer.get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    "ElasticBuffer.dispatch": "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
    "previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, "
    "do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "ElasticBuffer.combine": "x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
    "previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False",
    "ElasticBuffer.barrier": "use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "ElasticBuffer.get_theoretical_num_sms": "num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=200, sm_write_gbs=50",
    "ElasticBuffer.get_theoretical_num_qps": "num_sms",
    "ElasticBuffer.capture": "",
    "ElasticBuffer.get_logical_domain_size": "",
    "ElasticBuffer.get_physical_domain_size": "",
    "EventOverlap.wait": "",  # of DeepEP 2.5, and so are these
    "EPBuffer.__init__": "group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True, "
    "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0, "
    "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False",
    "EPBuffer.get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    "EPBuffer.dispatch": "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None, "
    "async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, do_handle_copy=False, "
    "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False, "
    "defer_epilogue=False",
    "EPBuffer.combine": "x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
    "async_with_compute_stream=False, allocate_on_comm_stream=False, defer_epilogue=False",
    "EPBuffer.barrier": "wait_comm_stream=True, with_cpu_sync=False, sequential=True, context_idx=None",
    "EPBuffer.get_theoretical_num_sms": "num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=0, sm_write_gbs=0",
    "EPBuffer.get_theoretical_num_qps": "num_sms",
    "EPBuffer.capture": "",
    "EPBuffer.lb_prefetch_weights": "redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPBuffer.lb_reduce_grads": "redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPBuffer.lb_get_theoretical_num_sms": "",
    "BufferAllocator.__init__": "",
    "BufferAllocator.allocate": "shape, dtype",
    "BufferAllocator.materialize": "storage",
    "EPBuffer.destroy": "",
    "EPBuffer.get_comm_stream": "",
    "EPBuffer.get_logical_domain_size": "",
    "EPBuffer.get_physical_domain_size": "",
}
# Functions of the module deep_ep, of DeepEP 2.5.
FUNCTIONS = {
    "get_physical_domain_size": "group_or_buffer",
    "get_logical_domain_size": "group_or_buffer, allow_hybrid_mode=None",
    "destroy_all_managed_nccl_comm": "",
    "get_num_allocation_alignment": "",
    "get_num_rdma_alignment": "",
    "get_num_tma_alignment": "",
    "comm.barrier": "buffer, wait_comm_stream=True, with_cpu_sync=False, sequential=True, context_idx=None",
    "comm.get_comm_stream": "buffer",
    "utils.check_nvlink_connections": "group",
}
SIGNATURES |= {f"internode_{name}": SIGNATURES[name] for name in ("dispatch", "combine")}
STATIC = {"is_sm90_compiled", "set_num_sms", "capture", "get_low_latency_rdma_size_hint"}
STATIC |= {"get_dispatch_config", "get_combine_config", "ElasticBuffer.get_buffer_size_hint", "ElasticBuffer.capture"}
STATIC |= {"EPBuffer.get_buffer_size_hint", "EPBuffer.capture"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A program, a module beside it, and an installed deep_ep that must not be loaded."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "deep_ep.py").write_text(REAL)
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]])
def test_the_launcher_runs_a_program_and_the_processes_it_starts(folder, program):
    paths = os.pathsep.join([str(ROOT), str(folder / "installed")])
    command = [sys.executable, "-m", "ep_dispatcher.integrations.deep_ep", *program, "--flag", "1"]
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | dict(PYTHONPATH=paths), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    home = "ep_dispatcher.integrations.deep_ep.buffer"
    assert json.loads(ran.stdout) == dict(
        argv=["--flag", "1"], version="1.2.1", home=home, in_child=home, found=True, same=True, dtype="torch.int64"
    )


def test_the_launcher_says_how_to_use_it(monkeypatch, capsys):
    def ends(*arguments):
        monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_program("launcher", "usage", lambda: None)
        return ended.value.code

    monkeypatch.setattr(sys, "path", list(sys.path))
    assert [ends(), ends("-m"), ends("--help")] == [2, 2, 0] and capsys.readouterr().out == 3 * "usage\n"
    assert "is 'nothing.py'" in ends("nothing.py") and "-m is 'nothing'" in ends("-m", "nothing")


def test_install_and_uninstall(monkeypatch, folder):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.syspath_prepend(str(folder / "installed"))
    path = list(sys.path)
    d.install()
    d.install()
    assert sys.path == [FOLDER, *path] and os.environ["PYTHONPATH"] == os.pathsep.join([FOLDER, "somewhere"])
    assert importlib.import_module("deep_ep").Buffer is d.Buffer
    d.uninstall()
    d.uninstall()
    assert sys.path == path and os.environ["PYTHONPATH"] == "somewhere"
    with pytest.raises(ImportError, match="the installed deep_ep was loaded"):
        importlib.import_module("deep_ep")
    (folder / "installed" / "deep_ep.py").write_text("")
    importlib.import_module("deep_ep")
    with pytest.raises(RuntimeError, match="has to come before the program imports deep_ep"):
        d.install()
    del sys.modules["deep_ep"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    owner, _, method = name.rpartition(".")
    function = inspect.getattr_static(getattr(d, owner or "Buffer"), method)
    is_static = isinstance(function, staticmethod)
    parameters = list(inspect.signature(function.__func__ if is_static else function).parameters.values())
    assert shown(parameters[not is_static :]) == SIGNATURES[name] and is_static == (name in STATIC)


def shown(parameters: list[inspect.Parameter]) -> str:
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional)


def test_functions_of_the_module(monkeypatch):
    """With attribute access alone, as programs of DeepEP 1 call deep_ep.utils.check_nvlink_connections."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    d.install()
    try:
        module = importlib.import_module("deep_ep")
        for name, parameters in FUNCTIONS.items():
            function = functools.reduce(getattr, name.split("."), module)
            assert shown(list(inspect.signature(function).parameters.values())) == parameters, name
        assert module.get_num_allocation_alignment() == 2 << 20
        for name in module.__all__:
            assert getattr(module, name) is not None
    finally:
        d.uninstall()


def test_sizes_and_configs():
    small, large = Config(20, 6, 256, 6, 128), Config(num_sms=24)
    for config in (small, large, Buffer.get_dispatch_config(4), Buffer.get_combine_config(5)):
        for num_ranks in (2, 8, 16):
            hints = [config.get_nvl_buffer_size_hint(size, num_ranks) for size in (1024, 14336)]
            assert 0 < hints[0] < hints[1] and all(hint % 128 == 0 for hint in hints)
            rdma = [config.get_rdma_buffer_size_hint(size, num_ranks) for size in (1024, 14336)]
            assert rdma == [0, 0] if num_ranks <= 8 else 0 < rdma[0] < rdma[1] and rdma[1] % 128 == 0
    hint = Buffer.get_low_latency_rdma_size_hint
    assert 0 < hint(64, 7168, 8, 256) < hint(128, 7168, 8, 256) and hint(128, 7168, 8, 256) % 128 == 0


def test_the_runtime():
    """Places among nodes of 8 ranks, as DeepEP counts them."""
    for rank, num_ranks, places in ((3, 4, (1, 0, 3, False)), (11, 16, (2, 1, 3, True))):
        r = Runtime(rank, num_ranks, CommStream())
        asked = r.get_num_rdma_ranks(), r.get_rdma_rank(), r.get_root_rdma_rank(True), r.is_internode_available()
        assert asked == places and r.get_root_rdma_rank(False) == 0 and r.is_available()
    if torch.cuda.is_available():
        assert r.get_local_device_id() == torch.cuda.current_device()
    else:
        for ask in (r.get_local_device_id, r.get_comm_stream):
            with pytest.raises(NotImplementedError, match="no GPU"):
                ask()
    with pytest.raises(NotImplementedError, match="^runtime.intranode_dispatch: .*deep_ep.Buffer"):
        r.intranode_dispatch()
    assert not hasattr(r, "__array__")
    with pytest.raises(NotImplementedError, match="^deep_ep_cpp.Buffer: "):
        Runtime(0, 1, 0, 0, False, False, False, False)
