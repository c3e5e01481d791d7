"""Processes that each hold a share of the experts and meet over gloo, against the references."""
import numpy as np
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.expert_world import expert_worker
from kits.plan_driver import PlanDriver, greedy
from kits.process_ranks import process_ranks, run_on


def test_two_processes_give_the_tokens_of_the_reference():
    """A batch whose prompts end in different steps, one of them a single token: some steps leave a rank without rows."""
    path = tiny("deepseek_v32")
    ref = load_file(path / "ref.safetensors")
    lengths = (65, 1, 7)
    with process_ranks(2, expert_worker, str(path), 16, 40) as pipes:
        drive = PlanDriver(run_on(pipes), 16, 2, 40)
        for slot, n in enumerate(lengths):
            drive.start(slot, ref[f"prompt.{n}"].tolist(), greedy())
        drive.step(dict.fromkeys(range(3), 32))
        while drive.slots[0].fed < lengths[0]:
            drive.step({0: 32}, [1, 2])
        while min(len(running.outputs) for running in drive.slots.values()) < 6:
            drive.step({}, [0, 1, 2])
        for pipe in pipes:
            pipe.send(None)
    for slot, n in enumerate(lengths):
        assert np.array_equal(drive.slots[slot].outputs[:6], ref[f"greedy.{n}"][:6]), n
