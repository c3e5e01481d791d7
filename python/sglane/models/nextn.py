"""NextN (MTP) layer of DeepSeek-V3 and its successors: a decoder layer that goes one token further than the main model (DeepSeek-V3 report, 2.2)."""
import torch
from torch import Tensor

from sglane.configs.sizes import ModelConfig
from sglane.forward.forward_batch import ForwardBatch
from sglane.layers.linear import Linear
from sglane.layers.norm import RMSNorm
from sglane.layers.rotary import Angles
from sglane.layers.weights import WeightSource
from sglane.models.causal_lm import DecoderLayer


class NextnLayer:
    """u = eh_proj [enorm(embedding of the next token) | hnorm(hidden)]; z = decoder(u); g = norm(z). Embedding and head are the main model's."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, decoder: DecoderLayer):
        """prefix: the layer's module name with a dot at its end."""
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self._embedding_norm = RMSNorm.load(weights, f"{prefix}enorm", hidden_size, eps)
        self._hidden_norm = RMSNorm.load(weights, f"{prefix}hnorm", hidden_size, eps)
        self._project = Linear.load(weights, {f"{prefix}eh_proj": hidden_size}, 2 * hidden_size)
        self._decoder = decoder
        self._norm = RMSNorm.load(weights, f"{prefix}shared_head.norm", hidden_size, eps)

    def __call__(self, embedded: Tensor, hidden: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        """embedded and hidden [n, hidden] of all rows; returns [m, hidden] of the batch's `outputs`."""
        u = self._project(torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), -1))
        return self._norm(self._decoder(u, angles, batch, outputs_only=True))
