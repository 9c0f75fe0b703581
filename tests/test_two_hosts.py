"""Several hosts on this machine: every bit of the CPU engine is right, and the commands of the pages for hosts work.

Buffers find by themselves which ranks are on one host. tests/lib/two_hosts.py makes the hosts.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
from conftest import exhaustive, long
from lib import dispatch_combine as grid
from lib import nodes as node_cases
from lib.commands import ROOT
from lib.two_hosts import Hosts, HostsPool

import ep_dispatcher as ep

CASES = [dataclasses.replace(case, threads=1) for case in grid.GRID if (case.num_ranks, case.ranks_per_node) == (4, 2)]
TINY = {
    "quickstart": "",
    "train_moe_lm": "--layers 2 --hidden 32 --heads 2 --intermediate 32 --experts 8 --check --steps 3",
    "megatron_gpt": "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 32 --num-experts 4 "
    "--seq-length 32 --micro-batch-size 2 --train-iters 6 --out {out}",
    "parity": "--swiglu --disable-bias-linear --hidden-size 32 --seq-length 16 --timed-steps 0",
}


def by_default(nodes: tuple, run, rank: int, *given):
    """Run a body on one rank whose buffers get no ``ranks_per_node``, and must find these nodes."""
    make = ep.Buffer.__init__

    def make_by_default(self, *args, ranks_per_node=None, **options):
        make(self, *args, **options)
        assert self.topology.nodes == nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep.Buffer, "__init__", make_by_default)
        return run(rank, *given)


@pytest.mark.parametrize(
    "num_hosts,options,interface",
    [
        (2, {}, "eth0"),
        exhaustive(2, {}, None),  # gloo finds the interface by the host's own name
        exhaustive(2, dict(names=False), "eth0"),
        long(2, dict(interfaces=2), "eth0"),  # names lead to the other one
        long(2, dict(mtu=9000), "eth0"),
        long(2, dict(ipv6=True), "eth0"),
        exhaustive(2, dict(ipv6=True, mtu=9000), None),
        exhaustive(2, dict(loss=5), "eth0"),
        long(2, dict(rate="20mbit"), "eth0"),
        exhaustive(3, {}, "eth0"),
        long(4, {}, "eth0"),
    ],
    ids=str,
)
def test_bits_of_the_definition(make_hosts, num_hosts, options, interface):
    hosts, per_host = make_hosts(num_hosts, **options), 1 if num_hosts == 4 else 2
    num_ranks = num_hosts * per_host
    nodes = tuple(tuple(range(first, first + per_host)) for first in range(0, num_ranks, per_host))
    with HostsPool(hosts, per_host, interface=interface, timeout_s=180) as pool:
        for case in CASES:
            case = dataclasses.replace(case, num_ranks=num_ranks, ranks_per_node=per_host)
            grid.check_case(lambda _: pool, "cpu", case, run=partial(by_default, nodes, grid.run_case))
        case = grid.Case(num_ranks, per_host, **node_cases.SMALL)
        before = [sent(hosts, host) for host in range(num_hosts)]
        pool.run(partial(by_default, nodes, node_cases.train), "cpu", case, 4)
        for host in range(num_hosts):
            eth0, *others = (now - then for now, then in zip(sent(hosts, host), before[host]))
            assert eth0 > 1_000_000 > sum(others)


def sent(hosts: Hosts, host: int) -> list[int]:
    """Bytes that a host has sent through each interface."""
    lines = (line.split() for line in hosts.run(host, "cat /proc/net/dev").communicate()[0].splitlines())
    bytes_of = {line[0]: int(line[9]) for line in lines if line[0].endswith(":")}
    return [bytes_of[f"eth{i}:"] for i in range(hosts.interfaces)]


def test_what_a_host_is(make_hosts):
    hosts = make_hosts(3)
    own = os.readlink("/proc/thread-self/ns/net")
    with hosts.on_switch():
        assert os.readlink("/proc/thread-self/ns/net") != own
    assert os.readlink("/proc/thread-self/ns/net") == own
    hosts.run(0, "touch /dev/shm/a").wait()
    seen = hosts.run_all("hostname; ls /dev/shm; ls -d /proc/[0-9]* | wc -l; getent hosts host0")
    assert [code for code, _ in seen] == [0, 0, 0]
    for host, (_, output) in enumerate(seen):
        name, *shm, processes, address = output.splitlines()
        assert name == f"host{host}" and shm == ["a"] * (host == 0) and int(processes) < 6
        assert address.split() == ["10.77.0.1", "host0"]


def test_hosts_that_share_memory(make_hosts):
    hosts = make_hosts(2, own_memory=False)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        for host, (code, output) in enumerate(hosts.run_all(f"hostname; ls {file.name}; readlink /proc/self/ns/ipc")):
            own = os.readlink("/proc/self/ns/ipc")
            assert code == 0 and output.splitlines() == [f"host{host}", file.name, own]


def command_for_two_hosts(page: str) -> str:
    """The torchrun line of a page, as every host runs it."""
    command = re.search(r"^```\n([^`]*--node-rank 0 [^`]*)^```$", (ROOT / page).read_text(), re.M)[1]
    return command.replace("--node-rank 0", "--node-rank $NODE_RANK").strip()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "program,said",
    [
        ("quickstart", "right: True"),
        long("train_moe_lm", "AGREE"),
        long("megatron_gpt", "AGREE"),
        ("parity", "the same within rounding"),
    ],
)
def test_commands_of_the_page(make_hosts, program, said, tmp_path):
    """nodes.md has the line of the quickstart, and says that the others are started the same way."""
    if program in ("megatron_gpt", "parity"):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    command = command_for_two_hosts("docs/nodes.md")
    start = "-m ep_dispatcher.integrations.megatron.parity" if program == "parity" else f"examples/{program}.py"
    command = command.replace("examples/quickstart.py", f"{start} {TINY[program].format(out=tmp_path)}")
    assert start in command
    outputs = make_hosts(2).run_all(command)
    assert [code for code, _ in outputs] == [0, 0], outputs
    both = [output.count(said) for _, output in outputs]
    assert both == ([2, 2] if program == "quickstart" else [1, 0]), outputs


RESTARTED = """
import os, signal, sys, time
import torch.distributed as dist
from lib.round_trip import make_buffer, round_trip
dist.init_process_group("gloo")
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
buffer = make_buffer(timeout_s=5)
print(f"life {life}: rank {rank} of nodes {buffer.topology.nodes}", flush=True)
for seed in range(5 if os.path.exists(sys.argv[1]) else 100_000):
    round_trip(buffer, seed=seed)
    if rank == dist.get_world_size() - 1 and seed == 3 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print(f"life {life}: rank {rank} is right", flush=True)
buffer.destroy()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_torchrun_restarts_the_ranks_of_all_hosts(make_hosts, tmp_path):
    """A rank dies, and torchrun starts all again. Its ranks would find addresses of their earlier life in its store."""
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    outputs = make_hosts(2).run_all(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes 2 --nproc-per-node 2 "
        f"--max-restarts 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id job {script} {tmp_path / 'died'}",
        {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])},
    )
    assert [code for code, _ in outputs] == [0, 0], outputs
    for _, output in outputs:
        assert output.count("of nodes ((0, 1), (2, 3))") >= 4 and output.count("is right") == 2, output
