"""The host tier's promises, one scenario each. Random sequences with contents are in test_kv_ledger_random."""
import itertools

import numpy as np
import pytest

from kits.ledger_planner import Planner, host, key_of
from sglane.mem_cache.kv_ledger import KVLedger, LedgerError, Shortfall
from sglane.mem_cache.page_hash import page_hashes
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import bigram_key
from sglane.utils import fallback


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("bigram_keys", [False, True])
def test_what_leaves_the_device_is_found_on_the_host(cp_size, bigram_keys):
    """A device miss and a host hit, loaded into pages of the same lanes in the same order."""
    planner = Planner(16, 32, cp_size, bigram_keys=bigram_keys)
    key = bigram_key(key_of(0, 42)) if bigram_keys else key_of(0, 41)
    assert vars(planner.compute(key)) == {"device": 0, "host": 0}
    leaf = next(iter(planner.ledger._tree.leaves().leaves.values()))
    owners = planner.layout.lanes(leaf.path_pages(leaf.root)[0])[:10].tolist()
    other = key_of(10_000, 10_065)
    planner.compute(bigram_key(other) if bigram_keys else other[:64])
    holding, answer, found = planner.admit(key)
    assert vars(found) == {"device": 0, "host": 40} and planner.layout.lanes(answer.load.device_pages).tolist() == owners
    assert answer.pages[:10].tolist() == answer.load.device_pages.tolist() and answer.num_cached_tokens == 40
    assert planner.ledger.pending_load(holding) == answer.load.ticket
    planner.issue([answer.load])
    planner.end()
    assert planner.ledger.pending_load(holding) == 0
    planner.retire()
    planner.ledger.release(holding, key)
    assert planner.ledger.host_report()["hits_host_tokens"] == planner.ledger.host_report()["load_tokens"] == 40
    planner.finish()


@pytest.mark.parametrize("chunk", [4, 6, 8, 40, 100])
def test_a_prompt_in_many_chunks_is_on_the_host_completely(chunk):
    """Every completed page is backed up once, in however many chunks it came."""
    planner = Planner(16, 32)
    planner.compute(key_of(0, 41), chunk)
    assert host(planner, "cached") == 11  # the tail as a whole page too
    assert planner.ledger.host_report()["backup_tokens"] == 44 and planner.ledger.host_report()["backup_duplicates"] == 0
    planner.push_out(16)
    assert vars(planner.compute(key_of(0, 41))) == {"device": 0, "host": 40}
    planner.finish()


def test_records_are_found_by_what_they_hold():
    """As twins, and when the device has lost its pages; a page that is not backed up yet has no record."""
    planner = Planner(16, 32)
    key = key_of(0, 42)
    planner.compute(key)
    names = page_hashes(key, "", planner.layout)
    records = planner.ledger.host_records(key, "")
    assert list(records) == names and len(set(records.values())) == 10
    planner.push_out(16)
    assert planner.ledger.host_records(np.concatenate([key[:20], key_of(500, 520)]), "") == {name: records[name] for name in names[:5]}
    assert planner.ledger.host_records(key, "other") == {}
    planner.finish()


def test_repeated_prompts_reserve_once():
    planner = Planner(32, 32)
    planner.compute(key_of(0, 40))
    before = host(planner, "free")
    first, _, _ = planner.admit(key_of(0, 60))
    second, _, _ = planner.admit(key_of(0, 60))
    planner.ledger.plan_backup(first, key_of(0, 60), 60)
    planner.issue()
    planner.ledger.publish(first, key_of(0, 60))
    planner.ledger.plan_backup(second, key_of(0, 60), 60)  # the tree has these pages by now
    assert before - host(planner, "free") == 5 and not planner.ledger.take_backups()
    planner.ledger.publish(second, key_of(0, 60))
    planner.retire()
    planner.end()
    for holding in (first, second):
        planner.ledger.release(holding, key_of(0, 60))
    assert planner.ledger.host_report()["backup_duplicates"] == 0
    planner.finish()


