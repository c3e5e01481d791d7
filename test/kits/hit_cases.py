"""Hits as the planner tests ask for them: a prompt whose beginning is in the tree, answered as if it were not."""
import numpy as np

from kits.engine import Engine
from kits.fake_executor import expected_output, prompt_of
from sglane.plan.io_struct import RequestOutput

BASE = prompt_of(1, 30)


def second_prompt(shared: int) -> np.ndarray:
    """The first `shared` tokens of BASE, then others."""
    second = np.concatenate([BASE[:shared], prompt_of(2, 9)])
    if shared < len(BASE):
        second[shared] = (BASE[shared] + 1) % 900
    return second


def hit(engine: Engine, shared: int) -> RequestOutput:
    """BASE, then second_prompt(shared), whose last message is returned."""
    engine.add("a", BASE, 1)
    engine.run()
    engine.add("b", second_prompt(shared), 6)
    engine.run()
    assert engine.outputs["b"] == expected_output(second_prompt(shared), 6)
    return engine.last["b"]


def next_turn(engine: Engine, num_new: int) -> RequestOutput:
    """A prompt that begins with another's prompt and answer of `num_new` tokens: all of them but the last, which was never fed, are reused."""
    first = prompt_of(3, 11)
    engine.add("a", first, num_new)
    engine.run()
    second = np.concatenate([first, engine.outputs["a"], prompt_of(4, 3)])
    engine.add("b", second, 4)
    engine.run()
    assert engine.last["b"].num_cached_tokens == 11 + num_new - 1
    assert engine.outputs["b"] == expected_output(second, 4)
    return engine.last["b"]
