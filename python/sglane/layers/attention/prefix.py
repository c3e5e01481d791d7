"""The rows of earlier steps that extends attend to: which pages, where they lie, how they come here."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.forward.token_split import Entry
from sglane.layers.attention.plane import Plane


@dataclass(frozen=True)
class PrefixPiece:
    """The pages of a tile that belong to the prefix of one extend, ascending positions."""

    places: Tensor  # int64 [p], for `PageTile.fill`
    depths: np.ndarray  # int64 [p]: page d holds positions [d * page_size, (d + 1) * page_size)
    num_tokens: int  # valid ones; only the prefix's last page may be partly filled
    page_size: int

    def positions(self) -> np.ndarray:
        """int64 [num_tokens], ascending."""
        every = self.depths[:, None] * self.page_size + np.arange(self.page_size)
        return every.ravel()[:self.num_tokens]


@dataclass(frozen=True)
class PrefixTile:
    """Pages that are here at once. From each lane comes the same number of pages, where it has as many."""

    lane_rows: list[Tensor]  # int64 [m] pool rows of each lane's pages
    most: int  # pages of the lane that has most
    pieces: list[PrefixPiece | None]  # of each extend; None: it has no page here


@dataclass(frozen=True)
class PrefixPlan:
    """The distinct prefix pages of a step's extends: shared ones are fetched once. The same on every rank, and for every layer and plane."""

    tiles: list[PrefixTile]  # empty: no extend has a prefix
    num_tokens: int  # of whole pages
    fewest: int  # pages of the lane that has fewest