@pytest.mark.parametrize("ended_before", [False, True])
def test_of_two_copies_one_is_given_up_and_counted(ended_before):
    planner = Planner(32, 32)
    holdings = [planner.admit(key_of(0, 21))[0] for _ in range(2)]
    for holding in holdings:
        planner.ledger.plan_backup(holding, key_of(0, 21), 21)
    planner.issue()
    if ended_before:
        planner.end()
        assert host(planner, "held") == 10
    for holding in holdings:
        planner.ledger.publish(holding, key_of(0, 21))
        planner.ledger.audit()
    planner.end()
    planner.retire()
    assert host(planner, "cached") == 5 and planner.ledger.host_report()["backup_duplicates"] == 5
    for holding in holdings:
        planner.ledger.release(holding, key_of(0, 21))
    planner.finish()


def test_a_copy_is_found_only_when_all_lanes_have_ended():
    """Lanes end in any order, and each counts."""
    for order in itertools.permutations(range(4)):
        planner = Planner(16, 16, cp_size=4)
        holding, _, _ = planner.admit(key_of(0, 17))
        planner.ledger.plan_backup(holding, key_of(0, 17), 17)
        planner.issue()
        planner.ledger.publish(holding, key_of(0, 17))
        planner.retire()
        parts = [planner.open[index] for index in order]
        assert sorted(lane for _, lane in parts) == [0, 1, 2, 3]
        for part in parts:
            assert host(planner, "cached") == 0 and planner.ledger.has_open_tickets()
            planner.end(planner.open.index(part))
        assert planner.ledger.snapshot()["host"]["cached"] == [1, 1, 1, 1] and not planner.ledger.has_open_tickets()
        planner.ledger.release(holding, key_of(0, 16))
        planner.finish()


def test_a_ticket_that_is_not_open_and_a_lane_without_a_part_raise():
    planner = Planner(16, 16, cp_size=2)
    holding, _, _ = planner.admit(key_of(0, 5), num_tokens=5)
    planner.ledger.plan_backup(holding, key_of(0, 5), 5)
    planner.issue()
    order, lane = planner.open[0]
    for ticket, speaker in ((order.ticket + 1, lane), (order.ticket, 1 - lane)):
        with pytest.raises(LedgerError, match=f"lane {speaker} .*ticket {ticket}"):
            planner.ledger.ticket_ended(ticket, speaker)
    planner.end()
    with pytest.raises(LedgerError, match="not open"):
        planner.ledger.ticket_ended(order.ticket, lane)
    with pytest.raises(LedgerError, match="no host tier"):
        KVLedger(PageLayout(4, 1), 5, 1).ticket_ended(1, 0)


def test_evicted_before_its_backup_has_ended():
    """The page is not reusable before the copy has ended, and whoever waits for it is told to ask again."""
    planner = Planner(8, 8)
    holding, _, _ = planner.admit(key_of(0, 32))
    planner.ledger.plan_backup(holding, key_of(0, 32), 32)
    planner.issue()
    planner.retire()
    planner.ledger.release(holding, key_of(0, 32))
    before = fallback.counts()["host_backup_dropped"]
    other, answer, _ = planner.admit(key_of(100, 112))
    assert isinstance(answer, Shortfall) and answer.pending and fallback.counts()["host_backup_dropped"] == before + 3
    assert planner.ledger.snapshot()["device"]["tickets"] == [3] and host(planner, "tickets") == 8
    for _ in range(2):
        assert planner.ledger.admit(other, 12, np.zeros(1, np.int64)).pending
    planner.end()
    assert planner.ledger.snapshot()["device"]["tickets"] == [0] and host(planner, "free") == 3
    assert not isinstance(planner.ledger.admit(other, 12, np.zeros(1, np.int64)), Shortfall)
    assert planner.ledger.host_report()["dropped_tokens"]["evicted_before_end"] == 12
    planner.ledger.release(other, key_of(0, 0))
    planner.finish()


@pytest.mark.parametrize("order", list(itertools.permutations(("release", "retire", "backup"))))
@pytest.mark.parametrize("second", [False, True])
def test_evicting_all_empties_the_device_in_every_order_of_ends(order, second):
    """Leases of requests, and tickets of backups, end in any order."""
    planner = Planner(16, 16, cp_size=2)
    key = key_of(0, 31)
    holding, _, _ = planner.admit(key)
    planner.ledger.plan_backup(holding, key, 31)
    planner.issue()
    planner.ledger.publish(holding, key)
    waiting = planner.ledger.match(key, "", 30) if second else None
    verbs = {"release": lambda: planner.ledger.release(holding, key), "retire": planner.retire, "backup": planner.end}
    for name in order:
        verbs[name]()
        planner.ledger.audit()
    if waiting is not None:
        planner.ledger.cancel(waiting)
    planner.ledger.audit()
    cached = planner.ledger._tree.cached_counts()
    assert (planner.ledger._tree.evictable_counts() == cached).all() and cached.sum() == 8
    planner.push_out(16)
    assert not planner.ledger._tree.cached_counts().any()
    planner.finish()


