"""One plane of the KV pool on one rank: [rows, layers, page_size, width], page first."""
import torch
from torch import Tensor


class Plane:
    """A page is one contiguous piece; a layer is a view with a row stride.

    Row 0 stays all zeros: padded reads go there and nothing writes it.
    """

    def __init__(self, name: str, buffer: Tensor):
        """buffer [rows, layers, page_size, width], contiguous."""
        self.name = name
        self.num_layers, self.page_size, self.width = buffer.shape[1:]
        self.buffer = buffer
        self._by_token = buffer.view(-1, self.width)  # [rows * layers * page_size, width]
        self._by_page = buffer.view(-1, self.page_size * self.width)  # [rows * layers, page_size * width]

    def write(self, layer: int, places: Tensor, x: Tensor) -> None:
        """Store x [n, width] at `places` int64 [n]; no two equal."""
        self._by_token.index_copy_(0, places + layer * self.page_size, x)

    def places(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """int64, shape of rows: index of (row, offset) of layer 0 in the view by token; other layers follow at every page_size."""
        return rows * (self.num_layers * self.page_size) + offsets

    def tokens(self, layer: int, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows and offsets int64 [...]; returns [..., width]."""
        index = self.places(rows, offsets) + layer * self.page_size
        return self._by_token.index_select(0, index.view(-1)).view(*rows.shape, self.width)

    def pages(self, layer: int, rows: Tensor) -> Tensor:
        """rows int64 [m]; returns [m, page_size, width], rows beyond a page's valid length included."""
        return self._by_page.index_select(0, rows * self.num_layers + layer).view(-1, self.page_size, self.width)

    def read_pages(self, layer: int, rows: Tensor, out: Tensor) -> None:
        """Copy the pages `rows` int64 [m] to out [m, page_size * width], rows beyond a page's valid length included."""
        torch.index_select(self._by_page, 0, rows * self.num_layers + layer, out=out)

    def copy_tokens(self, src_row: int, dst_row: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of every layer from one row to another."""
        self.buffer[dst_row, :, :num_tokens].copy_(self.buffer[src_row, :, :num_tokens])

    def fill(self, rows: Tensor, value: float) -> None:
        """Overwrite whole rows, int64 [m], all layers."""
        self.buffer.index_fill_(0, rows, value)
