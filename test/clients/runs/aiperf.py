"""`aiperf`."""
from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_REQUESTS = 10


def run(bench: Bench) -> str:
    for kind in ("chat", "completions"):
        profile(bench, kind)
    return f"{NUM_REQUESTS} requests each by chat and completions, streamed, /metrics scraped: all completed"


def profile(bench: Bench, kind: str) -> None:
    bench.run(
        bench.environment.program("aiperf"), "profile", "-m", bench.model, "--endpoint-type", kind, "--streaming", "-u", bench.url,
        "--tokenizer", bench.tokenizer, "--concurrency", 2, "--request-count", NUM_REQUESTS, "--synthetic-input-tokens-mean", 32,
        "--output-tokens-mean", 16, "--extra-inputs", "ignore_eos:true", "--ui", "simple", "--artifact-dir", kind,
        env={"HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None},  # with them it asks for a hub id, even of a folder
    )
    report = bench.read_json(f"{kind}/profile_export_aiperf.json")
    count, errors = report["request_count"]["avg"], (report.get("error_request_count") or {"avg": 0})["avg"]
    check(count == NUM_REQUESTS and errors == 0, f"{kind}: {count} requests, {errors} errors")
    scraped = bench.folder / kind / "server_metrics_export.json"
    check(scraped.is_file() and "sglang:generation_tokens" in scraped.read_text(), f"{kind}: the server's metrics were not taken")
    check(report["output_sequence_length"]["avg"] > 0, f"{kind}: no output: {report['output_sequence_length']}")


AIPERF = Client("aiperf", "0.13.0", "streamed chat and completions, server metrics", Packages(("aiperf==0.13.0",), shares_torch=True), run)
