"""The histogram of waiting times: buckets, first admissions only, nothing left behind."""
from sglane.managers.queue_times import BOUNDS_S, QueueTimes


def test_buckets_and_sum():
    times = QueueTimes()
    for index, wait_s in enumerate([0.0, 0.0005, 0.02, 1e6]):
        times.arrived(str(index), 100.0)
        times.admitted(str(index), 100.0 + wait_s)
    assert list(times.take_new()) == ["0", "1", "2", "3"] and times.take_new() == {}
    report = times.report()
    assert report["bounds_s"] == list(BOUNDS_S)
    assert len(report["counts"]) == len(BOUNDS_S) + 1 and sum(report["counts"]) == 4
    assert (report["counts"][0], report["counts"][3], report["counts"][-1]) == (2, 1, 1)
    assert abs(report["sum_s"] - (0.0005 + 0.02 + 1e6)) < 1e-6


def test_only_the_first_admission_counts_and_the_refused_are_forgotten():
    times = QueueTimes()
    times.arrived("a", 1.0)
    times.admitted("a", 2.0)
    times.admitted("a", 9.0)  # after a retraction
    times.arrived("b", 1.0)
    times.ended("b")
    times.ended("a")
    assert sum(times.report()["counts"]) == 1 and times.report()["sum_s"] == 1.0
    assert times.num_waiting == 0
