"""LangChain with its OpenAI package."""
from clients.bench import Bench
from clients.client import Client
from clients.environments import Packages
from clients.runs.counted import count_of


def run(bench: Bench) -> str:
    num_checks = count_of(bench.python("langchain_calls.py", bench.url, bench.model))
    return f"{num_checks} checks: chains, streams with usage, batches, logprobs, structured output, a tool call and its result, completions"


LANGCHAIN_OPENAI = Client("langchain-openai", "1.7.4", "chains, streams, batches, structured output, tools, completions",
                          Packages(("langchain-openai==1.7.4",)), run)
