"""A tiny checkpoint made smaller still, for prompts so long that only one or two heads are affordable. It has no reference."""
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from kits.checkpoints import tiny

NUM_HEADS = 2
#: Layers that are kept; of glm_moe_dsa_share two with an indexer and one that shares its selection.
NUM_LAYERS = {"llama": 2, "glm_moe_dsa_share": 3}


def slim(family: str, folder: Path) -> Path:
    """family: llama or glm_moe_dsa_share. folder: an empty one of the caller's; returned."""
    source = tiny(family)
    config = json.loads((source / "config.json").read_text())
    num_layers = NUM_LAYERS[family]
    tensors: dict[str, Tensor] = {}
    for path in source.glob("model*.safetensors"):
        for name, tensor in load_file(path).items():
            parts = name.split(".")
            if parts[1] != "layers" or int(parts[2]) < num_layers:
                tensors[name] = (fewer_heads(parts[-2], tensor, config)).contiguous()
    save_file(tensors, folder / "model.safetensors")
    for name in ("indexer_types", "layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:num_layers]
    config |= {"num_hidden_layers": num_layers, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS}
    if family != "llama":
        config |= {"index_n_heads": NUM_HEADS, "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fewer_heads(module: str, tensor: Tensor, config: dict[str, int]) -> Tensor:
    """The part of a projection's weight that belongs to the first NUM_HEADS heads."""
    rows = {"weights_proj": 1, "wq_b": config.get("index_head_dim"), "q_proj": config.get("head_dim"), "q_b_proj": config.get("qk_head_dim")}
    if "kv_lora_rank" in config:
        rows["kv_b_proj"] = config["qk_nope_head_dim"] + config["v_head_dim"]
    size = rows.get(module)
    if size is not None:
        return tensor[: NUM_HEADS * size]
    return tensor[:, : NUM_HEADS * config.get("v_head_dim", config["head_dim"])] if module == "o_proj" else tensor
