"""The ledger's promises, one scenario each. Random sequences are in test_kv_ledger_random."""
import numpy as np
import pytest

from sglane.mem_cache.kv_ledger import KVLedger, LedgerError, Shortfall
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import bigram_key, token_key
from sglane.utils import fallback


def key_of(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def idle(ledger):
    return np.zeros(ledger.layout.cp_size, np.int64)


def ledger_of(num_pages, page_size=4, cp_size=1, **more):
    return KVLedger(PageLayout(page_size, cp_size), num_pages // cp_size + 1, num_slots=4, **more)


def admit(ledger, key, num_tokens=None, max_tokens=None):
    """Match and admit; returns (holding, answer)."""
    holding = ledger.match(key, "", len(key) - 1 if max_tokens is None else max_tokens)
    answer = ledger.admit(holding, len(key) if num_tokens is None else num_tokens, idle(ledger))
    ledger.audit()
    return holding, answer


def leave_cached(ledger, key):
    """A request that computes `key` and ends."""
    holding, _ = admit(ledger, key)
    ledger.release(holding, key)
    ledger.audit()


def counts(ledger, name):
    return ledger.snapshot()["device"][name]


def test_a_hit_is_exact_to_the_token_and_the_private_page_is_in_the_same_lane():
    ledger = ledger_of(24, cp_size=3)
    leave_cached(ledger, key_of(0, 10))
    for num_shared in range(1, 10):
        key = np.concatenate((key_of(0, num_shared), key_of(100, 103)))
        holding, admission = admit(ledger, key)
        assert admission.num_cached_tokens == holding.num_cached_tokens == num_shared
        copy = admission.tail_copy
        assert (copy is None) == (num_shared % 4 == 0)
        if copy is not None:
            assert copy.num_tokens == num_shared % 4 and ledger.layout.lane(copy.src_page) == ledger.layout.lane(copy.dst_page)
            assert admission.pages[num_shared // 4] == copy.dst_page
        ledger.release(holding, key[:0])


@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_the_same_prompt_again_hits_all_but_its_last_token(num_tokens):
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, num_tokens))
    for _ in range(3):
        holding, admission = admit(ledger, key_of(0, num_tokens))
        assert admission.num_cached_tokens == num_tokens - 1
        ledger.release(holding, key_of(0, num_tokens))
    assert counts(ledger, "cached") == [3 if num_tokens == 9 else 2]


def test_max_tokens_caps_the_hit():
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, 12))
    for limit in (-1, 0, 1, 4, 6, 11):
        holding = ledger.match(key_of(0, 12), "", limit)
        assert holding.num_cached_tokens == max(limit, 0)
        ledger.cancel(holding)


def test_publishing_moves_the_row_to_the_pages_that_came_first():
    ledger = ledger_of(12)
    first, admission = admit(ledger, key_of(0, 10))
    second, other = admit(ledger, key_of(0, 10))
    assert not set(admission.pages) & set(other.pages)
    assert ledger.publish(first, key_of(0, 10)) is None
    change = ledger.publish(second, key_of(0, 10))
    assert change.first_page == 0 and change.pages.tolist() == admission.pages[:2].tolist()
    assert second.pages.tolist() == [*admission.pages[:2], other.pages[2]]
    assert ledger.publish(second, key_of(0, 10)) is None
    ledger.audit()
    assert counts(ledger, "cached") == [2] and counts(ledger, "held") == [2]


def test_homes_follow_the_last_page_when_it_becomes_the_trees():
    ledger = ledger_of(12, cp_size=2)
    first, admission = admit(ledger, key_of(0, 8))
    second, other = admit(ledger, key_of(0, 8))
    assert [int(answer.pages[-1]) % 2 for answer in (admission, other)] == [0, 1] and ledger.lane_totals()["homes"] == [1, 1]
    ledger.publish(first, key_of(0, 8))
    ledger.publish(second, key_of(0, 8))
    ledger.audit()
    assert second.home_lane == 0 and ledger.lane_totals()["homes"] == [2, 0] and ledger.lane_totals()["home_moves"] == [0, 0]


def test_the_page_that_decoding_needs_next_is_made_free_where_the_request_grows():
    ledger = ledger_of(8, cp_size=2)
    holding, _ = admit(ledger, key_of(0, 3))
    for number in range(1, 5):
        leave_cached(ledger, key_of(100 * number, 100 * number + 8))
    while sum(ledger.free_counts()):
        leave_cached(ledger, key_of(int(sum(ledger.free_counts())) * 1000, int(sum(ledger.free_counts())) * 1000 + 4))
    ledger.issued(1)
    home, cached = holding.home_lane, counts(ledger, "cached")
    ledger.look_ahead(holding, 3)
    assert counts(ledger, "cached") == cached, "the page is not full yet"
    ledger.look_ahead(holding, 4)
    ledger.audit()
    assert counts(ledger, "cached")[home] < cached[home] and counts(ledger, "tickets")[home] > 0
    ledger.retired(1)
    pages = ledger.extend(holding, 5, decode=True, lane_tokens=idle(ledger))
    assert ledger.layout.lanes(pages).tolist() == [home]