def plan_prefix(entries: Sequence[Entry], page_size: int, cp_size: int, scratch_tokens: int, device: torch.device) -> PrefixPlan:
    """entries: extends. scratch_tokens: what two tiles may hold."""
    counts = [-(-entry.start // page_size) for entry in entries]
    if not any(counts):
        return PrefixPlan([], 0, 0)
    every = np.concatenate([entry.pages[:count] for entry, count in zip(entries, counts)]).astype(np.int64)
    pages, inverse = np.unique(every, return_inverse=True)
    found = np.split(inverse.ravel(), np.cumsum(counts)[:-1])  # by extend: places among `pages`
    lanes = pages % cp_size
    lane_counts = np.bincount(lanes, minlength=cp_size)
    in_lane = np.empty(len(pages), np.int64)  # place among the pages of the same lane
    in_lane[np.argsort(lanes, kind="stable")] = np.arange(len(pages)) - np.repeat(np.cumsum(lane_counts) - lane_counts, lane_counts)
    per_lane = _pages_per_lane(int(lane_counts.max()), page_size, cp_size, scratch_tokens)
    tile_of = in_lane // per_lane
    tiles = []
    for t in range(int(tile_of.max()) + 1):
        here = tile_of == t
        lane_rows = [pages[here & (lanes == lane)] // cp_size for lane in range(cp_size)]
        most = max(len(rows) for rows in lane_rows)
        places = lanes * most + in_lane - t * per_lane if cp_size > 1 else pages
        pieces = [_piece(index, here, places, entry.start, page_size, device) for index, entry in zip(found, entries)]
        tiles.append(PrefixTile([torch.from_numpy(rows).to(device) for rows in lane_rows], most, pieces))
    return PrefixPlan(tiles, len(pages) * page_size, int(lane_counts.min()))


def _pages_per_lane(most: int, page_size: int, cp_size: int, scratch_tokens: int) -> int:
    """Pages of one lane in one tile. On several ranks the next tile is on its way while one is in use."""
    at_once = scratch_tokens if cp_size == 1 else scratch_tokens // 2
    if most * cp_size * page_size <= at_once:
        return most
    return max(1, scratch_tokens // 2 // (cp_size * page_size))


def _piece(index: np.ndarray, here: np.ndarray, places: np.ndarray, start: int, page_size: int, device: torch.device) -> PrefixPiece | None:
    """index int64 [P]: an extend's pages among the step's; here bool and places int64 [pages of the step]."""
    depths = np.flatnonzero(here[index])
    if not len(depths):
        return None
    num_tokens = len(depths) * page_size
    if depths[-1] == len(index) - 1:
        num_tokens -= len(index) * page_size - start
    return PrefixPiece(torch.from_numpy(places[index[depths]]).to(device), depths, num_tokens, page_size)


class PageTile(Protocol):
    """The pages of one tile, one layer and one plane, here to be read."""

    def fill(self, places: Tensor, out: Tensor) -> None:
        """Copy the pages `places` int64 [p] to out [p, page_size * width]."""
        ...

    def close(self) -> None:
        """Give back the memory; nothing is read afterwards."""
        ...


class PoolTile:
    """Pages of this rank's own pool, read where they lie; a place is a pool row."""

    def __init__(self, plane: Plane, layer: int):
        self._plane = plane
        self._layer = layer

    def fill(self, places: Tensor, out: Tensor) -> None:
        self._plane.read_pages(self._layer, places, out)

    def close(self) -> None:
        pass


class FetchedTile:
    """Pages of all lanes, copied here; the i-th page of a lane is at lane * most + i."""

    def __init__(self, pages: Tensor):
        """pages [N * most, page_size * width]."""
        self._pages = pages

    def fill(self, places: Tensor, out: Tensor) -> None:
        torch.index_select(self._pages, 0, places, out=out)

    def close(self) -> None:
        self._pages = self._pages[:0].clone()  # without a hold on the memory


class PrefixPages(Protocol):
    """How the prefix pages of one plane come to this rank. Materialising is local work, launching is what ranks do together."""

    num_layers: int

    def materialise(self, layer: int, tile: PrefixTile) -> Tensor: ...

    def launch(self, layer: int, pages: Tensor) -> PageTile: ...


class OwnPages:
    """One rank: pages are read from its pool when they are used."""

    def __init__(self, plane: Plane):
        self.num_layers = plane.num_layers
        self._plane = plane

    def materialise(self, layer: int, tile: PrefixTile) -> Tensor:
        return self._plane.buffer

    def launch(self, layer: int, pages: Tensor) -> PageTile:
        return PoolTile(self._plane, layer)


class MappedPages:
    """All lanes' planes are mapped here: pages are read from where they lie, without the other ranks' doing."""

    def __init__(self, planes: Sequence[Plane]):
        """planes: of all lanes, in lane order."""
        self.num_layers = planes[0].num_layers
        self._planes = planes

    def materialise(self, layer: int, tile: PrefixTile) -> Tensor:
        """[N * most, page_size * width]"""
        own = self._planes[0].buffer
        pages = own.new_empty((len(self._planes), tile.most, self._planes[0].page_size * self._planes[0].width))
        for plane, rows, out in zip(self._planes, tile.lane_rows, pages):
            plane.read_pages(layer, rows, out[:len(rows)])
        return pages.flatten(0, 1)

    def launch(self, layer: int, pages: Tensor) -> PageTile:
        return FetchedTile(pages)


class GatheredPages:
    """Each rank packs its own pages, padded to the longest rank's number; one all-gather brings those of all."""

    def __init__(self, plane: Plane, exchange: Exchange):
        self.num_layers = plane.num_layers
        self._plane = plane
        self._exchange = exchange

    def materialise(self, layer: int, tile: PrefixTile) -> Tensor:
        """[most, page_size * width]"""
        rows = tile.lane_rows[self._exchange.rank]
        pages = self._plane.buffer.new_empty((tile.most, self._plane.page_size * self._plane.width))
        self._plane.read_pages(layer, rows, pages[:len(rows)])
        pages[len(rows):] = 0.0
        return pages

    def launch(self, layer: int, pages: Tensor) -> PageTile:
        return FetchedTile(self._exchange.all_gather(pages).flatten(0, 1))


def prefix_pages(plane: Plane, lanes: Sequence[Plane], exchange: Exchange) -> PrefixPages:
    """lanes: the planes of all lanes if they are mapped here, else empty."""
    if exchange.size == 1:
        return OwnPages(plane)
    return MappedPages(lanes) if lanes else GatheredPages(plane, exchange)
