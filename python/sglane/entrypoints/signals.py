"""SIGTERM and SIGINT of a launcher."""
import asyncio
import logging
import signal

logger = logging.getLogger(__name__)


class StopRequested(Exception):
    """SIGTERM or SIGINT."""


class Signals:
    """Counts SIGTERM and SIGINT. The first asks for an orderly end, the second for one now."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.count += 1
        self.last = number
        logger.info("%s received%s", signal.Signals(number).name, ", stopping now" if self.count > 1 else "")
