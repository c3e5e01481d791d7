"""Normalisations over the last dimension, computed in float32."""
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sglane.layers.weights import WeightSource

#: Rows from which a float32 copy of bfloat16 rows no longer stays in the cache.
MANY_ROWS = 64


class RMSNorm:
    """w * x / sqrt(mean(x^2) + eps); the result has the type of x."""

    def __init__(self, weight: Tensor, eps: float):
        self._weight = weight  # [size], run type
        self._wide = weight.float()
        self._eps = eps
        self._eps_wide = torch.full((1,), eps, device=weight.device)

    @staticmethod
    def load(weights: WeightSource, name: str, size: int, eps: float) -> "RMSNorm":
        return RMSNorm(weights.tensor(f"{name}.weight", (size,)), eps)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        if x.dtype == torch.bfloat16 and x.dim() == 2 and len(x) > MANY_ROWS:
            return _scaled_rows(x, self._eps).mul_(self._weight)
        wide = x.float()  # torch's own rms_norm is made of more operations
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps_wide, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).mul_(self._wide).to(x.dtype)


def _scaled_rows(x: Tensor, eps: float) -> Tensor:
    """x [n, size] / sqrt(mean(x^2) + eps) in one pass without a float32 copy: a batch norm whose channels are the rows, with mean 0."""
    n, size = x.shape
    zero, root = _row_constants(n, size)
    square = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square_()  # [n]: `size` times the mean, and so is eps
    return torch.batch_norm(x.unsqueeze(0), root, None, zero, square, False, 0.0, eps * size, False).squeeze(0)


@lru_cache(maxsize=8)
def _row_constants(n: int, size: int) -> tuple[Tensor, Tensor]:
    """float32 [n]: zeros, and the root of `size`. All norms of a step share them."""
    return torch.zeros(n), torch.full((n,), size ** 0.5)


class LayerNorm:
    """Mean removed, with bias. Its eps is the indexer's: 1e-6, not torch's default."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float = 1e-6):
        self._weight = weight  # float32 [size]
        self._bias = bias  # float32 [size]
        self._eps = eps

    @staticmethod
    def load(weights: WeightSource, name: str, size: int) -> "LayerNorm":
        return LayerNorm(weights.tensor(f"{name}.weight", (size,), torch.float32), weights.tensor(f"{name}.bias", (size,), torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)
