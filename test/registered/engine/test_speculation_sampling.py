"""Speculation over real weights in float32 changes no token: prompt lookup, sampled requests, penalties and grammars, each compared with the same
requests without speculation. Drafts are mostly the tokens of that run (kits/scripted_drafts.py), so that windows are really accepted."""
import json
from functools import cache

import numpy as np
import pytest

from kits.checked_drafts import executors_of
from kits.checkpoints import tiny
from kits.grammar_world import END_ID, byte_vocabulary, text_of
from kits.plan_driver import PlanDriver, greedy
from kits.process_ranks import process_ranks, run_on
from kits.real_engine import TinyModel
from kits.scripted_drafts import Script, follow, speculating_worker
from sglane.model_executor.grammar import Grammars
from sglane.plan.io_struct import Grammar

NUM_NEW = 30
FOUR_LANES = pytest.param(4, marks=pytest.mark.slow)
#: Prompts whose greedy answers repeat what was before, so that prompt lookup is right now and then.
REPEATING = {"llama": (0, 2, 3), "qwen3": (0, 3, 4), "deepseek_v3": (0, 2, 3)}
SAMPLED = [
    {"temperature": 0.8, "seed": 11}, {"temperature": 0.8, "top_p": 0.7, "seed": 12}, {"temperature": 0.8, "top_k": 20, "seed": 13}, {},
    {"temperature": 0.8, "min_p": 0.1, "seed": 14}, {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 15},
]
PENALTIES = [
    {"repetition_penalty": 1.7}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0, "temperature": 0.8, "seed": 21},
    {"repetition_penalty": 1.2, "frequency_penalty": -1.0, "temperature": 0.5, "seed": 22}, {"logit_bias": {7: 6.0, 9: 5.0, 11: -100.0}}, {},
]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}, "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 6,
                                                                                       "maxItems": 6}}, "required": ["kind", "list"]}
CONSTRAINED = {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "stop_token_ids": [END_ID]}


@cache
def model(family, algorithm=None, num_steps=3):
    if algorithm is None:
        return TinyModel(tiny(family))
    return TinyModel(tiny(family), speculative_algorithm=algorithm, speculative_num_steps=num_steps)


def make(family, algorithm, cp_size=1, num_steps=3, **sizes):
    made = model(family, algorithm, num_steps)
    sizes = {"page_size": 4, "chunk": 16, "num_pages": 100 * cp_size, **sizes}
    if algorithm is not None:
        sizes["keeps_history"] = True
    return made.engine(**sizes) if cp_size == 1 else made.ranks(cp_size, **sizes)


def alone(family, prompt, num_new=NUM_NEW, **sampling):
    """The output without speculation, neighbours or lanes."""
    engine = make(family, None)
    engine.add("a", prompt, num_new, sampling=sampling)
    engine.run()
    return engine.outputs["a"]


@cache
def repeating(family, seed):
    """A prompt that contains the greedy answer to its beginning, and that beginning again at its end; and its own greedy answer."""
    base = np.random.default_rng(seed).integers(8, 500, 24).tolist()
    prompt = base + alone(family, base)[:20] + base
    return prompt, alone(family, prompt)


def check_counts(last, num_steps=3):
    """Of a request that was not stopped early."""
    spec = last.spec
    assert len(spec.histogram) == num_steps + 1 and sum(spec.histogram) == spec.num_verify_steps
    assert sum(i * count for i, count in enumerate(spec.histogram)) == spec.num_accepted <= spec.num_drafts


def check_starts(engine, script):
    """From now on the plans' histories are the beginnings of what is known."""
    found = []
    for executor in executors_of(engine):
        apply = executor._apply_slots

        def checked(plan, apply=apply):
            for start in plan.starts:
                history = np.frombuffer(start.history, np.int32).tolist()
                assert len(history) == start.num_cached_tokens and script.begins(history)
                found.append(start.num_cached_tokens)
            apply(plan)

        executor._apply_slots = checked
    return found


# Prompt lookup


@pytest.mark.parametrize(("family", "cp_size"), [
    pytest.param(family, cp_size, marks=pytest.mark.slow if cp_size == 4 or (family, cp_size) == ("qwen3", 2) else [])
    for family in REPEATING for cp_size in (1, 2, 4)])
