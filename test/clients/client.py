"""One entry of the catalog."""
from collections.abc import Callable
from dataclasses import dataclass

from clients.bench import Bench
from clients.environments import Packages


@dataclass(frozen=True)
class Client:
    """run: does it all, raises ClientFailed, and returns in a line what ran and what came out."""

    name: str
    version: str
    about: str
    packages: Packages
    run: Callable[[Bench], str]
    is_fast: bool = False
    shares: str | None = None  # name of the environment, if not its own

    @property
    def environment(self) -> str:
        return self.shares or self.name
