"""The KV pools of one rank: one buffer per plane, rows addressed by page."""
import logging

import numpy as np
import torch

from sglane.distributed.peers import Peers
from sglane.layers.attention.plane import Plane
from sglane.model_executor.pool_memory import HostMemory, device_memory
from sglane.plan.step_plan import PlaneSpec, TailCopy

logger = logging.getLogger(__name__)


def plane_specs(planes: tuple[tuple[str, int, int], ...], dtype: torch.dtype) -> list[PlaneSpec]:
    """planes: (name, layers, width) as the model's configuration states them; planes without layers are left out."""
    return [PlaneSpec(name, num_layers, width, dtype.itemsize) for name, num_layers, width in planes if num_layers]


def num_bytes_per_page(specs: list[PlaneSpec], page_size: int) -> int:
    """All planes and layers of one page."""
    return sum(spec.num_layers * spec.width * spec.num_bytes_per_element for spec in specs) * page_size


class KVPool:
    """Pages of this rank's lane; pages of other lanes in an argument are skipped."""

    def __init__(self, specs: list[PlaneSpec], num_rows: int, page_size: int, cp_size: int, rank: int, dtype: torch.dtype,
                 device: torch.device, peers: Peers | None = None):
        """num_rows includes row 0, which stays zero. peers: the other ranks, if they map each other's pools (CPU only)."""
        self.num_rows = num_rows
        self.cp_size = cp_size
        self.rank = rank
        self.device = device
        assert peers is None or device.type == "cpu", f"pools on {device} cannot be mapped by other ranks"
        shapes = {spec.name: (num_rows, spec.num_layers, page_size, spec.width) for spec in specs}
        self._memory = HostMemory(shapes, dtype, peers) if device.type == "cpu" else None
        buffers = self._memory.buffers if self._memory else device_memory(shapes, dtype, device)
        self.planes = {name: Plane(name, buffer) for name, buffer in buffers.items()}
        #: Plane -> that plane of every lane, own included, in lane order; empty when this rank maps no other pools. Others' are only read.
        self.lanes: dict[str, list[Plane]] = {}
        if self._memory is not None and self._memory.lanes:
            self.lanes = {name: [plane if lane == rank else Plane(name, buffers[name]) for lane, buffers in enumerate(self._memory.lanes)]
                          for name, plane in self.planes.items()}
        num_bytes = num_rows * num_bytes_per_page(specs, page_size)
        logger.info("KV Cache is allocated. dtype: %s, #tokens: %d, KV size: %.2f GB", dtype, (num_rows - 1) * page_size, num_bytes / (1 << 30))

    def plane(self, name: str) -> Plane:
        return self.planes[name]

    def use(self, pages: np.ndarray) -> None:
        """Pages int32 [m] are about to be written for the first time or again."""
        if self._memory is not None:
            self._memory.use(int(pages.max(initial=0)) // self.cp_size)

    def work_ahead(self) -> bool:
        """Called while there is nothing else to do: a few milliseconds of what later steps would wait for. False: nothing is left to do."""
        return self._memory is not None and self._memory.take_ahead()

    def copy_tail(self, copy: TailCopy) -> None:
        """Raises AssertionError if the pages lie in different lanes."""
        assert copy.src_page % self.cp_size == copy.dst_page % self.cp_size, f"tail copy between lanes: {copy}"
        if copy.src_page % self.cp_size == self.rank:
            for plane in self.planes.values():
                plane.copy_tokens(copy.src_page // self.cp_size, copy.dst_page // self.cp_size, copy.num_tokens)

    def poison(self, pages: np.ndarray) -> None:
        """Fill pages int32 [m] with NaN, so that any use of a row that was not written shows."""
        rows = pages[pages % self.cp_size == self.rank].astype(np.int64) // self.cp_size
        if len(rows):
            assert rows.min() > 0, "page of the sink row is to be poisoned"
            index = torch.from_numpy(rows).to(self.device)
            for plane in self.planes.values():
                plane.fill(index, float("nan"))
