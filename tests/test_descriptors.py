"""Descriptors go from rank to rank, and to nobody else: strangers get nothing, give nothing, and cost no time."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import torch.distributed as dist
from conftest import on_ranks
from lib.faults import open_files
from lib.round_trip import CONFIG

import ep_dispatcher as ep
from ep_dispatcher import _C_cpu, topology
from ep_dispatcher.engines.descriptors import SILENT_S, Descriptors
from ep_dispatcher.gather import PeersLate
from ep_dispatcher.memory import Shape

LIMIT_S = 30.0
SHORT_S = 5.0  # far below the limit, also on a loaded machine
JOB = os.environ.get("PYTEST_XDIST_WORKER", "")  # two tests at a time must not share a secret
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


def file_with(text: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def text_of(fd: int) -> str:
    return os.pread(fd, 100, 0).decode()


def number_of_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def exchange_and_check(descriptors: Descriptors, rank: int, num_ranks: int) -> float:
    """Exchange one descriptor, and check what came. Return the seconds that it took."""
    own, started = file_with(f"of rank {rank}"), time.monotonic()
    of_ranks = descriptors.exchange([own], LIMIT_S)
    seconds = time.monotonic() - started
    texts = [[text_of(fd) for fd in fds] for fds in of_ranks]
    assert texts == [[f"of rank {other}"] if other != rank else [] for other in range(num_ranks)]
    for fd in (own, *(fd for fds in of_ranks for fd in fds)):
        os.close(fd)
    return seconds


@on_ranks(3, fresh=True)  # which open nothing else meanwhile
def test_every_rank_gets_the_descriptors_of_all_others(rank):
    num_ranks, before = dist.get_world_size(), number_of_files()
    pids = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    for turn, count in enumerate((1, 2, 0)):
        descriptors = Descriptors(f"all {turn}{JOB}", rank, range(num_ranks))
        dist.barrier()
        if rank == turn:
            time.sleep(0.3)  # the others wait for a slow one
        own = [file_with(f"{turn} {rank} {i}") for i in range(count)]
        of_ranks = descriptors.exchange(own, LIMIT_S)
        assert [[text_of(fd) for fd in fds] for fds in of_ranks] == [
            [f"{turn} {other} {i}" for i in range(count)] if other != rank else [] for other in range(num_ranks)
        ]
        assert descriptors.pids == pids
        for fd in (*own, *(fd for fds in of_ranks for fd in fds)):
            os.close(fd)
        descriptors.close()
    assert number_of_files() == before


@pytest.mark.parametrize("which", range(7))
@on_ranks(3)
def test_a_process_that_says_something_else_is_not_heard(rank, which):
    descriptors = Descriptors(f"heard{which}{JOB}", rank, range(3))
    dist.barrier()
    if rank == 0:
        right, others = descriptors._greeting(0, 1), descriptors._greeting(0, 2)
        message, num_fds = [
            (b"x", 1),
            (b"x" * 64, 1),
            (others, 1),
            (right, 0),
            (right, 2),
            (right[:-1], 1),
            (right[:-1] + b"-", 1),
        ][which]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:  # one at a time: the queue is short
            stranger.connect(descriptors._name(1))
            fds = [file_with("a stranger's") for _ in range(num_fds)]
            socket.send_fds(stranger, [message], fds)
            for fd in fds:
                os.close(fd)
    dist.barrier()
    exchange_and_check(descriptors, rank, 3)
    descriptors.close()


@on_ranks(3)
def test_silent_connections_cost_no_time(rank):
    """The names of abstract sockets are public (/proc/net/unix), and a silent connection once took the whole limit.

    They also fill the queue of every socket, so that ranks have to connect again and again.
    """
    descriptors = Descriptors(f"silent{JOB}", rank, range(3))
    dist.barrier()
    with contextlib.ExitStack() as open_connections:
        with contextlib.suppress(BlockingIOError):  # until the queue is full
            for _ in range(100):
                stranger = open_connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stranger.setblocking(False)
                stranger.connect(descriptors._name(rank))
        dist.barrier()
        assert exchange_and_check(descriptors, rank, 3) < SHORT_S
    descriptors.close()


@on_ranks(2)
def test_a_silent_connection_is_closed_while_others_wait(rank):
    descriptors = Descriptors(f"closed{JOB}", rank, range(2))
    dist.barrier()
    if rank == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(descriptors._name(1))
            stranger.settimeout(SHORT_S + SILENT_S)
            assert stranger.recv(1) == b""
    exchange_and_check(descriptors, rank, 2)
    descriptors.close()


AS_NOBODY = f"""
import os, socket, sys
os.setgid({NOBODY}), os.setuid({NOBODY})
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
name = bytes([0]) + sys.argv[2].encode()
"""
CONNECTS = """
stranger.connect(name)
fd = os.memfd_create("a stranger's")
socket.send_fds(stranger, [sys.argv[3].encode()], [fd])
print("connected", flush=True)
stranger.settimeout(20)
try:
    print(stranger.recv(1))  # a receipt, if it was taken for a rank
