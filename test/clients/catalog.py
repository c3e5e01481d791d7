"""Every client, the quick ones first."""
from clients.client import Client
from clients.runs.canitoolcall import CANITOOLCALL
from clients.runs.llm import LLM
from clients.runs.openai import OPENAI
from clients.runs.schemathesis import SCHEMATHESIS
from clients.runs.sglang_bench import SGLANG_BENCH
from clients.runs.sglang_router import SGLANG_ROUTER

CLIENTS: tuple[Client, ...] = (OPENAI, LLM, SGLANG_BENCH, SCHEMATHESIS, CANITOOLCALL, SGLANG_ROUTER)
