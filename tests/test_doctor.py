"""The report must say what is wrong and how to mend it, and never die of what it reports."""

import json
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from ep_dispatcher import doctor

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
    for name in [name for name in os.environ if name.startswith("EP_DISPATCHER_")]:
        monkeypatch.delenv(name)


def found(what: str) -> doctor.Finding:
    return next(probe for probe in doctor.PROBES if probe.what == what).run()


def run_as_file(*arguments: str, hide: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """`python ep_dispatcher/doctor.py` in a process in which the modules `hide` cannot be imported."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({hide!r}))\n"
        f"sys.argv = {['doctor', *arguments]!r}\n"
        f"runpy.run_path({str(doctor.PACKAGE / 'doctor.py')!r}, run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=os.environ | environment
    )


def test_here_a_buffer_can_be_made():
    result = subprocess.run([sys.executable, "-m", "ep_dispatcher.doctor"], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "A Buffer can be made here." in result.stdout
    assert "a Buffer on one rank, dispatch and combine: right" in result.stdout
    assert not result.stderr


def test_switches_for_more_ranks_do_not_fail_the_self_test(monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "3")
    assert doctor.run_self_test() == doctor.Finding(
        "self-test", "ok", "a Buffer on one rank, dispatch and combine: right"
    )


def test_json_says_the_same_as_the_text():
    result = doctor.report(run=False)
    printed = json.loads(run_as_file("--json", "--no-run").stdout)
    assert [finding["what"] for finding in printed["findings"]] == [finding["what"] for finding in result["findings"]]
    assert printed["used"] == result["used"] and printed["ok"] is result["ok"] is True
    text = doctor.as_text(result)
    for finding in result["findings"]:
        assert all(finding[key] in text for key in ("what", "found", "matters", "fix"))


def test_whatever_is_not_ok_says_why_and_how():
    for finding in doctor.report(run=False)["findings"]:
        assert finding["found"]
        assert finding["state"] == "ok" or (finding["matters"] and finding["fix"]), finding


def test_without_pytorch_it_still_reports():
    result = run_as_file(hide=("torch",))
    assert result.returncode == 1 and not result.stderr
    assert "!!  PyTorch" in result.stdout and "pip install 'torch>=2.9'" in result.stdout
    assert "self-test" not in result.stdout  # it cannot work, so it is not tried


@pytest.mark.parametrize(
    "version, ok", [("2.8.1", False), ("2.9.0a0+nv25.9", True), ("2.11.0+cu130", True), ("3.0", True)]
)
def test_versions_of_pytorch(monkeypatch, version, ok):
    torch = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    finding = found("PyTorch")
    assert (finding.state == "ok") is ok and version in finding.found


def test_without_megatron_a_buffer_can_be_made(monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    result = doctor.report(run=False)
    finding = next(finding for finding in result["findings"] if finding["what"] == "megatron-core")
    assert result["ok"] and finding["state"] == "optional" and finding["fix"] == "pip install megatron-core"


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(5, "boom"), KeyError("boom")])
def test_a_probe_that_dies_is_a_finding(monkeypatch, error):
    def dies():
        raise error

    probes = [doctor.Probe(p.what, dies, p.state, p.matters, p.fix) for p in doctor.PROBES]
    monkeypatch.setattr(doctor, "PROBES", probes)
    result = doctor.report()
    assert not result["ok"] and len(result["findings"]) == len(probes)
    assert all("boom" in finding["found"] for finding in result["findings"])


def test_switches(monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_SPIN_US", "7")
    assert found("switches").found == "EP_DISPATCHER_SPIN_US=7"
    monkeypatch.setenv("EP_DISPATCHER_ENGIN", "cpu")
    finding = found("switches")
    assert finding.state == "optional" and "EP_DISPATCHER_ENGINE?" in finding.fix
    monkeypatch.delenv("EP_DISPATCHER_ENGIN")
    monkeypatch.setenv("EP_DISPATCHER_CUDAA", "0")
    assert found("switches").fix == "unset EP_DISPATCHER_CUDAA (meant: EP_DISPATCHER_CUDA?)"
    monkeypatch.setenv("EP_DISPATCHER_ENGINE", "gpu")
    assert "given 'gpu', allowed: auto, cpu, cuda" in found("switches").found
    result = doctor.report(run=False)
    assert not result["ok"] and result["used"]["engine"].startswith("none")


def test_what_is_used(monkeypatch):
    used = doctor.what_is_used
    monkeypatch.setenv("EP_DISPATCHER_ENGINE", "cpu")
    monkeypatch.setenv("EP_DISPATCHER_RANKS_PER_NODE", "2")
    assert used()["engine"] == "cpu" and used()["a node is"].startswith("2 ranks")
    assert "memfd" in used()["inside a node"] and "POSIX" not in used()["inside a node"]
    monkeypatch.setattr(doctor, "choose_engine", lambda: "cuda")
    assert used()["between nodes"] == "nothing yet: all ranks have to be on one host"

    def none():
        raise ValueError("engine: given 'cuda', allowed: 'cpu'")

    monkeypatch.setattr(doctor, "choose_engine", none)
    assert used() == {"engine": "none: ValueError: engine: given 'cuda', allowed: 'cpu'"}


def test_compiled_modules_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "ep_dispatcher")
    doctor.PACKAGE.mkdir()
    assert found("compiled module cpu").found == "not built"
    (doctor.PACKAGE / "_C_cpu.cpython-27-x86_64-linux-gnu.so").write_bytes(b"")
    assert found("compiled module cpu").found.startswith("built only for another Python: _C_cpu.cpython-27")
    (doctor.PACKAGE / "_C_cpu.abi3.so").write_bytes(b"no library")
    finding = found("compiled module cpu")
    assert finding.state == "error" and "ImportError" in finding.found


def test_a_compiled_module_older_than_its_sources_is_noticed(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "ep_dispatcher")
    monkeypatch.setattr(doctor, "_run", lambda *command: "")
    for path in (doctor.PACKAGE / "_C_cpu.abi3.so", tmp_path / "csrc/cpu/plan.cpp"):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(doctor.PACKAGE / "_C_cpu.abi3.so", (0, 0))
    assert found("compiled module cpu").found == "older than csrc/ (plan.cpp)"


def test_commands_that_are_missing_fail_or_hang():
    for command, said in (
        (["no-such-command"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit('this is why')"], "this is why"),
        ([sys.executable, "-c", "import os; os.abort()"], "killed by signal 6"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "timed out"),
    ):
        with pytest.raises(doctor.Unusable, match=said):
            doctor._run(*command, timeout_s=2.0)


def fake_gpus(monkeypatch, capabilities: list[tuple[int, int]]) -> None:
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(cuda, "get_device_name", lambda i: "Some GPU")
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda a, b: (a, b) != (0, 2))


def test_gpus(monkeypatch):
    fake_gpus(monkeypatch, [(9, 0), (9, 0)])
    assert found("GPUs").found == "2 x Some GPU (compute capability 9.0)"
    fake_gpus(monkeypatch, [(8, 0)])
    finding = found("GPUs")
    assert finding.state == "optional" and "older than compute capability 9.0" in finding.found


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


def test_nvshmem_home(monkeypatch, tmp_path):
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert "has no include/nvshmem.h" in found("NVSHMEM").found
    (tmp_path / "include").mkdir()
    (tmp_path / "include/nvshmem.h").touch()
    assert found("NVSHMEM").state == "ok"
