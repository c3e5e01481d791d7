"""Mixed traffic for a long time over two ranks with small tiers: sessions, flushes, aborts; nothing leaks, nothing drifts."""
import threading
import time

import pytest

from kits.audit import assert_clean, assert_empty, wait_idle
from kits.canary import Canary
from kits.mixed_load import MixedLoad
from kits.server import Server
from kits.soak import MAX_GROWTH_BYTES, growth, resident
from kits.text_checkpoint import TEMPLATE, with_text
from sglane.configs.model_config import PACKAGED_MODELS

FLAGS = (
    "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "1280", "--max-running-requests", "16", "--chunked-prefill-size", "64",
    "--schedule-conservativeness", "0.1", "--tool-call-parser", "qwen3", "--reasoning-parser", "qwen3", "--log-level", "warning",
    "--cp-size", "2", "--enable-cp-shared-kv", "--enable-hierarchical-cache", "--hicache-ratio", "1.5",
)
ALLOWED = ["tail_copy_skipped", "load_back_skipped", "host_backup_skipped", "host_backup_dropped", "session_lease_dropped"]
REQUESTS_PER_ROUND = 40


class Disturbance:
    """Sessions of three turns and flushes, until told to stop. What goes wrong is kept."""

    def __init__(self, server: Server):
        self.num_turns = self.num_flushes = 0
        self.errors: list[str] = []
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._guard, args=(work,)) for work in (self._talk, self._flush)]

    def _guard(self, work):
        try:
            while not self._stop.is_set():
                work()
        except Exception as error:  # noqa: BLE001  # shown by the test
            self.errors.append(f"{type(error).__name__}: {error}")

    def _talk(self):
        session = self._server.ask("/open_session", {"capacity_of_str_len": 1000})
        last, length = None, -8
        for turn in range(3):
            body = {"text": f"turn {turn} of a talk about lighthouses", "session_params": {"id": session, "rid": last},
                    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
            meta = self._server.ask("/generate", body)["meta_info"]
            assert meta["completion_tokens"] == 8 and meta["prompt_tokens"] > length + 8, meta  # the turns before come first
            last, length = meta["id"], meta["prompt_tokens"]
            self.num_turns += 1
        assert self._server.post("/close_session", {"session_id": session}).status_code == 200
        self._stop.wait(0.2)

    def _flush(self):
        self._stop.wait(5)
        self.num_flushes += self._server.post("/flush_cache", timeout=0.5).status_code == 200  # a busy server refuses

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "flags"), [("deepseek_v32", ()), ("tiny-dsa", ("--speculative-algorithm", "NEXTN"))])
@pytest.mark.parametrize("seconds", [20, pytest.param(1800, marks=pytest.mark.slow)])
def test_host_tier_soak(tmp_path, seconds, model, flags):
    """tiny-dsa: drafts are accepted. Its own chat template shows no tools."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    folder = model if model in PACKAGED_MODELS else with_text(model, tmp_path)
    flags = (*flags, "--chat-template", str(template))
    with Server("--model-path", str(folder), *FLAGS, *flags, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as server:
        canary = Canary.record(server)
        load, samples, number = MixedLoad(server.url, 7), [], 0
        end_s = time.monotonic() + seconds
        with Disturbance(server) as disturbance:
            while time.monotonic() < end_s or number < 3:
                load.run(number * REQUESTS_PER_ROUND, (number + 1) * REQUESTS_PER_ROUND)
                samples.append(resident(server))
                number += 1
        assert not disturbance.errors, disturbance.errors
        state = server.server_info()["internal_states"][0]
        cache = state["host_cache"]
        print(f"{number * REQUESTS_PER_ROUND} requests, {disturbance.num_turns} turns, {disturbance.num_flushes} flushes; {cache}; "
              f"fallbacks {state['kv_ledger']['fallbacks']}; {state.get('speculation')}; "
              f"MiB {[{name: size >> 20 for name, size in sample.items()} for sample in samples[::10]]}")
        assert cache["tickets"]["load"]["tokens"] > 0 and cache["tickets"]["backup"]["tokens"] > 0 and disturbance.num_turns > 0
        assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
        assert seconds < 600 or max(growth(samples).values()) < MAX_GROWTH_BYTES, growth(samples)
        canary.check(server)
        server.flush_cache()
        assert_empty(server.kv_ledger())
        canary.check(server)
        assert "Traceback" not in server.log(), server.log_tail()
