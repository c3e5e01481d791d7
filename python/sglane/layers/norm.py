"""Normalisations over the last dimension, computed in float32."""
import torch
import torch.nn.functional as F
from torch import Tensor

from sglane.layers.weights import WeightSource


class RMSNorm:
    """w * x / sqrt(mean(x^2) + eps); the result has the type of x."""

    def __init__(self, weight: Tensor, eps: float):
        self._weight = weight  # [size], run type
        self._eps = eps

    @staticmethod
    def load(weights: WeightSource, name: str, size: int, eps: float) -> "RMSNorm":
        return RMSNorm(weights.tensor(f"{name}.weight", (size,)), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


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
