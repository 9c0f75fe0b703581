"""Hosts of one machine, from Linux namespaces: own network and address, host name, processes and /dev/shm.

    sudo python tests/lib/two_hosts.py 'torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 2 ...'

    with Hosts(2, rate="10gbit") as hosts:      # ValueError where `problem()` says why there can be none
        process = hosts.run(1, "torchrun ...")  # a Popen
        hosts.plug(1, False)                    # pull the cable of host 1
        with HostsPool(hosts, ranks_per_host=2) as pool:
            pool.run(fn, ...)                   # as RankPool does, ranks 2 and 3 on host 1

A switch, which is a namespace too, joins the hosts host0, host1, ... by their interface eth0. Needs root, iproute2 and
util-linux. Nothing outlives the process that made the hosts.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from ep_dispatcher.tools.testing import RankPool, rank_main

ROOT = Path(__file__).parents[2]
NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
OWN = "--net --uts --ipc --mount --pid --mount-proc"
MEMORY_MOUNT, MOUNTS = "mount -t tmpfs tmpfs /dev/shm", "mount -t sysfs sysfs /sys"
SWITCH = 254  # its number in the addresses of a network
PR_SET_PDEATHSIG = 1
# The first process of a host: it ends, and so all others there, when its input does. It leaves no zombies of orphans.
FIRST_PROCESS = "echo ready; trap '' CHLD; exec cat"
_libc = ctypes.CDLL(None, use_errno=True)


def problem() -> str | None:
    """Return why this machine can have no hosts, None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
    trial = f"{MEMORY_MOUNT} && {MOUNTS} && ip link add eth0 type veth peer name eth1 && ip link add net0 type bridge"
    done = subprocess.run(["unshare", *OWN.split(), "--fork", "sh", "-c", trial], capture_output=True, text=True)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else None


class _Place:
    """A set of namespaces. ``pid`` is its first process, which lives as long as this process does not close it."""

    def __init__(self, own: str, setup: str = "true"):
        command = ["unshare", *own.split(), "--fork", "--kill-child", "sh", "-c", f"{setup} && {FIRST_PROCESS}"]
        pipe = subprocess.PIPE
        self._unshare = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)}: {self._unshare.communicate()[1]}")
        self.pid = child_of(self._unshare.pid)

    def configure(self, program: str, *lines: str) -> None:
        """Give lines to ``ip`` or ``tc``."""
        command = ["nsenter", f"--net=/proc/{self.pid}/ns/net", program, "-batch", "-"]
        done = subprocess.run(command, input="\n".join([*lines, ""]), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.strip()}\n{lines}")

    def end(self) -> None:
        """Kill every process there."""
        if self._unshare.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._unshare.communicate()


def enter(pid: int, *kinds: str) -> None:
    """Move the calling thread to namespaces of a process; with "pid" only its children."""
    folder = os.getcwd()
    for file in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds]:  # before /proc is another one
        _move_to(file)
    os.chdir(folder)


def _move_to(namespace: int) -> None:
    """Move the calling thread to an open namespace, and close that file."""
    if _libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


