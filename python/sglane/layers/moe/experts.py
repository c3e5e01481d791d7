"""Routed experts: the rows of a step are grouped by expert, and each expert in use runs once."""
import torch
from torch import Tensor

from sglane.configs.sizes import MoeConfig
from sglane.forward.expert_rows import ExpertRows
from sglane.layers.linear import Linear
from sglane.layers.mlp import GatedMLP
from sglane.layers.moe.router import Router
from sglane.layers.moe.shard import ALL_EXPERTS, ExpertShard
from sglane.layers.weights import WeightSource


class Experts:
    """A list of feed-forward layers, applied to the rows that chose them. See RoutedExperts."""

    def __init__(self, experts: list[GatedMLP], shard: ExpertShard = ALL_EXPERTS, first: int = 0):
        """experts: those of `shard`. first: id of the first one; the others follow."""
        self.shard = shard
        self._experts = experts
        self._first = first

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, config: MoeConfig, shard: ExpertShard) -> "Experts":
        """Reads the experts of `shard`, and makes sure that the others are there.

        Accepts a tensor per expert, or all experts of a layer in one tensor [experts, out, in] (gate rows before up rows).
        """
        size, held = config.intermediate_size, shard.held(config.num_experts)
        if not weights.has(f"{prefix}gate_up_proj"):
            for e in range(config.num_experts):
                if e not in held:
                    GatedMLP.expect(weights, f"{prefix}{e}.", hidden_size, size)
            return Experts([GatedMLP.load(weights, f"{prefix}{e}.", hidden_size, size) for e in held], shard, held.start)
        weights.expect(f"{prefix}gate_up_proj", (config.num_experts, 2 * size, hidden_size))
        weights.expect(f"{prefix}down_proj", (config.num_experts, hidden_size, size))
        return Experts([GatedMLP(Linear(weights.matrix(f"{prefix}gate_up_proj", (2 * size, hidden_size), e)),
                                 Linear(weights.matrix(f"{prefix}down_proj", (hidden_size, size), e))) for e in held], shard, held.start)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See RoutedExperts: this rank holds every expert."""
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

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See RoutedExperts. Sums are in float32 and in order of the experts, whatever the device: an expert meets a row at most once."""
        n, k = ids.shape
        sums = x.new_zeros((n, x.shape[1]), dtype=torch.float32)
        local = ids.flatten() - self._first  # [n * k] place in the list, outside of it for experts of other ranks
        chosen = ((local >= 0) & (local < len(self._experts))).nonzero().squeeze(1)  # [m] choices of experts held here
        local = local.index_select(0, chosen)
        counts = torch.bincount(local, minlength=len(self._experts)).tolist()
        chosen = chosen.index_select(0, local.argsort(stable=True))
        shares = weights.flatten().index_select(0, chosen).unsqueeze(1)  # float32 [m, 1]
        rows = chosen // k
        found = x.index_select(0, rows)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(begin, begin + count)
                sums.index_add_(0, rows[part], self._experts[expert](found[part]) * shares[part])
                begin += count
        return sums


class MoE:
    """Routed experts plus experts that every token visits."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None):
        self._router = router
        self._experts = experts
        self._shared = shared

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, config: MoeConfig, shard: ExpertShard) -> "MoE":
        shared = None
        if config.num_shared_experts:
            shared = GatedMLP.load(weights, f"{prefix}shared_experts.", hidden_size, config.intermediate_size * config.num_shared_experts)
        router = Router.load(weights, f"{prefix}gate.", hidden_size, config)
        return MoE(router, Experts.load(weights, f"{prefix}experts.", hidden_size, config, shard), shared)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x [n, hidden] -> [n, hidden]; rows: the way of x to the routed experts."""
        routed = rows(self._experts, x, *self._router(x))
        return routed if self._shared is None else routed + self._shared(x)
