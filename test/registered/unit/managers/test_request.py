"""The request's phase table, its tokens and its prompt log probabilities."""
import numpy as np
import pytest

from sglane.managers.request import TRANSITIONS, IllegalTransition, Phase, Request, merge_blocks
from sglane.mem_cache.kv_ledger import KVLedger
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.io_struct import FinishReason, GenerateRequest, SamplingParams
from sglane.plan.step_plan import LogprobBlock


def make(num_prompt=5, max_new=4, limit=100, **sampling):
    ids = np.arange(num_prompt, dtype=np.int32)
    params = SamplingParams(max_new_tokens=max_new, **sampling)
    return Request(GenerateRequest(rid="r", input_ids=ids.tobytes(), sampling=params, logprob_start=0), 0, limit)


def admitted(request):
    ledger = KVLedger(PageLayout(4, 1), 16, 2)
    holding = ledger.match(request.key(), "", 0)
    ledger.admit(holding, request.num_known_tokens, np.zeros(1, np.int64))
    request.admit(0, holding, 0, 0)
    return request


def in_phase(phase):
    request = make()
    if phase is Phase.FINISHED:
        request.finish_with(FinishReason(kind="stop"))
    elif phase is not Phase.WAITING:
        admitted(request)
        if phase is Phase.DECODE:
            request.issue_extend(1, 5)
    assert request.phase is phase
    return request


@pytest.mark.parametrize("phase", list(Phase))
def test_only_listed_transitions_are_possible(phase):
    verbs = {
        "retract": lambda r: r.retract(),
        "finish": lambda r: r.finish_with(FinishReason(kind="stop")),
        "admit": admitted,
        "prompt_issued": lambda r: r.issue_extend(1, 5),
    }
    for verb, fire in verbs.items():
        request = in_phase(phase)
        if (phase, verb) in TRANSITIONS:
            fire(request)
            assert request.phase is TRANSITIONS[phase, verb]
        else:
            with pytest.raises(IllegalTransition):
                fire(request)


def test_output_limit_is_clamped_by_the_request_limit():
    assert make(num_prompt=90, max_new=50, limit=100).num_output_limit == 10


def test_tokens_after_the_stop_do_not_count():
    request = admitted(make(max_new=10, stop_token_ids=[7]))
    request.issue_extend(1, 5)
    assert request.retire_tokens(np.array([3, 7, 9], np.int32)).tolist() == [3, 7]
    assert request.finish == FinishReason(kind="stop", matched=7) and request.num_output_tokens == 2


def test_min_new_tokens_outranks_a_stop_id():
    request = admitted(make(max_new=10, stop_token_ids=[7], min_new_tokens=2))
    request.issue_extend(1, 5)
    assert request.retire_tokens(np.array([7, 7, 7], np.int32)).tolist() == [7, 7, 7]


def test_a_stop_string_cut_limits_what_is_published():
    request = admitted(make(max_new=10))
    request.issue_extend(1, 5)
    request.retire_rows(5)
    request.retire_tokens(np.array([30], np.int32))
    for token in (31, 32):
        request.issue_continue(2, 1)
        request.retire_window(1, 1, 0)
        request.retire_tokens(np.array([token], np.int32))
    assert len(request.publishable_key()) == 7  # 5 prompt rows, 2 output rows: the last token was not fed
    request.finish_with(FinishReason(kind="stop"), 1)
    assert request.publishable_key().tolist() == [0, 1, 2, 3, 4, 30]


def test_tokens_grow_beyond_the_first_buffer():
    request = admitted(make(max_new=5000, limit=10_000))
    request.issue_extend(1, 5)
    for i in range(600):
        request.retire_tokens(np.array([i], np.int32))
    assert request.tokens()[5:].tolist() == list(range(600))


def block(positions, top=2):
    n = len(positions)
    ids = np.array(positions, np.int32)
    values = ids.astype(np.float32)
    tops = np.repeat(ids, top)
    return LogprobBlock(0, ids.tobytes(), ids.tobytes(), values.tobytes(), top, tops.tobytes(), tops.astype(np.float32).tobytes(), b"") if n else None


def test_prompt_blocks_of_ranks_and_chunks_are_joined_in_order():
    chunk = merge_blocks([block([5, 6]), block([1, 4]), block([2, 3]), block([3])])[0]
    assert chunk.first_position == 1
    assert np.frombuffer(chunk.token_ids, np.int32).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.frombuffer(chunk.top_ids, np.int32).reshape(-1, 2)[:, 1].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_gap_in_prompt_blocks_is_an_error():
    with pytest.raises(AssertionError, match="gaps"):
        merge_blocks([block([1, 3])])
