"""`sglang.bench_serving`."""
from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

#: What the wheel needs to run its benchmark, without the engine.
NEEDS = (
    "aiohttp", "msgspec", "numpy", "orjson", "requests", "tqdm", "transformers==5.24.*", "pillow", "pybase64", "datasets", "jinja2", "psutil",
    "pyzmq",
)
NUM_PROMPTS = 8
OUTPUT_TOKENS = 8
RANDOM = (
    "--dataset-name", "random-ids", "--random-input-len", 64, "--random-output-len", OUTPUT_TOKENS, "--random-range-ratio", 1.0,
    "--num-prompts", NUM_PROMPTS, "--request-rate", 50, "--max-concurrency", 4,
)
SHARED_PREFIX = (
    "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", 2, "--gsp-prompts-per-group", 4, "--gsp-system-prompt-len", 192,
    "--gsp-question-len", 16, "--gsp-output-len", OUTPUT_TOKENS, "--gsp-range-ratio", 1.0, "--max-concurrency", 2,
    "--flush-cache", "--cache-report",
)


def run(bench: Bench) -> str:
    cached = 0
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        measure(bench, backend, "random", RANDOM)
        cached += measure(bench, backend, "prefix", SHARED_PREFIX)
    cached += measure(bench, "sglang-oai-chat", "turns", (*SHARED_PREFIX, "--gsp-num-turns", 2), num_asked=2 * NUM_PROMPTS)
    return f"3 backends, random and shared prefixes with flush and cache report, two turns: all completed, {cached} cached tokens"


def measure(bench: Bench, backend: str, kind: str, options: tuple[object, ...], num_asked: int = NUM_PROMPTS) -> int:
    """One run; returns the cached tokens of its cache report, if it was to make one."""
    name = f"{backend}-{kind}.jsonl"
    bench.python("sglang_bench.py", "--backend", backend, "--base-url", bench.url, "--model", bench.model, "--tokenizer", bench.tokenizer,
                 "--output-file", name, "--output-details", "--disable-tqdm", "--seed", 1, *options)
    report = bench.read_lines(name)[0]
    check(report["completed"] == num_asked, f"{name}: {report['completed']} of {num_asked} requests were completed")
    check(not any(report["errors"]), f"{name}: {report['errors']}")
    check(all(report["generated_texts"]), f"{name}: empty texts: {report['generated_texts']}")
    check(report["total_output_tokens"] == num_asked * OUTPUT_TOKENS, f"{name}: {report['total_output_tokens']} output tokens")
    if "--cache-report" not in options:
        return 0
    cached = report["cache_report"]["total_cached_tokens"]
    check(cached > 0, f"{name}: no cached tokens: {report['cache_report']}")
    return int(cached)


SGLANG_BENCH = Client("sglang-bench", "0.5.23", "bench_serving: sglang, sglang-oai, sglang-oai-chat; shared prefixes, turns, cache report",
                      Packages(NEEDS, alone=("sglang==0.5.23",)), run, is_fast=True)
