"""Routed experts: the rows of a step are grouped by expert, and each expert in use runs once."""
import torch
from torch import Tensor

from sglane.configs.sizes import MoeConfig
from sglane.layers.linear import Linear
from sglane.layers.mlp import GatedMLP
from sglane.layers.moe.router import Router
from sglane.layers.weights import WeightSource


class Experts:
    """A list of feed-forward layers, applied to the rows that chose them."""

    def __init__(self, experts: list[GatedMLP]):
        self._experts = experts

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, config: MoeConfig) -> "Experts":
        """Accepts a tensor per expert, or all experts of a layer in one tensor [experts, out, in] (gate rows before up rows)."""
        size = config.intermediate_size
        if not weights.has(f"{prefix}gate_up_proj"):
            return Experts([GatedMLP.load(weights, f"{prefix}{e}.", hidden_size, size) for e in range(config.num_experts)])
        return Experts([GatedMLP(Linear(weights.matrix(f"{prefix}gate_up_proj", (2 * size, hidden_size), e)),
                                 Linear(weights.matrix(f"{prefix}down_proj", (hidden_size, size), e))) for e in range(config.num_experts)])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [n, hidden], ids int64 [n, k], weights float32 [n, k]; returns the weighted sums [n, hidden]."""
        n, k = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)  # [n * k] choices grouped by expert
        counts = torch.bincount(flat, minlength=len(self._experts)).tolist()
        rows = x.index_select(0, order // k)
        found = torch.empty_like(rows)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                found[begin:begin + count] = self._experts[expert](rows[begin:begin + count])
                begin += count
        by_token = torch.empty_like(found).index_copy_(0, order, found).view(n, k, x.shape[1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class MoE:
    """Routed experts plus experts that every token visits."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None):
        self._router = router
        self._experts = experts
        self._shared = shared

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, config: MoeConfig) -> "MoE":
        shared = None
        if config.num_shared_experts:
            shared = GatedMLP.load(weights, f"{prefix}shared_experts.", hidden_size, config.intermediate_size * config.num_shared_experts)
        router = Router.load(weights, f"{prefix}gate.", hidden_size, config)
        return MoE(router, Experts.load(weights, f"{prefix}experts.", hidden_size, config), shared)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        routed = self._experts(x, *self._router(x))
        return routed if self._shared is None else routed + self._shared(x)
