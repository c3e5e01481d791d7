"""Every client, the quick ones first."""
from clients.client import Client
from clients.runs.aiperf import AIPERF
from clients.runs.canitoolcall import CANITOOLCALL
from clients.runs.evalscope import EVALSCOPE
from clients.runs.guidellm import GUIDELLM
from clients.runs.langchain_openai import LANGCHAIN_OPENAI
from clients.runs.litellm import LITELLM
from clients.runs.llm import LLM
from clients.runs.lm_eval import LM_EVAL
from clients.runs.openai import OPENAI
from clients.runs.schemathesis import SCHEMATHESIS
from clients.runs.sglang_bench import SGLANG_BENCH
from clients.runs.sglang_router import SGLANG_ROUTER
from clients.runs.vllm_bench import VLLM_BENCH

CLIENTS: tuple[Client, ...] = (
    OPENAI, LLM, SGLANG_BENCH, SGLANG_ROUTER, CANITOOLCALL, SCHEMATHESIS, LITELLM, LANGCHAIN_OPENAI, LM_EVAL, VLLM_BENCH, GUIDELLM, AIPERF, EVALSCOPE,
)
