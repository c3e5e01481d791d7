"""`evalscope perf`."""
from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_REQUESTS = 10


def run(bench: Bench) -> str:
    bench.run(
        bench.environment.program("evalscope"), "perf", "--url", f"{bench.url}/v1/chat/completions", "--model", bench.model, "--api", "openai",
        "--dataset", "random", "--tokenizer-path", bench.tokenizer, "--parallel", 2, "--number", NUM_REQUESTS, "--min-prompt-length", 16,
        "--max-prompt-length", 32, "--prefix-length", 64, "--min-tokens", 16, "--max-tokens", 16, "--stream", "--outputs-dir", "report",
    )
    found = sorted(bench.folder.glob("report/**/benchmark_summary.json"))
    check(found, "the client wrote no summary")
    summary = bench.read_json(str(found[0].relative_to(bench.folder)))
    check(summary["Succeed requests"] == NUM_REQUESTS and summary["Failed requests"] == 0, f"summary: {summary}")
    return f"{NUM_REQUESTS} streamed chats with one prefix: all succeeded"


EVALSCOPE = Client("evalscope", "1.14.1", "perf: streamed chats", Packages(("evalscope[perf]==1.14.1",), shares_torch=True), run)
