"""`evalscope perf`."""
from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_REQUESTS = 10
OUTPUT_TOKENS = 16


def run(bench: Bench) -> str:
    bench.run(
        bench.environment.program("evalscope"), "perf", "--url", f"{bench.url}/v1/chat/completions", "--model", bench.model, "--api", "openai",
        "--dataset", "random", "--tokenizer-path", bench.tokenizer, "--parallel", 2, "--number", NUM_REQUESTS, "--min-prompt-length", 16,
        "--max-prompt-length", 32, "--prefix-length", 64, "--min-tokens", OUTPUT_TOKENS, "--max-tokens", OUTPUT_TOKENS,
        "--stream", "--outputs-dir", "report",
    )
    found = sorted(bench.folder.glob("report/**/benchmark_summary.json"))
    check(found, "the client wrote no summary")
    summary = bench.read_json(str(found[0].relative_to(bench.folder)))
    check((summary["Success Requests"], summary["Failed Requests"]) == (NUM_REQUESTS, 0), f"summary: {summary}")
    check(summary["Avg Output Tokens"] == OUTPUT_TOKENS, f"output: {summary}")
    check(summary["KV Cache Hit Rate (%)"] > 0, f"no cached tokens: {summary}")
    return f"{NUM_REQUESTS} streamed chats with one prefix: all succeeded, {summary['KV Cache Hit Rate (%)']:.0f}% of the prompts' tokens cached"


EVALSCOPE = Client("evalscope", "1.14.1", "perf: streamed chats", Packages(("evalscope[perf]==1.14.1",), shares_torch=True), run)
