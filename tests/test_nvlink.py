"""How far NVLink reaches: what NVML says of a GPU, and the nodes that follow. Stand-ins play NVML and the driver."""

import ctypes
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import on_ranks
from lib.errors import error_of
from lib.round_trip import make_buffer, round_trip

from ep_dispatcher import buffer_arguments, nvlink
from ep_dispatcher.memory import MAX_LOCAL

OK, NOT_SUPPORTED, UNKNOWN = 0, 3, 999  # of nvmlReturn_t


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_model.cpp")
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@pytest.fixture
def gpu(monkeypatch, nvml):
    """A GPU that NVML knows, and whose memory other hosts can map."""
    monkeypatch.setattr(nvlink, "_NVML", str(nvml))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0123"))
    monkeypatch.setattr(nvlink, "try_fabric", lambda device: None)
    return nvml


ID = "ab" * 16


@pytest.mark.parametrize(
    "call,status,state,clique,byte,domain,problem",
    [
        (OK, OK, 3, 7, 0xAB, f"{ID}.7", ""),
        (OK, OK, 3, 32766, 0xAB, f"{ID}.32766", ""),
        (OK, OK, 3, 0, 0, "", ""),  # an HGX board: a fabric that ends at the host
        (OK, OK, 0, 0, 0xAB, "", ""),
        (NOT_SUPPORTED, OK, 3, 7, 0xAB, "", ""),
        (UNKNOWN, OK, 3, 7, 0xAB, "", "nvmlDeviceGetGpuFabricInfoV returned 999"),
        (OK, OK, 1, 7, 0xAB, "", "NVLink's fabric has the state not started, and the status 0"),
        (OK, OK, 2, 7, 0xAB, "", "NVLink's fabric has the state in progress, and the status 0"),
        (OK, UNKNOWN, 3, 7, 0xAB, "", "NVLink's fabric has the state completed, and the status 999"),
        (OK, OK, 9, 7, 0xAB, "", "NVLink's fabric has the state 9, and the status 0"),
    ],
)
def test_the_domain_of_a_gpu(monkeypatch, gpu, call, status, state, clique, byte, domain, problem):
    monkeypatch.setenv("NVML_MODEL", f"{call} {status} {state} {clique} {byte}")
    assert nvlink.own_domain() == (domain, problem)
    assert ctypes.CDLL(str(gpu)).nvmlModelUsers() == 0, "it was not shut down"


def test_a_domain_that_cannot_be_asked_for_or_used_is_a_problem(monkeypatch, gpu, tmp_path):
    monkeypatch.setenv("NVML_MODEL", "0 0 3 1 1")

    def fail(device):
        raise RuntimeError("cuMemCreate: CUDA_ERROR_NOT_PERMITTED")

    monkeypatch.setattr(nvlink, "try_fabric", fail)
    assert nvlink.own_domain() == ("01" * 16 + ".1", "cuMemCreate: CUDA_ERROR_NOT_PERMITTED")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="none"))
    assert nvlink.own_domain() == ("", "nvmlDeviceGetHandleByUUID returned 6")
    monkeypatch.setattr(nvlink, "_NVML", str(tmp_path / "missing.so"))
    domain, problem = nvlink.own_domain()
    assert not domain and "missing.so" in problem
    monkeypatch.setattr(nvlink, "_NVML", None)  # this program, which has no NVML: as one of an old driver
    assert nvlink.own_domain() == ("", "")


# ---- nodes -----------------------------------------------------------------------------------------------------------


def find(hosts: str, domains: str, ranks_per_node=None, broken: str = "", engine: str = "cuda"):
    """Nodes of ranks on these hosts, in these NVLink domains ("." for none), with a problem on the broken ranks."""
    asked: list[str] = []

    class Exchange:
        same_on_all_ranks = nullcontext

        def __call__(self, phase, produce):
            asked.append(phase)
            return [[d.strip("."), f"error {r}" if str(r) in broken else ""] for r, d in enumerate(domains)]

    topology, why = nvlink.find_nodes(Exchange(), 0, list(hosts), ranks_per_node, engine)
    assert asked == ["NVLink domains"] * (engine == "cuda" and len(set(hosts)) > 1)
    return topology.nodes, why


ONE, TWO, HOSTS = ((0, 1, 2, 3),), ((0, 1), (2, 3)), "AABB"


@pytest.mark.parametrize("demanded", [None, "nvlink"])
@pytest.mark.parametrize(
    "hosts,domains,expected",
    [
        ("AAAA", "....", ONE),
        ("AABB", "xxxx", ONE),
        ("ABCD", "xxyy", TWO),
        ("AABB", "....", TWO),
        ("AABB", "xxyy", TWO),  # domains of one host each
        ("AAAA", "xxyy", ONE),  # and of less than a host: as before
        ("AABB", "xyzz", TWO),
        ("ABCC", "xx..", TWO),
    ],
)
def test_a_node_is_what_nvlink_joins(hosts, domains, expected, demanded):
    assert find(hosts, domains, demanded) == (expected, "")


