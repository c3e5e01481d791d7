"""The host tier of a real server: what left the device comes back, exactly; slow, refused and aborted copies harm nobody."""
import json
import os
import re
import threading
import time

import numpy as np
import pytest
from safetensors.torch import load_file

from kits.audit import assert_clean, assert_empty, leaks, wait_idle
from kits.checkpoints import tiny
from kits.server import Server, ServerFailed

FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--page-size", "4", "--max-total-tokens", "512", "--chunked-prefill-size", "32",
         "--log-level", "warning", "--enable-hierarchical-cache")
CHECKED = {"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}
SKIPPED = ["tail_copy_skipped", "load_back_skipped", "host_backup_skipped", "host_backup_dropped"]


def lanes(cp_size: int) -> tuple[str, ...]:
    return ("--cp-size", str(cp_size), "--enable-cp-shared-kv") if cp_size > 1 else ()


def hold(rank: int, point: str, sleep_ms: float) -> dict[str, str]:
    return {"SGLANE_HOLD": json.dumps({"rank": rank, "point": point, "sleep_ms": sleep_ms})}


def prompt_of(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(8, 250, length)]


def push_out(server: Server, seed: int = 100, num_tokens: int = 1024) -> None:
    """Other traffic, more than the device holds."""
    for i in range(num_tokens // 128):
        server.generate(prompt_of(seed + i, 127), max_new_tokens=1, ignore_eos=True)


def settled(server: Server) -> None:
    """No copy is under way."""
    deadline = time.monotonic() + 30
    while leaks(server.kv_ledger()):
        assert time.monotonic() < deadline, server.kv_ledger()
        time.sleep(0.02)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "cp_size"), [("llama", 1), ("deepseek_v32", 2), ("glm_moe_dsa_share", 4)])
def test_fill_evict_replay(family, cp_size):
    """Reference answers cold, from the device, and from the host; then once more after a flush. No segment of shared memory is left."""
    path = tiny(family)
    reference = load_file(path / "ref.safetensors")
    named = set(os.listdir("/dev/shm"))
    with Server("--model-path", str(path), *FLAGS, *lanes(cp_size), "--hicache-ratio", "6", env=CHECKED) as server:
        for n in (65, 200):
            settled(server)
            server.flush_cache()
            prompt, expected = reference[f"prompt.{n}"].tolist(), reference[f"greedy.{n}"].tolist()

            def ask(prompt=prompt, expected=expected):
                answer = server.generate(prompt, max_new_tokens=len(expected), ignore_eos=True)
                assert answer["output_ids"] == expected
                return answer["meta_info"]["cached_tokens_details"]

            assert ask() == {"device": 0, "host": 0}
            assert ask() == {"device": n - 1, "host": 0}
            for _ in range(2):
                settled(server)
                push_out(server)
                found = ask()
                assert found["device"] + found["host"] == n - 1 and found["host"] > 0, (n, found)
        ledger = wait_idle(server)
        assert_clean(ledger, allowed_fallbacks=SKIPPED)
        assert min(ledger["host"]["cached"]) > 0, f"a lane has no host page: {ledger}"
        server.flush_cache()
        assert_empty(server.kv_ledger())
        assert ask() == {"device": 0, "host": 0}
    assert set(os.listdir("/dev/shm")) == named


@pytest.mark.timeout(300)
def test_a_turn_finds_the_answer_before_it_in_the_host():
    """The debug log tells of both ways."""
    flags = (*FLAGS, "--hicache-ratio", "6", "--log-level", "debug")
    with Server("--model-path", str(tiny("llama")), *flags, env=CHECKED) as server:
        first = prompt_of(1, 50)
        answer = server.generate(first, max_new_tokens=30, ignore_eos=True)["output_ids"]
        settled(server)
        push_out(server)
        second = first + answer + prompt_of(2, 5)
        found = server.generate(second, max_new_tokens=4)["meta_info"]["cached_tokens_details"]
        assert found["device"] + found["host"] == 50 + 29 and found["host"] > 0
        for kind in ("load", "backup"):
            assert re.search(rf"\[hicache\] step \d+ orders {kind} \d+: \d+ pages", server.log())
            assert re.search(rf"\[hicache\] rank 0 ended its part of {kind} \d+: \d+ bytes in", server.log())
        assert_clean(wait_idle(server), allowed_fallbacks=SKIPPED)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["backup", "load", "ack"])
