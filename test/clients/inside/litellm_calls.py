"""LiteLLM by two of its providers. Usage: litellm_calls.py URL MODEL"""
import asyncio
import json
import sys

import litellm
from checks import done, expect

URL, MODEL = sys.argv[1:3]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
AGE = {"type": "integer", "minimum": 1, "maximum": 99}
PERSON = {"type": "object", "additionalProperties": False, "required": ["age"], "properties": {"age": AGE}}


def common(provider: str) -> dict:
    return {"model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "timeout": 120, "num_retries": 0}


def chat(provider: str) -> None:
    answer = litellm.completion(**common(provider), messages=QUESTION, max_tokens=16)
    text = answer.choices[0].message.content
    expect("Paris" in text, f"{provider}: a sensible answer", text)
    expect(answer.usage.completion_tokens > 0 and answer.usage.prompt_tokens > 0, f"{provider}: usage", answer.usage)
    chunks = list(litellm.completion(**common(provider), messages=QUESTION, max_tokens=16, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(streamed == text, f"{provider}: the stream adds up", streamed)
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    expect(whole.usage.completion_tokens == answer.usage.completion_tokens, f"{provider}: usage of the stream", whole.usage)
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    shaped = litellm.completion(**common(provider), messages=QUESTION, max_tokens=40, response_format=form)
    expect(1 <= json.loads(shaped.choices[0].message.content)["age"] <= 99, f"{provider}: the schema holds", shaped.choices[0])


async def several(provider: str) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**common(provider), messages=QUESTION, max_tokens=8) for _ in range(4)))
    expect(all(answer.choices[0].message.content for answer in answers), f"{provider}: four at once", answers)


def rest() -> None:
    completed = litellm.text_completion(**common("text-completion-openai"), prompt="The capital of France is", max_tokens=8)
    expect("Paris" in completed.choices[0].text, "a completion", completed)
    try:
        litellm.completion(**{**common("openai"), "temperature": -1}, messages=QUESTION)
        expect(False, "a negative temperature was taken")
    except litellm.BadRequestError as error:
        expect("temperature" in str(error), "the refusal names the field", str(error))


for name in ("openai", "hosted_vllm"):
    chat(name)
    asyncio.run(several(name))
rest()
done()
