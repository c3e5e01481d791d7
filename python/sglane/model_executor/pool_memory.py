"""Memory of the KV pools: zeros, which on CPU the system hands out on first use."""
import errno
import math
import mmap
import os

import torch
from torch import Tensor

from sglane.distributed.peers import Peers
from sglane.distributed.shared_memory import create_file, map_file
from sglane.utils import fallback

#: madvise(2): take the pages of a range now, contents unchanged (Linux 5.14).
MADV_POPULATE_WRITE = 23
#: Memory taken in one go, in bytes; takes about a millisecond.
TAKEN_AT_ONCE = 1 << 22
#: Memory that is kept ready beyond the rows in use, in bytes of all planes.
KEPT_READY = 1 << 27
#: Planes begin at multiples of this, so that huge pages fit.
ALIGNMENT = 1 << 21

Shapes = dict[str, tuple[int, int, int, int]]  # plane -> [rows, layers, page_size, width]


def device_memory(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros on a GPU."""
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


class HostMemory:
    """Buffers of zeros on CPU, one after another in one piece of memory.

    Taking all of it at the start would cost seconds and gigabytes that a small load never needs; taking it at the first write, as the system
    does by itself, costs 5 % of a prefill. So idle moments are used to keep some memory ready beyond the highest row in use.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, peers: Peers | None = None):
        """peers: the other ranks, which have pools of the same shapes: every rank maps all of them. Blocks until all are there; raises
        PeerLost."""
        self._shapes = shapes
        self._dtype = dtype
        self._offsets: list[int] = []
        self._row_bytes: list[int] = []
        self._num_bytes = 0
        for shape in shapes.values():
            self._offsets.append(self._num_bytes)
            self._row_bytes.append(math.prod(shape[1:]) * dtype.itemsize)
            self._num_bytes += -(-shape[0] * self._row_bytes[-1] // ALIGNMENT) * ALIGNMENT
        self.lanes: list[dict[str, Tensor]] = []  # the buffers of all lanes, own included; empty without peers
        if peers is None:
            self._memory = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            want_huge_pages(self._memory)
            self.buffers = self._buffers_of(self._memory)
        else:
            self._memory = self._share(peers)
            self.buffers = self.lanes[peers.rank]
        self._num_rows = next(iter(shapes.values()))[0]
        self._used = 0  # highest row in use
        self._ready = 0  # rows [0, ready) have their memory

    def _buffers_of(self, memory: mmap.mmap) -> dict[str, Tensor]:
        return {name: torch.frombuffer(memory, dtype=self._dtype, count=math.prod(shape), offset=offset).view(shape)
                for (name, shape), offset in zip(self._shapes.items(), self._offsets)}

    def _share(self, peers: Peers) -> mmap.mmap:
        """Maps the pools of all lanes; returns the own one's memory."""
        own = create_file(f"pool{peers.rank}", self._num_bytes)
        memories = []
        for lane, fd in enumerate(peers.exchange_file(own)):
            found = os.fstat(fd).st_size
            assert found == self._num_bytes, f"the pool of lane {lane} has {found} bytes, that of lane {peers.rank} {self._num_bytes}"
            memories.append(map_file(fd, self._num_bytes))
            os.close(fd)
        os.close(own)
        want_huge_pages(memories[peers.rank])  # taken only where /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise"
        self.lanes = [self._buffers_of(memory) for memory in memories]
        return memories[peers.rank]

    def use(self, row: int) -> None:
        """Rows up to `row` are in use."""
        self._used = max(self._used, row)

    def take_ahead(self) -> bool:
        """Take the memory of some rows. False: enough are ready."""
        row_bytes = sum(self._row_bytes)
        wanted = min(self._num_rows, self._used + 1 + max(1, KEPT_READY // row_bytes))
        if self._ready >= wanted:
            return False
        begin, self._ready = self._ready, min(wanted, self._ready + max(1, TAKEN_AT_ONCE // row_bytes))
        for offset, plane_row_bytes in zip(self._offsets, self._row_bytes):
            first = (offset + begin * plane_row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._memory.madvise(MADV_POPULATE_WRITE, first, offset + self._ready * plane_row_bytes - first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fallback.count("pool_memory_late")
                self._ready = self._num_rows
                return False
        return True


def want_huge_pages(memory: mmap.mmap) -> None:
    """Ask for them; the system may have none to give."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without them
            raise
