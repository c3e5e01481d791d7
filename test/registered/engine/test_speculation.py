"""Scheduler + executors with a draft layer, over real weights in float32: outputs are those without speculation, and at every step of every path the
draft layer's state is the oracle's: cold, chunked, after hits, tail copies, load-backs, retractions."""
import itertools
from functools import cache

import numpy as np
import pytest

from kits.checked_drafts import References, watch
from kits.checkpoints import tiny
from kits.real_engine import TinyModel
from sglane.model_executor.copy_engine import Backups
from sglane.model_executor.copy_jobs import CopyLayout
from sglane.model_executor.host_pool import HostPool
from sglane.model_executor.kv_pool import KVPool
from sglane.speculative.nextn import NextnDrafter

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_share")
NUM_NEW = 20
#: Family, ranks, whether they map each other's pools; the other combinations are slow tests.
FAST_HITS = (("deepseek_v32", 1, False), ("deepseek_v32", 2, True), ("deepseek_v3", 2, False), ("glm_moe_dsa_share", 1, False))


@cache
def model(family, num_steps=3):
    return TinyModel(tiny(family), speculative_algorithm="NEXTN", speculative_num_steps=num_steps)


@cache
def references(family):
    return References(tiny(family))


@cache
def case(family, seed, length, num_new=NUM_NEW):
    """A prompt and its greedy tokens, none of which rounding could change."""
    for salt in range(100):
        prompt = np.random.default_rng((seed, salt)).integers(8, 500, length).tolist()
        tokens = references(family).add(prompt, num_new)
        if tokens is not None:
            return prompt, tokens
    raise AssertionError(f"{family}: no prompt of {length} tokens is clear")


def make(family, cp_size, num_steps=3, wrong=None, mapped=False, **sizes):
    sizes = {"page_size": 4, "chunk": 16, "num_pages": 60 * cp_size, "keeps_history": True, **sizes}
    made = model(family, num_steps)
    engine = made.engine(**sizes) if cp_size == 1 else made.ranks(cp_size, mapped=mapped, **sizes)
    watch(engine, references(family), wrong)
    return engine


def ask(engine, family, rid, seed, length, num_new=NUM_NEW, **fields):
    """One request on its own; returns its last message."""
    prompt, want = case(family, seed, length, num_new)
    engine.add(rid, prompt, num_new, **fields)
    engine.run(max_turns=100_000)
    assert engine.outputs[rid] == want
    return engine.last[rid]


def matrix():
    """Every family with every number of ranks; the other combinations are slow tests."""
    for i, (family, cp_size) in enumerate(itertools.product(FAMILIES, (1, 2, 4))):
        for j, (num_steps, wrong) in enumerate(itertools.product((3, 1, 5), (99, None, 1))):
            yield pytest.param(family, cp_size, num_steps, wrong, marks=[] if j == i % 9 else pytest.mark.slow)