@pytest.mark.parametrize(
    "domains,broken,argument,reason",
    [
        ("xxxx", "2", "ranks_per_node", "rank 2: error 2"),
        ("xx..", "3", "ranks_per_node", "rank 3: error 3"),
        ("xxxy", "", "group", "NVLink domains of"),
        ("xyyx", "", "group", "NVLink domains of the ranks [(0, 3), (1, 2)], but each has to be of neighbouring"),
        ("xxx.", "", "group", "NVLink domains of"),
    ],
)
def test_nodes_are_hosts_where_nvlink_cannot_be_used(domains, broken, argument, reason):
    """And a buffer says why, or refuses where NVLink was demanded."""
    nodes, why = find(HOSTS, domains, None, broken)
    assert nodes == TWO and reason in why
    text = error_of(find, HOSTS, domains, "nvlink", broken)
    assert text.startswith(argument) and reason in text
    assert find(HOSTS, domains, 2, broken) == (TWO, "")


def test_domains_of_a_host_need_no_fabric():
    assert find(HOSTS, "xxyy", None, broken="0123") == find(HOSTS, "xxyy", "nvlink", broken="0") == (TWO, "")


def test_nodes_of_a_given_size_may_span_hosts_of_a_domain():
    """As where a group lies unevenly on two domains."""
    assert find("ABCDEF", "xxxxyy", 2) == (((0, 1), (2, 3), (4, 5)), "")
    assert error_of(find, "ABCDEF", "xxxyyy", 2).startswith("ranks_per_node ")
    assert error_of(find, "ABCDEF", "xxxxyy", 2, "0").startswith("ranks_per_node ")
    assert find("AAAA", "xxxx", 2) == (TWO, "")


def test_a_domain_of_more_ranks_than_a_node_can_have_is_several_nodes():
    num_hosts = MAX_LOCAL // 4 + 1
    hosts, domains = "".join(4 * chr(0x100 + i) for i in range(num_hosts)), 4 * num_hosts * "x"
    nodes, why = find(hosts, domains)
    assert nodes == tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(num_hosts)) and "group has " in why
    assert error_of(find, hosts, domains, "nvlink").startswith("group ")


def test_the_cpu_engine_asks_nobody():
    assert find(HOSTS, "xxxx", engine="cpu") == (TWO, "")


# ---- a buffer --------------------------------------------------------------------------------------------------------


def config_of_buffer(hosts: str, domains: str, rank: int, **changes):
    """The EngineConfig of a buffer whose engine would be on GPUs."""
    configs = []

    def make(engine, config):
        configs.append(config)
        health = SimpleNamespace(is_busy=False, suspended=False)
        without_effect = dict(destroy=lambda: None, limit_tokens_to_node=lambda most: None)
        return SimpleNamespace(**without_effect, health=health, device="cpu")

    def domain():
        assert len(set(hosts)) > 1, "NVML was asked"
        return domains[rank], ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_arguments, "host_id", lambda: hosts[rank])
        patch.setattr(buffer_arguments.engines, "choose", lambda engine: "cuda")
        patch.setattr(buffer_arguments.engines, "make", make)
        patch.setattr(nvlink, "own_domain", domain)
        make_buffer(**changes).destroy()
    return configs[0]


@on_ranks(4)
def test_a_buffer_has_the_nodes(rank):
    for hosts, domains, given, nodes, why in (
        ("AAAA", "", None, ONE, ""),
        ("AAAA", "", "nvlink", ONE, ""),
        ("AABB", "xxxx", None, ONE, ""),
        ("AABB", "xxxx", "nvlink", ONE, ""),
        ("AABB", "xxxx", 2, TWO, ""),
        ("AABB", "xxxy", None, TWO, "group has NVLink domains of [3, 1] ranks"),
    ):
        config = config_of_buffer(hosts, domains, rank, ranks_per_node=given)
        assert config.topology.nodes == nodes and (config.num_nodes, config.num_ranks) == (len(nodes), 4)
        assert config.hosts == tuple(hosts) and config.why_hosts.startswith(why) and bool(config.why_hosts) == bool(why)
    text = error_of(config_of_buffer, "AABB", "xxxy", rank, ranks_per_node="nvlink")
    assert text.startswith("group has NVLink domains of [3, 1] ranks")


@on_ranks(2)
def test_a_node_of_several_hosts_works(rank, engine):
    """Ranks of one machine say that NVLink joins their hosts. PyTorch maps their memory as it can there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_arguments, "host_id", lambda: f"host {rank}")
        patch.setattr(nvlink, "own_domain", lambda: ("x", ""))
        buffer = make_buffer(engine=engine)
    with buffer:
        is_cuda = engine == "cuda"
        assert buffer.topology.num_nodes == (1 if is_cuda else 2)
        assert ("NVLink between 2 hosts of a node" in repr(buffer)) == is_cuda
        round_trip(buffer)


@on_ranks(1)
def test_nvlink_is_for_the_cuda_engine(rank):
    for given in ("nvlink", "hosts"):
        text = error_of(make_buffer, engine="cpu", ranks_per_node=given)
        assert text.startswith(f"ranks_per_node is '{given}', but has to be ")
