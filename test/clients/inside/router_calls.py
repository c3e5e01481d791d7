"""Requests through a router to two workers. Usage: router_calls.py URL MODEL"""
import json
import sys
import urllib.request

import openai
from checks import done, expect

URL, MODEL = sys.argv[1:3]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120.0, max_retries=0)


def ask(method: str, path: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as response:
        return response.status, response.read().decode()


def through_the_sdk() -> None:
    answers = [client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16) for _ in range(4)]
    texts = {answer.choices[0].message.content for answer in answers}
    expect(len(texts) == 1 and "Paris" in texts.pop(), "four alike answers of two workers", answers)
    expect(answers[-1].usage.prompt_tokens_details.cached_tokens > 0, "each worker reuses its own prefix", answers[-1].usage)
    chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stream=True,
                                                 stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect("Paris" in text and chunks[-1].usage.completion_tokens > 0, "streamed, with usage", text)
    completion = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
    expect("Paris" in completion.choices[0].text, "a completion", completion)
    try:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
        expect(False, "a negative temperature was taken")
    except openai.BadRequestError as error:
        expect("temperature" in str(error), "the worker's refusal comes through", str(error))


def native() -> None:
    status, body = ask("POST", "/generate", {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
    answer = json.loads(body)
    expect(status == 200 and "Paris" in answer["text"], "/generate", body)
    expect(answer["meta_info"]["completion_tokens"] > 0, "its counts", body)
    status, body = ask("GET", "/v1/models")
    expect(MODEL in body, "/v1/models", body)
    status, body = ask("POST", "/flush_cache", {})
    expect(status == 200, "flush reaches the workers", body)
    status, body = ask("GET", "/get_loads")
    loads = json.loads(body)
    expect(len(loads["workers"]) == 2 and all(worker["load"] >= 0 for worker in loads["workers"]), "the load of both workers", body)


through_the_sdk()
native()
done()
