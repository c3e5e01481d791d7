"""What a copy between device and host pool consists of: its pages, and the pieces in which their layers follow the forward."""
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sglane.plan.step_plan import PlaneSpec

#: Neighbouring layers of a page are copied in one piece of about this many bytes: below it a copy costs more to begin than to carry out.
PIECE_BYTES = 1 << 18
#: Pieces of a plane, if it has as many layers: copies are to follow the layers of a forward, and to be followed by them.
MIN_PIECES = 6


class Piece(NamedTuple):
    """Some neighbouring layers of one plane."""

    plane: str
    number: int  # among the plane's pieces
    first: int  # the layer of the model that reads it first
    last: int  # the layer of the model after which all of it is written


class CopyLayout:
    """The pieces of all planes, and the orders in which loads and backups copy them."""

    def __init__(self, specs: Sequence[PlaneSpec], page_size: int, written_after: Mapping[str, tuple[int, ...]]):
        """written_after: see ModelSizes."""
        #: Plane -> layers of each piece.
        self.sizes: dict[str, list[int]] = {}
        self.num_layers = 1 + max(layers[-1] for layers in (written_after[spec.name] for spec in specs))  # of the model
        self._places: dict[tuple[str, int], int] = {}
        pieces: list[Piece] = []
        for spec in specs:
            after = written_after[spec.name]
            assert len(after) == spec.num_layers, f"plane {spec.name} has {spec.num_layers} layers, but {len(after)} are written"
            size = _layers_at_once(spec, page_size)
            begins = range(0, spec.num_layers, size)
            self.sizes[spec.name] = [min(size, spec.num_layers - begin) for begin in begins]
            pieces += [Piece(spec.name, i, after[begin], after[min(begin + size, spec.num_layers) - 1]) for i, begin in enumerate(begins)]
        self.load_order = sorted(pieces, key=lambda piece: (piece.first, piece.plane))
        self.backup_order = sorted(pieces, key=lambda piece: (piece.last, piece.plane))
        for place, piece in enumerate(self.load_order):
            begin = sum(self.sizes[piece.plane][:piece.number])
            for layer in range(begin, begin + self.sizes[piece.plane][piece.number]):
                self._places[piece.plane, layer] = place

    def place(self, plane: str, layer: int) -> int:
        """Which piece of `load_order` brings a plane's layer."""
        return self._places[plane, layer]

    def views(self, planes: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, list[tuple[Tensor, ...]]]:
        """planes: [rows, layers, page_size, width] each; rows: those to copy. Returns for each piece of every plane a view per row."""
        return {name: list(zip(*(planes[name].select(0, row).split_with_sizes(sizes) for row in rows))) for name, sizes in self.sizes.items()}


def _layers_at_once(spec: PlaneSpec, page_size: int) -> int:
    num_bytes = page_size * spec.width * spec.num_bytes_per_element
    return min(math.ceil(PIECE_BYTES / num_bytes), math.ceil(spec.num_layers / MIN_PIECES))


class CopyJob:
    """One rank's part of a ticket: pairs of rows."""

    def __init__(self, ticket: int, is_load: bool, host_rows: list[int], device_rows: list[int], num_bytes: int):
        """num_bytes: of all pairs."""
        self.ticket = ticket
        self.is_load = is_load
        self.host_rows = host_rows
        self.device_rows = device_rows
        self.num_bytes = num_bytes
        self.begin_s = time.perf_counter()
        #: What copies have to wait for: of a load one mark; of a backup one for each layer that the model has computed. See CopyStream.
        self.reached: list[Any] = []

    def reach(self, mark: Any, times: int = 1) -> None:
        """A load: what comes before it. A backup: the model has computed one more layer, or `times`."""
        self.reached += [mark] * times


def own_rows(host_pages: bytes, device_pages: bytes, cp_size: int, rank: int) -> tuple[list[int], list[int]]:
    """Rows of the host and device pages that lie in this rank's lane, pairwise. Raises AssertionError if the numbers differ."""
    host, device = np.frombuffer(host_pages, np.int32), np.frombuffer(device_pages, np.int32)
    assert len(host) == len(device), f"{len(host)} host pages are paired with {len(device)} device pages"
    mine = device % cp_size == rank
    return (host[mine] // cp_size).tolist(), (device[mine] // cp_size).tolist()