def test_an_abort_in_the_middle_leaves_published_chunks_in_the_tree():
    for num_chunks in range(1, 6):
        ledger = ledger_of(16)
        key = key_of(0, 48)
        holding, _ = admit(ledger, key, num_tokens=8)
        for chunk in range(2, num_chunks + 1):
            ledger.publish(holding, key[: 8 * (chunk - 1)])
            ledger.extend(holding, 8 * chunk, decode=False, lane_tokens=idle(ledger))
        ledger.release(holding, key[:0])
        ledger.audit()
        assert ledger.hint(key, "") == 8 * (num_chunks - 1)
        assert counts(ledger, "held") == [0]


def test_freed_pages_wait_for_the_steps_that_may_touch_them():
    ledger = ledger_of(6, record_reusable=True)
    holding, admission = admit(ledger, key_of(0, 8))
    ledger.issued(1)
    ledger.issued(2)
    ledger.release(holding, key_of(0, 0))
    assert counts(ledger, "tickets") == [2] and counts(ledger, "free") == [4]
    ledger.retired(1)
    assert counts(ledger, "tickets") == [2] and not len(ledger.drain_reusable())
    ledger.retired(2)
    assert counts(ledger, "tickets") == [0] and sorted(ledger.drain_reusable()) == sorted(admission.pages)


def test_the_source_of_a_tail_copy_stays_until_its_step_is_issued_and_then_until_it_retires():
    ledger = ledger_of(4)
    leave_cached(ledger, key_of(0, 4))
    holding, admission = admit(ledger, np.concatenate((key_of(0, 2), key_of(50, 52))))
    assert admission.tail_copy.src_page not in admission.pages
    assert ledger.available().tolist() == [2]  # the source cannot be evicted
    ledger.issued(1)
    assert ledger.available().tolist() == [3]
    refused = ledger.extend(holding, 16, decode=False, lane_tokens=idle(ledger))  # needs the source's page too
    assert isinstance(refused, Shortfall) and refused.pending and counts(ledger, "tickets") == [1]
    ledger.retired(1)
    assert admission.tail_copy.src_page in ledger.extend(holding, 16, decode=False, lane_tokens=idle(ledger))
    ledger.audit()


@pytest.mark.parametrize("num_new_pages", [24, 25, 30])
def test_eviction_takes_the_gap_and_no_more(num_new_pages):
    ledger = ledger_of(64)
    leave_cached(ledger, key_of(1000, 1040))
    leave_cached(ledger, key_of(2000, 2120))
    assert counts(ledger, "free") == [24]
    holding, admission = admit(ledger, key_of(0, 4 * num_new_pages))
    assert len(admission.pages) == num_new_pages
    assert counts(ledger, "cached") == [40 - max(num_new_pages - 24, 0)]
    assert ledger.hint(key_of(2000, 2120), "") == 120  # the older one paid


def test_a_real_shortage_changes_nothing():
    ledger = ledger_of(8)
    leave_cached(ledger, key_of(0, 8))
    running, _ = admit(ledger, key_of(100, 112))
    before = ledger.snapshot()
    holding, answer = admit(ledger, key_of(200, 224))
    assert isinstance(answer, Shortfall) and not answer.pending and answer.free == 3
    ledger.cancel(holding)
    assert ledger.snapshot() == before
    ledger.release(running, key_of(0, 0))
    assert not isinstance(admit(ledger, key_of(200, 224))[1], Shortfall)


def test_a_full_lane_cuts_the_hit_to_the_page():
    ledger = ledger_of(4, cp_size=2)
    leave_cached(ledger, key_of(0, 6))  # pages in lanes 0 and 1
    tail = ledger.match(key_of(0, 6), "", 6).source.page
    blocker, _ = admit(ledger, key_of(100, 108))  # the other two pages
    before = fallback.counts()["tail_copy_skipped"]
    holding, admission = admit(ledger, key_of(0, 8))
    assert isinstance(admission, Shortfall)  # the first holding still leases the tail
    ledger.cancel(ledger._holdings[2])
    admission = ledger.admit(holding, 8, idle(ledger))
    ledger.audit()
    assert admission.num_cached_tokens == 4 and admission.tail_copy is None and admission.pages[1] == tail
    assert fallback.counts()["tail_copy_skipped"] == before + 1


