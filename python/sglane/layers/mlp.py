"""Gated feed-forward layer."""
import torch.nn.functional as F
from torch import Tensor

from sglane.forward.expert_rows import ExpertRows
from sglane.layers.linear import Linear
from sglane.layers.weights import WeightSource


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear):
        """gate_up: rows of gate, then rows of up."""
        self._gate_up = gate_up
        self._down = down

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, intermediate_size: int, bias: bool = False) -> "GatedMLP":
        """prefix: module name with a dot at its end."""
        gate_up = Linear.load(weights, {f"{prefix}gate_proj": intermediate_size, f"{prefix}up_proj": intermediate_size}, hidden_size, bias)
        return GatedMLP(gate_up, Linear.load(weights, {f"{prefix}down_proj": hidden_size}, intermediate_size, bias))

    @staticmethod
    def expect(weights: WeightSource, prefix: str, hidden_size: int, intermediate_size: int) -> None:
        """The same tensors must be there, but are another rank's to read."""
        for name, shape in (("gate_proj", (intermediate_size, hidden_size)), ("up_proj", (intermediate_size, hidden_size)),
                            ("down_proj", (hidden_size, intermediate_size))):
            weights.expect(f"{prefix}{name}.weight", shape)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))


class DenseMLP:
    """The feed-forward part of a decoder layer without experts: it never leaves its rank."""

    def __init__(self, mlp: GatedMLP):
        self._mlp = mlp

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, intermediate_size: int, bias: bool = False) -> "DenseMLP":
        return DenseMLP(GatedMLP.load(weights, prefix, hidden_size, intermediate_size, bias))

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x [n, hidden] -> [n, hidden]; the way to the experts is not taken."""
        return self._mlp(x)
