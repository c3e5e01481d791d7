"""The whole ledger under random operation sequences, audited after each, against the contents of pages (kits.ledger_world)."""
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.ledger_world import LedgerWorld
from sglane.mem_cache.kv_ledger import HostOptions

OPS = (
    "match", "match", "cancel", "admit", "admit", "extend", "extend", "extend", "publish", "publish", "release",
    "issue", "issue", "retire", "retire", "flush",
)


def run(world, ops, num_families=1):
    """Each op is (name, seed); names that make no sense at the moment do nothing. num_families: of prompts that have nothing in common."""
    for name, seed in ops:
        rng = np.random.default_rng(seed)

        def pick(requests, rng=rng):
            return requests[rng.integers(len(requests))] if requests else None

        request = pick(world.matched if name in ("cancel", "admit") else world.running)
        if name == "match" and len(world.matched) < 3:
            num_prompt = int(rng.integers(1, 5 * world.layout.page_size + 6))
            # Long common beginnings, a few places to part, and generated tokens that coincide often.
            tokens = (np.arange(60 + num_prompt) % 7).astype(np.int32)
            changed = rng.integers(0, len(tokens), 2)
            tokens[changed[rng.random(2) < 0.5]] = 9
            namespace = "" if rng.random() < 0.8 else "other"
            world.match(tokens + np.int32(100 * rng.integers(num_families)), num_prompt, namespace)
        elif name == "issue":
            world.issue()
        elif name == "retire":
            world.retire()
        elif name == "copy":
            world.copies.some(rng)
        elif name == "end":
            world.copies.end_one(rng)
        elif name == "flush":
            world.flush()
        elif request is not None and name == "cancel":
            world.cancel(request)
        elif request is not None and name == "admit":
            world.admit(request, int(rng.integers(1, 3 * world.layout.page_size + 3)))
        elif request is not None and name == "extend":
            world.extend(request, int(rng.integers(1, 2 * world.layout.page_size + 3)))
        elif request is not None and name == "publish":
            world.publish(request)
        elif request is not None and name == "release":
            world.release(request, int(rng.choice([0, request.num_known, rng.integers(0, request.num_known + 1)])))
        world.ledger.audit()
        world.check_tree()
    finish(world)


def finish(world):
    """Everything ends; the ledger is empty after a flush."""
    end_everything(world)
    for request in list(world.matched):
        world.cancel(request)
    for request in list(world.running):
        world.release(request, request.num_known)
        world.ledger.audit()
    end_everything(world)
    world.check_tree()
    assert not world.running and not world.ledger.has_open_tickets()
    state = world.ledger.snapshot()
    assert state["leases"] == state["requests"] == 0 and state["slots"]["free"] == state["slots"]["total"]
    for tier in ("device", "host"):
        assert not any(state[tier]["held"]) and not any(state[tier]["tickets"])
    world.flush()
    world.ledger.audit()
    after = world.ledger.snapshot()
    assert all(after[tier]["free"] == state[tier]["total"] for tier in ("device", "host"))


def end_everything(world):
    """All that is planned is issued, all that is under way comes to its end. Twice: what it makes ready may be ordered then."""
    for _ in range(2):
        while world.outstanding:
            world.retire()
        world.issue()
        while world.outstanding:
            world.retire()
        world.copies.end_all()


HOST_OPS = (*OPS, "copy", "end", "end", "end", "match", "admit", "release")

op_lists = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 2**32 - 1)), min_size=30, max_size=100)
host_op_lists = st.lists(st.tuples(st.sampled_from(HOST_OPS), st.integers(0, 2**32 - 1)), min_size=30, max_size=120)
geometries = st.tuples(st.sampled_from([1, 4, 16]), st.integers(1, 4))