def child_of(pid: int) -> int:
    """Wait until a process has a child, and return its process id."""
    deadline = time.monotonic() + 30
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} has no child")
        time.sleep(0.005)
    return int(children[0])


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, also on a host, where a signal to nsenter does not arrive."""
    children: list[str] = []
    with suppress(OSError):  # it may have ended, or a thread of it
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += path.read_text().split()
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(int(child))


class Hosts(AbstractContextManager):
    """``num`` hosts. Close them, or use ``with``.

    rate        of each host's sending, as tc takes it ("10gbit"); ``loss``: percent of packets that it sends
    ipv6        IPv6 addresses alone
    interfaces  of each host: eth0, eth1, ..., each in a network of its own. Names lead to the last one
    names       whether the hosts know each other's names, and their own
    own_memory  False: shared memory is that of this machine, as NVIDIA's MPS needs for hosts that share a GPU
    """

    def __init__(
        self,
        num: int = 2,
        *,
        rate: str | None = None,
        loss: float = 0,
        mtu: int = 1500,
        ipv6: bool = False,
        interfaces: int = 1,
        names: bool = True,
        own_memory: bool = True,
    ):
        why_not = problem()
        if why_not is not None:
            raise ValueError(f"hosts: {why_not}")
        self.num, self.ipv6, self.interfaces = num, ipv6, interfaces
        self._file = tempfile.NamedTemporaryFile("w", prefix="hosts")
        known = [f"{self.address(host, interfaces - 1)} host{host}" for host in range(num)] if names else []
        known.append(f"{self.address(SWITCH)} switch")  # TCPStore looks for the names of its peers
        self._file.write("\n".join(["127.0.0.1 localhost", "::1 localhost", *known, ""]))
        self._file.flush()
        self._places: list[_Place] = []
        self.switch = _Place("--net")
        namespaces, mounts = (OWN, f"{MEMORY_MOUNT} && {MOUNTS}") if own_memory else (OWN.replace("--ipc ", ""), MOUNTS)
        try:
            for host in range(num):
                own = f"mount --bind {self._file.name} /etc/hosts && hostname host{host} && ip link set lo up"
                self._places.append(_Place(namespaces, f"{mounts} && {own}"))
            self._connect(mtu)
            if rate is not None or loss:
                self.limit(rate, loss)
        except BaseException:  # it is raised again
            self.close()
            raise

    def address(self, host: int, interface: int = 0) -> str:
        """Return a host's address on an interface; that of the switch for host ``SWITCH``."""
        number = host if host == SWITCH else host + 1
        return f"fd77:{interface}::{number}" if self.ipv6 else f"10.77.{interface}.{number}"

    def _add(self, host: int, interface: int, name: str) -> str:
        address = self.address(host, interface)
        return f"addr add {address}/64 dev {name} nodad" if self.ipv6 else f"addr add {address}/24 dev {name}"

    def _connect(self, mtu: int) -> None:
        self.switch.configure("ip", "link set lo up")
        for i in range(self.interfaces):
            own = f"address 02:77:00:00:00:{i:02x}"  # else it takes that of a port, and loses it with the host
            self.switch.configure(
                "ip",
                f"link add net{i} {own} mtu {mtu} type bridge forward_delay 0 mcast_snooping 0",
                self._add(SWITCH, i, f"net{i}"),
                f"link set net{i} up",
            )
            for host, place in enumerate(self._places):
                port = f"port{host}.{i}"
                self.switch.configure(
                    "ip",
                    f"link add {port} mtu {mtu} type veth peer name eth{i} mtu {mtu} netns {place.pid}",
                    f"link set {port} master net{i} up",
                )
                place.configure("ip", self._add(host, i, f"eth{i}"), f"link set eth{i} up")

    def limit(self, rate: str | None, loss: float = 0) -> None:
        """Set rate and loss (percent) of what every host sends through eth0, in place of those before; None: no limit.

        A classic BPF filter gives lost packets to a class that drops them: unlike netem most kernels have that.
        """
        htb = f"htb rate {rate or '100gbit'} burst 256k cburst 256k"
        lines = ["qdisc replace dev eth0 root pfifo", "qdisc del dev eth0 root"]  # there may be one to delete, or none
        if rate is not None or loss:
            lines.append("qdisc add dev eth0 root handle 1: htb default 1")
            lines.append(f"class add dev eth0 classid 1:1 parent 1: {htb}")
        if loss:
            # Load a random word; below this limit the default class takes the packet.
            code = f"4,32 0 0 {0xFFFFF038},53 1 0 {int(2**32 * (1 - loss / 100))},6 0 0 0,6 0 0 {2**32 - 1}"
            lines += [
                f"class add dev eth0 classid 1:2 parent 1: {htb}",
                "qdisc add dev eth0 parent 1:2 blackhole",
                f"filter add dev eth0 parent 1: protocol all bpf bytecode '{code}' classid 1:2",
            ]
        for place in self._places:
            place.configure("tc", *lines)

    def plug(self, host: int, is_in: bool) -> None:
        """Pull the cable of eth0, or plug it in again."""
        self.switch.configure("ip", f"link set port{host}.0 {'up' if is_in else 'down'}")

    def run(self, host: int, command: str, env: dict[str, str] | None = None) -> subprocess.Popen:
        """Start a command of bash on a host, in the project's folder. Its output and errors come out of ``stdout``.

        It has this Python's torchrun, and $NODE_RANK: the number of the host.
        """
        own = {
            "NODE_RANK": str(host),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
        }
        names = {kind: "mount" if kind == "mnt" else kind for kind in NAMESPACES}
        kinds = [f"--{name}=/proc/{self.first_pid(host)}/ns/{kind}" for kind, name in names.items()]
        return subprocess.Popen(
            ["nsenter", *kinds, f"--wd={ROOT}", "bash", "-c", command],
            env={**os.environ, **own, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_all(self, command: str, env: dict[str, str] | None = None, timeout_s: float = 300) -> list[tuple[int, str]]:
        """Run a command on every host at once. Return exit code and output of each; kill what runs at the limit."""
        started = [self.run(host, command, env) for host in range(self.num)]
        watchdog = threading.Timer(timeout_s, lambda: [self.signal(host, signal.SIGKILL) for host in range(self.num)])
        watchdog.start()
        try:
            outputs = [process.communicate()[0] for process in started]
        finally:
            watchdog.cancel()
        return [(process.returncode, output) for process, output in zip(started, outputs)]

    def first_pid(self, host: int) -> int:
        """Return the process whose end is that of all others on the host, as this process knows it."""
        return self._places[host].pid

    def pids(self, host: int) -> list[int]:
        """Return the processes of a host but its first one, as this process knows them; without zombies."""
        first, found = self.first_pid(host), []
        try:
            own = os.readlink(f"/proc/{first}/ns/pid")
        except OSError:
            return []  # the host is dead
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/pid") == own and int(path.name) != first:
                    found.append(int(path.name))
            except OSError:
                pass  # it has ended
        return found

    def signal(self, host: int, number: int) -> None:
        """Send a signal to every process of a host, as a host that is suspended (SIGSTOP) or resumed."""
        for pid in self.pids(host):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def kill(self, host: int) -> None:
        """End a host. Pull its cable first, or its system still closes its connections."""
        self._places[host].end()

    @contextmanager
    def on_switch(self) -> Iterator[None]:
        """What this thread connects meanwhile, it connects from the switch."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)  # opened now: later it is the switch's
        enter(self.switch.pid, "net")
        try:
            yield
        finally:
            _move_to(own)

    def close(self) -> None:
        for place in (*self._places, self.switch):
            place.end()
        self._file.close()

    def __exit__(self, *exc_info) -> None:
        self.close()


class HostsPool(RankPool):
    """A RankPool whose ranks live on hosts, ``ranks_per_host`` on each. The store is on the switch.

    ``interface`` is GLOO_SOCKET_IFNAME of the ranks; None sets none. ``pids`` are those that this process knows.
    """

    def __init__(self, hosts: Hosts, ranks_per_host: int, *, interface: str | None = "eth0", **options):
        self._hosts, self._ranks_per_host, self._interface = hosts, ranks_per_host, interface
        super().__init__(hosts.num * ranks_per_host, **options)
        self.pids = [child_of(process.pid) for process in self._processes]

    def _serve_store(self) -> dist.TCPStore:
        with self._hosts.on_switch():
            return dist.TCPStore(self._hosts.address(SWITCH), 0, is_master=True, wait_for_workers=False)

    def _main_of(self, rank: int) -> Callable:
        return partial(_main_on_host, self._hosts.first_pid(rank // self._ranks_per_host), self._interface)


def _main_on_host(pid: int, interface: str | None, rank: int, connection: Connection) -> None:
    """Be a rank on the host of a process: in a child, which is among the host's processes. End as the child does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    enter(pid, *NAMESPACES)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank_main(rank, connection)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", help="what bash runs on every host; $NODE_RANK is the host's number")
    parser.add_argument("--hosts", type=int, default=2, help="default: 2")
    parser.add_argument("--rate", help="of each host's sending, such as 10gbit; default: no limit")
    parser.add_argument("--loss", type=float, default=0, help="percent of packets; default: 0")
    parser.add_argument("--mtu", type=int, default=1500, help="default: 1500")
    parser.add_argument("--ipv6", action="store_true", help="IPv6 addresses alone")
    args = parser.parse_args()
    why_not = problem()
    if why_not is not None:
        parser.error(why_not)
    with Hosts(args.hosts, rate=args.rate, loss=args.loss, mtu=args.mtu, ipv6=args.ipv6) as hosts:
        started = [hosts.run(host, args.command) for host in range(hosts.num)]
        with ThreadPoolExecutor(hosts.num) as threads:
            return max(threads.map(_show, range(hosts.num), started))


def _show(host: int, process: subprocess.Popen) -> int:
    """Print what the process says, and return its exit code."""
    assert process.stdout is not None
    for line in process.stdout:
        print(f"host{host}: {line}", end="", flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
