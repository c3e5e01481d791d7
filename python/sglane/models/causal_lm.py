"""The frame that all models share: embedding, decoder layers, final norm, output head."""
from typing import Protocol

from torch import Tensor

from sglane.configs.sizes import ModelConfig
from sglane.forward.expert_rows import ExpertRows
from sglane.forward.forward_batch import ForwardBatch
from sglane.layers.embedding import Embedding, load_head
from sglane.layers.moe.shard import ALL_EXPERTS, ExpertShard
from sglane.layers.norm import RMSNorm
from sglane.layers.rotary import Angles, Rotary
from sglane.layers.weights import WeightSource


class Attention(Protocol):
    """One layer's attention with its projections."""

    def __call__(self, x: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        """x [n, hidden], normed; returns [n, hidden]."""
        ...


class FeedForward(Protocol):
    """One layer's feed-forward part: dense, or with experts."""

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x [n, hidden], normed; returns [n, hidden]."""
        ...


class DraftLayer(Protocol):
    """See CausalLM.draft."""

    def __call__(self, embedded: Tensor, hidden: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        """embedded and hidden [n, hidden]; returns [m, hidden] of the rows `batch.outputs`."""
        ...


class DecoderLayer:
    """h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_norm: RMSNorm, mlp: FeedForward):
        self._input_norm = input_norm
        self._attention = attention
        self._post_norm = post_norm
        self._mlp = mlp

    @staticmethod
    def load(weights: WeightSource, config: ModelConfig, prefix: str, attention: Attention, mlp: FeedForward) -> "DecoderLayer":
        """prefix: the layer's module name with a dot at its end."""
        norms = [RMSNorm.load(weights, prefix + name, config.hidden_size, config.rms_norm_eps)
                 for name in ("input_layernorm", "post_attention_layernorm")]
        return DecoderLayer(norms[0], attention, norms[1], mlp)

    def __call__(self, h: Tensor, angles: Angles, batch: ForwardBatch, outputs_only: bool = False) -> Tensor:
        """h [n, hidden] is changed in place. outputs_only: only the rows `batch.outputs` are computed to the end and returned, [m, hidden]."""
        h.add_(self._attention(self._input_norm(h), angles, batch))
        if outputs_only and len(batch.outputs) < len(h):
            h = h.index_select(0, batch.outputs)
        return h.add_(self._mlp(self._post_norm(h), batch.output_experts if outputs_only else batch.experts))


class CausalLM:
    """A loaded model. Subclasses say how one decoder layer is made."""

    def __init__(self, config: ModelConfig, weights: WeightSource, shard: ExpertShard = ALL_EXPERTS):
        """shard: the routed experts to hold; everything else is whole on every rank."""
        self.config = config
        self.shard = shard
        self.embedding = Embedding.load(weights, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [self.load_layer(weights, layer) for layer in range(config.num_layers)]
        self.norm = RMSNorm.load(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = load_head(weights, "lm_head", self.embedding, config.tie_word_embeddings)
        self._rotary = Rotary(config.rope, self.rope_dim(config), weights.device)
        self._draft: DraftLayer | None = None
        self.weight_bytes = weights.resident_bytes

    @staticmethod
    def rope_dim(config: ModelConfig) -> int:
        """Values that are rotated per head."""
        return config.head_dim

    def load_layer(self, weights: WeightSource, layer: int) -> DecoderLayer:
        raise NotImplementedError

    def load_draft(self, weights: WeightSource, prefix: str) -> None:
        """prefix: the draft layer's module name with a dot at its end."""
        self._draft = self.load_draft_layer(weights, prefix)
        self.weight_bytes += weights.resident_bytes

    def load_draft_layer(self, weights: WeightSource, prefix: str) -> DraftLayer:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [m, hidden] of the tokens `batch.outputs` after the final norm; m may be 0."""
        angles = self._rotary.angles(batch.positions)
        h = self.embedding(batch.tokens)
        last = len(self.layers) - 1
        for layer, decoder in enumerate(self.layers):
            h = decoder(h, angles, batch, outputs_only=layer == last)
            batch.hooks.layer_end(layer)
        return self.norm(h)

    def draft(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """One pass of the draft layer. The batch's tokens are those after the rows, hidden [n, hidden] is of the rows, after the final norm (or what
        this gave for the row before). Returns [m, hidden] of the rows `batch.outputs`, ready for `logits`, which are those of the token after the
        next one."""
        assert self._draft is not None, "the model was loaded without its draft layer"
        g = self._draft(self.embedding(batch.tokens), hidden, self._rotary.angles(batch.positions), batch)
        batch.hooks.layer_end(len(self.layers))
        return g

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] after the final norm; returns float32 [m, vocab]."""
        return self.head(hidden).float()