def test_the_source_of_a_load_stays_while_room_is_made():
    """Device and host are full, and the load itself has to evict."""
    planner = Planner(16, 24)
    prompts = [key_of(start, start + 41) for start in (0, 1000, 2000)]
    for number in range(40):
        found = planner.compute(prompts[(0, 1, 0, 2)[number % 4]])
        assert host(planner, "free") <= 2 or number < 2
        if number > 1 and number % 2 == 0:
            assert found.device + found.host == 40 and found.host >= 20
    assert planner.ledger.host_report()["load_tokens"] > 400
    planner.finish()


def test_host_room_is_made_by_twins_of_device_pages():
    """All pages on both tiers, host as large as the device; one more prompt is backed up."""
    planner = Planner(16, 16)
    for start in (0, 1000, 2000, 3000):
        planner.compute(key_of(start, start + 16))
    assert host(planner, "free") == 0 and planner.ledger.snapshot()["device"]["free"] == [0]
    before = fallback.counts()["host_backup_skipped"]
    planner.compute(key_of(4000, 4016))
    assert fallback.counts()["host_backup_skipped"] == before and host(planner, "cached") == 16
    assert planner.ledger.hint(key_of(4000, 4016), "") == 16 and planner.ledger.hint(key_of(0, 16), "") == 0
    planner.finish()


def test_no_room_on_the_host_is_counted_and_the_first_pages_go_first():
    planner = Planner(16, 5)
    before = fallback.counts()["host_backup_skipped"]
    holding, _, _ = planner.admit(key_of(0, 41))
    planner.ledger.plan_backup(holding, key_of(0, 41), 41)
    (order,) = planner.issue()
    assert sorted(order.device_pages.tolist()) == sorted(holding.pages[:5].tolist())
    assert fallback.counts()["host_backup_skipped"] == before + 1
    assert planner.ledger.host_report()["dropped_tokens"]["no_room"] == 20
    planner.end()
    planner.retire()
    planner.ledger.release(holding, key_of(0, 0))
    planner.finish()


def test_a_lane_that_cannot_take_a_load_cuts_the_hit_to_its_device_part():
    """Pages enough in all, none in the lane of a page that is to be loaded."""
    planner = Planner(16, 32, cp_size=2)
    planner.compute(key_of(0, 17))
    planner.push_out(16)
    elsewhere = np.array([1 << 20, 0])
    blocker = planner.ledger.match(key_of(500, 600), "", 0)
    planner.ledger.admit(blocker, 4, elsewhere)
    for end in range(8, 33, 4):  # all pages of lane 1
        planner.ledger.extend(blocker, end, decode=True, lane_tokens=elsewhere)
    before = fallback.counts()["load_back_skipped"]
    holding, answer, found = planner.admit(key_of(0, 17))
    assert vars(found) == {"device": 0, "host": 16} and answer.load is None and answer.num_cached_tokens == 0 == holding.num_cached_host
    assert fallback.counts()["load_back_skipped"] == before + 1 and len(answer.pages) == 5
    planner.issue()
    planner.ledger.publish(holding, key_of(0, 17))  # gives the host-only pages the pages that were computed, whatever their lanes
    planner.ledger.audit()
    planner.retire()
    assert planner.ledger.hint(key_of(0, 17), "") == 17 and planner.ledger.host_report()["backup_duplicates"] == 0
    planner.ledger.release(holding, key_of(0, 17))
    planner.ledger.release(blocker, key_of(0, 0))
    planner.push_out(16)
    assert vars(planner.compute(key_of(0, 17))) == {"device": 0, "host": 16}
    planner.finish()


