"""Server-sent events are single lines for every reader."""
import json

import pytest

from sglane.entrypoints.responses import event


@pytest.mark.parametrize("text", ["plain", "a\u0085b", "\u2028", "x\u2029\u2028y", "é“quoted”", "\x0b\x0c\x1c\x1d\x1e\r\n", "…\u0085"])
def test_an_event_is_one_line_and_says_the_same(text):
    data = event({"text": text}).decode()
    lines = data.splitlines()
    assert len(lines) == 2 and lines[1] == "" and data.endswith("\n\n")
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