def test_what_was_evicted_for_a_waiting_request_is_not_taken_by_the_next():
    ledger = ledger_of(8)
    leave_cached(ledger, key_of(0, 32))
    ledger.issued(1)
    big, answer = admit(ledger, key_of(100, 112))
    assert isinstance(answer, Shortfall) and answer.pending
    small, answer = admit(ledger, key_of(200, 204))
    assert isinstance(answer, Shortfall) and answer.pending
    assert counts(ledger, "tickets") == [4]  # three and one, not three for both
    ledger.retired(1)
    ledger.issued(2)
    assert not isinstance(ledger.admit(small, 4, idle(ledger)), Shortfall)
    late, answer = admit(ledger, key_of(300, 304))
    assert isinstance(answer, Shortfall) and answer.pending  # evicts for itself
    assert not isinstance(ledger.admit(big, 12, idle(ledger)), Shortfall)
    ledger.audit()
    ledger.cancel(late)


def test_asking_again_before_the_step_retires_evicts_nothing_more():
    ledger = ledger_of(8)
    leave_cached(ledger, key_of(0, 32))
    ledger.issued(1)
    holding, _ = admit(ledger, key_of(100, 112))
    for _ in range(3):
        assert ledger.admit(holding, 12, idle(ledger)).pending
    assert counts(ledger, "tickets") == [3] and counts(ledger, "cached") == [5]


def test_a_promise_never_refuses_pages_that_exist():
    ledger = ledger_of(4)
    leave_cached(ledger, key_of(0, 16))
    ledger.issued(1)
    admit(ledger, key_of(100, 116))  # waits for all four pages
    ledger.retired(1)
    assert not isinstance(admit(ledger, key_of(200, 208))[1], Shortfall)


def test_decode_keeps_its_lane_until_it_is_short():
    ledger = ledger_of(9, cp_size=3)
    holding, admission = admit(ledger, key_of(0, 4))
    home = holding.home_lane
    assert home == ledger.layout.lane(int(admission.pages[-1]))
    lanes = []
    for num_tokens in range(5, 17):
        pages = ledger.extend(holding, num_tokens, decode=True, lane_tokens=idle(ledger))
        lanes += [ledger.layout.lane(int(page)) for page in pages]
    assert lanes == [home, home, (home + 1) % 3]
    assert holding.home_lane == (home + 1) % 3


def test_enough_pages_in_total_but_not_in_the_lane_of_the_copy():
    """A refusal is about the total; the lane of a copy alone only cuts the hit."""
    ledger = ledger_of(32, cp_size=4)
    leave_cached(ledger, key_of(0, 6))
    lane = ledger.layout.lane(int(ledger.match(key_of(0, 6), "", 6).source.page))
    elsewhere = np.full(4, 1000)
    elsewhere[lane] = 0
    blocker = ledger.match(key_of(100, 130), "", 29)
    assert set(ledger.admit(blocker, 28, elsewhere).pages % 4) == {lane}
    assert ledger.free_counts()[lane] == 0 and ledger.free_counts().sum() == 23
    holding, admission = admit(ledger, key_of(0, 8))
    assert admission.num_cached_tokens == 4 and ledger.layout.lane(int(admission.pages[1])) != lane


def test_a_request_that_ends_before_its_tail_copy_is_issued_leaves_no_tail():
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, 6))
    key = np.concatenate((key_of(0, 5), key_of(50, 60)))
    holding, admission = admit(ledger, key)
    with pytest.raises(LedgerError, match="tail copy"):
        ledger.publish(holding, key)
    ledger.release(holding, key[: admission.num_cached_tokens])
    ledger.audit()
    assert counts(ledger, "cached") == [2] and counts(ledger, "held") == [0]


def test_namespaces_do_not_share():
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, 8))
    assert (ledger.hint(key_of(0, 8), ""), ledger.hint(key_of(0, 8), "salted")) == (8, 0)


def test_flush_only_when_nothing_is_held():
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, 8))
    holding = ledger.match(key_of(0, 8), "", 7)
    with pytest.raises(LedgerError, match="flush"):
        ledger.flush()
    ledger.cancel(holding)
    ledger.issued(1)
    ledger.flush()
    assert counts(ledger, "tickets") == [2] and counts(ledger, "cached") == [0]
    ledger.retired(1)
    ledger.audit()
    assert counts(ledger, "free") == [12]


