"""The host tier of one rank: one record per page, kept in the lane of the page's device page."""
import logging

import numpy as np
import torch
from torch import Tensor

from sglane.layers.attention.plane import Plane
from sglane.model_executor.kv_pool import num_bytes_per_page
from sglane.model_executor.pool_memory import HostMemory
from sglane.plan.step_plan import PlaneSpec, TailCopy

logger = logging.getLogger(__name__)


class HostPool:
    """Records of this rank's lane: the planes one after another, each [layers, page_size, width] as in the device pool, so that a page, or
    neighbouring layers of one, are one piece of memory on both sides. Pages of other lanes in an argument are skipped."""

    def __init__(self, specs: list[PlaneSpec], num_rows: int, page_size: int, cp_size: int, rank: int, dtype: torch.dtype, device: torch.device):
        """num_rows includes row 0, which is never used. device: that of the device pool; for a GPU the memory is pinned and taken at once."""
        self.num_rows = num_rows
        self.record_bytes = num_bytes_per_page(specs, page_size)
        self._cp_size = cp_size
        self._rank = rank
        self._memory = None
        if device.type == "cuda":
            self.buffer = torch.zeros((num_rows, self.record_bytes), dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = HostMemory({"host": (num_rows, 1, 1, self.record_bytes)}, torch.uint8)
            self.buffer = self._memory.buffers["host"].view(num_rows, self.record_bytes)
        #: Plane -> its part of every record, [rows, layers, page_size, width] with the record's size as the stride of rows.
        self.planes: dict[str, Tensor] = {}
        parts, begin = [], 0
        for spec in specs:
            num_bytes = num_bytes_per_page([spec], page_size)
            part = self.buffer[:, begin:begin + num_bytes].view(dtype)
            self.planes[spec.name] = part.unflatten(1, (spec.num_layers, page_size, spec.width))
            begin += num_bytes
            parts.append(f"{spec.name} {num_rows * num_bytes / 1e9:.2f} GB")
        logger.info("Host KV cache is allocated. #tokens: %d, size: %.2f GB (%s)", (num_rows - 1) * page_size, num_rows * self.record_bytes / 1e9,
                    ", ".join(parts))

    def use(self, rows: list[int]) -> None:
        """Rows are about to be written for the first time or again."""
        if self._memory is not None:
            self._memory.use(max(rows, default=0))

    def work_ahead(self) -> bool:
        """See KVPool.work_ahead."""
        return self._memory is not None and self._memory.take_ahead()

    def copy_tail(self, copy: TailCopy, planes: dict[str, Plane]) -> None:
        """The first tokens of a record, all planes and layers, to a page of `planes`. Raises AssertionError if the pages lie in different lanes."""
        assert copy.src_page % self._cp_size == copy.dst_page % self._cp_size, f"tail copy between lanes: {copy}"
        if copy.src_page % self._cp_size == self._rank:
            for name, plane in planes.items():
                rows = self.planes[name][copy.src_page // self._cp_size, :, :copy.num_tokens]
                plane.buffer[copy.dst_page // self._cp_size, :, :copy.num_tokens].copy_(rows)

    def poison(self, pages: np.ndarray) -> None:
        """Fill the records of host pages int32 [m] with NaN."""
        rows = pages[pages % self._cp_size == self._rank].astype(np.int64) // self._cp_size
        if len(rows):
            assert rows.min() > 0, "record of the sink row is to be poisoned"
            for plane in self.planes.values():
                plane.index_fill_(0, torch.from_numpy(rows), float("nan"))
