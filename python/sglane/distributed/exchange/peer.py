"""Exchange between ranks of one host through shared memory: each writes its part once, the others read it where it lies."""
import os

import torch
from torch import Tensor

from sglane.distributed.barrier import Barrier, file_bytes
from sglane.distributed.peers import Peers
from sglane.distributed.shared_memory import bytes_of, create_file, map_file

#: Bytes that a buffer can hold before it grows; only what is written takes memory.
FIRST_BYTES = 1 << 22


class SharedBuffer:
    """A file that all ranks map and that grows: to the next power of two, as soon as an operation needs it.

    All ranks see the same sizes in the same order, so each of them makes the file longer itself, by the same amount, and nothing has to be
    handed over again. No rank can make it shorter by being late: an operation is over only when all ranks have come to it.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def view(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]: the beginning of the buffer."""
        if num_bytes > self._bytes.numel():
            capacity = max(FIRST_BYTES, 1 << (num_bytes - 1).bit_length())
            os.ftruncate(self._fd, capacity)
            self._bytes = bytes_of(map_file(self._fd, capacity))
        return self._bytes[:num_bytes]

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._fd)


class PeerExchange:
    """One communicator; one thread of each rank uses it at a time, and any thread may use another one meanwhile.

    Operation k uses buffer k % 2, in which the parts of all ranks lie one after another: write the own part, barrier, read. Buffer k % 2 is
    written again in operation k + 2, which no rank begins before all have come to the barrier of k + 1, and so have read what they want of k.
    """

    def __init__(self, peers: Peers, timeout_s: float):
        """peers: this communicator's own connections; timeout_s: how long a rank is waited for.

        Blocks until rank 0 has given its files; raises PeerLost.
        """
        self.rank = peers.rank
        self.size = peers.size
        self._peers = peers

        def make() -> list[int]:
            return [create_file("barrier", file_bytes(peers.size)), create_file("even", 0), create_file("odd", 0)]

        barrier, even, odd = peers.files_of_first(make)
        self._barrier = Barrier(barrier, peers, timeout_s)
        os.close(barrier)
        self._buffers = [SharedBuffer(even), SharedBuffer(odd)]

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...], same shape and type on every rank; returns [size, ...] in rank order."""
        if not x.numel():
            return x.new_empty((self.size, *x.shape))
        return self.gather_in_place(x).clone()

    def gather_in_place(self, x: Tensor) -> Tensor:
        """As all_gather, without the copy: what it returns lies in shared memory, is only read, and is valid until this rank's next call."""
        return self._write(x, x.shape, x.shape[0] if x.dim() else 0)

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        """x [n, ...], n <= max_length; returns [T, ...] in global order (see Exchange). Reads other ranks' rows where they lie."""
        if max_length == 0:
            return x
        if not x.shape[1:].numel():
            return x.new_empty((inverse.shape[0], *x.shape[1:]))
        every = self._write(x, torch.Size((max_length, *x.shape[1:])), x.shape[0])  # [size, max_length, ...]
        return every.flatten(0, 1).index_select(0, inverse)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size, ...] -> [...] (see Exchange)."""
        if not x.numel():
            return x.new_empty(x.shape[1:])
        return self.gather_in_place(x)[:, self.rank].sum(0)

    def barrier(self) -> None:
        self._barrier.wait()

    def close(self) -> None:
        """Leave the communicator. Ranks that still wait for this one raise PeerLost."""
        self._barrier.close()
        for buffer in self._buffers:
            buffer.close()
        self._peers.close()

    def _write(self, x: Tensor, shape: torch.Size, num_rows: int) -> Tensor:
        """Put x into the first `num_rows` rows of this rank's part, which has room for `shape`. Returns all parts, [size, *shape]."""
        assert x.device.type == "cpu", f"peer exchange of a tensor on {x.device}"
        num_bytes = shape.numel() * x.element_size()
        buffer = self._buffers[0]
        self._buffers.reverse()
        every = buffer.view(self.size * num_bytes).view(x.dtype).view(self.size, *shape)
        own = every[self.rank]
        (own[:num_rows] if own.dim() else own).copy_(x)
        self._barrier.wait(num_bytes)
        return every
