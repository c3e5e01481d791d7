"""LiteLLM."""
from clients.bench import Bench
from clients.client import Client
from clients.environments import Packages
from clients.runs.counted import count_of


def run(bench: Bench) -> str:
    num_checks = count_of(bench.python("litellm_calls.py", bench.url, bench.model))
    return f"{num_checks} checks: chat, streams, schemas, four at once by openai/ and hosted_vllm/; completions, a refusal"


LITELLM = Client("litellm", "1.110.2", "SDK: chat, streams, schemas by two providers; completions", Packages(("litellm==1.110.2",)), run)
