"""`guidellm`."""
from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_REQUESTS = 10


def run(bench: Bench) -> str:
    bench.run(
        bench.environment.program("guidellm"), "run", "--backend", f"kind=openai_http,target={bench.url},model={bench.model}",
        "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={bench.tokenizer}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--disable-console-interactive", "--output", "kind=json,path=report.json",
    )
    benchmark = bench.read_json("report.json")["benchmarks"][0]
    totals = benchmark["metrics"]["request_totals"]
    check(totals["successful"] == NUM_REQUESTS and totals["errored"] == 0, f"requests: {totals}")
    outputs = [request["output"] for request in benchmark["requests"]["successful"]]
    check(len(outputs) == NUM_REQUESTS and all(outputs), f"texts: {outputs}")
    return f"{NUM_REQUESTS} chats of 32 + 16 tokens in two streams: all successful"


GUIDELLM = Client("guidellm", "0.8.1", "concurrent profile, synthetic chats", Packages(("guidellm==0.8.1",), shares_torch=True), run)
