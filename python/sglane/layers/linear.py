"""Matrix products with a stored weight. The form it is stored in and the device decide which product runs; failures never do."""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sglane.layers.weights import FP8, Matrix, WeightSource, concat_rows, dequantise

#: Elements of the smallest float32 weight that is packed: a packed product costs about 12 us more per call.
MIN_PACKED_FLOAT32 = 1 << 18
#: Elements of the largest bfloat16 weight that is kept in float32: oneDNN spends 14 us on a call, whatever its size.
MAX_WIDENED = 1 << 15


class PlainProduct:
    """Weight in the run type."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class WidenedProduct:
    """On CPU: a small bfloat16 weight as float32. The result is rounded once, as that of a bfloat16 product."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self._weight, self._bias).to(x.dtype)


class PackedProduct:
    """On CPU: the weight is stored in oneDNN's blocked layout, which makes products with few rows up to twice as fast."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class BlockScaledProduct:
    """FP8 weight with block scales: only the copy in use is ever in the type of the activations."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None):
        self._weight = weight
        self._scales = scales
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantise(self._weight, self._scales, x.dtype), self._bias)


def product(matrix: Matrix, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product for a stored form on its device."""
    data = matrix.data
    if matrix.scales is not None:
        return BlockScaledProduct(data, matrix.scales, bias)
    if data.dtype == FP8:
        raise ValueError("an FP8 matrix needs block scales")
    if data.device.type == "cpu" and data.dtype == torch.bfloat16 and data.numel() <= MAX_WIDENED:
        return WidenedProduct(data, bias)
    return PackedProduct(data, bias) if _packs(data) else PlainProduct(data, bias)


#: Bytes of the copies that a product makes, for each byte of its weight.
COPIES = {PackedProduct: 1, WidenedProduct: 2}


def _packs(data: Tensor) -> bool:
    """Types and sizes with a packed product that is faster than the plain one."""
    if data.device.type != "cpu":
        return False
    if data.dtype == torch.float32:
        return data.numel() >= MIN_PACKED_FLOAT32
    return data.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """x [n, in] -> [n, out]. Rows of several weights may be joined; n may be 0."""

    def __init__(self, matrix: Matrix, bias: Tensor | None = None):
        self.out_features, self.in_features = matrix.data.shape
        self._product = product(matrix, bias)
        #: Memory of a copy of the weight in another layout, in bytes.
        self.copied_bytes = matrix.data.nbytes * COPIES.get(type(self._product), 0)

    @staticmethod
    def load(weights: WeightSource, names: dict[str, int], in_features: int, bias: bool = False) -> "Linear":
        """names: module name -> rows; several are joined in this order."""
        parts = [weights.matrix(f"{name}.weight", (rows, in_features)) for name, rows in names.items()]
        offsets = [weights.tensor(f"{name}.bias", (rows,)) for name, rows in names.items()] if bias else []
        return Linear(concat_rows(parts, weights.dtype), torch.cat(offsets) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)
