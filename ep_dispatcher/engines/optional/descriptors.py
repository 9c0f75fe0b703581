"""Passes open file descriptors between the ranks of one host, through Unix sockets."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from contextlib import ExitStack

from ep_dispatcher.gather import PeersLate


class Descriptors:
    """One exchange: every rank gives the same descriptors to all others, and gets theirs.

        descriptors = Descriptors(secret, rank, num_ranks)   # every rank, before the first one exchanges
        of_ranks = descriptors.exchange([fd], timeout_s)     # of_ranks[r]: those of rank r; of_ranks[rank]: none
        descriptors.close()

    The sockets have abstract names: they leave nothing in a file system, and the ranks must share a network namespace.
    Names and the first bytes of messages are derived from ``secret``, which only the ranks have, and use once. So no
    other process can take a rank's place or get a descriptor.
    """

    def __init__(self, secret: str, rank: int, num_ranks: int):
        self._secret, self._rank, self._num_ranks = secret, rank, num_ranks
        self._others = [(rank + i) % num_ranks for i in range(1, num_ranks)]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(b"\0" + self._digest(f"socket of {rank}"))
            self._socket.listen(num_ranks)  # no rank waits for a slow one to connect
        except BaseException:  # it is raised again
            self._socket.close()
            raise

    def _digest(self, what: str) -> bytes:
        return hashlib.sha256(f"{self._secret}/{what}".encode()).hexdigest().encode()

    def exchange(self, fds: list[int], timeout_s: float) -> list[list[int]]:
        """Return the descriptors of all ranks; the caller closes them and its own. PeersLate after the limit."""
        end, received = time.monotonic() + timeout_s, {self._rank: list[int]()}
        try:
            with ExitStack() as connections:
                sent = [self._send(rank, fds, connections, end) for rank in self._others]
                while len(received) < self._num_ranks:
                    self._receive(len(fds), received, end)
                # If this rank ended now, messages that no peer has received would be lost: wait for the receipts.
                for rank, connection in zip(self._others, sent):
                    _limit(connection, end, [rank])
                    if connection.recv(1) != b"k":
                        raise PeersLate(f"rank {rank} did not take this rank's memory", [rank])
        except BaseException as error:  # it is raised again, or as PeersLate
            for fd in (fd for of_rank in received.values() for fd in of_rank):
                os.close(fd)
            if isinstance(error, (TimeoutError, ConnectionError)):
                late = [rank for rank in self._others if rank not in received] or self._others
                raise PeersLate(f"no descriptors came from ranks {late}", late) from error
            raise
        return [received[rank] for rank in range(self._num_ranks)]

    def _send(self, rank: int, fds: list[int], connections: ExitStack, end: float) -> socket.socket:
        connection = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        while True:
            _limit(connection, end, [rank])
            try:
                connection.connect(b"\0" + self._digest(f"socket of {rank}"))
                break
            except BlockingIOError:  # other processes fill its queue
                time.sleep(0.01)
            except ConnectionRefusedError as error:
                raise RuntimeError(
                    f"rank {rank} is on this host and its socket cannot be found: ranks of a host need one network "
                    "namespace"
                ) from error
        socket.send_fds(connection, [self._digest(f"from {self._rank} to {rank}")], fds)
        return connection

    def _receive(self, num_fds: int, received: dict[int, list[int]], end: float) -> None:
        """Take the next message, if it is from one of the ranks."""
        missing = [rank for rank in self._others if rank not in received]
        _limit(self._socket, end, missing)
        connection, _ = self._socket.accept()
        with connection:
            _limit(connection, end, missing)
            # A message of 64 bytes was sent in one piece, so it arrives in one.
            message, fds, _, _ = socket.recv_fds(connection, 64, num_fds, socket.MSG_CMSG_CLOEXEC)
            for rank in missing:
                if hmac.compare_digest(message, self._digest(f"from {rank} to {self._rank}")) and len(fds) == num_fds:
                    received[rank] = fds
                    connection.sendall(b"k")
                    return
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self._socket.close()


def _limit(connection: socket.socket, end: float, late: list[int]) -> None:
    """Set the limit of the next call on the socket."""
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise PeersLate("the time for descriptors is over", late)
    connection.settimeout(left_s)
