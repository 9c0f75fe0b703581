"""The NVSHMEM wire: every bit is that of the definition, over NVLink and over a network made of software."""

import ctypes
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch
from lib.commands import ROOT
from lib.nvshmem import run_wire

from ep_dispatcher import engines
from ep_dispatcher.tools.nvcc import find_for_build

SETTINGS = dict(
    EP_DISPATCHER_WIRE="nvshmem",
    NVSHMEM_REMOTE_TRANSPORT="none",  # else it looks for a network card, and does not start without one
    NVSHMEM_DISABLE_NVLS="1",
    NVSHMEM_DISABLE_MNNVL="1",
    NVSHMEM_DISABLE_NCCL="1",
    NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="lo",
)
# tests/remote_wire.cu: what it is, and how NVSHMEM comes to load it under this name.
REMOTE = SETTINGS | dict(NVSHMEM_REMOTE_TRANSPORT="ucx", REMOTE_WIRE_HOLD_US="2000")
REMOTE_STEPS = 20
TRAIN_STEPS = 200
# NVSHMEM lets ranks share a GPU; they need NVIDIA's MPS, and few multiprocessors each. So only where it is asked for.
SHARES_GPU = os.environ.get("EP_TEST_SHARED_GPU") == "1"
BUILD = ["-std=c++17", "-O2", "-shared", "-cudart=static", "-Xlinker=-soname=nvshmem_transport_ucx.so.3"]
BUILD += ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90,code=compute_90"]
BUILD += ["-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"]

wire_cases = [
    pytest.mark.skipif(engines.cuda_problem() is not None, reason=f"no GPU: {engines.cuda_problem()}"),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 and not SHARES_GPU,
        reason="fewer than 2 GPUs; with EP_TEST_SHARED_GPU=1 ranks share one",
    ),
    pytest.mark.skipif(importlib.util.find_spec("ep_dispatcher._C_nvshmem") is None, reason="built without NVSHMEM"),
]
SPLITS = [pytest.param(2, 1, marks=wire_cases), pytest.param(4, 2, marks=wire_cases)]
NODES_OF_ONE = [pytest.param(4, 1, marks=wire_cases)]
MIXED_STEPS = 60
STEPS = 200


@pytest.fixture(scope="module")
def remote_wire(tmp_path_factory) -> Path:
    """Build the plug-in of NVSHMEM that is a network made of software."""
    nvcc = find_for_build()
    if nvcc is None:
        pytest.skip("no nvcc")
    library = tmp_path_factory.mktemp("remote_wire") / "libremote_wire.so"
    command = [nvcc, *BUILD, str(ROOT / "tests/remote_wire.cu"), "-o", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    return library


def nvshmem_version() -> tuple[int, ...]:
    """Of the library that the module uses; (0, 0, 0) where it has another name."""
    importlib.import_module("ep_dispatcher._C_nvshmem")
    parts = [ctypes.c_int() for _ in range(3)]
    try:
        ctypes.CDLL("libnvshmem_host.so.3").nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
    except OSError:
        pass
    return tuple(part.value for part in parts)


@pytest.mark.parametrize("puts", [False, True])
@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_every_bit_over_the_nvshmem_wire(num_ranks, ranks_per_node, puts):
    """By stores through NVLink, and by NVSHMEM's puts."""
    run_wire("nvshmem", SETTINGS, num_ranks, ranks_per_node, STEPS, num_ranks if puts else 0)


@pytest.mark.parametrize("num_ranks,ranks_per_node", NODES_OF_ONE)
def test_every_bit_where_only_some_memory_is_mapped(num_ranks, ranks_per_node):
    """Rank 0 and its rail peers put, the others store to each other. NVSHMEM lets ranks share a GPU."""
    run_wire("nvshmem", SETTINGS, num_ranks, ranks_per_node, MIXED_STEPS, 1)


@pytest.fixture
def remote_settings(remote_wire) -> dict[str, str]:
    """Each put waits 2 ms, or until a fence or quiet demands it, and then the newest goes first."""
    if nvshmem_version()[:2] != (3, 4):
        pytest.skip(f"tests/remote_wire.cu is for NVSHMEM 3.4, this is {nvshmem_version()}")
    preload = ":".join([str(remote_wire), *filter(None, [os.environ.get("LD_PRELOAD")])])
    return REMOTE | dict(LD_PRELOAD=preload)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_every_bit_where_no_memory_is_mapped(remote_settings, num_ranks, ranks_per_node):
    run_wire("nvshmem", remote_settings, num_ranks, ranks_per_node, REMOTE_STEPS)


@pytest.mark.parametrize("num_ranks,ranks_per_node", SPLITS)
def test_training_where_no_memory_is_mapped(remote_settings, num_ranks, ranks_per_node):
    """200 steps of changing routing, with gradients and by the handle, then a CUDA graph.

    docs/tests.md says how to see it fail: in a build that leaves a fence out.
    """
    run_wire("nvshmem", remote_settings, num_ranks, ranks_per_node, TRAIN_STEPS, 0, "train", "graph")


@pytest.mark.parametrize("interface,served", [(20003, False), (30000, True), (30405, True), (40000, False)])
def test_the_remote_wire_serves_one_interface(remote_wire, interface, served):
    """NVSHMEM 3.5 has version 4 of it, with another layout."""
    transport = ctypes.POINTER(ctypes.c_int)()
    status = ctypes.CDLL(str(remote_wire)).nvshmemt_init(ctypes.byref(transport), None, interface)
    assert (status == 0, bool(transport)) == (served, served)
    assert not served or transport[0] == interface  # its first field
