"""Progress bar of loading: a shard is complete when its last tensor has been read."""
import sys
from collections import Counter

from tqdm import tqdm


class LoadProgress:
    """Counts shards. Silent unless `show`, and then only on a terminal unless `force`."""

    def __init__(self, label: str, show: bool, force: bool = False):
        self._label = label
        self._show = show and (force or sys.stderr.isatty())
        self._shard_of: dict[str, str] = {}
        self._left: Counter[str] = Counter()  # tensors still to be read by shard
        self._bar: tqdm | None = None

    def start(self, shard_of: dict[str, str]) -> None:
        """shard_of: name -> shard of every tensor that will be read."""
        self._shard_of = shard_of
        self._left = Counter(shard_of.values())
        if self._show:
            self._bar = tqdm(total=len(self._left), desc=self._label, file=sys.stderr,
                             bar_format="{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]")

    def taken(self, name: str) -> None:
        """A tensor has been read."""
        shard = self._shard_of[name]
        self._left[shard] -= 1
        if self._left[shard] == 0 and self._bar is not None:
            self._bar.update(1)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
