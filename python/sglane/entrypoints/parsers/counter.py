"""How many output tokens were spent on thoughts."""
from collections.abc import Sequence

from sglane.entrypoints.detokenizer import Detokenizer
from sglane.entrypoints.parsers.reasoning import ReasoningParser


class ReasoningCounter:
    """Reads the output once more, token by token, so that the count doesn't depend on how tokens were grouped. The markers' tokens count."""

    def __init__(self, parser: ReasoningParser, detokenizer: Detokenizer):
        self._parser = parser
        self._detokenizer = detokenizer
        self._num_read = 0
        self._has_ended = False

    def count(self, output_ids: Sequence[int]) -> int:
        """output_ids: what was given before, and more."""
        while not self._has_ended and self._num_read < len(output_ids):
            _, answer = self._parser.feed(self._detokenizer.step(output_ids[self._num_read]))
            self._num_read += 1
            self._has_ended = self._parser.has_closed or bool(answer)
        return self._num_read if self._parser.is_inside or self._parser.has_closed else 0
