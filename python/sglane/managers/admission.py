"""Who waits, in which order, and whether the next one may come in. Pure bookkeeping: nothing here touches pages."""
from collections.abc import Callable, Iterable, Iterator

from sglane.managers.request import Request
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import RadixKey, common_prefix

#: The reserve counts on this share of the output tokens that running requests may still ask for.
INITIAL_RESERVE_RATIO = 0.7
MIN_RESERVE_RATIO = 0.1
#: Steps in which the ratio falls from its initial value to the minimum when nothing is retracted.
RESERVE_DECAY_STEPS = 600
#: No request counts for more output tokens than this in the reserve.
MAX_RESERVED_TOKENS_PER_REQUEST = 4096
#: Waiting requests whose hits are looked up for longest-prefix-match ordering; the rest stay in order of arrival.
LPM_LOOKAHEAD_REQUESTS = 128


class WaitingQueue:
    """Waiting requests by priority, then arrival. A retracted request keeps its arrival, so it comes first again."""

    def __init__(self, policy: str, limit: int | None):
        self._policy = policy
        self._limit = limit
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def is_full(self) -> bool:
        return self._limit is not None and len(self._requests) >= self._limit

    def num_tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return sum(request.num_known_tokens for request in self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._requests.sort(key=lambda item: (-item.priority, item.arrival))

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def in_order(self, hit_length: Callable[[Request], int]) -> list[Request]:
        """A copy in the order in which requests are to be tried. `hit_length` gives the cached tokens of a request."""
        if self._policy == "fcfs" or len(self._requests) < 2:
            return list(self._requests)
        head, rest = self._requests[:LPM_LOOKAHEAD_REQUESTS], self._requests[LPM_LOOKAHEAD_REQUESTS:]
        hits = {request.rid: hit_length(request) for request in head}
        head = sorted(head, key=lambda item: (-item.priority, -hits[item.rid], item.arrival))
        return head + rest


class Reserve:
    """Tokens held back for the output of running requests: a ratio that rises with each retraction and decays otherwise."""

    def __init__(self, conservativeness: float, layout: PageLayout):
        self._initial = min(INITIAL_RESERVE_RATIO * conservativeness, 1.0)
        self._minimum = min(MIN_RESERVE_RATIO * conservativeness, 1.0)
        self._layout = layout
        self.ratio = self._initial

    def decay(self) -> None:
        self.ratio = max(self.ratio - (self._initial - self._minimum) / RESERVE_DECAY_STEPS, self._minimum)

    def reset(self) -> None:
        """After a retraction: the guess was too low."""
        self.ratio = self._initial

    def num_pages(self, running: Iterator[Request]) -> int:
        """Pages that running requests are expected to ask for: known tokens not covered yet, plus a share of the output."""
        total = 0
        for request in running:
            residence = request.admitted()
            output = min(request.num_tokens_to_come(), MAX_RESERVED_TOKENS_PER_REQUEST) * self.ratio
            final = max(residence.num_to_prefill, residence.num_rows_issued) + int(output)
            total += max(self._layout.num_pages(final) - len(residence.holding.pages), 0)
        return total


def must_wait_for_prefix(
    candidate: Request, key: RadixKey, num_hit_tokens: int, running: Iterable[Request], leaving: Iterable[Request], page_size: int
) -> bool:
    """True while somebody else is about to publish more of the candidate's prompt than the tree has now.

    A running prefill will publish whole pages; a leaving request will publish its tail too, as soon as its last issued step has retired.
    """
    most = candidate.max_hit_tokens()
    for other in running:
        if other.namespace == candidate.namespace and other.has_unpublished_prompt():
            shared = min(common_prefix(key, other.key()), other.admitted().num_to_prefill, most)
            if shared // page_size > num_hit_tokens // page_size:
                return True
    for other in leaving:
        if other.namespace == candidate.namespace and min(common_prefix(key, other.key()), other.num_rows_to_publish(), most) > num_hit_tokens:
            return True
    return False


def chunk_rows(start: int, num_left: int, budget: int, page_size: int) -> int:
    """Rows of the next chunk: all that is left if the budget allows, else up to a page boundary if that leaves at least one token."""
    if num_left <= budget:
        return num_left
    end = (start + budget) // page_size * page_size
    return end - start if end > start else budget
