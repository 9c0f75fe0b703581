"""Passes open file descriptors between the ranks of one host, through Unix sockets whose both ends are checked.

What ranks tell each other through the store proves nothing: whoever can reach its port can read and write there. What
the kernel says (SO_PEERCRED) does. The rank that connects asks whose process listens, and the rank that listens asks
whose process has connected. A process of another user gets no descriptor, and none of its own is taken.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from functools import partial

from ep_dispatcher.gather import PeersLate

SILENT_S = 1.0  # a process that has connected says within this time which rank it is
_AGAIN_S = 0.01  # until the next attempt to connect to a socket whose queue is full
_RECEIPT = b"k"


class Descriptors:
    """One exchange: every rank gives the same descriptors to all others, and gets theirs.

        descriptors = Descriptors(secret, rank, ranks)       # every rank, before the first one exchanges
        of_ranks = descriptors.exchange([fd], timeout_s)     # of_ranks[i]: those of ranks[i]; none for this rank itself
        descriptors.pids                                     # [len(ranks)] their processes, as the kernel knows them
        descriptors.close()

    All ``ranks`` run as one user, in one process namespace and one network namespace. The sockets have abstract names,
    which leave nothing in a file system. Names and the first bytes of messages are derived from ``secret``, which is
    used once. So two jobs of one user never meet. Nothing depends on hiding it.
    """

    def __init__(self, secret: str, rank: int, ranks: Sequence[int]):
        self._secret, self._rank, self._ranks = secret, rank, tuple(ranks)
        place = self._ranks.index(rank)
        self._others = self._ranks[place + 1 :] + self._ranks[:place]  # every rank begins with a different one
        self.pids = [os.getpid()] * len(self._ranks)
        self._fds: list[int] = []  # of this rank
        self._received: dict[int, list[int]] = {rank: []}
        self._unconnected = list(self._others)
        self._without_receipt = set(self._others)
        self._connections: list[socket.socket] = []  # that this rank has made
        self._silent: dict[socket.socket, float] = {}  # that others have made and said nothing: when to close them
        self._selector = selectors.DefaultSelector()
        self._listener = _new_socket()
        try:
            self._listener.bind(self._name(rank))
            self._listener.listen(len(self._ranks))  # no rank waits for a slow one to connect
        except OSError as error:
            self.close()
            raise RuntimeError(
                f"rank {rank} cannot make the socket at which the ranks of its host meet: {error}{self._holder()}"
            ) from error
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _digest(self, what: str) -> bytes:
        return hashlib.sha256(f"{self._secret}/{what}".encode()).hexdigest().encode()

    def _name(self, rank: int) -> bytes:
        return b"\0" + self._digest(f"socket of {rank}")

    def _greeting(self, sender: int, receiver: int) -> bytes:
        return self._digest(f"from {sender} to {receiver}")

    def _holder(self) -> str:
        """Say who has the name of this rank's socket, if anybody does."""
        with _new_socket() as probe:
            try:
                probe.connect(self._name(self._rank))
                return "; its name is taken by process {} of user {}".format(*_credentials(probe))
            except OSError:
                return ""

    def exchange(self, fds: list[int], timeout_s: float) -> list[list[int]]:
        """Return the descriptors of all ranks; the caller closes them and its own.

        PeersLate after the limit. RuntimeError if a rank runs as another user, or in another process namespace.
        """
        self._fds, end = fds, time.monotonic() + timeout_s
        try:
            # If this rank ended before a peer has its descriptors, they would be lost: wait for the receipts too.
            while missing := self._missing():
                for rank in [*self._unconnected]:
                    self._connect(rank)
                now = time.monotonic()
                if now >= end:
                    raise PeersLate(f"no descriptors came from ranks {missing}", missing)
                for connection in [one for one, until in self._silent.items() if now >= until]:
                    self._drop(connection)
                wakes = [end, *self._silent.values()]
                if self._unconnected:
                    wakes.append(now + _AGAIN_S)
                for ready, _ in self._selector.select(max(min(wakes) - now, 0)):
                    ready.data()
        except BaseException:  # it is raised again
            for fd in (fd for of_rank in self._received.values() for fd in of_rank):
                os.close(fd)
            self._received.clear()
            raise
        return [self._received[rank] for rank in self._ranks]

    def _missing(self) -> list[int]:
        """Return the ranks that have sent nothing; once all have sent, those that have not received."""
        return [rank for rank in self._others if rank not in self._received] or sorted(self._without_receipt)

    def _connect(self, rank: int) -> None:
        """Connect to a rank and send. Do nothing while its queue is full: other processes may have filled it."""
        connection = _new_socket()
        self._connections.append(connection)
        try:
            connection.connect(self._name(rank))
        except BlockingIOError:
            self._connections.pop().close()
            return
        except ConnectionRefusedError as error:  # every rank began to listen before the first one connects
            raise PeersLate(f"rank {rank} does not listen any more", [rank]) from error
        self._unconnected.remove(rank)
        pid, user = _credentials(connection)
        if user != os.geteuid():
            raise RuntimeError(
                f"the socket of rank {rank} belongs to user {user} (process {pid}), but rank {self._rank} runs as user "
                f"{os.geteuid()}: all ranks of a host must run as one user"
            )
        if pid == 0:
            raise RuntimeError(
                f"rank {rank} runs in a process namespace that rank {self._rank} cannot see: all ranks of a host must "
                "run in one"
            )
        self.pids[self._ranks.index(rank)] = pid
        try:
            socket.send_fds(connection, [self._greeting(self._rank, rank)], self._fds)
        except ConnectionError as error:
            raise PeersLate(f"rank {rank} has left", [rank]) from error
        self._selector.register(connection, selectors.EVENT_READ, partial(self._take_receipt, rank, connection))

    def _take_receipt(self, rank: int, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        try:
            receipt = connection.recv(1)
        except ConnectionError:
            receipt = b""
        if receipt != _RECEIPT:
            raise PeersLate(f"rank {rank} did not take the descriptors of rank {self._rank}", [rank])
        self._without_receipt.remove(rank)

    def _accept(self) -> None:
        """Accept a connection, if a process of this user has made it. It costs nobody time while it is silent."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # whoever made it has closed it
            return
        if _credentials(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._silent[connection] = time.monotonic() + SILENT_S
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        """Take the descriptors in the message of a connection, if it is one of the missing ranks'."""
        try:
            # A message of 64 bytes was sent in one piece, so it arrives in one. A longer one is not a rank's.
            greeting, fds, flags, _ = socket.recv_fds(connection, 65, len(self._fds), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            self._drop(connection)
            return
        is_whole = len(fds) == len(self._fds) and not flags & socket.MSG_CTRUNC
        for rank in self._others:
            is_new = is_whole and rank not in self._received
            if is_new and hmac.compare_digest(greeting, self._greeting(rank, self._rank)):
                self._received[rank] = fds
                try:
                    connection.sendall(_RECEIPT)
                except OSError:  # it has ended since: its descriptors are good, and it needs no receipt
                    pass
                break
        else:
            for fd in fds:
                os.close(fd)
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._silent[connection]
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        self._selector.close()
        for one in (self._listener, *self._connections, *self._silent):
            one.close()


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end, as they were when it began to listen or connected.

    The process is 0 if it is in a process namespace that this one cannot see.
    """
    ucred = struct.Struct("iII")  # process, user, group
    pid, user, _ = ucred.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))
    return pid, user