def test_one_slow_rank_changes_no_answer(point):
    """Copies of one rank are late. Nobody fails, everybody gets the answer of an undisturbed server, and a flush waits for what is under way."""
    prompts = [prompt_of(seed, length) for seed, length in enumerate((40, 90, 130, 61, 128, 33))]
    path = str(tiny("deepseek_v32"))
    with Server("--model-path", path, *FLAGS[:-1], *lanes(2)) as plain:
        expected = [plain.generate(prompt, max_new_tokens=6, ignore_eos=True)["output_ids"] for prompt in prompts]
    with Server("--model-path", path, *FLAGS, *lanes(2), "--hicache-ratio", "4", env={**CHECKED, **hold(1, point, 15.0)}) as server:
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected):
                assert server.generate(prompt, max_new_tokens=6, ignore_eos=True)["output_ids"] == tokens
            push_out(server, num_tokens=512)
        for _ in range(5):
            server.generate(prompts[0], max_new_tokens=1)
            server.flush_cache(timeout_s=10.0)
            assert_empty(server.kv_ledger())
        server.generate(prompts[1], max_new_tokens=1)
        assert_clean(wait_idle(server), allowed_fallbacks=SKIPPED)


@pytest.mark.timeout(300)
def test_aborts_while_loads_are_under_way_leak_nothing():
    with Server("--model-path", str(tiny("llama")), *FLAGS, "--hicache-ratio", "6", env={**CHECKED, **hold(0, "load", 20.0)}) as server:
        prompt = prompt_of(3, 120)
        tokens = server.generate(prompt, max_new_tokens=6, ignore_eos=True)["output_ids"]
        for i in range(4):
            settled(server)
            push_out(server, seed=200 + 20 * i)
            body = {"input_ids": prompt, "rid": f"gone{i}", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
            asking = threading.Thread(target=server.post, args=("/generate", body))
            asking.start()
            time.sleep(0.02 * (i + 1))
            server.post("/abort_request", {"rid": f"gone{i}"})
            asking.join()
        assert server.generate(prompt, max_new_tokens=6, ignore_eos=True)["output_ids"] == tokens
        assert_clean(wait_idle(server), allowed_fallbacks=SKIPPED)
        server.flush_cache()
        assert_empty(server.kv_ledger())


@pytest.mark.timeout(120)
def test_a_copy_that_does_not_end_ends_the_server():
    """No step waits for it, so only its ticket tells."""
    flags = (*FLAGS, "--hicache-ratio", "6", "--watchdog-timeout", "3", "--skip-server-warmup")
    with Server("--model-path", str(tiny("llama")), *flags, env=hold(0, "backup", 600_000.0)) as server:
        assert len(server.generate(prompt_of(5, 20), max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
        refused = server.post("/flush_cache")
        assert refused.status_code == 400 and "copies to or from the host tier are under way" in refused.text
        assert server.wait_exit(30.0) != 0
        assert "has not ended within 3 s" in server.log()


@pytest.mark.timeout(300)
def test_selective_backs_up_what_is_asked_for_again():
    flags = (*FLAGS, "--hicache-ratio", "6", "--hicache-write-policy", "write_through_selective")
    with Server("--model-path", str(tiny("llama")), *flags, env=CHECKED) as server:
        prompt = prompt_of(4, 100)
        server.generate(prompt, max_new_tokens=1)
        settled(server)
        assert sum(server.kv_ledger()["host"]["cached"]) == 0
        for _ in range(2):
            server.generate(prompt, max_new_tokens=1)
        settled(server)
        assert sum(server.kv_ledger()["host"]["cached"]) > 0
        push_out(server)
        assert server.generate(prompt, max_new_tokens=1)["meta_info"]["cached_tokens_details"]["host"] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("flags", "words"), [
    (("--hicache-size", "1000000"), ("--hicache-size", "GiB")),
    (("--hicache-size", "0.000001"), ("--hicache-size", "page")),
    (("--hicache-write-policy", "write_back"), ("--hicache-write-policy", "write_back")),
    (("--hicache-io-backend", "kernel"), ("--hicache-io-backend", "kernel")),
    (("--hicache-mem-layout", "layer_first"), ("--hicache-mem-layout", "layer_first")),
    (("--hicache-storage-backend", "file"), ("--hicache-storage-backend", "third tier")),
    (("--disable-radix-cache",), ("--disable-radix-cache", "--enable-hierarchical-cache")),
])
def test_what_cannot_be_is_refused_at_the_start(flags, words):
    begin_s = time.monotonic()
    with pytest.raises(ServerFailed) as failed, Server("--model-path", str(tiny("llama")), *FLAGS, *flags):
        pass
    for word in words:
        assert word in str(failed.value), f"{word} is not in the log"
    assert time.monotonic() - begin_s < 60
