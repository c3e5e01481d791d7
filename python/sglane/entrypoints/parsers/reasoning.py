"""Thoughts in front of an answer: `<think>thoughts</think>answer`, where the first marker may be the prompt's last."""
from dataclasses import dataclass

from sglane.entrypoints.parsers.cursor import SPACE, Cursor, Malformed, OutOfText, Reading

START, END = "<think>", "</think>"
MARKERS = (START, END)


@dataclass(frozen=True)
class ReasoningFormat:
    """is_open_without_marker: the model thinks although neither the prompt nor its output says so."""

    is_open_without_marker: bool


FORMATS = {
    "deepseek-r1": ReasoningFormat(is_open_without_marker=True),
    "deepseek-v3": ReasoningFormat(is_open_without_marker=False),
    "glm45": ReasoningFormat(is_open_without_marker=False),
    "qwen3": ReasoningFormat(is_open_without_marker=False),
}


def opening(form: ReasoningFormat, prompt_end: str) -> str:
    """How output after a prompt that ends like this begins: `inside` thoughts; `maybe` with the marker of some; empty: with the answer."""
    end = prompt_end.rstrip(SPACE)
    if end.endswith(END):
        return ""
    return "inside" if end.endswith(START) or form.is_open_without_marker else "maybe"


def ends_inside(text: str) -> bool:
    """Whether a part of an answer ends with thoughts that were not closed."""
    return text.rfind(START) > text.rfind(END)


class ReasoningParser:
    """Splits a text into thoughts and answer. White space around the markers belongs to neither."""

    def __init__(self, is_inside: bool, keep_markers: bool = False):
        """is_inside: the prompt has begun the thoughts. keep_markers: thoughts come out as they were written."""
        self.is_inside = is_inside
        self.has_closed = False
        self._keep_markers = keep_markers
        self._cursor = Cursor()
        self._thoughts: list[str] = []
        self._answer: list[str] = []
        self._space = ""  # may stand before the end marker
        self._machine = self._run()
        next(self._machine)

    def feed(self, piece: str) -> tuple[str, str]:
        """(thoughts, answer): what is certain after this piece."""
        self._cursor.push(piece)
        self._machine.send(None)
        return self._given()

    def finish(self) -> tuple[str, str]:
        """What was held; nothing may be fed afterwards."""
        self._cursor.end(was_cut=False)
        self._machine.send(None)
        return self._given()

    def _given(self) -> tuple[str, str]:
        thoughts, answer = "".join(self._thoughts), "".join(self._answer)
        self._thoughts.clear()
        self._answer.clear()
        return thoughts, answer

    def _run(self) -> Reading:
        yield
        try:
            yield from self._read()
        except OutOfText:
            # Before the thoughts only white space and a part of their marker can be held.
            held = self._cursor.unmark() + self._cursor.take_all()
            if self.is_inside:
                self._thoughts.append(self._space + held)
            elif not self.has_closed:
                self._answer.append(held)
        yield

    def _read(self) -> Reading:
        self._cursor.mark()
        try:
            yield from self._cursor.space()
            yield from self._cursor.expect(START)
            self.is_inside = True
        except Malformed:
            pass  # no marker
        before = self._cursor.unmark()
        if not self.is_inside:
            self._answer.append(before)
            yield from self._pass_on()
        if self._keep_markers:
            self._thoughts.append(before)
            yield from self._cursor.until(END, sink=self._thoughts.append)
            self._thoughts.append(END)
        else:
            yield from self._cursor.space()
            yield from self._cursor.until(END, sink=self._add_thought)
        self.is_inside, self.has_closed = False, True
        if not self._keep_markers:
            yield from self._cursor.space()
        yield from self._pass_on()

    def _pass_on(self) -> Reading:
        while True:
            self._answer.append(self._cursor.take_all())
            yield from self._cursor.more()

    def _add_thought(self, text: str) -> None:
        """White space waits until something follows."""
        text = self._space + text
        body = text.rstrip(SPACE)
        self._space = text[len(body) :]
        self._thoughts.append(body)

