"""Slower paths: declared, counted, announced once."""
import logging

import pytest

from sglane.utils import fallback


def test_counting_warns_once(monkeypatch, caplog):
    monkeypatch.setitem(fallback.DECLARED, "a_slow_path", "for a test")
    before = fallback.counts()
    with caplog.at_level(logging.WARNING):
        fallback.count("a_slow_path")
        fallback.count("a_slow_path")
    after = fallback.counts()
    assert after.pop("a_slow_path") - before.pop("a_slow_path", 0) == 2
    assert after == before
    assert [record.getMessage().count("for a test") for record in caplog.records] == [1]
    fallback._counts.pop("a_slow_path")


def test_an_undeclared_name_is_a_bug():
    with pytest.raises(KeyError, match="nobody_said_so"):
        fallback.count("nobody_said_so")
    assert "nobody_said_so" not in fallback.counts()


def test_every_declared_name_is_shown_even_when_it_was_not_taken():
    assert set(fallback.DECLARED) <= set(fallback.counts())


def test_the_shown_counts_are_a_copy():
    fallback.counts()["tail_copy_skipped"] = 99
    assert fallback.counts()["tail_copy_skipped"] != 99


def test_reports_of_ranks_are_added_and_replace_one_another(monkeypatch):
    monkeypatch.setattr(fallback, "_reported", {})
    before = fallback.counts()["cp_prefetch_late"]
    fallback.report(0, {"cp_prefetch_late": 2})
    fallback.report(1, {"cp_prefetch_late": 5, "tail_copy_skipped": 0})
    fallback.report(0, {"cp_prefetch_late": 3})
    assert fallback.counts()["cp_prefetch_late"] == before + 8
