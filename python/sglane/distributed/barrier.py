"""A barrier of processes in shared memory: one slot per rank, in a cache line of its own."""
import os
import time

from sglane.distributed.futex import Futex
from sglane.distributed.peers import PeerLost, Peers
from sglane.distributed.shared_memory import bytes_of, map_file

#: Bytes of a slot: word 0 is the rank's count of barriers, word 1 + count % 2 what it says about that barrier. One more slot, after those of
#: the ranks, has in its word 0 the rank that somebody has given up, plus one.
SLOT_BYTES = 64
_WORDS = SLOT_BYTES // 8
#: How long a rank asks again and again, yielding its core each time, before it sleeps in the kernel. Sleeping at once costs a barrier 3 to 12
#: us more on an idle machine; a longer poll gains nothing more, and each yield puts the rank behind busy processes of others.
POLL_S = 20e-6
#: Longest sleep before a waiting rank looks whether the others live.
SLEEP_S = 0.05


def file_bytes(size: int) -> int:
    """Bytes of the file that `size` ranks share for one barrier."""
    return (size + 1) * SLOT_BYTES


class Barrier:
    """Used by one thread of each rank.

    Order of memory: what a rank wrote before `wait` is seen by every rank after its `wait`. The count is one aligned 64-bit store (of a
    memoryview), with a fence before it; readers load it the same way and have a fence behind it (see Futex.fence).
    """

    def __init__(self, fd: int, peers: Peers, timeout_s: float):
        """fd: a file of file_bytes(size) zeros, the same one on every rank. timeout_s: how long a rank is waited for."""
        memory = map_file(fd, file_bytes(peers.size))
        self._address = bytes_of(memory).data_ptr()
        self._words = memoryview(memory).cast("Q")
        self._peers = peers
        self._timeout_s = timeout_s
        self._futex = Futex()
        self._count = 0
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._own = peers.rank * _WORDS
        self._given_up = peers.size * _WORDS

    def wait(self, note: int = 0) -> None:
        """Returns when every rank has called it as often as this one. note: must be the same on all ranks.

        Raises PeerLost naming a rank that has ended or does not come; after that, every call on every rank does. Raises AssertionError if
        a rank has another note.
        """
        if self._words[self._given_up]:
            self._give_up(self._words[self._given_up] - 1, "was given up before")
        self._count = count = self._count + 1
        place = 1 + count % 2  # a rank is at most one barrier ahead, so what it says about this one is still there
        self._words[self._own + place] = note
        self._futex.fence()
        self._words[self._own] = count
        self._futex.wake(self._address + self._own * 8)
        poll_end_s = time.perf_counter() + POLL_S
        for rank in self._others:
            while self._words[rank * _WORDS] < count:
                if time.perf_counter() < poll_end_s:
                    os.sched_yield()
                else:
                    self._sleep_until(rank, count)
        self._futex.fence()
        for rank in self._others:
            other = self._words[rank * _WORDS + place]
            assert other == note, f"operation {count}: rank {rank} says {other}, rank {self._peers.rank} says {note} bytes"

    def close(self) -> None:
        """No call may be under way."""
        self._words.release()

    def _sleep_until(self, rank: int, count: int) -> None:
        """Returns when the rank has come."""
        begin_s = time.monotonic()
        place = rank * _WORDS
        while (found := self._words[place]) < count:
            # Bytes 0 to 3 of a word are its low half: both kinds of machine that Futex knows are little-endian.
            self._futex.wait(self._address + place * 8, found & 0xFFFFFFFF, SLEEP_S)
            if self._words[place] >= count:
                return
            if self._words[self._given_up]:
                self._give_up(self._words[self._given_up] - 1, "was given up by another rank")
            if self._peers.has_left(rank) and self._words[place] < count:
                self._give_up(rank, "has ended")
            if time.monotonic() - begin_s > self._timeout_s:
                self._give_up(rank, f"did not come within {self._timeout_s:g} s")

    def _give_up(self, rank: int, why: str) -> None:
        self._words[self._given_up] = rank + 1
        raise PeerLost(rank, f"rank {rank} {why} (operation {self._count} of this communicator)")
