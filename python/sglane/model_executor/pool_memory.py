"""Memory of the KV pools: zeros, which on CPU the system hands out on first use."""
import errno
import logging
import math
import mmap

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: madvise(2): take the pages of a range now, contents unchanged (Linux 5.14).
MADV_POPULATE_WRITE = 23
#: Memory taken in one go, in bytes; takes about a millisecond.
TAKEN_AT_ONCE = 1 << 22
#: Memory that is kept ready beyond the rows in use, in bytes of all planes.
KEPT_READY = 1 << 27

Shapes = dict[str, tuple[int, int, int, int]]  # plane -> [rows, layers, page_size, width]


def device_memory(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros on a GPU."""
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


class HostMemory:
    """Buffers of zeros on CPU.

    Taking all of it at the start would cost seconds and gigabytes that a small load never needs; taking it at the first write, as the system
    does by itself, costs 5 % of a prefill. So idle moments are used to keep some memory ready beyond the highest row in use.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype):
        self.buffers: dict[str, Tensor] = {}
        self._maps: list[tuple[mmap.mmap, int]] = []  # with the bytes of a row
        for name, shape in shapes.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self.buffers[name] = torch.frombuffer(memory, dtype=dtype).view(shape)
            self._maps.append((memory, num_bytes // shape[0]))
        self._num_rows = next(iter(shapes.values()))[0]
        self._row_bytes = sum(row_bytes for _, row_bytes in self._maps)
        self._used = 0  # highest row in use
        self._ready = 0  # rows [0, ready) have their memory

    def use(self, row: int) -> None:
        """Rows up to `row` are in use."""
        self._used = max(self._used, row)

    def take_ahead(self) -> bool:
        """Take the memory of some rows. False: enough are ready."""
        wanted = min(self._num_rows, self._used + 1 + max(1, KEPT_READY // self._row_bytes))
        if self._ready >= wanted:
            return False
        begin, self._ready = self._ready, min(wanted, self._ready + max(1, TAKEN_AT_ONCE // self._row_bytes))
        for memory, row_bytes in self._maps:
            first = begin * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                memory.madvise(MADV_POPULATE_WRITE, first, self._ready * row_bytes - first)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                logger.info("This kernel takes the KV pool's memory at the first write of each page only.")
                self._ready = self._num_rows
        return True