def test_lookup_changes_nothing(family, cp_size):
    """Cold and in chunks, beside each other, then after hits on prompts and on answers."""
    cases, script = {str(seed): repeating(family, seed) for seed in REPEATING[family]}, Script()
    for rid, (prompt, want) in list(cases.items()):
        following = prompt + want + prompt[:9]
        cases[f"next{rid}"] = following, alone(family, following)
    for prompt, want in cases.values():
        script.add(prompt, want)
    engine = follow(make(family, "NGRAM", cp_size), script, own=True)
    cached = check_starts(engine, script)
    num_accepted = 0
    for turn in range(2):
        for rid, (prompt, _) in cases.items():
            engine.add(f"{rid}.{turn}", prompt, NUM_NEW)
            if rid.startswith("next"):
                engine.run()
        engine.run()
        for rid, (_, want) in cases.items():
            last = engine.last[f"{rid}.{turn}"]
            assert engine.outputs[f"{rid}.{turn}"] == want, (turn, rid)
            check_counts(last)
            yielded = 1 + last.spec.num_verify_steps + last.spec.num_accepted
            assert len(want) <= yielded <= len(want) + 3  # the last window may reach over the end
            num_accepted += last.spec.num_accepted
    assert num_accepted > 5 and script.num_asked > 50
    assert sum(count > 30 for count in cached) >= cp_size * len(cases)


@pytest.mark.parametrize("cp_size", [1, 2, FOUR_LANES])
def test_looked_up_windows_after_hits_of_both_tiers(cp_size):
    """Whole windows are accepted right after a hit, wherever its pages came from."""
    script, engine = Script(), make("llama", "NGRAM", cp_size, num_pages=40 * cp_size, num_host_pages=400 * cp_size)
    prompt, want = repeating("llama", 0)
    script.add(prompt, want)
    others = [np.random.default_rng(1000 + i).integers(8, 500, 40 * cp_size).tolist() for i in range(6)]
    for other in others:
        script.add(other, alone("llama", other, 2))
    follow(engine, script)
    starts = check_starts(engine, script)
    tiers = []
    for turn in range(3):
        engine.add(f"a{turn}", prompt, NUM_NEW)
        engine.run(max_turns=100_000)
        last = engine.last[f"a{turn}"]
        assert engine.outputs[f"a{turn}"] == want and last.spec.num_accepted > 15
        check_counts(last)
        tiers.append((last.num_cached_tokens > 0, last.num_cached_host > 0))
        for i, other in enumerate(others * (turn == 1)):
            engine.add(f"other{i}", other, 2)
            engine.run(max_turns=100_000)
    assert tiers == [(False, False), (True, False), (True, True)]
    assert len(prompt) - 1 in starts


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_lookup_after_retractions(family, cp_size):
    prompts = [np.random.default_rng(50 + i).integers(8, 500, 11).tolist() for i in range(4)]
    script = Script()
    wants = [alone(family, prompt) for prompt in prompts]
    for prompt, want in zip(prompts, wants):
        script.add(prompt, want)
    engine = follow(make(family, "NGRAM", cp_size, num_pages=24, num_slots=4, conservativeness=0.0), script)
    check_starts(engine, script)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, NUM_NEW)
    engine.run(max_turns=100_000)
    assert [engine.outputs[str(i)] for i in range(4)] == wants
    assert engine.scheduler.totals.num_retractions > 0
    for last in engine.last.values():
        check_counts(last)
        assert last.spec.num_accepted > 5


# Sampling


@cache
def without_speculation(family, name):
    """Prompts and outputs of requests with these parameters."""
    found = []
    for i, sampling in enumerate({"sampled": SAMPLED, "penalties": PENALTIES}[name]):
        prompt = np.random.default_rng((len(name), i)).integers(8, 500, 9 + 8 * i).tolist()
        found.append((prompt, sampling, alone(family, prompt, **sampling)))
    return found


