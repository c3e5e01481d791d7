"""What the host tier costs a cold prefill, and what a hit in it saves, turn by turn in one run.

    python benchmark/hicache/bench_host_hit.py --model-path FOLDER [--dtype bfloat16] [--prompt 16384] [--repeats 7]

Backup: time to first token of cold prompts of 4096 tokens, a server with the host tier beside one without; median of paired ratios. Host hit: a
prompt of --prompt tokens, cold; then other prompts until it has left the device; then the same prompt again, which is loaded from the host. A model
folder whose context is shorter is used with a longer one: the answers mean nothing then, the work is the same.
"""
import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from streams import machine, own_server, run_streams, spread  # noqa: E402

from sglane.configs.model_config import load_model_config  # noqa: E402

PAIRED_TOKENS = 4096
OTHER_TOKENS = 4096


def first_token_s(url: str, ids: list[int]) -> float:
    time.sleep(0.3)
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    return run_streams(f"{url}/generate", [{"input_ids": ids, "stream": True, "sampling_params": sampling}])[0].ttft_s


def cached(url: str, ids: list[int]) -> dict[str, int]:
    answer = httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}, timeout=600)
    return dict(answer.json()["meta_info"]["cached_tokens_details"])


@contextlib.contextmanager
def with_context(folder: str, num_tokens: int) -> Iterator[str]:
    """The model folder, or one like it whose context is long enough."""
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["max_position_embeddings"] >= num_tokens:
        yield folder
        return
    with tempfile.TemporaryDirectory() as other:
        for path in Path(folder).iterdir():
            if path.name != "config.json":
                (Path(other) / path.name).symlink_to(path.resolve())
        (Path(other) / "config.json").write_text(json.dumps({**config, "max_position_embeddings": num_tokens}))
        yield other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="a folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with with_context(args.model_path, args.prompt + 64) as folder:
        run(folder, args)


def run(folder: str, args: argparse.Namespace) -> None:
    config = load_model_config(folder, None)
    random = np.random.default_rng(2)

    def prompt(n: int) -> list[int]:
        return [int(token) for token in random.integers(10, config.vocab_size, n)]

    pool = args.prompt + 2 * OTHER_TOKENS
    flags = ["--model-path", folder, "--dtype", args.dtype, "--max-total-tokens", str(pool), "--log-level", "warning"]
    host = ["--enable-hierarchical-cache", "--hicache-ratio", "3"]
    print(f"{args.model_path}, {args.dtype}; {machine()}")
    with own_server(*flags, *host) as (on, _), own_server(*flags) as (off, _):
        for url in (on, off):
            first_token_s(url, prompt(PAIRED_TOKENS))
        pairs = []
        for _ in range(args.repeats):
            ids = prompt(PAIRED_TOKENS)
            pairs.append((first_token_s(on, ids), first_token_s(off, ids)))
        print(f"cold {PAIRED_TOKENS}: with backup {spread([a * 1e3 for a, _ in pairs])} ms, without {spread([b * 1e3 for _, b in pairs])} ms, "
              f"ratio {spread([a / b for a, b in pairs], 3)}")
    with own_server(*flags, *host) as (on, _):
        ids = prompt(args.prompt)
        cold = first_token_s(on, ids)
        hits = []
        for _ in range(min(args.repeats, 3)):
            for _ in range(pool // OTHER_TOKENS + 1):
                first_token_s(on, prompt(OTHER_TOKENS))
            hits.append(first_token_s(on, ids))
        details = cached(on, ids)
        print(f"prompt of {args.prompt}: cold {cold * 1e3:.0f} ms, host hit {spread([hit * 1e3 for hit in hits])} ms, ratio "
              f"{statistics.median(hits) / cold:.3f}; then on the device: {details['device']} tokens")


if __name__ == "__main__":
    main()
