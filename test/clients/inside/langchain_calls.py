"""LangChain's OpenAI models. Usage: langchain_calls.py URL MODEL"""
import sys
from typing import Literal

from checks import done, expect
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:3]
SETTINGS = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "timeout": 120, "max_retries": 0}


class Person(BaseModel):
    """A person."""

    age: int = Field(ge=1, le=99)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Current weather of a city."""
    return f"18 degrees in {city}"


def chats() -> None:
    model = ChatOpenAI(**SETTINGS, max_tokens=16, stream_usage=True)
    chain = ChatPromptTemplate.from_messages([("system", "You are helpful."), ("human", "What is the capital of {country}?")]) | model
    answer = chain.invoke({"country": "France"})
    expect("Paris" in answer.content and answer.usage_metadata["output_tokens"] > 0, "an answer with usage", answer)
    whole = None
    for chunk in chain.stream({"country": "France"}):
        whole = chunk if whole is None else whole + chunk
    expect(whole.content == answer.content, "the stream adds up", whole)
    expect(whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"], "usage of the stream", whole.usage_metadata)
    batch = chain.batch([{"country": "Italy"}, {"country": "Spain"}])
    expect(len(batch) == 2 and all(item.content for item in batch), "a batch", batch)
    turns = [SystemMessage("Be brief."), HumanMessage("My name is Ada."), AIMessage("Hello Ada."), HumanMessage("What is my name?")]
    expect(model.invoke(turns).content, "several turns")
    scored = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    expect(scored.response_metadata["logprobs"]["content"], "logprobs", scored.response_metadata)


def shapes() -> None:
    model = ChatOpenAI(**SETTINGS, max_tokens=40).with_structured_output(Person, method="json_schema")
    person = model.invoke("Invent a person.")
    expect(isinstance(person, Person) and 1 <= person.age <= 99, "structured output", person)


def tools() -> None:
    asked = ChatOpenAI(**SETTINGS, max_tokens=64).bind_tools([get_weather], tool_choice="any")
    answer = asked.invoke("What is the weather?")
    expect(len(answer.tool_calls) == 1 and answer.tool_calls[0]["name"] == "get_weather", "a call", answer)
    result = get_weather.invoke(answer.tool_calls[0])
    expect(isinstance(result, ToolMessage), "LangChain runs the call", result)
    after = ChatOpenAI(**SETTINGS, max_tokens=16).bind_tools([get_weather], tool_choice="none").invoke(
        [HumanMessage("What is the weather?"), answer, result])
    expect(after.content, "an answer after the result", after)


def completions() -> None:
    text = OpenAI(**SETTINGS, max_tokens=8).invoke("The capital of France is")
    expect("Paris" in text, "a completion", text)


chats()
shapes()
tools()
completions()
done()
