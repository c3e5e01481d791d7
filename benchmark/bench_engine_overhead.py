"""What a streamed step costs besides the model: a server with a random 2-layer model, one stream and 16 streams of token ids.

    python benchmark/bench_engine_overhead.py [--repeats 5] [--num-new 256] [--dtype bfloat16]
"""
import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from streams import decode_rate, machine, own_server, run_streams, spread

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 2, 64, 4, 2, 128, 2048


def write_checkpoint(folder: Path) -> None:
    """A llama with random weights, without a tokenizer."""
    head_dim = HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
                 "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                 "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE), "input_layernorm": (HIDDEN,),
                 "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(shape, generator=generator).bfloat16() * 0.1 for name, shape in shapes.items()}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
              "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "head_dim": head_dim,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
              "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-new", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    sampling = {"max_new_tokens": args.num_new, "temperature": 0.0, "ignore_eos": True}

    def bodies(count: int) -> list[dict[str, object]]:
        return [{"input_ids": generator.integers(3, VOCAB, 32).tolist(), "stream": True, "sampling_params": sampling} for _ in range(count)]

    print(f"{LAYERS} layers, hidden {HIDDEN}, {args.dtype}; {machine()}")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        flags = ("--model-path", folder, "--dtype", args.dtype, "--skip-tokenizer-init", "--max-total-tokens", "32768", "--log-level", "warning")
        with own_server(*flags) as (url, start_s):
            route = f"{url}/generate"
            run_streams(route, bodies(4))  # warm up
            step_ms = [1e3 / decode_rate(run_streams(route, bodies(1))) for _ in range(args.repeats)]
            rates = [decode_rate(run_streams(route, bodies(16))) for _ in range(args.repeats)]
    print(f"start to ready: {start_s:.1f} s")
    print(f"1 stream, ms per step: {spread(step_ms, 2)}")
    print(f"16 streams, tokens/s: {spread(rates, 0)}")


if __name__ == "__main__":
    main()