def sampled_matrix():
    for name in ("sampled", "penalties"):
        for family, algorithm in (("deepseek_v3", "NEXTN"), ("deepseek_v32", "NEXTN"), ("llama", "NGRAM"), ("deepseek_v3", "NGRAM")):
            for cp_size in (1, 2, 4):
                fast = cp_size < 3 and family != "deepseek_v32" and (family, algorithm) != ("deepseek_v3", "NGRAM")
                fast = fast or (cp_size == 2 and name == "sampled")
                yield pytest.param(name, family, algorithm, cp_size, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "family", "algorithm", "cp_size"), list(sampled_matrix()))
def test_noise_and_penalties_are_those_of_each_position(name, family, algorithm, cp_size):
    """All requests share their steps, twice: the second time after hits."""
    cases, script = without_speculation(family, name), Script()
    for prompt, _, want in cases:
        script.add(prompt, want)
    engine = follow(make(family, algorithm, cp_size), script)
    for turn in "ab":
        for i, (prompt, sampling, _) in enumerate(cases):
            engine.add(f"{turn}{i}", prompt, NUM_NEW, sampling=sampling)
        engine.run()
        for i, (prompt, sampling, want) in enumerate(cases):
            last = engine.last[f"{turn}{i}"]
            assert engine.outputs[f"{turn}{i}"] == want, (turn, sampling)
            check_counts(last)
            assert last.spec.num_accepted > 12 and last.spec.num_accepted < last.spec.num_drafts
            assert last.num_cached_tokens == (len(prompt) - 1 if turn == "b" else 0)


def test_parameters_decide():
    """The cases above differ from greedy answers, or they would show nothing."""
    for name in ("sampled", "penalties"):
        for prompt, sampling, want in without_speculation("deepseek_v3", name):
            assert (want != alone("deepseek_v3", prompt)) == bool(sampling), sampling


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(("family", "algorithm"), [("deepseek_v3", "NEXTN"), ("llama", "NGRAM")])
def test_stop_tokens_come_after_the_least_length_only(family, algorithm, cp_size):
    """min_new_tokens ends at every place of a window; wrong drafts are the stop token, too early."""
    prompt = np.random.default_rng(70).integers(8, 500, 13).tolist()
    free = alone(family, prompt)
    stop = free[4]
    for least in range(4, 10):
        sampling = {"stop_token_ids": [stop], "min_new_tokens": least, "logit_bias": {stop: 100.0}}
        want = alone(family, prompt, **sampling)
        assert want.index(stop) == least and len(want) == least + 1
        script = Script()
        script.add(prompt, want, wrong=dict.fromkeys(range(least), stop))
        engine = follow(make(family, algorithm, cp_size), script)
        engine.add("a", prompt, NUM_NEW, sampling=sampling)
        engine.run()
        assert engine.outputs["a"] == want and engine.last["a"].finish.matched == stop
        assert engine.last["a"].spec.num_accepted > 0


# Grammars


def constrained_cases(family, vocabulary):
    """Prompts, parameters, outputs, and what would be said at each place if there were no grammar."""
    found = []
    for i in range(3):
        prompt = np.random.default_rng(80 + i).integers(2, 90, 6 + 5 * i).tolist()
        sampling = {**CONSTRAINED, **({"temperature": 1.0, "seed": i} if i == 1 else {})}
        engine = make(family, None, num_pages=400, grammars=Grammars("xgrammar", vocabulary))
        engine.add("a", prompt, 150, sampling=sampling)
        engine.run()
        want = engine.outputs["a"]
        for j in range(len(want)):
            engine.add(f"free{j}", prompt + want[:j], 1)
        engine.run()
        found.append((prompt, sampling, want, {j: engine.outputs[f"free{j}"][0] for j in range(len(want))}))
    return found


def xgrammars(vocabulary, cp_size):
    """Of each rank."""
    return {"grammars": Grammars("xgrammar", vocabulary)} if cp_size == 1 else {"make_grammars": lambda: Grammars("xgrammar", vocabulary)}


@cache
def constrained(family):
    vocabulary = byte_vocabulary(model(family).config.vocab_size)
    return vocabulary, constrained_cases(family, vocabulary)


@pytest.mark.parametrize(("family", "algorithm", "cp_size", "num_steps"), [
    ("llama", "NGRAM", 1, 3), ("llama", "NGRAM", 2, 5), ("deepseek_v3", "NEXTN", 1, 5), ("deepseek_v3", "NEXTN", 2, 3),
    pytest.param("deepseek_v3", "NEXTN", 4, 5, marks=pytest.mark.slow)])
