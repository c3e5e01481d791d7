"""GGUF files of the llama architecture, seen under Hugging Face names."""
from collections.abc import Collection

import numpy as np
import torch

from sglane.configs.gguf_file import GGUFFile
from sglane.configs.model_config import ModelConfig

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Read into the configuration, not into the model.
_CONFIG_TENSORS = ("rope_freqs.weight",)


class GGUFStore:
    """Tensors are dequantised to float32 when read."""

    label = "Loading GGUF tensors"

    def __init__(self, config: ModelConfig):
        self.path = config.source.path
        self._file = GGUFFile(config.source.path)
        self._names = {hf_name(name): name for name in self._file.tensors if name not in _CONFIG_TENSORS}
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def shard(self, name: str) -> str:
        return name

    def is_fp8(self, name: str) -> bool:
        return False

    def read(self, name: str, part: int | None = None) -> torch.Tensor:
        own = self._names[name]
        data = self._file.read(own)
        pieces = own.split(".")
        if len(pieces) > 2 and pieces[2] in self._heads:
            data = halves_from_pairs(data, self._heads[pieces[2]])
        return torch.from_numpy(data if data.flags.writeable else data.copy()) if part is None else torch.from_numpy(data[part].copy())


def hf_name(name: str) -> str:
    """Unknown tensors keep their name, so that they are reported under it."""
    if name in _TOP:
        return _TOP[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER:
        return f"model.layers.{pieces[1]}.{_LAYER[pieces[2]]}.{pieces[3]}"
    return name


def halves_from_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF stores the rows of q and k so that rotated pairs are neighbours; the model wants them half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [H, D / 2, 2, in]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
