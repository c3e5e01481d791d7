"""Choice of experts by sigmoid scores with a correction bias and groups."""
import torch
import torch.nn.functional as F
from torch import Tensor

from sglane.configs.sizes import MoeConfig
from sglane.layers.weights import WeightSource


class Router:
    """The bias takes part in the choice, never in the weights. Scores are float32."""

    def __init__(self, weight: Tensor, bias: Tensor, config: MoeConfig):
        """weight float32 [experts, hidden], bias float32 [experts]."""
        self._weight = weight
        self._bias = bias
        self._config = config

    @staticmethod
    def load(weights: WeightSource, prefix: str, hidden_size: int, config: MoeConfig) -> "Router":
        weight = weights.tensor(f"{prefix}weight", (config.num_experts, hidden_size), torch.float32)
        return Router(weight, weights.tensor(f"{prefix}e_score_correction_bias", (config.num_experts,), torch.float32), config)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden]; returns expert ids int64 [n, topk] and their weights float32 [n, topk]."""
        config = self._config
        scores = F.linear(x.float(), self._weight).sigmoid()  # [n, experts]
        biased = scores + self._bias
        if config.num_groups > 1:
            biased = self._best_groups(biased)
        ids = biased.topk(config.topk, -1).indices
        chosen = scores.gather(1, ids)
        if config.norm_topk_prob:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return ids, chosen * config.scaling_factor

    def _best_groups(self, biased: Tensor) -> Tensor:
        """Experts outside the best groups get -inf: biased scores may be negative, so 0 would not exclude them."""
        config = self._config
        grouped = biased.unflatten(1, (config.num_groups, config.num_experts // config.num_groups))
        group_scores = grouped.topk(2, -1).values.sum(-1)  # [n, groups]
        keep = group_scores.topk(config.topk_groups, -1).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, keep, False)
        return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