def test_grammars(family, algorithm, cp_size, num_steps):
    """Wrong drafts are what the model would say without the grammar; drafts go on behind the end of the answer."""
    vocabulary, cases = constrained(family)
    script = Script()
    for prompt, _, want, free in cases:
        script.add(prompt, want, wrong=free)
        assert sum(free[j] != token for j, token in enumerate(want)) > len(want) // 3
    engine = follow(make(family, algorithm, cp_size, num_steps, num_pages=400 * cp_size, **xgrammars(vocabulary, cp_size)), script)
    for i, (prompt, sampling, _, _) in enumerate(cases):
        engine.add(str(i), prompt, 150, sampling=sampling)
    engine.run()
    for i, (_, _, want, _) in enumerate(cases):
        last = engine.last[str(i)]
        assert engine.outputs[str(i)] == want and last.finish.matched == END_ID
        assert json.loads(text_of(vocabulary, want))["kind"] in ("red", "green")
        check_counts(last, num_steps)
        assert last.spec.num_accepted > len(want) // 2


@pytest.mark.parametrize(("family", "algorithm", "cp_size", "own"), [
    ("llama", "NGRAM", 1, True), ("deepseek_v3", "NEXTN", 2, False), pytest.param("llama", "NGRAM", 2, True, marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "NEXTN", 1, False, marks=pytest.mark.slow)])
def test_retractions_of_every_kind_of_request(family, algorithm, cp_size, own):
    """Grammars, penalties and noise begin again where they were. own: with the drafts of prompt lookup, which JSON text repeats enough for."""
    vocabulary, cases = constrained(family)
    requests = [(prompt, sampling, want, 150) for prompt, sampling, want, _ in cases]
    for name in ("sampled", "penalties"):
        requests += [(*case, NUM_NEW) for case in without_speculation(family, name)[:3]]
    script = Script()
    for prompt, _, want, _ in requests:
        script.add(prompt, want)
    engine = follow(make(family, algorithm, cp_size, num_pages=48, num_slots=6, conservativeness=0.0, **xgrammars(vocabulary, cp_size)), script, own)
    for i, (prompt, sampling, _, num_new) in enumerate(requests):
        engine.add(str(i), prompt, num_new, sampling=sampling)
    engine.run(max_turns=100_000)
    for i, (_, sampling, want, _) in enumerate(requests):
        assert engine.outputs[str(i)] == want, sampling
        check_counts(engine.last[str(i)])
    assert sum(engine.last[str(i)].num_retractions for i in range(len(cases))) > 0
    assert sum(engine.last[str(i)].num_retractions for i in range(len(cases), len(requests))) > 0
    assert all(engine.last[str(i)].spec.num_accepted > 5 for i in range(len(cases)))


# Processes


@pytest.mark.parametrize("transport", ["peer", pytest.param("collective", marks=pytest.mark.slow)])
def test_two_processes(transport):
    """A draft layer whose drafts are often right, over the exchanges of a server."""
    family, prompts = "deepseek_v3", [np.random.default_rng(90 + i).integers(8, 500, 5 + 30 * i).tolist() for i in range(2)]
    wants = [alone(family, prompt) for prompt in prompts]
    with process_ranks(2, speculating_worker, str(tiny(family)), 4, 60, list(zip(prompts, wants)), transport=transport) as pipes:
        drive = PlanDriver(run_on(pipes), 4, 2, 60)
        for slot, prompt in enumerate(prompts):
            drive.start(slot, prompt, greedy())
        drive.step(dict.fromkeys(range(2), 16))
        num_steps = 0
        while min(len(running.outputs) for running in drive.slots.values()) < 20:
            rest = {1: 16} if drive.slots[1].fed < len(prompts[1]) else {}
            drive.step(rest, [0] if rest else [0, 1], window=4)
            num_steps += 1
        for pipe in pipes:
            pipe.send(None)
    for slot, want in enumerate(wants):
        found = drive.slots[slot].outputs
        assert found[:NUM_NEW] == want[:len(found)], slot
    assert num_steps < 16 and drive.num_drafts > 20
