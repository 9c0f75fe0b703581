"""The report must say what is wrong and how to mend it, and never die of what it reports."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from ep_dispatcher import engines
from ep_dispatcher.tools import doctor

NVSWITCH = """\
	\x1b[4mGPU0	GPU1	NIC0	CPU Affinity	NUMA Affinity\x1b[0m
GPU0	 X 	NV18	PIX	0-47	0
GPU1	NV18	 X 	SYS	0-47	0
NIC0	PIX	SYS	 X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("EP_DISPATCHER_", "NVSHMEM_"))]:
        monkeypatch.delenv(name)


def found(what: str) -> doctor.Finding:
    return next(probe for probe in doctor.PROBES if probe.what == what).run()


def not_installed(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def run_as_file(*arguments: str, hide: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """`python ep_dispatcher/tools/doctor.py` in a process in which the modules `hide` cannot be imported."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({hide!r}))\n"
        f"sys.argv = {['doctor', *arguments]!r}\n"
        f"runpy.run_path({str(doctor.PACKAGE / 'tools/doctor.py')!r}, run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)


@pytest.mark.exhaustive
def test_here_a_buffer_can_be_made(monkeypatch):
    result = run_as_file()
    assert result.returncode == 0 and "ok  self-test" in result.stdout and not result.stderr, result.stdout
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "3")  # for more ranks: it does not fail the self-test
    assert doctor.SELF_TEST.run().state == "ok"


def test_json_says_the_same_as_the_text():
    result = doctor.report(run=False)
    printed = json.loads(run_as_file("--json", "--no-run").stdout)
    assert [finding["what"] for finding in printed["findings"]] == [finding["what"] for finding in result["findings"]]
    assert printed["used"] == result["used"] and printed["ok"] is result["ok"] is True
    text = doctor.as_text(result, everything=True)
    for finding in result["findings"]:
        assert all(finding[key] in text for key in ("what", "found", "matters", "fix"))
        assert finding["found"] and (finding["state"] == "ok" or (finding["matters"] and finding["fix"]))


def test_without_pytorch_it_still_reports():
    result = run_as_file(hide=("torch",))
    assert result.returncode == 1 and not result.stderr and "!!  PyTorch" in result.stdout
    assert "self-test" not in result.stdout, "it cannot work, so it is not tried"


@pytest.mark.parametrize(
    "what, version, state",
    [
        ("PyTorch", "2.8.1", "error"),
        ("PyTorch", "2.9.0a0+nv25.9", "ok"),
        ("PyTorch", "3.0", "ok"),
        ("Transformer Engine", "2.13.0+abc", "optional"),  # loses gradients
        ("Transformer Engine", "2.14.0", "ok"),
        ("megatron-core", None, "optional"),
    ],
)
def test_versions(monkeypatch, what, version, state):
    torch = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda="13.0"))
    if what == "PyTorch":
        monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(metadata, "version", lambda name: version or not_installed(name))
    assert found(what).state == state and (version or "") in found(what).found


def test_one_remedy_for_transformer_engine(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    finding = found("Transformer Engine")
    assert "register()" in finding.fix and "pip install" not in finding.fix and "register()" not in finding.found


@pytest.mark.parametrize("path", ["/opt/cuda/bin/nvcc", None])
def test_the_remedy_for_the_cuda_module_depends_on_nvcc(monkeypatch, tmp_path, path):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "ep_dispatcher")
    nvcc = SimpleNamespace(find=lambda: path, FIX="install it", PLACES="PATH")
    load = doctor._load
    monkeypatch.setattr(doctor, "_load", lambda name: nvcc if name == "tools/nvcc" else load(name))
    fix = found("compiled module cuda").fix
    assert "EP_DISPATCHER_CUDA=1" in fix and ("install it" in fix) == (path is None) and (path or "") in fix
    if path is None:
        assert found("nvcc").fix == "install it"


def test_what_is_of_no_use_here_is_not_shown(monkeypatch):
    """On a machine for CPUs the report fits on a screen."""
    result = doctor.report(run=False)
    result["uses_here"] = [""]
    text = doctor.as_text(result)
    found_here = text.split("A Buffer with default arguments uses")[0]
    shown = [finding["what"] for finding in result["findings"] if f"  {finding['what']} " in found_here]
    assert shown == [finding["what"] for finding in result["findings"] if not finding["use"]]
    assert "PyTorch" in shown and "NVLink" not in shown and "--all" in text and len(text.splitlines()) <= 24
    assert "--all" not in doctor.as_text(result, everything=True)


def test_uses_of_a_machine(monkeypatch):
    def uses(**findings: tuple[str, str]) -> set[str]:
        known = {"GPUs": ("optional", "none"), "megatron_core": ("optional", "not installed")}
        known |= {f"compiled module {engine}": ("ok", "") for engine in ("cpu", "cuda")}
        known |= {"compiled module nvshmem": ("optional", "not built")} | findings
        use = {"compiled module cuda": doctor.GPUS, "compiled module nvshmem": doctor.NVSHMEM}
        named = {name.replace("_", "-"): values for name, values in known.items()}
        made = [doctor.Finding(name, *values, use=use.get(name, "")) for name, values in named.items()]
        return doctor.uses_here(made) - {""}

    assert uses() == set()
    assert uses(GPUs=("ok", "8 x H200")) == {doctor.GPUS}
    assert uses(GPUs=("optional", "nvidia-smi lists GPUs, but ...")) == {doctor.GPUS}
    assert uses(megatron_core=("ok", "megatron-core 0.16.1")) == {doctor.MEGATRON}
    assert uses(**{"compiled module cpu": ("error", "not built")}) == {doctor.BUILDING}
    assert uses(**{"compiled module cuda": ("optional", "not built")}) == set()
    with_gpu = {"GPUs": ("ok", "8 x H200"), "compiled module cuda": ("optional", "not built")}
    assert uses(**with_gpu) == {doctor.GPUS, doctor.BUILDING}
    assert uses(**{"compiled module nvshmem": ("ok", "")}) == {doctor.NVSHMEM}
    monkeypatch.setenv("EP_DISPATCHER_WIRE", "nvshmem")
    assert doctor.NVSHMEM in uses()


BESIDE_TRITON = [("0.18.2", False, "ok"), ("0.19.2", True, "ok"), ("0.19.2", False, "optional")]


@pytest.mark.parametrize("version, has_triton, state", BESIDE_TRITON)
def test_megatron_without_triton(monkeypatch, version, has_triton, state):
    """0.19 imports Triton and does not require it: beside a PyTorch for CPUs what pip installs cannot be imported."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if has_triton else None)
    found_it = found("megatron-core")
    assert found_it.state == state and version in found_it.found
    assert ("pip install triton" in found_it.found) is (state != "ok")


def test_a_probe_that_dies_is_a_finding(monkeypatch):
    def dies():
        raise KeyError("boom")

    probes = [dataclasses.replace(probe, look=dies) for probe in doctor.PROBES]
    monkeypatch.setattr(doctor, "PROBES", probes)
    result = doctor.report()
    assert not result["ok"] and len(result["findings"]) == len(probes)
    assert all("boom" in finding["found"] for finding in result["findings"])


def test_switches(monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_TIMEOUT_S", "7")
    assert found("switches").found == "EP_DISPATCHER_TIMEOUT_S=7.0" and found("unknown switches").state == "ok"
    monkeypatch.setenv("EP_DISPATCHER_ENGIN", "cpu")
    assert found("unknown switches").state == "optional"
    assert "EP_DISPATCHER_ENGINE)" in found("unknown switches").found
    monkeypatch.setenv("EP_DISPATCHER_ENGINE", "gpu")
    assert "'gpu'" in found("switches").found
    result = doctor.report(run=False)
    assert not result["ok"] and result["used"]["engine"].startswith("none")


def test_what_is_used(monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_ENGINE", "cpu")
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "2")
    assert doctor.what_is_used()["engine"] == "cpu" and doctor.what_is_used()["a node is"].startswith("2 ranks")
    monkeypatch.setattr(engines, "choose", lambda engine: "cuda")
    for state, wire, between in (
        ("optional", "auto", "PyTorch's NCCL, but NVLink"),
        ("optional", "nccl", "PyTorch's NCCL, by EP_DISPATCHER_WIRE"),
        ("optional", "peer", "NVLink, by"),
        ("optional", "nvshmem", "nothing"),
        ("ok", "nvshmem", "NVSHMEM, by"),
    ):
        monkeypatch.setenv("EP_DISPATCHER_WIRE", wire)
        module = doctor.Finding("compiled module nvshmem", state, "")
        monkeypatch.setattr(doctor, "PROBES", [SimpleNamespace(what=module.what, run=lambda module=module: module)])
        assert doctor.what_is_used()["between nodes"].startswith(between)
    monkeypatch.setenv("EP_DISPATCHER_WIRE", "carrier pigeon")
    assert doctor.what_is_used()["engine"].startswith("none: ValueError: EP_DISPATCHER_WIRE")


def test_compiled_modules_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "ep_dispatcher")
    doctor.PACKAGE.mkdir()
    (doctor.PACKAGE / "_C_cpu.pyi").touch()  # the stub
    assert found("compiled module cpu").found == f"not built in {doctor.PACKAGE}"
    (doctor.PACKAGE / "_C_cpu.cpython-27-x86_64-linux-gnu.so").write_bytes(b"")
    assert found("compiled module cpu").found.startswith("built only for another Python than this ")
    (doctor.PACKAGE / "_C_cpu.abi3.so").write_bytes(b"no library")
    finding = found("compiled module cpu")
    assert finding.state == "error" and "ImportError" in finding.found


@pytest.mark.parametrize(
    "module, source",
    [("cpu", "csrc/cpu/plan.cpp"), ("cuda", "csrc/cuda/plan/plan.cuh"), ("nvshmem", "csrc/bindings_cuda.cpp")],
)
def test_a_compiled_module_older_than_its_sources_is_noticed(monkeypatch, tmp_path, module, source):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "ep_dispatcher")
    monkeypatch.setattr(doctor, "_run", lambda *command, **limit: "")
    compiled = doctor.PACKAGE / f"_C_{module}.abi3.so"
    for path in (compiled, tmp_path / source):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(tmp_path / source, (1, 1))
    assert found(f"compiled module {module}").state == "ok"
    os.utime(compiled, (0, 0))
    finding = found(f"compiled module {module}")
    assert finding.state != "ok" and source.rpartition("/")[2] in finding.found and finding.fix


def test_commands_that_are_missing_fail_or_hang():
    for command, said in (
        (["no-such-command"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit('this is why')"], "this is why"),
        ([sys.executable, "-c", "import os; os.abort()"], "killed by signal 6"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "timed out"),
    ):
        with pytest.raises(doctor.Unusable, match=said):
            doctor._run(*command, timeout_s=2.0 if said == "timed out" else 60.0)


def fake_gpus(monkeypatch, capabilities: list[tuple[int, int]]) -> None:
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(cuda, "get_device_name", lambda i: "Some GPU")
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 2))


@pytest.mark.parametrize(
    "capabilities, state", [([(9, 0), (9, 0)], "ok"), ([(8, 0)], "optional"), ([(12, 0)], "optional")]
)
def test_gpus(monkeypatch, capabilities, state):
    fake_gpus(monkeypatch, capabilities)
    assert found("GPUs").state == state and f"{capabilities[0][0]}.0" in found("GPUs").found


def test_nvlink(monkeypatch):
    assert doctor.nvlink_pairs(NVSWITCH) == {(0, 1): True}
    assert doctor.nvlink_pairs(NVSWITCH.replace("NV18", "SYS")) == {(0, 1): False}
    assert doctor.nvlink_pairs("") == doctor.nvlink_pairs("no devices were found") == {}

    fake_gpus(monkeypatch, [(9, 0)] * 2)
    monkeypatch.setattr(doctor, "_run", lambda *command: NVSWITCH)
    assert found("NVLink").state == "ok"

    def no_nvidia_smi(*command):
        raise doctor.Unusable("nvidia-smi: not there")

    fake_gpus(monkeypatch, [(9, 0)] * 3)
    monkeypatch.setattr(doctor, "_run", no_nvidia_smi)
    assert found("NVLink").found.startswith("not between GPUs 0-2 (")


def test_nvshmem(monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", not_installed)
    assert found("NVSHMEM").state == "optional"
    monkeypatch.setattr(metadata, "version", lambda name: "3.3.9" if name.endswith("cu12") else not_installed(name))
    assert found("NVSHMEM").found == "nvidia-nvshmem-cu12 3.3.9"
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert found("NVSHMEM").state == "optional"
    (tmp_path / "include/non_abi").mkdir(parents=True)
    (tmp_path / "include/nvshmem.h").touch()
    names = ("VENDOR_MAJOR", "VENDOR_MINOR", "VENDOR_PATCH", "TRANSPORT_PLUGIN_MAJOR")
    lines = (f"#define NVSHMEM_{name}_VERSION {number}" for name, number in zip(names, (3, 4, 5, 9)))
    (tmp_path / "include/non_abi/nvshmem_version.h").write_text("\n".join(lines))
    assert found("NVSHMEM").state == "ok" and "3.4.5," in found("NVSHMEM").found


def add_card(root, card: str, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> None:
    port = root / "sys/class/infiniband" / card / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")


def add_devices(root) -> None:
    (root / "dev/infiniband/uverbs0").mkdir(parents=True)


@pytest.mark.parametrize(
    "has_card, installed, environment, state, text",
    [
        (True, True, {}, "ok", "IBGDA is off: no card of the driver mlx5_core"),
        (True, True, dict(NVSHMEM_IB_ENABLE_IBGDA="1"), "ok", "kernels post by IBGDA"),
        (False, True, dict(NVSHMEM_REMOTE_TRANSPORT="libfabric"), "ok", "libfabric"),  # its cards need not be there
        (True, True, dict(NVSHMEM_REMOTE_TRANSPORT="none"), "optional", "NVSHMEM_REMOTE_TRANSPORT=none"),
        (True, True, dict(NVSHMEM_REMOTE_TRANSPORT="tcp"), "optional", "NVSHMEM_REMOTE_TRANSPORT=tcp"),
        (False, False, {}, "optional", "NVSHMEM ("),
        (False, True, {}, "optional", "RDMA"),
    ],
)
def test_nvshmem_transport(monkeypatch, tmp_path, has_card, installed, environment, state, text):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: "3.4.5" if installed else not_installed(name))
    if has_card:
        add_card(tmp_path, "mlx5_0")
        add_devices(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert found("NVSHMEM transport").state == state and text in found("NVSHMEM transport").found


def test_rdma_network_cards(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert found("RDMA network cards").state == "optional"
    add_card(tmp_path, "mlx5_0")
    add_card(tmp_path, "mlx5_1", "1: DOWN", "Ethernet")
    assert found("RDMA network cards").state == "optional"
    add_devices(tmp_path)
    assert found("RDMA network cards").state == "ok" and "mlx5_0" in found("RDMA network cards").found
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert found("RDMA network cards").state == "optional"


class Driver:
    """Stands for libcuda.so.1: what it says of dma-buf, by GPU."""

    def __init__(self, *shares: int):
        self._shares = shares

    def cuInit(self, flags):
        return 0 if self._shares else 100  # no device

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self._shares)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, ordinal):
        assert attribute == 124
        value._obj.value = self._shares[ordinal]
        return 0


def test_gpudirect_rdma(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "ROOT", tmp_path)

    def no_driver(name):
        raise OSError(f"{name}: not there")

    monkeypatch.setattr(doctor.ctypes, "CDLL", no_driver)
    assert found("GPUDirect RDMA").found.startswith("cannot be told")
    for shares, state in (((), "optional"), ((1, 1), "ok"), ((1, 0), "optional")):
        monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name, shares=shares: Driver(*shares))
        assert found("GPUDirect RDMA").state == state
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert found("GPUDirect RDMA").state == "ok"
