"""Fixed greedy requests whose answers must not change, whatever else the server did in between.

Start the server with `--dtype float32`: in bfloat16 a batch mate or a cache hit changes the shapes of matrix products, and so
now and then a token.
"""
from collections.abc import Sequence
from typing import Any, Protocol, Self

#: Short, longer than a page of 16, and with a shared beginning (a cache hit for the second of the two).
TEXTS = (
    "The capital of France is",
    "A list of the planets of the solar system, from the sun outwards: Mercury, Venus,",
    "Once upon a time there was a small robot who lived in a lighthouse by the sea. Every evening it",
    "Once upon a time there was a small robot who lived in a lighthouse by the sea. One morning it",
)


class Generates(Protocol):
    """Anything that answers native requests: a server under test."""

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> dict[str, Any]: ...


class Canary:
    """Remembers the answers of a healthy server; `check` asks again."""

    def __init__(self, prompts: Sequence[str | Sequence[int]], answers: Sequence[list[int]], max_new_tokens: int):
        self._prompts = prompts
        self._answers = answers
        self._max_new_tokens = max_new_tokens

    @classmethod
    def record(cls, server: Generates, prompts: Sequence[str | Sequence[int]] = TEXTS, max_new_tokens: int = 24) -> Self:
        """Ask every prompt once. Do it before the load whose traces are looked for."""
        answers = [ask(server, prompt, max_new_tokens) for prompt in prompts]
        assert all(answers), f"an empty answer: {answers}"
        return cls(prompts, answers, max_new_tokens)

    def check(self, server: Generates) -> None:
        """Ask again; raises AssertionError with the prompt and both answers (token ids) on any difference."""
        for prompt, expected in zip(self._prompts, self._answers, strict=True):
            found = ask(server, prompt, self._max_new_tokens)
            assert found == expected, f"the answer to {prompt!r} changed: {expected} became {found}"


def ask(server: Generates, prompt: str | Sequence[int], max_new_tokens: int) -> list[int]:
    """Output token ids of one greedy request that does not stop early."""
    answer = server.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
    return list(answer["output_ids"])