except ConnectionError:
    print(b"")
"""
LISTENS = """
stranger.bind(name)
stranger.listen(8)
print("listening", flush=True)
connection, _ = stranger.accept()
connection.settimeout(20)
message, fds, _, _ = socket.recv_fds(connection, 64, 9)
print(message, fds)
"""


def stranger(program: str, *arguments: str) -> subprocess.Popen:
    """Another user's process. It has said that it is ready."""
    command = [sys.executable, "-c", AS_NOBODY + program, "", *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() in ("connected\n", "listening\n")
    return started


@needs_root
@on_ranks(2)
def test_another_user_who_knows_the_secret_is_not_heard(rank):
    """Everything that names are derived from goes through the store."""
    descriptors = Descriptors(f"known{JOB}", rank, range(2))
    dist.barrier()
    if rank == 0:  # it plays rank 0, and comes before that
        name, greeting = descriptors._name(1)[1:].decode(), descriptors._greeting(0, 1).decode()
        process = stranger(CONNECTS, name, greeting)
    dist.barrier()
    exchange_and_check(descriptors, rank, 2)
    if rank == 0:
        assert process.communicate(timeout=60)[0] == "b''\n"
    descriptors.close()


@needs_root
@on_ranks(1)
def test_another_user_who_listens_gets_nothing(rank):
    """It plays rank 1, on which this rank waits."""
    descriptors = Descriptors(f"listens{JOB}", 0, range(2))
    process = stranger(LISTENS, descriptors._name(1)[1:].decode())
    own = file_with("mine")
    with pytest.raises(RuntimeError, match=f"^the socket of rank 1 belongs to user {NOBODY} .process {process.pid}."):
        descriptors.exchange([own], LIMIT_S)
    descriptors.close()
    os.close(own)
    assert process.communicate(timeout=60)[0] == "b'' []\n"


@needs_root
@on_ranks(1)
def test_a_name_that_is_taken_says_by_whom(rank):
    planned = Descriptors(f"taken{JOB}", 0, range(2))
    name = planned._name(0)[1:].decode()
    planned.close()
    process = stranger(LISTENS, name)
    before = number_of_files()
    with pytest.raises(RuntimeError, match=f"its name is taken by process {process.pid} of user {NOBODY}"):
        Descriptors(f"taken{JOB}", 0, range(2))
    assert number_of_files() == before
    process.communicate(timeout=60)


@needs_root
@on_ranks(2, fresh=True)
def test_ranks_of_two_users_are_told_so(rank):
    if rank == 1:
        os.seteuid(NOBODY)
    with pytest.raises(RuntimeError) as caught:
        ep.Buffer(**CONFIG, engine="cpu", timeout_s=LIMIT_S)
    text = str(caught.value)
    assert f"user {NOBODY}" in text and "user 0" in text and "all ranks of a host must run as one user" in text


@on_ranks(3, fresh=True)  # which open nothing else meanwhile
def test_a_rank_that_does_not_come_is_named(rank):
    before = number_of_files()
    descriptors = Descriptors(f"late{JOB}", 5 + rank, [5, 6, 7])
    dist.barrier()
    if rank != 2:
        own, started = file_with(""), time.monotonic()
        with pytest.raises(PeersLate) as caught:
            descriptors.exchange([own], 1.0)
        assert caught.value.ranks == (7,) and 0.9 < time.monotonic() - started < 20
        os.close(own)
    dist.barrier()
    descriptors.close()
    dist.barrier()
    if rank == 0:
        descriptors = Descriptors(f"another{JOB}", 5, [5, 6, 7])
        with pytest.raises(PeersLate, match="^rank 6 does not listen any more$"):
            descriptors.exchange([], 1.0)
        with pytest.raises(RuntimeError, match="^rank 5 cannot make the socket .* is taken by process"):
            Descriptors(f"another{JOB}", 5, [5, 6, 7])  # a name serves once
        descriptors.close()
    assert number_of_files() == before


# ---- what is mapped --------------------------------------------------------------------------------------------------


def sealed(num_bytes: int) -> int:
    """Memory as a rank passes it on."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def engine_of_two() -> tuple[_C_cpu.Engine, int]:
    """Rank 0 of two, which has not attached yet, and the bytes of its memory."""
    shape = Shape(1, 2, 4, 2, 8, 16, ep.checks.DTYPES[0])
    config = shape.fill_sizes(_C_cpu.Config())
    config.rank_at = [0, 1]
    engine = _C_cpu.Engine(config, 1)
    return engine, os.fstat(engine.fd()).st_size


def test_nothing_but_sealed_memory_of_the_right_size_is_mapped():
    """A file that shrinks under a mapping ends the process (SIGBUS), and a smaller one is read behind its end."""
    engine, num_bytes = engine_of_two()
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, num_bytes)
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile(dir="/dev/shm") as in_memory:
        for one in (file, in_memory):
            one.truncate(num_bytes)
        wrong = {
            "no memory of a sealed size": [unsealed, file.fileno(), in_memory.fileno(), os.pipe()[0], 9999],
            f"has {num_bytes - 1} bytes, but a rank of this buffer has {num_bytes}": [sealed(num_bytes - 1)],
            f"has {2 * num_bytes} bytes": [sealed(2 * num_bytes)],
        }
        for text, fds in wrong.items():
            for fd in fds:
                with pytest.raises(RuntimeError, match=f"^rank 1: shared memory: what it has passed on .*{text}"):
                    engine.attach([0, os.getpid()], [-1, fd])
    engine.attach([os.getpid()] * 2, [-1, sealed(num_bytes)])
    engine.close()


@needs_root
def test_memory_of_another_user_is_not_mapped():
    engine, num_bytes = engine_of_two()
    fd = sealed(num_bytes)
    os.fchown(fd, NOBODY, NOBODY)
    with pytest.raises(RuntimeError, match=f"belongs to user {NOBODY}, but this rank runs as user 0$"):
        engine.attach([os.getpid()] * 2, [-1, fd])
    engine.close()


def test_no_rank_can_make_its_memory_smaller():
    """Pages can be given back all the same, as suspend() does: test_suspend."""
    engine, num_bytes = engine_of_two()
    for size in (0, num_bytes - 1, num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(engine.fd(), size)
    engine.close_fd()
    engine.close()


@pytest.mark.exhaustive
@needs_root
def test_processes_of_two_network_namespaces_are_on_two_hosts():
    """Else they would be one node, and their sockets could not meet."""
    program = "from ep_dispatcher.topology import host_id; print(host_id())"
    found = [
        subprocess.run([*before, sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
        for before in ([], ["unshare", "--net"])
    ]
    if found[1].returncode:
        pytest.skip(f"no network namespace: {found[1].stderr.strip()}")
    assert found[0].stdout.strip() == topology.host_id() != found[1].stdout.strip()


@on_ranks(2, fresh=True)
def test_a_buffer_leaves_no_descriptor_of_memory(rank):
    """Only while it is made: afterwards nobody can open it through /proc."""
    with ep.Buffer(**CONFIG, engine="cpu", timeout_s=LIMIT_S):
        assert not [name for name in open_files() if "memfd:ep_dispatcher" in name]
