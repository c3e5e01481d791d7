"""All sampling features at once on a pool small enough to evict and retract: books exact, the same answers afterwards, memory flat."""
import pytest

from kits.audit import assert_clean, wait_idle
from kits.canary import Canary
from kits.mixed_load import MixedLoad
from kits.server import Server
from kits.soak import MAX_GROWTH_BYTES, growth, resident
from kits.text_checkpoint import with_text

FLAGS = (
    "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "640", "--max-running-requests", "16", "--chunked-prefill-size", "64",
    "--schedule-conservativeness", "0.1", "--tool-call-parser", "qwen3", "--reasoning-parser", "qwen3", "--log-level", "warning",
)
ALLOWED = ["tail_copy_skipped"]
NUM_ROUNDS = 12


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_requests", "seed", "cp_size"), [
    (300, 1, 1), (120, 3, 2), pytest.param(2000, 2, 1, marks=pytest.mark.slow), pytest.param(2000, 4, 4, marks=pytest.mark.slow),
])
def test_mixed_soak(tmp_path, num_requests, seed, cp_size):
    folder = with_text("llama", tmp_path)
    lanes = ("--cp-size", str(cp_size), "--enable-cp-shared-kv") if cp_size > 1 else ()
    with Server("--model-path", str(folder), *FLAGS, *lanes, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as server:
        canary = Canary.record(server)
        load, samples, ends = MixedLoad(server.url, seed), [], {}
        for number in range(NUM_ROUNDS):
            for end, count in load.run(num_requests * number // NUM_ROUNDS, num_requests * (number + 1) // NUM_ROUNDS).items():
                ends[end] = ends.get(end, 0) + count
            samples.append(resident(server))
        print(f"ends {ends}, paths {dict(load.paths)}, MiB {[{name: size >> 20 for name, size in sample.items()} for sample in samples]}")
        assert sum(ends.values()) == num_requests and ends["ok"] > num_requests * 0.8 and ends["left"] and ends["aborted"], ends
        state = server.server_info()["internal_states"][0]
        assert state["totals"]["num_retractions"] > 0, "the pool was not small enough to retract"
        assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
        assert max(growth(samples).values()) < MAX_GROWTH_BYTES, (growth(samples), samples)
        canary.check(server)
        server.flush_cache()
        assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
        canary.check(server)
        assert "Traceback" not in server.log(), server.log_tail()