def test_a_second_hit_finds_loading_pages_and_an_abort_does_not_end_the_load():
    planner = Planner(16, 32)
    planner.compute(key_of(0, 33))
    planner.push_out(16)
    first, answer, _ = planner.admit(key_of(0, 33))
    second, other, found = planner.admit(key_of(0, 35))
    assert vars(found) == {"device": 32, "host": 1} and other.load is None  # the tail page was left on the host
    assert planner.ledger.pending_load(second) == answer.load.ticket
    assert other.tail_copy is not None and other.tail_copy.from_host
    planner.issue([answer.load])
    planner.retire()
    for holding in (first, second):
        planner.ledger.release(holding, key_of(0, 0))
    planner.ledger.audit()
    with pytest.raises(LedgerError, match="copies are under way"):
        planner.ledger.flush()
    big, short, _ = planner.admit(key_of(700, 764))  # the whole device: the load will let go of its pages
    assert isinstance(short, Shortfall) and short.pending
    planner.end()
    assert not isinstance(planner.ledger.admit(big, 64, np.zeros(1, np.int64)), Shortfall)
    planner.ledger.release(big, key_of(0, 0))
    planner.finish()


@pytest.mark.parametrize("num_stored", range(1, 14))
@pytest.mark.parametrize("suffix", [1, 3, 5])
def test_every_split_of_a_prefix_between_the_tiers(num_stored, suffix):
    """Stored length, and device part of any length; whole pages are loaded from where the device part ends, the rest is copied."""
    for num_evicted in range(planner_pages(num_stored) + 1):
        planner = Planner(12, 24)
        planner.compute(key_of(0, num_stored))
        if num_evicted:
            planner.push_out(12 - planner_pages(num_stored) + num_evicted)
        key = np.append(key_of(0, num_stored), key_of(100, 100 + suffix))
        holding, answer, found = planner.admit(key)
        num_on_device = min((planner_pages(num_stored) - num_evicted) * 4, num_stored)
        assert vars(found) == {"device": num_on_device, "host": num_stored - num_on_device}
        num_loaded = num_stored // 4 - num_on_device // 4 if num_evicted else 0
        assert (0 if answer.load is None else len(answer.load.host_pages)) == num_loaded
        assert (answer.tail_copy is not None) == bool(num_stored % 4) and answer.num_cached_tokens == num_stored
        if answer.tail_copy is not None:
            assert answer.tail_copy.from_host == bool(num_evicted) and answer.tail_copy.num_tokens == num_stored % 4
            assert answer.tail_copy.dst_page == answer.pages[num_stored // 4]
        planner.issue([] if answer.load is None else [answer.load])
        planner.retire()
        planner.end()
        planner.ledger.release(holding, key)
        planner.finish()


def planner_pages(num_tokens):
    return -(-num_tokens // 4)


def test_a_host_page_that_a_tail_copy_reads_is_not_reused_before_the_step_has_retired():
    planner = Planner(8, 2, record_reusable=True)
    planner.compute(key_of(0, 6))  # one page and a tail: the host is full
    planner.push_out(8)
    holding, answer, found = planner.admit(np.append(key_of(0, 6), key_of(50, 53)))
    assert vars(found) == {"device": 0, "host": 6} and answer.tail_copy.from_host
    planner.issue([answer.load])
    planner.end()
    other, _, _ = planner.admit(key_of(300, 304))
    planner.ledger.drain_reusable_host()
    planner.ledger.plan_backup(other, key_of(300, 304), 4)
    assert answer.tail_copy.src_page not in planner.ledger.drain_reusable_host()
    assert host(planner, "tickets") == 1 and not planner.ledger.take_backups()  # it is given up, and waits for the step
    planner.retire()
    assert planner.ledger.drain_reusable_host().tolist() == [answer.tail_copy.src_page]
    planner.ledger.plan_backup(other, key_of(300, 304), 4)
    assert len(planner.ledger.take_backups()) == 1


def test_only_what_was_hit_often_enough_is_backed_up():
    planner = Planner(16, 16, min_hits=2)
    planner.compute(key_of(0, 17), chunk=8)  # its own chunks are no hits
    assert planner.compute(key_of(0, 17)).device == 16 and host(planner, "cached") == 0
    assert planner.compute(np.append(key_of(0, 9), key_of(70, 75))).device == 9 and host(planner, "cached") == 2
    assert planner.compute(key_of(0, 17)).device == 16 and host(planner, "cached") == 4
    planner.finish()


def test_a_demand_for_the_gap_evicts_the_gap():
    """With demotion: what is evicted is still found."""
    planner = Planner(64, 64)
    planner.compute(key_of(0, 40))
    planner.compute(key_of(1000, 1120))
    planner.push_out(30)
    assert planner.ledger.snapshot()["device"]["cached"] == [34]
    assert vars(planner.compute(key_of(0, 40))) == {"device": 16, "host": 23}
    planner.finish()


def test_late_tickets_never_stop_progress():
    """Every copy ends two plans late; 30 prompts that each need most of the device all get their pages."""
    planner = Planner(16, 16, cp_size=2)
    for number in range(30):
        key = key_of(1000 * (number % 4), 1000 * (number % 4) + 49)
        holding = planner.ledger.match(key, "", 48)
        for _ in range(8):
            answer = planner.ledger.admit(holding, 49, np.zeros(2, np.int64))
            if not isinstance(answer, Shortfall):
                break
            assert answer.pending
            planner.settle()
        assert not isinstance(answer, Shortfall), "the request never got its pages"
        planner.ledger.plan_backup(holding, key, 49)
        planner.issue([] if answer.load is None else [answer.load])
        planner.retire()
        planner.ledger.release(holding, key)
    planner.finish()


def test_host_pages_of_a_waiting_hit_are_not_evicted():
    """The hit is leased at match; other prompts then want the host's room."""
    planner = Planner(16, 8)
    planner.compute(key_of(0, 33))
    planner.push_out(16)
    waiting = planner.ledger.match(key_of(0, 33), "", 32)
    assert waiting.num_cached_host == 32
    for start in (1000, 2000):
        planner.compute(key_of(start, start + 20))
        assert host(planner, "cached") == 8 and planner.ledger.hint(key_of(0, 33), "") == 32
    planner.ledger.cancel(waiting)
    planner.compute(key_of(3000, 3020))
    assert planner.ledger.hint(key_of(0, 33), "") < 32
    planner.finish()


def test_the_first_rows_of_a_page_that_is_loading_are_copied_from_the_host():
    planner = Planner(16, 32)
    planner.compute(key_of(0, 33))
    planner.push_out(16)
    first, answer, _ = planner.admit(key_of(0, 33))
    second, other, found = planner.admit(np.append(key_of(0, 18), key_of(70, 73)))
    assert vars(found) == {"device": 16, "host": 2} and other.load is None
    assert other.tail_copy.from_host and other.tail_copy.src_page == answer.load.host_pages[4]
    planner.issue([answer.load])
    planner.end()
    third, other, found = planner.admit(np.append(key_of(0, 18), key_of(80, 83)))
    assert vars(found) == {"device": 18, "host": 0} and not other.tail_copy.from_host and other.tail_copy.src_page == answer.load.device_pages[4]
    planner.issue()
    planner.retire()
    for holding in (first, second, third):
        planner.ledger.release(holding, key_of(0, 0))
    planner.finish()


def test_a_lease_far_below_the_device_part_pins_it():
    """The last node on the device is neither the leased node nor its parent."""
    planner = Planner(32, 64)
    for length in (16, 32, 48):
        planner.compute(np.append(key_of(0, length), key_of(500 + length, 505 + length)))
    planner.compute(key_of(0, 57))
    planner.push_out(28)
    on_device = int(planner.ledger._tree.cached_counts().sum())
    waiting = planner.ledger.match(key_of(0, 57), "", 56)
    assert 0 < waiting.num_cached_device <= 16 and len(waiting.lease.path_from(waiting.lease.root)) > 3
    planner.ledger.audit()
    assert planner.ledger._tree.evictable_counts().sum() == on_device - waiting.num_cached_device // 4
    planner.ledger.cancel(waiting)
    planner.ledger.audit()
    assert planner.ledger._tree.evictable_counts().sum() == on_device
    planner.finish()


def test_orders_say_whether_their_rows_are_of_earlier_steps():
    planner = Planner(16, 32)
    holding, _, _ = planner.admit(key_of(0, 13))
    planner.ledger.plan_backup(holding, key_of(0, 13), 13)
    (order,) = planner.issue()
    assert not order.is_written and sorted(order.device_pages.tolist()) == sorted(holding.pages[:3].tolist())
    planner.retire()
    planner.ledger.release(holding, key_of(0, 13))
    (order,) = planner.issue()
    assert order.is_written and len(order.device_pages) == 1  # the tail
    planner.end()
    planner.retire()
    planner.finish()