@pytest.mark.parametrize("misuse", [
    lambda ledger, holding: ledger.cancel(holding),
    lambda ledger, holding: ledger.admit(holding, 20, idle(ledger)),
    lambda ledger, holding: ledger.publish(holding, key_of(0, 40)),
    lambda ledger, holding: (ledger.release(holding, key_of(0, 0)), ledger.release(holding, key_of(0, 0))),
    lambda ledger, holding: (ledger.release(holding, key_of(0, 0)), ledger.extend(holding, 20, decode=True, lane_tokens=idle(ledger))),
    lambda ledger, holding: ledger.retired(1),
    lambda ledger, holding: (ledger.issued(3), ledger.issued(3)),
])
def test_misuse_raises(misuse):
    ledger = ledger_of(12)
    holding, _ = admit(ledger, key_of(0, 8))
    with pytest.raises(LedgerError):
        misuse(ledger, holding)


def test_an_admission_without_a_slot_or_without_work_raises():
    ledger = ledger_of(40)
    leave_cached(ledger, key_of(0, 8))
    with pytest.raises(LedgerError, match="nothing to compute"):
        admit(ledger, key_of(0, 8), num_tokens=8, max_tokens=8)
    for start in range(100, 500, 100):
        admit(ledger, key_of(start, start + 4))
    assert not ledger.has_free_slot()
    with pytest.raises(LedgerError, match="slots"):
        admit(ledger, key_of(900, 904))


@pytest.mark.parametrize("bigram_keys", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_key_of_another_type_is_refused_at_every_door(bigram_keys, prefix_cache):
    """Even where nothing would be compared, and before anything is changed. An empty key has a type too."""
    ledger = ledger_of(12, bigram_keys=bigram_keys, prefix_cache=prefix_cache)
    right, wrong = (np.int64, np.int32) if bigram_keys else (np.int32, np.int64)
    key = key_of(0, 8).astype(right)
    holding, _ = admit(ledger, key)
    before = ledger.snapshot()
    for refused in (key.astype(wrong), key[:0].astype(wrong), key.astype(np.uint32), key.astype(key.dtype.newbyteorder()), key.reshape(2, 4)):
        for door in (
            lambda key: ledger.hint(key, "new"),
            lambda key: ledger.match(key, "new", 4),
            lambda key: ledger.publish(holding, key),
            lambda key: ledger.release(holding, key),
        ):
            with pytest.raises(ValueError, match=f"is {np.dtype(right)}"):
                door(refused)
            ledger.audit()
            assert ledger.snapshot() == before
    ledger.release(holding, key)
    assert ledger.hint(key, "") == (8 if prefix_cache else 0) and ledger.hint(key[:0], "") == 0


def test_token_and_bigram_ledgers_find_the_same_prefixes():
    """T known tokens are T - 1 bigrams, and two prompts that share S tokens share S - 1."""
    tokens = np.arange(20, dtype=np.int32) << 12
    other = np.concatenate((tokens[:10], tokens[:5]))
    for bigram_keys, make_key, num_hit in ((False, token_key, 10), (True, bigram_key, 9)):
        ledger = ledger_of(12, bigram_keys=bigram_keys)
        leave_cached(ledger, make_key(tokens))
        assert ledger.hint(make_key(other), "") == num_hit
        assert ledger.hint(make_key(tokens), "") == len(make_key(tokens))


def damage_page(ledger):
    ledger._holdings[2].grown(np.array([5], np.int32))


def damage_lease(ledger):
    ledger._tree.pin(ledger._holdings[2].lease)


def damage_leaf_set(ledger):
    ledger._tree.leaves().leaves.clear()


def damage_slots(ledger):
    ledger._free_slots.pop()


@pytest.mark.parametrize(("damage", "message"), [
    (damage_page, "listed more than once"), (damage_lease, "leases by node"), (damage_leaf_set, "leaf"), (damage_slots, "slots")])
def test_the_audit_names_what_is_wrong(damage, message):
    ledger = ledger_of(12)
    leave_cached(ledger, key_of(0, 8))
    holding, _ = admit(ledger, key_of(100, 108))
    ledger.audit()
    damage(ledger)
    with pytest.raises(LedgerError, match=message):
        ledger.audit()


def test_a_snapshot_adds_up():
    ledger = ledger_of(12, cp_size=2)
    leave_cached(ledger, key_of(0, 10))
    admit(ledger, np.concatenate((key_of(0, 6), key_of(50, 60))))
    state = ledger.snapshot()
    device = state["device"]
    assert [sum(lane) for lane in zip(*(device[name] for name in ("free", "cached", "held", "tickets")))] == device["total"] == [6, 6]
    assert state["host"] == {name: [0, 0] for name in device}
    assert state["leases"] == 2 and state["requests"] == 1 and state["slots"] == {"total": 4, "free": 3}
    assert ledger.num_tokens_total == 48
