"""The ranks of one host meet: unix sockets between every two of them, over which they hand each other files without a name."""
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

#: What a rank says first on a connection: its number, and which of the meetings this is.
_HELLO = struct.Struct("=II")
_RETRY_S = 0.02
#: Most descriptors in one message.
_MOST_FILES = 8


class PeerLost(RuntimeError):
    """A rank of this host has ended, or did not come in time."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


class Peers:
    """One connection to each other rank. It hands over files at set-up and tells later who has ended; nothing else travels on it."""

    def __init__(self, rank: int, connections: dict[int, socket.socket]):
        """connections: by rank, without the own one; closed by `close`."""
        self.rank = rank
        self.size = len(connections) + 1
        self._connections = connections
        self._polls: dict[int, select.poll] = {}
        for other, connection in connections.items():
            self._polls[other] = select.poll()
            self._polls[other].register(connection, select.POLLRDHUP)

    def has_left(self, rank: int) -> bool:
        """The other rank has ended or has closed its side."""
        return bool(self._polls[rank].poll(0))

    def exchange_file(self, fd: int) -> list[int]:
        """Every rank gives one file. Returns their descriptors in rank order, the own one duplicated; all are the caller's to close.

        Cannot block for ever: a message of a few bytes fits any socket, so all ranks have sent before they wait. Raises PeerLost.
        """
        for rank in self._connections:
            self._send(rank, [fd])
        return [os.dup(fd) if rank == self.rank else self._receive(rank, 1)[0] for rank in range(self.size)]

    def files_of_first(self, make: Callable[[], list[int]]) -> list[int]:
        """Rank 0 makes files, everyone gets them. Returns the descriptors, the caller's to close. Raises PeerLost.

        The number of files follows from the place in the program, so all ranks call it with the same `make`.
        """
        if self.rank != 0:
            return self._receive(0, _MOST_FILES)
        files = make()
        for rank in self._connections:
            self._send(rank, files)
        return files

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _send(self, rank: int, files: Sequence[int]) -> None:
        try:
            socket.send_fds(self._connections[rank], [b"f"], files)
        except OSError as error:
            raise PeerLost(rank, f"rank {rank} took no files: {error}") from error

    def _receive(self, rank: int, most: int) -> list[int]:
        try:
            _, files, _, _ = socket.recv_fds(self._connections[rank], 1, most, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerLost(rank, f"rank {rank} sent no files: {error}") from error
        if not files:
            raise PeerLost(rank, f"rank {rank} ended before it sent its files")
        return list(files)


def meet(rank: int, size: int, path: str, num_meetings: int, timeout_s: float) -> list[Peers]:
    """Connect all ranks with each other `num_meetings` times, for as many independent users.

    path: a file name in a folder that only this user can enter; the ranks' sockets are there while they meet, as path.RANK. Every rank
    listens before it calls a lower one, so the order in which ranks come does not matter. Raises PeerLost naming a rank that did not come.
    """
    end_s = time.monotonic() + timeout_s
    own = f"{path}.{rank}"
    connections: list[dict[int, socket.socket]] = [{} for _ in range(num_meetings)]
    with ExitStack() as stack, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(own)
        listener.listen(size * num_meetings)
        try:
            for lower in range(rank):
                for meeting in range(num_meetings):
                    connection = stack.enter_context(_call(lower, f"{path}.{lower}", end_s))
                    connection.sendall(_HELLO.pack(rank, meeting))
                    connections[meeting][lower] = connection
            while any(len(made) < size - 1 for made in connections):
                missing = set(range(size)) - {rank, *min(connections, key=len)}
                connection, hello = _answer(listener, missing, end_s)
                other, meeting = _HELLO.unpack(hello)
                connections[meeting][other] = stack.enter_context(connection)
        finally:
            os.unlink(own)
        stack.pop_all()  # all are there: nothing is closed
    return [Peers(rank, made) for made in connections]


def _call(rank: int, path: str, end_s: float) -> socket.socket:
    """A connection to a rank that may not be there yet."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(max(_RETRY_S, end_s - time.monotonic()))
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError) as error:  # it has not made its socket, or does not listen yet
            connection.close()
            if time.monotonic() > end_s:
                raise PeerLost(rank, f"rank {rank} did not come in time") from error
        time.sleep(_RETRY_S)


def _answer(listener: socket.socket, missing: set[int], end_s: float) -> tuple[socket.socket, bytes]:
    """The next connection, and what its other side said first."""
    listener.settimeout(max(_RETRY_S, end_s - time.monotonic()))
    try:
        connection = listener.accept()[0]
        connection.settimeout(max(_RETRY_S, end_s - time.monotonic()))
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except TimeoutError as error:
        raise PeerLost(min(missing), f"ranks {sorted(missing)} did not come in time") from error
    if len(hello) < _HELLO.size:
        connection.close()
        raise PeerLost(min(missing), f"one of the ranks {sorted(missing)} ended before it said which")
    return connection, hello
