"""Checks the order of events in a stream: one finish per choice and nothing after it, then usage if asked for, then [DONE]."""
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    """What the events of one choice add up to."""

    text: str = ""
    finish_reason: str | None = None
    matched_stop: Any = None
    num_chunks: int = 0
    roles: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def collect_openai(events: Sequence[dict[str, Any]], num_choices: int, include_usage: bool, chat: bool, *,
                   is_garbage: bool = False) -> tuple[list[Choice], dict[str, Any] | None]:
    """Events of /v1/completions or /v1/chat/completions (without [DONE]) -> choices in order, usage. Raises AssertionError on disorder.

    is_garbage: the bytes are random, so a chunk may end with a replacement mark for one that is surely invalid.
    """
    choices = {index: Choice() for index in range(num_choices)}
    usage = None
    ids = {event["id"] for event in events}
    assert len(ids) == 1, f"several ids in one stream: {ids}"
    for position, event in enumerate(events):
        assert "error" not in event, event
        if not event["choices"]:
            assert include_usage and position == len(events) - 1, f"an event without choices at {position} of {len(events)}: {event}"
            usage = event["usage"]
            continue
        (part,) = event["choices"]
        choice = choices[part["index"]]
        assert choice.finish_reason is None, f"choice {part['index']} goes on after its finish: {event}"
        add_part(choice, part, chat)
        is_half = choice.text.endswith("\ufffd") and not part["finish_reason"]
        assert is_garbage or not is_half, "half a character was sent"
    unfinished = [index for index, choice in choices.items() if choice.finish_reason is None]
    assert not unfinished, f"choices without a finish: {unfinished}"
    assert (usage is not None) == include_usage, "usage is missing" if include_usage else "usage was not asked for"
    return [choices[index] for index in range(num_choices)], usage


def add_part(choice: Choice, part: dict[str, Any], chat: bool) -> None:
    if chat:
        delta = part["delta"]
        if delta.get("role"):
            assert choice.num_chunks == 0, "the role comes first"
            choice.roles.append(delta["role"])
        choice.text += delta.get("content") or ""
    else:
        choice.text += part["text"]
    choice.num_chunks += 1
    choice.finish_reason = part["finish_reason"]
    choice.matched_stop = part["matched_stop"]
    if part["logprobs"]:
        choice.logprobs.append(part["logprobs"])


def collect_native(events: Sequence[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Events of /generate -> the last one of every choice. Text and ids only grow; one finish per choice, at its end."""
    last: dict[int, dict[str, Any]] = {}
    for event in events:
        assert set(event) != {"error"}, event
        index = event.get("index", 0)
        before = last.get(index)
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None, f"choice {index} goes on after its finish"
            assert event.get("text", "").startswith(before.get("text", "")), (before, event)
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
        last[index] = event
    assert sorted(last) == list(range(num_choices)), f"choices in the stream: {sorted(last)}"
    assert all(event["meta_info"]["finish_reason"] is not None for event in last.values()), "a choice has no finish"
    return [last[index] for index in range(num_choices)]
