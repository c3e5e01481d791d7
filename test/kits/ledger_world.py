"""A ledger beside executors that are as adverse as the step order allows, over a pool whose pages have contents.

Each plan's copies and writes are done when it is issued (a fast rank), and its reads are checked again when it retires (a slow rank): a page
that is reused too early, a wrong canonical row or a wrong tail copy shows as a wrong token. Reusable pages are poisoned as in poison mode. With a
host tier, its copies are done at any moment that their tickets allow (kits.host_copies).
"""
from dataclasses import dataclass, field

import numpy as np

from kits.host_copies import POISON, HostCopies
from sglane.mem_cache.hiradix_cache import READY
from sglane.mem_cache.kv_ledger import Holding, HostOptions, KVLedger
from sglane.mem_cache.page_layout import PageLayout, Shortfall
from sglane.mem_cache.radix_key import bigram_key, common_prefix, token_key


@dataclass(eq=False)
class Request:
    namespace: str
    tokens: np.ndarray  # int32, prompt and everything it will ever generate
    contents: np.ndarray  # what its rows hold: the key of all tokens
    num_prompt: int
    holding: Holding
    row: list[int] = field(default_factory=list)  # the executors' page table row, changed by deltas only
    num_issued: int = 0  # rows written by issued plans
    num_retired: int = 0
    planned: int = 0  # rows written once the plan being made is issued; 0: not in it
    last_step: int = 0

    @property
    def num_known(self):
        """Tokens whose value and row are known: prompt rows that are issued, output rows that have retired."""
        return max(min(self.num_issued, self.num_prompt), self.num_retired)


@dataclass
class Read:
    request: Request
    row: np.ndarray
    num_rows: int


