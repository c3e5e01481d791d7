"""Reading the keys of a step: the rows of an extend as one tensor or in pieces, the rows of decode buckets."""
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.prefetch import PrefixReader
from sglane.layers.attention.prefix import PageTile
from sglane.layers.attention.step_view import DecodeBucket, ExtendPart, LaneExtend, StepView


@dataclass(frozen=True)
class KeyPiece:
    """Some keys of one extend: rows [K, width] of `positions` int64 [K], ascending."""

    rows: Tensor
    positions: np.ndarray

    def last_visible(self, queries: np.ndarray) -> np.ndarray:
        """int64 [n]: for queries at these positions the index of the last key that each may see, -1: none."""
        return np.searchsorted(self.positions, queries, "right") - 1


class ExtendKeys:
    """One layer of one plane, for the extends of a step. The rows of this step come from the layer itself, and travel once; those of earlier
    steps come from the pools. Every rank makes one, and reads it to the end."""

    def __init__(self, plane: Plane, layer: int, current: Tensor, view: StepView, exchange: Exchange, prefix: PrefixReader):
        """current [n, width]: the layer's rows of the local tokens, in the plane's type."""
        self._plane = plane
        self._layer = layer
        self._view = view
        self._prefix = prefix
        gather = view.current
        self._current = exchange.gather_rows(current[gather.local], gather.max_length, gather.inverse)  # [tokens of all extends, width]
        self._tile: PageTile | None = None  # of a step that has one only
        if len(view.prefix.tiles) == 1:
            self._tile = prefix.take(plane.name, layer, 0)

    @property
    def is_whole(self) -> bool:
        """All keys fit the scratch memory; else they are read in pieces."""
        return len(self._view.prefix.tiles) <= 1

    def whole(self, extend: int) -> Tensor:
        """[num_keys, width] of positions [0, num_keys): valid rows only."""
        part = self._view.extends[extend]
        if self._tile is None or part.start == 0:
            return self._new(part)
        piece = self._view.prefix.tiles[0].pieces[extend]
        assert piece is not None, f"extend {extend} has a prefix of {part.start} tokens without pages"
        rows = self._filled(self._tile, piece.places, part.num_keys)
        rows[part.start:] = self._new(part)  # also over what the prefix's last page holds beyond its valid rows
        return rows

    def pieces(self) -> Iterator[tuple[int, KeyPiece]]:
        """All keys of the extends that have tokens here, each piece with its extend's number: those of this step, then the prefix tile by tile."""
        busy = [i for i, part in enumerate(self._view.extends) if part.end > part.begin]
        for i in busy:
            part = self._view.extends[i]
            yield i, KeyPiece(self._new(part), np.arange(part.start, part.num_keys))
        for t, tile in enumerate(self._view.prefix.tiles):
            pages = self._prefix.take(self._plane.name, self._layer, t)
            for i in busy:
                piece = tile.pieces[i]
                if piece is not None:
                    yield i, KeyPiece(self._filled(pages, piece.places, piece.num_tokens), piece.positions())

    def _new(self, part: ExtendPart) -> Tensor:
        return self._current[part.first:part.first + part.num_keys - part.start]

    def _filled(self, tile: PageTile, places: Tensor, num_rows: int) -> Tensor:
        """[num_rows, width], the first of which are those of the pages; cut if the pages hold more."""
        size, width = self._plane.page_size, self._plane.width
        room = self._current.new_empty((max(num_rows, len(places) * size), width))
        tile.fill(places, room[:len(places) * size].view(-1, size * width))
        return room[:num_rows]


def lane_pieces(plane: Plane, layer: int, extend: LaneExtend) -> Iterator[KeyPiece]:
    """The keys of an extend in this lane."""
    for rows, positions in extend.pieces:
        yield KeyPiece(plane.pages(layer, rows).view(-1, plane.width)[:len(positions)], positions)


def bucket_rows(plane: Plane, layer: int, bucket: DecodeBucket) -> Tensor:
    """[b, P * page_size, width]; rows without a valid token are zero."""
    b, num_pages = bucket.rows.shape
    pages = plane.pages(layer, bucket.rows.view(-1))
    if bucket.stale is not None:
        pages.view(-1, plane.width).index_fill_(0, bucket.stale, 0.0)
    return pages.view(b, num_pages * plane.page_size, plane.width)
