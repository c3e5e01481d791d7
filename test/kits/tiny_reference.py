"""References by transformers' own classes: logits, greedy tokens, and the draft layer, whose wrapper refuses sparse models."""
import copy
from typing import Any

import torch
from torch import Tensor, nn


def full_forward(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids int64 [n]; returns logits [n, V] and hidden [n, hidden] after the final norm."""
    out = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return out.logits[0].float(), out.hidden_states[-1][0].float()


def greedy_tokens(model: Any, ids: Tensor, steps: int) -> tuple[Tensor, float]:
    """Continuation int64 [steps] with a cache, and the smallest distance between the best two logits on the way."""
    from transformers import DynamicCache

    cache, x, tokens, gap = DynamicCache(config=model.config), ids[None], [], float("inf")
    for _ in range(steps):
        logits = model(input_ids=x, cache=cache, use_cache=True).logits[0, -1].float()
        best = logits.topk(2)
        gap = min(gap, (best.values[0] - best.values[1]).item())
        tokens.append(int(best.indices[0]))
        x = torch.tensor([[tokens[-1]]])
    return torch.tensor(tokens), gap


class DraftLayer(nn.Module):
    """The draft (MTP) layer out of transformers' decoder layer and norm classes."""

    def __init__(self, model: Any):
        super().__init__()
        self.config = draft_config(model.config)
        norm, size, eps = type(model.model.norm), self.config.hidden_size, self.config.rms_norm_eps
        self.enorm, self.hnorm, self.final_norm = norm(size, eps), norm(size, eps), norm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(model.model.layers[-1])(self.config, 0)
        self.target = [model]  # in a list: no submodule of this one

    def tensors(self, layer: int, with_copies: bool) -> dict[str, Tensor]:
        """Under checkpoint names. with_copies: with embedding and head inside the layer, as some families ship them."""
        p = f"model.layers.{layer}."
        found = {f"{p}enorm.weight": self.enorm.weight, f"{p}hnorm.weight": self.hnorm.weight, f"{p}eh_proj.weight": self.eh_proj.weight,
                 f"{p}shared_head.norm.weight": self.final_norm.weight}
        for name, value in self.block.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e, (gate, up) in enumerate(part.chunk(2, 0) for part in value):
                    found[f"{p}mlp.experts.{e}.gate_proj.weight"], found[f"{p}mlp.experts.{e}.up_proj.weight"] = gate, up
            elif name.endswith("experts.down_proj"):
                found |= {f"{p}mlp.experts.{e}.down_proj.weight": part for e, part in enumerate(value)}
            else:
                found[p + name] = value
        if with_copies:
            found[f"{p}embed_tokens.weight"] = self.target[0].model.embed_tokens.weight
            found[f"{p}shared_head.head.weight"] = self.target[0].lm_head.weight
        return {name: value.detach().clone().contiguous() for name, value in found.items()}

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """All with a batch dimension of 1; returns logits and the hidden that the next draft step takes."""
        model = self.target[0]
        x = self.eh_proj(torch.cat((self.enorm(model.model.embed_tokens(next_ids)), self.hnorm(hidden)), -1))
        length = cache.get_seq_length() + x.shape[1]
        mask = (torch.arange(length)[None] <= torch.arange(length - x.shape[1], length)[:, None])[None, None]
        out = self.block(x, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True,
                         position_embeddings=model.model.rotary_emb(x, position_ids=positions))
        h = self.final_norm(out[0] if isinstance(out, tuple) else out)
        return model.lm_head(h), h


def draft_config(config: Any) -> Any:
    """One layer: sparse attention if the model has it, experts, a full indexer."""
    new = copy.deepcopy(config)
    new.num_hidden_layers, new.first_k_dense_replace = 1, 0
    present = new.to_dict()
    for key, value in (("layer_types", ["indexed_attention"]), ("mlp_layer_types", ["sparse"]), ("indexer_types", ["full"])):
        if present.get(key) is not None:
            setattr(new, key, value)
    new._attn_implementation = "sdpa"
    return new


def draft_references(draft: DraftLayer, next_ids: Tensor, hidden: Tensor, chain: int) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of the rows (token i + 1, hidden i), and `chain` tokens drafted greedily from the last row on."""
    from transformers import DynamicCache

    n, cache = len(next_ids), DynamicCache(config=draft.config)
    logits, h = draft(next_ids[None], hidden[None], torch.arange(n)[None], cache)
    tokens, h = [int(logits[0, -1].argmax())], h[:, -1:]
    for step in range(1, chain):
        row, h = draft(torch.tensor([[tokens[-1]]]), h, torch.tensor([[n - 1 + step]]), cache)
        tokens.append(int(row[0, -1].argmax()))
    return logits[0], torch.tensor(tokens)
