"""Constrained requests through scheduler and executors: lanes, retractions and prefix hits change no token; the books are exact."""
import json

import numpy as np
import pytest

from kits.checkpoints import tiny
from kits.grammar_world import END_ID, byte_vocabulary, text_of
from kits.real_engine import TinyModel
from sglane.model_executor.grammar import Grammars
from sglane.plan.io_struct import Grammar

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}, "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 6,
                                                                                       "maxItems": 6}}, "required": ["kind", "list"]}
SAMPLING = {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "stop_token_ids": [END_ID]}


@pytest.fixture(scope="module")
def model():
    return TinyModel(tiny("llama"))


@pytest.fixture(scope="module")
def vocabulary(model):
    return byte_vocabulary(model.config.vocab_size)


def add_all(engine, num=4):
    for i in range(num):
        temperature = {"temperature": 1.0, "seed": i} if i % 2 else {}
        prompt = np.random.default_rng(i).integers(2, 90, 6 + 5 * i)
        engine.add(f"r{i}", prompt, 150, sampling={**SAMPLING, **temperature, "logprobs": i == 1})
    engine.add("free", np.arange(2, 12), 40, sampling={"stop_token_ids": [END_ID]})
    engine.run()


@pytest.fixture(scope="module")
def undisturbed(model, vocabulary):
    """Outputs without neighbours, in a pool that is large enough."""
    engine = model.engine(grammars=Grammars("xgrammar", vocabulary), num_pages=400, overlap=False)
    add_all(engine)
    assert all(last.num_retractions == 0 for last in engine.last.values())
    return engine.outputs


def test_answers_are_valid(undisturbed, vocabulary):
    for i in range(4):
        assert undisturbed[f"r{i}"][-1] == END_ID
        value = json.loads(text_of(vocabulary, undisturbed[f"r{i}"]))
        assert value["kind"] in ("red", "green") and len(value["list"]) == 6, value


@pytest.mark.parametrize("overlap", [True, False])
def test_retractions_change_nothing(model, vocabulary, undisturbed, overlap):
    engine = model.engine(grammars=Grammars("xgrammar", vocabulary), num_pages=48, chunk=8, overlap=overlap)
    add_all(engine)
    assert sum(last.num_retractions for last in engine.last.values()) > 0
    assert engine.outputs == undisturbed
    assert all(engine.last[f"r{i}"].finish.matched == END_ID for i in range(4))


@pytest.mark.parametrize("cp_size", [2, 3])
def test_lanes_change_nothing(model, vocabulary, undisturbed, cp_size):
    engine = model.ranks(cp_size, make_grammars=lambda: Grammars("xgrammar", vocabulary), num_pages=120)
    add_all(engine)
    assert engine.outputs == undisturbed


def test_a_prefix_hit_on_an_earlier_answer(model, vocabulary):
    """The hit covers output of an earlier request, which is prompt in this one: the grammar starts anew."""
    engine = model.engine(grammars=Grammars("xgrammar", vocabulary))
    prompt = np.arange(2, 12)
    engine.add("first", prompt, 150, sampling=SAMPLING)
    engine.run()
    longer = np.concatenate([prompt, engine.outputs["first"]])
    engine.add("second", longer, 150, sampling=SAMPLING)
    engine.run()
    assert engine.last["second"].num_cached_tokens > len(prompt)
    assert json.loads(text_of(vocabulary, engine.outputs["second"]))["kind"] in ("red", "green")


def test_log_probabilities_are_those_of_the_model(model, vocabulary):
    """What the grammar rules out keeps its probability in the report."""
    engine = model.engine(grammars=Grammars("xgrammar", vocabulary))
    fields = {**SAMPLING, "logprobs": True, "logprob_token_ids": list(range(model.config.vocab_size))}
    engine.add("a", np.arange(2, 12), 20, sampling=fields)
    engine.add("b", np.arange(2, 12), 1, sampling={k: v for k, v in fields.items() if k != "grammar"})
    engine.run()
    first, free = (np.frombuffer(engine.messages[rid][0].output_logprobs[0].asked_logprobs, np.float32) for rid in "ab")
    assert np.abs(first - free).max() < 1e-4 and np.isfinite(first).all()


def test_length_ends_an_unfinished_answer(model, vocabulary):
    engine = model.engine(grammars=Grammars("xgrammar", vocabulary))
    engine.add("a", np.arange(2, 12), 5, sampling=SAMPLING)
    engine.run()
    assert engine.last["a"].finish.kind == "length" and len(engine.outputs["a"]) == 5
