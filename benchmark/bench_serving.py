"""Prefill, prefix hits and decode of a server, beside Hugging Face transformers and any other server, turn by turn in one run.

    python benchmark/bench_serving.py [--model-path FOLDER_OR_GGUF] [--dtype bfloat16] [--repeats 3] [--peer vllm=http://127.0.0.1:8000 ...]
                                      [--llama-gguf FILE]

Without --base-url a server of our own is started. Peers are servers with /v1/completions that take token ids (vLLM); start them yourself with
the same model, type and cores. llama.cpp runs in this process, without HTTP. Every repeat asks all engines the same questions one after the
other, so that a busy neighbour hits all of them; compare ratios, not runs. Prefill = prompt tokens / time to first token.
"""
import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import transformers
from streams import decode_rate, machine, own_server, run_streams, spread

from sglane.configs.model_config import load_model_config

Prompts = list[list[int]]
LENGTHS = (1024, 2048)
DECODE_PROMPT = 128
HIT_SHARE = 0.9
#: Between two measurements: compute threads of the engine before spin for some milliseconds after their last product.
PAUSE_S = 0.1


class Engine(Protocol):
    def first_token_s(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: Prompts, num_new: int) -> float:
        """Tokens per second of all prompts together."""
        ...


class Native:
    """Our own server: /generate."""

    def __init__(self, url: str):
        self._url = f"{url}/generate"

    def _bodies(self, prompts: Prompts, num_new: int) -> list[dict[str, object]]:
        sampling = {"max_new_tokens": num_new, "temperature": 0.0, "ignore_eos": True}
        return [{"input_ids": prompt, "stream": True, "sampling_params": sampling} for prompt in prompts]

    def first_token_s(self, prompt: list[int]) -> float:
        return run_streams(self._url, self._bodies([prompt], 1))[0].ttft_s

    def decode(self, prompts: Prompts, num_new: int) -> float:
        return decode_rate(run_streams(self._url, self._bodies(prompts, num_new)))


class OpenAIServer(Native):
    """Any other server."""

    def __init__(self, url: str, model: str):
        super().__init__(url)
        self._url, self._model = f"{url}/v1/completions", model

    def _bodies(self, prompts: Prompts, num_new: int) -> list[dict[str, object]]:
        return [{"model": self._model, "prompt": prompt, "stream": True, "max_tokens": num_new, "temperature": 0.0, "ignore_eos": True}
                for prompt in prompts]


class HuggingFace:
    """transformers `generate` in this process, with its defaults."""

    def __init__(self, path: str, dtype: torch.dtype):
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()

    def _generate_s(self, prompts: Prompts, num_new: int) -> float:
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False,
                                 pad_token_id=0)
        return time.perf_counter() - begin

    def first_token_s(self, prompt: list[int]) -> float:
        return self._generate_s([prompt], 1)

    def decode(self, prompts: Prompts, num_new: int) -> float:
        once = self._generate_s(prompts, 1)
        return len(prompts) * (num_new - 1) / (self._generate_s(prompts, num_new) - once)


def cases(prompt: Callable[[int], list[int]], num_new: int) -> dict[str, Callable[[Engine], float]]:
    """Name -> measurement of one repeat; every engine gets the same prompts."""
    fresh = {n: prompt(n) for n in LENGTHS}
    shared = int(LENGTHS[-1] * HIT_SHARE)
    again = fresh[LENGTHS[-1]][:shared] + prompt(LENGTHS[-1] - shared)
    few, many = [prompt(DECODE_PROMPT)], [prompt(DECODE_PROMPT) for _ in range(16)]
    found: dict[str, Callable[[Engine], float]] = {f"TTFT cold {n} ms": lambda e, n=n: e.first_token_s(fresh[n]) * 1e3 for n in LENGTHS}
    found[f"TTFT 90 % hit {LENGTHS[-1]} ms"] = lambda e: e.first_token_s(again) * 1e3
    found["decode b1 tok/s"] = lambda e: e.decode(few, num_new)
    found["decode b16 tok/s"] = lambda e: e.decode(many, num_new)
    return found


def measure(engines: dict[str, Engine], vocab_size: int, repeats: int, num_new: int) -> dict[str, dict[str, list[float]]]:
    generator = np.random.default_rng(0)

    def prompt(n: int) -> list[int]:
        return generator.integers(10, vocab_size, n).tolist()

    for engine in engines.values():  # warm up
        engine.first_token_s(prompt(64))
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for case, action in cases(prompt, num_new).items():
            for name, engine in engines.items():
                time.sleep(PAUSE_S)
                results.setdefault(case, {}).setdefault(name, []).append(action(engine))
    return results


def report(results: dict[str, dict[str, list[float]]]) -> None:
    """A table; ratios are medians of the ratios of single repeats, above 1 when sglane is faster."""
    names = list(next(iter(results.values())))
    print("| case | " + " | ".join(names) + " | " + " | ".join(f"faster than {name}" for name in names[1:]) + " |")
    print("|" + "---|" * (2 * len(names)))
    for case, by_engine in results.items():
        ratios = []
        for name in names[1:]:
            pairs = zip(by_engine[names[0]], by_engine[name])
            ratios.append(spread([other / own if case.endswith("ms") else own / other for own, other in pairs], 2))
        print(f"| {case} | " + " | ".join(spread(by_engine[name]) for name in names) + " | " + " | ".join(ratios) + " |")
    cold, hit = results[f"TTFT cold {LENGTHS[-1]} ms"][names[0]], results[f"TTFT 90 % hit {LENGTHS[-1]} ms"][names[0]]
    print(f"{names[0]}: TTFT with a 90 % hit / cold at {LENGTHS[-1]}: {statistics.median(h / c for h, c in zip(hit, cold)):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-new", type=int, default=64, help="new tokens of the decode cases")
    parser.add_argument("--base-url", help="an sglane server that runs already")
    parser.add_argument("--peer", action="append", default=[], help="name=URL of another server")
    parser.add_argument("--peer-model", default="default", help="model name that peers expect")
    parser.add_argument("--llama-gguf", help="the same weights as a GGUF file, for llama.cpp (package llama-cpp-python)")
    parser.add_argument("--no-hf", action="store_true")
    args = parser.parse_args()
    config = load_model_config(args.model_path, None)
    print(f"{config.source.path}, {args.dtype}; {machine()}, transformers {transformers.__version__}")
    peers: dict[str, Engine] = {}
    if config.source.kind == "gguf":
        print("transformers is left out: it keeps GGUF weights packed, which is another amount of work; give a folder with safetensors")
    elif not args.no_hf:
        peers["transformers"] = HuggingFace(config.source.path, getattr(torch, args.dtype))
    for peer in args.peer:
        name, _, url = peer.partition("=")
        peers[name] = OpenAIServer(url.rstrip("/"), args.peer_model)
    if args.llama_gguf:
        from llama_engine import LlamaCpp

        peers["llama.cpp"] = LlamaCpp(args.llama_gguf, len(os.sched_getaffinity(0)))
    if args.base_url:
        report(measure({"sglane": Native(args.base_url.rstrip("/")), **peers}, config.vocab_size, args.repeats, args.num_new))
        return
    flags = ["--model-path", args.model_path] if args.model_path else []
    with own_server("--dtype", args.dtype, "--max-total-tokens", "65536", "--log-level", "warning", *flags) as (url, start_s):
        print(f"start to ready: {start_s:.1f} s")
        report(measure({"sglane": Native(url), **peers}, config.vocab_size, args.repeats, args.num_new))


if __name__ == "__main__":
    main()