@pytest.mark.parametrize(("family", "cp_size", "num_steps", "wrong"), list(matrix()))
def test_outputs_states_and_drafts(family, cp_size, num_steps, wrong):
    """Cold, in chunks, three requests that share steps. Own drafts, drafts whose second one is wrong, and drafts that are right."""
    before = references(family).num_checked
    engine = make(family, cp_size, num_steps, wrong, page_size=(4, 16)[num_steps == 3], num_pages=240 // (4, 16)[num_steps == 3])
    for i, length in enumerate((1, 37, 70)):
        engine.add(str(i), case(family, i, length)[0], NUM_NEW, sampling={"max_drafts": (-1, 2, 0)[i] if wrong == 99 else -1})
    engine.run()
    for i, length in enumerate((1, 37, 70)):
        assert engine.outputs[str(i)] == case(family, i, length)[1], i
    assert references(family).num_checked > before + 3
    counts = [engine.last[str(i)].spec for i in range(3)]
    if wrong == 99 and num_steps == 3:
        assert counts[0].num_accepted == counts[0].num_drafts > 0 and counts[2].num_drafts == 0
        assert counts[0].num_verify_steps < counts[1].num_verify_steps < counts[2].num_verify_steps
    if wrong == 1:
        assert all(sum(count.histogram[2:]) == 0 for count in counts)


def check_hits(family, cp_size, mapped):
    """From the device and from the host, ending with a page or inside one: states equal the oracle's, acceptance is that of the cold run."""
    engine = make(family, cp_size, wrong=99, mapped=mapped, num_host_pages=400 * cp_size)
    cold = {length: ask(engine, family, f"cold{length}", 10 + length, length) for length in (41, 43)}
    kinds = set()
    for turn in range(4):
        for i in range(8 * (turn % 2)):
            ask(engine, family, f"other{turn}.{i}", 100 + i, 50 * cp_size - 7, 1)
        for length, first in cold.items():
            last = ask(engine, family, f"again{turn}.{length}", 10 + length, length)
            kinds.add((last.num_cached_host > 0, last.num_cached_tokens % 4 > 0))
            assert last.num_cached_tokens == length - 1
            assert last.spec.num_accepted == last.spec.num_drafts
            if cp_size == 1:  # where pages lie in lanes decides where windows end
                assert last.spec == first.spec
    assert len(kinds) == 4, kinds


@pytest.mark.parametrize(("family", "cp_size", "mapped"), [
    pytest.param(family, cp_size, mapped, marks=[] if (family, cp_size, mapped) in FAST_HITS else pytest.mark.slow)
    for family in FAMILIES for cp_size in (1, 2, 4) for mapped in (False, True) if cp_size > 1 or not mapped])
def test_after_hits_of_every_kind(family, cp_size, mapped):
    check_hits(family, cp_size, mapped)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_retraction(family, cp_size):
    engine = make(family, cp_size, wrong=99, num_pages=20, num_slots=4, conservativeness=0.0)
    for i in range(4):
        engine.add(str(i), case(family, 30 + i, 11)[0], NUM_NEW)
    engine.run(max_turns=100_000)
    for i in range(4):
        assert engine.outputs[str(i)] == case(family, 30 + i, 11)[1]
    assert engine.scheduler.totals.num_retractions > 0


@pytest.mark.parametrize("stop_at", range(5, 10))
def test_stops_inside_a_window(stop_at):
    prompt, want = case("deepseek_v32", 50, 21)
    engine = make("deepseek_v32", 1, wrong=99)
    engine.add("a", prompt, NUM_NEW, sampling={"stop_token_ids": [want[stop_at]]})
    engine.run()
    assert engine.outputs["a"] == want[:want.index(want[stop_at]) + 1] and engine.last["a"].finish.kind == "stop"


def test_logprobs_are_one_for_each_token():
    """Equal to those without speculation."""
    plain = TinyModel(tiny("deepseek_v32")).engine(page_size=4, chunk=16)
    spec = make("deepseek_v32", 1, wrong=99)
    prompt, want = case("deepseek_v32", 60, 21)
    found = []
    for engine in (plain, spec):
        engine.add("a", prompt, NUM_NEW, sampling={"logprobs": True, "num_top_logprobs": 3})
        engine.run()
        chunks = [chunk for message in engine.messages["a"] for chunk in message.output_logprobs]
        found.append((np.concatenate([np.frombuffer(chunk.token_ids, np.int32) for chunk in chunks]),
                      np.concatenate([np.frombuffer(chunk.logprobs, np.float32) for chunk in chunks]),
                      np.concatenate([np.frombuffer(chunk.top_ids, np.int32) for chunk in chunks])))
    assert found[0][0].tolist() == found[1][0].tolist() == want
    assert np.abs(found[0][1] - found[1][1]).max() < 1e-4 and found[0][2].tolist() == found[1][2].tolist()


def without_draft(planes):
    return {name: plane for name, plane in planes.items() if not name.startswith("draft.")}


def skip_device_tail(monkeypatch):
    def copy_tail(self, copy):
        if copy.src_page % self.cp_size == self.rank:
            for plane in without_draft(self.planes).values():
                plane.copy_tokens(copy.src_page // self.cp_size, copy.dst_page // self.cp_size, copy.num_tokens)

    monkeypatch.setattr(KVPool, "copy_tail", copy_tail)


def skip_host_tail(monkeypatch):
    copy_tail = HostPool.copy_tail
    monkeypatch.setattr(HostPool, "copy_tail", lambda self, copy, planes: copy_tail(self, copy, without_draft(planes)))


def skip_loads(monkeypatch):
    original = CopyLayout.__init__

    def init(self, *args):
        original(self, *args)
        self.load_order = [piece for piece in self.load_order if not piece.plane.startswith("draft.")]

    monkeypatch.setattr(CopyLayout, "__init__", init)


def skip_backups(monkeypatch):
    original = Backups.__init__

    def init(self, *args):
        original(self, *args)
        self._targets = {name: plane.clone() if name.startswith("draft.") else plane for name, plane in self._targets.items()}  # never read

    monkeypatch.setattr(Backups, "__init__", init)


def skip_draft_extend(monkeypatch):
    """Of windows: their rows keep what the chain left there."""
    original = NextnDrafter.extend

    def extend(self, rows, following, hidden, windows, runs, gate):
        planes = {name: plane.buffer.clone() for name, plane in self._runner._pool.planes.items() if name.startswith("draft.")}
        original(self, rows, following, hidden, windows, runs, gate)
        if not rows.view.extends:
            for name, buffer in planes.items():
                self._runner._pool.planes[name].buffer.copy_(buffer)

    monkeypatch.setattr(NextnDrafter, "extend", extend)


@pytest.mark.parametrize("mutation", [skip_device_tail, skip_host_tail, skip_loads, skip_backups, skip_draft_extend])
def test_the_checks_notice_a_path_without_draft_planes(mutation, monkeypatch):
    """The test above fails if a way of copying pages leaves the draft's planes out."""
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match="chain state after|drafts after|invalid for input"):  # the last one: poison was selected
        check_hits("deepseek_v32", 1, False)
