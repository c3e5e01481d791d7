"""The OpenAI SDK."""
from clients.bench import Bench
from clients.client import Client
from clients.environments import Packages
from clients.runs.counted import count_of


def run(bench: Bench) -> str:
    num_checks = count_of(bench.python("openai_calls.py", bench.url, bench.model))
    return f"{num_checks} checks of chat, completions, streams, tools, schemas, logprobs, errors"


OPENAI = Client("openai", "3.57.0", "SDK: chat, completions, streams, tools, json_schema, logprobs, errors",
                Packages(("openai==3.57.0",)), run, is_fast=True)
