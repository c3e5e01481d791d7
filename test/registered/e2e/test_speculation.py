"""Speculation of a real server: the answers of the references after every kind of hit, figures that add up, clear refusals, nothing lost."""
import json
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import load_file

from kits.audit import assert_clean, assert_empty, wait_idle
from kits.checkpoints import tiny
from kits.server import Server, ServerFailed
from sglane.configs.model_config import PACKAGED_MODELS

FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--page-size", "4", "--max-total-tokens", "768", "--chunked-prefill-size", "32",
         "--log-level", "warning", "--enable-metrics")
CHECKED = {"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}
ALLOWED = ["tail_copy_skipped", "load_back_skipped", "host_backup_skipped", "host_backup_dropped"]


def lanes(cp_size):
    return ("--cp-size", str(cp_size), "--enable-cp-shared-kv") if cp_size > 1 else ()


def prompt_of(seed, length):
    return [(seed * 31 + i * i * 7 + i) % 480 + 8 for i in range(length)]


def check_counts(meta):
    """The first token comes from the prompt's last step; a verify step gives its accepted drafts and one more, less what the limit cuts."""
    histogram = meta["spec_accept_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    assert meta["spec_accept_token_num"] == sum(i * count for i, count in enumerate(histogram)) <= meta["spec_draft_token_num"]
    given = 1 + meta["spec_verify_ct"] + meta["spec_accept_token_num"]
    assert given - 3 <= meta["completion_tokens"] <= given
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / meta["spec_verify_ct"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "cp_size", "algorithm"), [
    ("deepseek_v32", 2, "NEXTN"), ("glm_moe_dsa_share", 1, "EAGLE"), ("llama", 1, "NGRAM"),
    pytest.param("deepseek_v3", 4, "NEXTN", marks=pytest.mark.slow), pytest.param("qwen3", 2, "NGRAM", marks=pytest.mark.slow)])
def test_answers_after_every_kind_of_hit(family, cp_size, algorithm):
    path = tiny(family)
    reference = load_file(path / "ref.safetensors")
    flags = ("--speculative-algorithm", algorithm, "--speculative-num-steps", "3", "--enable-hierarchical-cache", "--hicache-ratio", "6")
    with Server("--model-path", str(path), *FLAGS, *lanes(cp_size), *flags, env=CHECKED) as server:
        for n in (65, 200):
            prompt, expected = reference[f"prompt.{n}"].tolist(), reference[f"greedy.{n}"].tolist()

            def ask(prompt=prompt, expected=expected):
                answer = server.generate(prompt, max_new_tokens=len(expected), ignore_eos=True)
                assert answer["output_ids"] == expected
                check_counts(answer["meta_info"])
                return answer["meta_info"]["cached_tokens_details"]

            assert ask() == {"device": 0, "host": 0}
            assert ask() == {"device": n - 1, "host": 0}
            for i in range(10):
                server.generate(prompt_of(i, 127), max_new_tokens=1, ignore_eos=True)
            found = ask()
            assert found["device"] + found["host"] == n - 1 and found["host"] > 0
            body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": len(expected), "temperature": 0, "ignore_eos": True}}
            events = list(server.stream("/generate", body))
            assert events[-1]["output_ids"] == expected and events[-1]["meta_info"]["completion_tokens"] == len(expected)
        state = server.server_info()["internal_states"][0]
        by_source = state["speculation"]["by_source"]
        assert by_source["none"]["num_verify_steps"] and by_source["device"]["num_verify_steps"] and by_source["host"]["num_verify_steps"]
        assert state["avg_spec_accept_length"] >= 1
        metrics = server.get("/metrics").text
        assert "sglang:spec_accept_length" in metrics and 'cache_source="host"' in metrics
        assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
        server.flush_cache()
        assert_empty(server.kv_ledger())
        assert ask() == {"device": 0, "host": 0}


@pytest.mark.timeout(300)
def test_requests_of_many_kinds():
    """Stops and limits inside windows, one log probability a token, choices, a request without drafts, an abort in the middle, bad values."""
    path = tiny("deepseek_v32")
    reference = load_file(path / "ref.safetensors")
    prompt, expected = reference["prompt.65"].tolist(), reference["greedy.65"].tolist()
    with Server("--model-path", str(path), *FLAGS, "--speculative-algorithm", "NEXTN", env=CHECKED) as server:
        for limit in range(1, 7):
            assert server.generate(prompt, max_new_tokens=limit, ignore_eos=True)["output_ids"] == expected[:limit]
        for i in range(2, 7):
            answer = server.generate(prompt, max_new_tokens=20, stop_token_ids=[expected[i]])
            assert answer["output_ids"] == expected[:expected.index(expected[i]) + 1]
            assert answer["meta_info"]["finish_reason"]["matched"] == expected[i]
        answer = server.generate(prompt, extra={"return_logprob": True, "top_logprobs_num": 2}, max_new_tokens=8, ignore_eos=True)
        assert [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]] == expected[:8]
        assert len(answer["meta_info"]["output_top_logprobs"]) == 8
        answer = server.generate(prompt, max_new_tokens=8, ignore_eos=True, speculative_num_steps=0)
        assert answer["output_ids"] == expected[:8]
        assert answer["meta_info"]["spec_draft_token_num"] == 0 and answer["meta_info"]["spec_verify_ct"] == 7
        sampled = [server.generate(prompt, max_new_tokens=12, ignore_eos=True, temperature=1.0, sampling_seed=5, speculative_num_steps=steps)
                   for steps in (0, 3, 3)]
        assert sampled[0]["output_ids"] == sampled[1]["output_ids"] == sampled[2]["output_ids"]
        for bad in (-1, 1.5, "many", True, None):
            refused = server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "speculative_num_steps": bad}})
            assert refused.status_code == (200 if bad is None else 400)
            assert bad is None or "speculative_num_steps" in refused.text
        body = {"input_ids": prompt, "rid": "gone", "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
        asking = threading.Thread(target=server.post, args=("/generate", body))
        asking.start()
        time.sleep(0.3)
        server.post("/abort_request", {"rid": "gone"})
        asking.join()
        assert_clean(wait_idle(server), allowed_fallbacks=ALLOWED)
        assert server.generate(prompt, max_new_tokens=8, ignore_eos=True)["output_ids"] == expected[:8]


@pytest.mark.timeout(120)
def test_refusals_at_the_start(tmp_path):
    for path in tiny("deepseek_v32").iterdir():
        if path.name.endswith(".index.json"):
            index = json.loads(path.read_text())
            index["weight_map"] = {name: file for name, file in index["weight_map"].items() if "mtp" not in file}
            (tmp_path / path.name).write_text(json.dumps(index))
        elif "mtp" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    refusals = (
        (("--model-path", str(tiny("llama")), "--speculative-algorithm", "EAGLE"), "no NextN layer"),
        (("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "6"), "-num-draft-tokens 6"),
        (("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"), "--speculative-eagle-topk 4"),
        (("--speculative-num-steps", "3"), "needs --speculative-algorithm"),
    )
    for flags, message in refusals:
        ran = subprocess.run([sys.executable, "-m", "sglane.launch_server", *flags], capture_output=True, text=True, timeout=60)
        assert ran.returncode != 0 and message in ran.stdout + ran.stderr, ran.stdout + ran.stderr
        assert "Traceback" not in ran.stdout + ran.stderr
    with pytest.raises(ServerFailed, match="no NextN layer to draft with"):
        with Server("--model-path", str(tmp_path), *FLAGS, "--speculative-algorithm", "NEXTN"):
            pass


@pytest.mark.timeout(300)
def test_the_packaged_model_answers_a_chat():
    with Server("--model-path", "tiny-dsa", "--speculative-algorithm", "NEXTN", "--log-level", "warning", *lanes(2)) as server:
        answer = server.chat("Good morrow, my lord. What news from the king?", temperature=0, max_tokens=60)
        assert answer["model"] and len(answer["choices"][0]["message"]["content"].split()) > 2
        assert server.server_info()["served_model_name"] == PACKAGED_MODELS["tiny-dsa"].name
        assert server.server_info()["internal_states"][0]["avg_spec_accept_length"] > 1.1
        assert_clean(wait_idle(server))