class LedgerWorld:
    def __init__(self, page_size, cp_size, num_rows, num_slots, prefix_cache=True, bigram_keys=False, host=None):
        self.layout = PageLayout(page_size, cp_size)
        self.ledger = KVLedger(self.layout, num_rows, num_slots, prefix_cache, record_reusable=True, bigram_keys=bigram_keys, host=host)
        self.key = bigram_key if bigram_keys else token_key
        self.pool = np.full((num_rows * cp_size, page_size), POISON, np.int64)
        self.copies = HostCopies(self.ledger, self.pool, (host or HostOptions(2, 1)).num_rows)
        self.matched, self.running = [], []
        self.plan_copies, self.plan_entries = [], []
        self.outstanding = []  # (step, reads, copies) issued and not retired
        self.step = 0
        self.inserted = []  # (namespace, key) ever given to the tree
        self.ever_evicted = False
        self.num_hits = self.num_copies = self.num_pending = self.num_evicted = self.num_changes = self.num_looked_ahead = 0

    @property
    def has_host(self):
        return self.ledger._host is not None

    # the planner's verbs

    def match(self, tokens, num_prompt, namespace):
        limit = num_prompt - 1
        prompt = self.key(tokens[:num_prompt])
        hint = self.ledger.hint(prompt[:limit], namespace)
        holding = self.ledger.match(prompt, namespace, limit)
        best = max((common_prefix(prompt[:limit], key) for space, key in self.inserted if space == namespace), default=0)
        assert holding.num_cached_tokens == hint <= best
        if self.ledger.prefix_cache and not self.ever_evicted:
            assert hint == best, f"hit {hint}, but {best} tokens were inserted"
        assert holding.num_cached_device + holding.num_cached_host == hint
        assert self.has_host or holding.num_cached_host == 0
        self.copies.seen["host hits"] += holding.num_cached_host > 0
        self.num_hits += hint > 0
        self.matched.append(Request(namespace, tokens, self.key(tokens), num_prompt, holding))

    def cancel(self, request):
        self.ledger.cancel(request.holding)
        self.matched.remove(request)

    def admit(self, request, num_new_tokens):
        if not self.ledger.has_free_slot():
            return
        holding = request.holding
        num_tokens = min(holding.num_cached_tokens + num_new_tokens, request.num_prompt)
        num_hit = holding.num_cached_tokens
        path = self.device_path(holding)
        num_pages = self.layout.num_pages(num_tokens) - len(path)
        before, others = self.state(), self.unreachable(holding)
        answer = self.ledger.admit(holding, num_tokens, np.zeros(self.layout.cp_size, np.int64))
        if isinstance(answer, Shortfall):
            self.check_shortfall(answer, before, num_pages, others)
            return
        self.note_eviction(before)
        assert answer.num_cached_tokens == holding.num_cached_tokens and answer.pages.tolist() == holding.pages.tolist()
        assert answer.num_cached_tokens <= num_hit and answer.pages[: len(path)].tolist() == path.tolist()
        if answer.load is not None:
            loaded = answer.load.device_pages
            assert answer.pages[len(path) : len(path) + len(loaded)].tolist() == loaded.tolist(), "a load that is not the row's"
            assert self.ledger.pending_load(holding) == answer.load.ticket
            self.copies.plan_loads.append(answer.load)
        if answer.tail_copy is not None:
            source, target, num_rows, from_host = answer.tail_copy
            self.copies.seen["tails from the host"] += from_host
            assert self.layout.lane(source) == self.layout.lane(target) and 0 < num_rows < self.layout.page_size
            assert answer.pages[holding.num_cached_tokens // self.layout.page_size] == target
            self.plan_copies.append((request, answer.tail_copy))
            self.num_copies += 1
        else:
            assert answer.num_cached_tokens % self.layout.page_size == 0
        self.matched.remove(request)
        self.running.append(request)
        request.row = answer.pages.tolist()
        request.num_issued = request.num_retired = answer.num_cached_tokens
        self.enter_plan(request, num_tokens)

    def extend(self, request, num_new_tokens):
        if request.planned or request.num_issued == len(request.contents):
            return
        decode = request.num_issued >= request.num_prompt
        if decode and self.ledger.pending_load(request.holding):
            self.copies.seen["decodes that wait for a load"] += 1
            return
        limit = len(request.contents) if decode else request.num_prompt
        num_tokens = min(request.num_issued + (1 if decode else num_new_tokens), limit)
        num_pages = self.layout.num_pages(num_tokens) - len(request.row)
        before, others = self.state(), self.unreachable(request.holding)
        answer = self.ledger.extend(request.holding, num_tokens, decode=decode, lane_tokens=np.zeros(self.layout.cp_size, np.int64))
        if isinstance(answer, Shortfall):
            self.check_shortfall(answer, before, num_pages, others)
            return
        self.note_eviction(before)
        assert len(answer) == max(num_pages, 0)
        request.row += answer.tolist()
        self.enter_plan(request, num_tokens)
        if decode and num_tokens < len(request.contents):
            self.look_ahead(request, num_tokens)

    def look_ahead(self, request, num_tokens):
        """Room for one page is made in the lane in which the request grows, and only if that lane has none to give."""
        home, before = request.holding.home_lane, self.state()
        self.ledger.look_ahead(request.holding, num_tokens)
        num_evicted = np.array(before["device"]["cached"]) - np.array(self.state()["device"]["cached"])
        if num_evicted.any():
            self.note_eviction(before)
            self.num_looked_ahead += 1
            assert num_tokens == len(request.row) * self.layout.page_size and num_evicted[home] == 1
            assert before["device"]["free"][home] <= self.num_promised(home)

    def num_promised(self, lane):
        return sum(int(promise.lanes[lane]) for promise in self.ledger._supply._promises.values())

    def publish(self, request):
        known = self.key(request.tokens[: request.num_known])
        change = self.ledger.publish(request.holding, known)
        self.inserted.append((request.namespace, known[: len(known) // self.layout.page_size * self.layout.page_size]))
        if change is not None:
            request.row[change.first_page : change.first_page + len(change.pages)] = change.pages.tolist()
            self.num_changes += 1
        assert request.row == request.holding.pages.tolist()

    def release(self, request, num_kept):
        """num_kept: tokens to leave in the tree, at most the known ones. Waits for the slot's last step, as the scheduler does."""
        if request.last_step > self.last_retired:
            return
        if request.planned:  # aborted before its plan was issued
            self.plan_entries.remove(request)
            self.plan_copies = [copy for copy in self.plan_copies if copy[0] is not request]
        key = self.key(request.tokens[: min(num_kept, request.num_known)])
        self.ledger.release(request.holding, key)
        self.inserted.append((request.namespace, key))
        self.running.remove(request)

    def issue(self):
        if len(self.outstanding) == 2:
            return
        self.step += 1
        backups = self.copies.plan_starts()
        self.pool[self.ledger.drain_reusable()] = POISON
        self.ledger.issued(self.step)
        for _, (source, target, num_rows, from_host) in self.plan_copies:
            self.pool[target, :num_rows] = (self.copies.host if from_host else self.pool)[source, :num_rows]
        self.copies.loads_begin()
        self.copies.backups_begin([order for order in backups if order.is_written])
        for request in self.plan_entries:
            self.write(request, request.num_issued, request.planned)
            request.num_issued, request.planned, request.last_step = request.planned, 0, self.step
        self.copies.backups_begin([order for order in backups if not order.is_written])
        self.copies.wait_for(max([self.ledger.pending_load(request.holding) for request in self.plan_entries], default=0))
        reads = [Read(request, np.array(request.row), request.num_issued) for request in self.plan_entries]
        for read in reads:
            assert read.row.tolist() == read.request.holding.pages.tolist()
            self.check_read(read)
        self.outstanding.append((self.step, reads, self.plan_copies))
        self.plan_entries, self.plan_copies = [], []

    def retire(self):
        if not self.outstanding:
            return
        step, reads, copies = self.outstanding.pop(0)
        for read in reads:
            self.check_read(read)
            read.request.num_retired = max(read.request.num_retired, read.num_rows)
        for request, (source, _, num_rows, from_host) in copies:  # a slow rank copies only now
            start = request.holding.num_cached_tokens - num_rows
            assert (self.copies.host if from_host else self.pool)[source, :num_rows].tolist() == request.contents[start : start + num_rows].tolist()
        self.ledger.retired(step)

    def flush(self):
        if not self.matched and not self.running and not self.ledger.has_open_tickets():
            assert not self.copies.open and not self.copies.plan_loads
            self.ledger.flush()
            self.inserted.clear()

    # the model

    @property
    def last_retired(self):
        return self.outstanding[0][0] - 1 if self.outstanding else self.step

    def enter_plan(self, request, num_tokens):
        request.planned = num_tokens
        if num_tokens <= request.num_prompt:
            self.ledger.plan_backup(request.holding, self.key(request.tokens[: request.num_prompt]), num_tokens)
        self.plan_entries.append(request)

    def write(self, request, start, stop):
        positions = np.arange(start, stop)
        pages = np.array(request.row)[positions // self.layout.page_size]
        assert (pages >= self.layout.cp_size).all()
        shared = np.isin(pages, request.holding.pages[: request.holding.num_tree_pages])
        assert not shared.any(), "a page of the tree is written"
        self.pool[pages, positions % self.layout.page_size] = request.contents[start:stop]

    def check_read(self, read):
        held = self.pool[read.row].reshape(-1)[: read.num_rows]
        expected = read.request.contents[: read.num_rows]
        assert np.array_equal(held, expected), f"rows hold {held.tolist()}, not {expected.tolist()} (pages {read.row.tolist()})"

    def check_tree(self):
        """Each node's pages hold exactly its key, on both tiers; a page that is being loaded does so on the host."""
        dtype = self.key(np.zeros(0, np.int32)).dtype
        residency = self.ledger._host.residency if self.has_host else None
        for root in self.ledger._tree.roots().values():
            stack = list(root.children)
            while stack:
                node = stack.pop()
                stack += node.children
                key = np.frombuffer(node.key, dtype)
                there = ~self.copies.is_loading(node.pages)
                self.check_rows(node, key, node.pages, np.flatnonzero(there), self.pool)
                if residency is not None:
                    copies = np.concatenate((residency.copy[node.pages] * (residency.state[node.pages] == READY), node.host_pages))
                    self.copies.check_visible(copies)
                    self.check_rows(node, key, copies, np.flatnonzero(copies), self.copies.host)
                    assert residency.is_ready(node.pages[~there]).all()

    def check_rows(self, node, key, pages, indices, pool):
        size = self.layout.page_size
        for index in indices.tolist():
            expected = key[index * size : (index + 1) * size]
            held = pool[pages[index]][: len(expected)]
            assert np.array_equal(held, expected), f"node {node.id}: page {pages[index]} holds {held.tolist()}, not {expected.tolist()}"

    def device_path(self, holding):
        """Device pages of the hit by now."""
        return holding.lease.path_pages(holding.lease.root)[0]

    def state(self):
        return self.ledger.snapshot() | {"available": self.ledger.available().tolist()}

    def note_eviction(self, before):
        num_evicted = sum(before["device"]["cached"]) - sum(self.state()["device"]["cached"])
        if num_evicted > 0:
            self.ever_evicted = True
            self.num_evicted += num_evicted

    def unreachable(self, holding):
        """Pages that nothing can give to this holding now: private pages of all, and the tree's that leases protect, but for the source."""
        tree = self.ledger._tree
        sources = [] if holding.source is None else [holding.source.node]
        evictable = tree.evictable_without(sources + list(tree.loads().values()))
        device = self.ledger.snapshot()["device"]
        return sum(device["held"]) + sum(device["cached"]) - int(evictable.sum())

    def check_shortfall(self, answer, before, num_pages, num_unreachable):
        after = self.state()
        total = sum(before["device"]["total"])
        if answer.pending:
            self.num_pending += 1
            tickets = sum(after["device"]["tickets"])
            assert tickets > 0 or self.ledger._tree.loads(), "told to wait, but nothing will become reusable"
            self.copies.seen["waits with parked pages"] += int(self.ledger._allocator.is_parked(np.arange(len(self.pool))).sum())
            assert num_pages <= total - num_unreachable
            self.note_eviction(before)
        else:
            assert after == before, "a real shortage changed something"
            assert num_pages > total - num_unreachable, "refused although it fits"
