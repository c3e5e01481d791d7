"""What copies between device and host brought: the planner's `host_cache`."""
from kits.fake_planner import STATE
from sglane.managers.host_work import COPY_BOUNDS_S, HostWork
from sglane.mem_cache.kv_ledger import KVLedger
from sglane.mem_cache.page_layout import PageLayout

NO_HOST_TIER = KVLedger(PageLayout(4, 1), 8, 2).host_report()


def test_without_a_host_tier_all_is_zero():
    report = HostWork(0).report(NO_HOST_TIER)
    assert not report["enabled"] and not any(report["dropped_tokens"].values())
    for ticket in report["tickets"].values():
        assert (ticket["tokens"], ticket["bytes"], sum(ticket["times"]["counts"]), ticket["times"]["sum_s"]) == (0, 0, 0, 0.0)


def test_parts_add_up():
    work = HostWork(64)
    for num_bytes, duration_s in ((1000, 0.004), (500, 0.2), (0, 100.0)):
        work.ended("backup", num_bytes, duration_s)
    work.ended("load", 70, 0.001)
    ledger = {**NO_HOST_TIER, "backup_tokens": 160, "load_tokens": 16, "backup_duplicates": 3, "open_tickets": 2}
    report = work.report(ledger)
    backup, load = report["tickets"]["backup"], report["tickets"]["load"]
    assert (backup["tokens"], backup["bytes"], load["tokens"], load["bytes"]) == (160, 1500, 16, 70)
    counts = dict(zip((*COPY_BOUNDS_S, None), backup["times"]["counts"], strict=True))
    assert {bound for bound, count in counts.items() if count} == {0.005, 0.25, None} and abs(backup["times"]["sum_s"] - 100.204) < 1e-9
    assert report["backup_duplicates"] == 3 and report["open_tickets"] == 2 and report["page_bytes"] == 64 and report["enabled"]


def test_the_oldest_ticket_ages_until_another_is_the_oldest():
    work = HostWork(64)
    asked = [(0, 5.0), (0, 9.0), (3, 10.0), (3, 14.0), (4, 15.0), (4, 15.5), (0, 20.0), (4, 21.0)]
    assert [work.oldest_age_s(*question) for question in asked] == [0.0, 0.0, 0.0, 4.0, 0.0, 0.5, 0.0, 0.0]


def test_the_fake_planner_says_the_same_things():
    real, fake = HostWork(0).report(NO_HOST_TIER), STATE["host_cache"]
    assert real.keys() == fake.keys() and real["dropped_tokens"].keys() == fake["dropped_tokens"].keys()
    for kind, ticket in real["tickets"].items():
        assert ticket.keys() == fake["tickets"][kind].keys()
