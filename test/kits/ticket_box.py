"""Where executors in the test's process tell the ends of loads and backups."""
import threading

from sglane.plan.step_plan import TicketEnded


class TicketBox:
    """What the ranks' copying threads told."""

    def __init__(self) -> None:
        self.ends: list[TicketEnded] = []
        self._num_taken = 0
        self._changed = threading.Condition()

    def send(self, message: TicketEnded) -> None:
        with self._changed:
            self.ends.append(message)
            self._changed.notify_all()

    def close(self) -> None:
        pass

    def wait(self, ticket: int, lanes: set[int]) -> None:
        """Until these lanes, and no others, have ended their parts."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.lanes(ticket) >= lanes, 30), f"ticket {ticket} ended in {self.lanes(ticket)}, not in {lanes}"
        assert self.lanes(ticket) == lanes

    def lanes(self, ticket: int) -> set[int]:
        found = [end.rank for end in self.ends if end.ticket == ticket]
        assert len(found) == len(set(found)), f"a lane has ended ticket {ticket} twice"
        return set(found)

    def ended(self) -> list[TicketEnded]:
        """Those that were not returned before; waits a moment for the first."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.ends) > self._num_taken, 0.001)
            found = self.ends[self._num_taken :]
            self._num_taken = len(self.ends)
        return found