@settings(max_examples=150)
@given(geometries, st.integers(3, 8), st.booleans(), op_lists)
def test_small_pools(geometry, num_rows, bigram_keys, ops):
    page_size, cp_size = geometry
    run(LedgerWorld(page_size, cp_size, num_rows + 12 // page_size, num_slots=4, bigram_keys=bigram_keys), ops)


@settings(max_examples=50)
@given(geometries, st.booleans(), op_lists)
def test_large_pools_find_everything_that_was_inserted(geometry, bigram_keys, ops):
    page_size, cp_size = geometry
    world = LedgerWorld(page_size, cp_size, num_rows=600, num_slots=8, bigram_keys=bigram_keys)
    run(world, ops)
    assert not world.ever_evicted


@settings(max_examples=20)
@given(geometries, op_lists)
def test_without_a_prefix_cache(geometry, ops):
    page_size, cp_size = geometry
    world = LedgerWorld(page_size, cp_size, 12, num_slots=4, prefix_cache=False)
    run(world, ops)
    assert not world.num_hits and not world.num_changes


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("bigram_keys", [False, True])
def test_long_runs_meet_every_case(page_size, cp_size, bigram_keys):
    """One long fixed run for each geometry; it must have seen hits, copies, waiting, eviction and moved rows (so the random tests can fail)."""
    rng = np.random.default_rng(page_size * 10 + cp_size)
    world = LedgerWorld(page_size, cp_size, 2 + max(24 // (page_size * cp_size), 14 // cp_size), num_slots=5, bigram_keys=bigram_keys)
    names = [OPS[index] for index in rng.integers(0, len(OPS), 900)]
    run(world, [(name, int(rng.integers(2**32))) for name in names if name != "flush"])
    seen = {"hits": world.num_hits, "copies": world.num_copies, "waits": world.num_pending, "evictions": world.num_evicted,
            "moved rows": world.num_changes}
    if cp_size > 1 and page_size < 16:
        seen["pages made ready"] = world.num_looked_ahead
    if page_size == 1:
        assert not seen.pop("copies")
    assert all(seen.values()), seen


def two_tiers(geometry, num_rows, num_host_rows, min_hits, bigram_keys, ops):
    page_size, cp_size = geometry
    host = HostOptions(num_host_rows + 12 // page_size, min_hits)
    run(LedgerWorld(page_size, cp_size, num_rows + 12 // page_size, num_slots=4, bigram_keys=bigram_keys, host=host), ops, num_families=3)


two_tier_cases = given(geometries, st.integers(3, 8), st.integers(2, 12), st.integers(1, 2), st.booleans(), host_op_lists)
test_two_tiers = settings(max_examples=60)(two_tier_cases(two_tiers))
test_two_tiers_at_length = pytest.mark.slow(settings(max_examples=3000)(two_tier_cases(two_tiers)))


def long_two_tiers(page_size, cp_size, bigram_keys, min_hits, num_ops):
    """Returns what happened in one long fixed run."""
    rng = np.random.default_rng(page_size * 10 + cp_size)
    num_rows = 2 + max(24 // (page_size * cp_size), 14 // cp_size)
    world = LedgerWorld(page_size, cp_size, num_rows, num_slots=5, bigram_keys=bigram_keys, host=HostOptions(num_rows * 3 // 2, min_hits))
    names = [HOST_OPS[index] for index in rng.integers(0, len(HOST_OPS), num_ops)]
    run(world, [(name, int(rng.integers(2**32))) for name in names if name != "flush"], num_families=4)
    report = world.ledger.host_report()
    return Counter({
        "waits": world.num_pending, "evictions": world.num_evicted, **world.copies.seen,
        "backup_duplicates": report["backup_duplicates"], **report["dropped_tokens"], "load_tokens": report["load_tokens"],
    })


def test_long_runs_meet_every_case_of_two_tiers():
    seen = Counter()
    for page_size, cp_size, bigram_keys in ((1, 1, False), (1, 2, True), (4, 1, False), (4, 4, False), (16, 2, True)):
        seen += long_two_tiers(page_size, cp_size, bigram_keys, 1, 900)
    expected = {"waits", "evictions", "host hits", "tails from the host", "waits with parked pages", "decodes that wait for a load", "loads",
                "backups of rows being written", "backups of earlier rows", "late copies", "backup_duplicates", "evicted_before_end", "host_evicted",
                "load_tokens"}
    assert expected <= set(seen), f"not met: {expected - set(seen)}"


def test_pages_that_are_hit_are_backed_up_where_only_those_are():
    seen = long_two_tiers(4, 1, False, 2, 700)
    assert seen["backups of earlier rows"] and seen["loads"] and not seen["backups of rows being written"]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("bigram_keys", [False, True])
@pytest.mark.parametrize("min_hits", [1, 2])
def test_longer_runs_over_two_tiers(page_size, cp_size, bigram_keys, min_hits):
    seen = long_two_tiers(page_size, cp_size, bigram_keys, min_hits, 3000)
    assert seen["evictions"] and seen["backups of earlier rows"]
