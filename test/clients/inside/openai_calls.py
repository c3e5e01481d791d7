"""What applications do with the OpenAI SDK. Usage: openai_calls.py URL MODEL"""
import asyncio
import json
import sys

import openai
from checks import done, expect

URL, MODEL = sys.argv[1:3]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120.0, max_retries=0)


def models() -> None:
    cards = client.models.list().data
    expect(MODEL in [card.id for card in cards], "the model is listed", cards)
    expect(client.models.retrieve(MODEL).id == MODEL, "the model's card")


def chat() -> str:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16)
    choice, usage = answer.choices[0], answer.usage
    expect(answer.object == "chat.completion" and answer.model == MODEL, "kind and model", answer)
    expect("Paris" in choice.message.content, "a sensible answer", choice.message.content)
    expect(choice.finish_reason in ("stop", "length"), "finish reason", choice.finish_reason)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and 0 < usage.completion_tokens <= 16, "usage adds up", usage)
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    again = client.chat.completions.create(model=MODEL, messages=parts, temperature=0, max_completion_tokens=16)
    expect(again.choices[0].message.content == choice.message.content, "parts of text, max_completion_tokens", again.choices[0].message.content)
    expect(again.usage.prompt_tokens_details.cached_tokens > 0, "the second answer reused the prefix", again.usage)
    many = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=1.0, seed=7, n=3, max_tokens=8)
    expect([item.index for item in many.choices] == [0, 1, 2], "three choices", many.choices)
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stop=["Paris"])
    expect(stopped.choices[0].finish_reason == "stop" and "Paris" not in stopped.choices[0].message.content, "stop", stopped.choices[0])
    return choice.message.content


def chat_stream(whole: str) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stream=True,
                                                 stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text == whole, "the stream adds up to the whole answer", text)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    expect(len(finishes) == 1, "one finish reason", finishes)
    expect(not chunks[-1].choices and chunks[-1].usage.completion_tokens > 0, "usage comes last", chunks[-1])
    expect(len({chunk.id for chunk in chunks}) == 1, "one id")
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, max_tokens=64) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    expect(final.choices[0].message.content.startswith(whole[:10]), "the SDK's own accumulator", final.choices[0])


async def many_at_once() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120.0, max_retries=0) as many:
        asked = [many.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"Count from {start}."}], max_tokens=8)
                 for start in range(8)]
        answers = await asyncio.gather(*asked)
        expect(len(answers) == 8 and len({answer.id for answer in answers}) == 8, "eight answers at once")
        early = await many.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=512, stream=True)
        async for _ in early:
            break
        await early.close()


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["The capital of France is", "Two and two is"], temperature=0, max_tokens=8)
    expect([choice.index for choice in answer.choices] == [0, 1], "one choice a prompt", answer.choices)
    expect("Paris" in answer.choices[0].text, "a sensible continuation", answer.choices[0].text)
    pieces = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].text for chunk in pieces if chunk.choices)
    expect("Paris" in text, "streamed", text)
    scored = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=1, logprobs=2, echo=True).choices[0]
    expect(scored.text.startswith("The capital of France is"), "echo", scored.text)
    expect(scored.logprobs.token_logprobs[0] is None and all(value <= 0 for value in scored.logprobs.token_logprobs[1:]), "scores of the prompt",
           scored.logprobs)
    expect(len(scored.logprobs.tokens) == len(scored.logprobs.text_offset) == len(scored.logprobs.top_logprobs), "lists of one length")
    expect("".join(scored.logprobs.tokens) == scored.text, "tokens spell the text", scored.logprobs.tokens)


def logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    content = choice.logprobs.content
    expect(len(content) == answer.usage.completion_tokens, "one entry a token", len(content))
    expect(all(item.logprob <= 0 and len(item.top_logprobs) == 3 for item in content), "three alternatives each", content)
    expect(all(item.top_logprobs[0].token == item.token for item in content), "greedy takes the best", content)
    spelled = b"".join(bytes(item.bytes) for item in content).decode()
    expect(spelled.startswith(choice.message.content), "bytes spell the text", choice.message.content)


def schemas() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Describe a person."}], response_format=form,
                                            temperature=0, max_tokens=100)
    person = json.loads(answer.choices[0].message.content)
    expect(set(person) == {"name", "age"} and 1 <= person["age"] <= 99 and len(person["name"]) <= 20, "the schema holds", person)
    free = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Describe a person as a short JSON object."}],
                                          response_format={"type": "json_object"}, temperature=0, max_tokens=200)
    if free.choices[0].finish_reason == "stop":
        expect(isinstance(json.loads(free.choices[0].message.content), dict), "an object", free.choices[0].message.content)


def tools() -> None:
    asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "temperature": 0, "max_tokens": 64, "tool_choice": "required"}
    choice = client.chat.completions.create(**asked).choices[0]
    expect(choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, "a call", choice)
    call = choice.message.tool_calls[0]
    expect(call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), "its arguments", call)
    deltas = [chunk.choices[0].delta.tool_calls[0] for chunk in client.chat.completions.create(**asked, stream=True)
              if chunk.choices and chunk.choices[0].delta.tool_calls]
    expect(deltas[0].id and deltas[0].function.name == "get_weather", "a streamed call begins with id and name", deltas[0])
    expect("".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments, "streamed arguments add up", deltas)
    named = client.chat.completions.create(**{**asked, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}).choices[0]
    expect([call.function.name for call in named.message.tool_calls] == ["get_weather"], "the named function", named)
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]},
               {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=16)
    after = answer.choices[0]
    expect(after.message.content and not after.message.tool_calls, "an answer after the result", after)


def errors() -> None:
    def refused(kind: type[openai.APIStatusError], param: str, **wrong: object) -> None:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 1, **wrong})
        except kind as error:
            expect(param in str(error), f"the message names {param}", str(error))
            return
        expect(False, f"{wrong} was taken")

    refused(openai.BadRequestError, "temperature", temperature=-1)
    refused(openai.BadRequestError, "messages", messages=[])
    refused(openai.BadRequestError, "max_tokens", max_tokens=0)
    schema = {"name": "x", "schema": {"type": "nothing"}}
    refused(openai.BadRequestError, "response_format", response_format={"type": "json_schema", "json_schema": schema})
    try:
        client.models.retrieve("no-such-model")
        expect(False, "an unknown model has a card")
    except openai.NotFoundError as error:
        expect("no-such-model" in str(error), "the message names the model", str(error))


models()
chat_stream(chat())
asyncio.run(many_at_once())
completions()
logprobs()
schemas()
tools()
errors()
done()
