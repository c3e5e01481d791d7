"""The kits themselves can fail: an audit that never complains would hide every leak."""
import copy

import pytest

from kits.audit import assert_clean, assert_conserved, assert_empty, leaks, wait_idle
from kits.canary import Canary
from kits.server import Server, ServerFailed, free_port, parse_sse

IDLE = {
    "page_size": 16, "cp_size": 2,
    "device": {"total": [9, 9], "free": [7, 9], "cached": [2, 0], "held": [0, 0], "tickets": [0, 0]},
    "host": {"total": [0, 0], "free": [0, 0], "cached": [0, 0], "held": [0, 0], "tickets": [0, 0]},
    "slots": {"total": 4, "free": 4}, "leases": 0, "requests": 0, "fallbacks": {"tail_copy_skipped": 0},
}


def changed(**changes):
    """IDLE with values replaced: device__held=[1, 0]."""
    ledger = copy.deepcopy(IDLE)
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = ledger
        for folder in folders:
            place = place[folder]
        place[name] = value
    return ledger


def test_an_idle_ledger_is_clean():
    assert leaks(IDLE) == []
    assert_clean(IDLE)


@pytest.mark.parametrize("changes", [
    {"device__held": [1, 0], "device__free": [6, 9]},
    {"device__tickets": [0, 1], "device__free": [7, 8]},
    {"device__free": [6, 9]},  # a page in no class
    {"device__cached": [3, 0]},  # a page in two classes
    {"device__free": [8, 9], "device__cached": [1, 0], "host__held": [1, 0]},
    {"device__free": [10, 9], "device__cached": [-1, 0]},
    {"device__free": [16]},  # a lane is missing
    {"slots__free": 3}, {"leases": 1}, {"requests": 1},
    {"fallbacks__tail_copy_skipped": 1}, {"fallbacks__something_quiet": 0},
])
def test_a_ledger_that_is_not_clean(changes):
    with pytest.raises(AssertionError):
        assert_clean(changed(**changes))


def test_named_fallbacks_are_allowed():
    assert_clean(changed(fallbacks__tail_copy_skipped=3), allowed_fallbacks=["tail_copy_skipped"])


def test_empty_means_no_cached_page():
    with pytest.raises(AssertionError, match="not all free"):
        assert_empty(IDLE)
    assert_empty(changed(device__free=[9, 9], device__cached=[0, 0]))


class Ledgers:
    """Shows one ledger after the other; the last one forever."""

    def __init__(self, *ledgers):
        self._ledgers = list(ledgers)

    def kv_ledger(self):
        return self._ledgers.pop(0) if len(self._ledgers) > 1 else self._ledgers[0]


def test_wait_idle_waits_then_gives_up():
    busy = changed(requests=1)
    assert wait_idle(Ledgers(busy, busy, IDLE)) == IDLE
    with pytest.raises(AssertionError, match="requests = 1"):
        wait_idle(Ledgers(busy), timeout_s=0.1)
    assert_conserved(busy)


class Answers:
    """Answers every prompt with the same ids."""

    def __init__(self, output_ids):
        self.output_ids = output_ids

    def generate(self, prompt, **sampling):
        return {"output_ids": self.output_ids}


def test_canary_sings_when_an_answer_changes():
    canary = Canary.record(Answers([1, 2, 3]))
    canary.check(Answers([1, 2, 3]))
    with pytest.raises(AssertionError, match="changed"):
        canary.check(Answers([1, 2, 4]))
    with pytest.raises(AssertionError, match="empty"):
        Canary.record(Answers([]))


def test_sse_parser_takes_a_good_stream():
    assert list(parse_sse(iter(['data: {"a": 1}', "", 'data: {"a": 2}', "", "data: [DONE]", ""]))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("lines", [
    ['data: {"a": 1}', ""],  # no [DONE]
    ['data: {"a": 1}', "data: [DONE]", ""],  # no blank line between
    ["data: [DONE]", "", 'data: {"a": 1}', ""],  # goes on after the end
    ["event: x", "", "data: [DONE]", ""],
    ["data: [DONE]"],
])
def test_sse_parser_refuses(lines):
    with pytest.raises(AssertionError):
        list(parse_sse(iter(lines)))


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ServerFailed, match=r"(?s)exit code 2.*no-such-flag"), Server("--no-such-flag"):
        pytest.fail("it started")


def test_free_ports_differ_from_zero():
    assert 0 < free_port() < 65536
