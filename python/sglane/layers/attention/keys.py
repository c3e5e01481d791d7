"""Reading the keys of a step: the rows of an extend as one tensor, the rows of decode buckets."""
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.step_view import DecodeBucket, ExtendPart, StepView


class ExtendKeys:
    """One layer of one plane, for the extends of a step. On several ranks the pages are gathered once, by one collective."""

    def __init__(self, plane: Plane, layer: int, current: Tensor, view: StepView, exchange: Exchange):
        """current [n, width]: the layer's rows of the local tokens, already written to the plane."""
        self._plane = plane
        self._layer = layer
        self._current = current
        self._pages: Tensor | None = None  # [N * M, page_size * width]
        if view.gather is not None:
            own = plane.pages(layer, view.gather.own_rows)
            self._pages = exchange.all_gather(own.flatten(1)).flatten(0, 1)

    def rows(self, part: ExtendPart) -> Tensor:
        """[num_keys, width] of positions [0, num_keys): valid rows only."""
        if part.fresh:
            return self._current[part.begin:part.end]
        if self._pages is not None:
            pages = self._pages.index_select(0, part.pages)
        else:
            pages = self._plane.pages(self._layer, part.pages)
        return pages.view(-1, self._plane.width)[:part.num_keys]


def bucket_rows(plane: Plane, layer: int, bucket: DecodeBucket) -> Tensor:
    """[b, P * page_size, width]; rows without a valid token are zero."""
    b, num_pages = bucket.rows.shape
    pages = plane.pages(layer, bucket.rows.view(-1))
    if bucket.stale is not None:
        pages.view(-1, plane.width).index_fill_(0, bucket.stale, 0.0)
    return pages.view(b, num_pages * plane.page_size, plane.width)
