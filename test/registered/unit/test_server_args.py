"""Flags: defaults, refusals with the flag's name and the reason, the way to a child process and back."""
import dataclasses

import pytest

from sglane.plan.io_struct import Endpoints
from sglane.server_args import ConfigError, ProcessSpec, ServerArgs, build_parser, flag_of, parse_args


def test_no_flags_give_the_defaults():
    assert parse_args([]) == ServerArgs()


def test_every_field_is_a_flag_with_a_help_text():
    text = build_parser().format_help()
    for item in dataclasses.fields(ServerArgs):
        assert flag_of(item.name) in text
        assert item.metadata["help"]


@pytest.mark.parametrize(("words", "field", "value"), [
    (["--page-size", "16"], "page_size", 16),
    (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
    (["--mem-fraction-static", "0.3"], "mem_fraction_static", 0.3),
    (["--disable-radix-cache"], "disable_radix_cache", True),
    (["--schedule-policy", "lpm"], "schedule_policy", "lpm"),
    (["--model", "somewhere"], "model_path", "somewhere"),
    (["--watchdog-timeout", "5"], "watchdog_timeout_s", 5.0),
])
def test_words_become_values(words, field, value):
    assert parse_args(words) == dataclasses.replace(ServerArgs(), **{field: value})


def test_other_spellings_of_the_two_rank_flags():
    args = parse_args(["--attn-cp-size", "2", "--enable-kv-cache-sharding"])
    assert (args.cp_size, args.enable_cp_shared_kv) == (2, True)


@pytest.mark.parametrize(("changes", "word"), [
    ({"page_size": 0}, "--page-size"),
    ({"max_running_requests": 0}, "--max-running-requests"),
    ({"max_total_tokens": -5}, "--max-total-tokens"),
    ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
    ({"chunked_prefill_size": -2}, "--chunked-prefill-size"),
    ({"mem_fraction_static": 1.0}, "--mem-fraction-static"),
    ({"port": 70000}, "--port"),
    ({"schedule_conservativeness": -0.1}, "--schedule-conservativeness"),
    ({"cp_size": 2}, "--enable-cp-shared-kv"),
    ({"enable_cp_shared_kv": True}, "--cp-size"),
])
def test_a_refusal_names_the_flag(changes, word):
    with pytest.raises(ConfigError, match=word):
        dataclasses.replace(ServerArgs(), **changes).resolve()


@pytest.mark.parametrize("words", [
    ["--no-such-flag"], ["--cp-size", "2"], ["--page-size", "many"], ["--dtype", "int3"], ["--enable-hierarchical-cache"],
])
def test_the_command_line_ends_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_nothing_changes_after_the_start():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerArgs().page_size = 1


def test_a_child_reads_what_its_parent_wrote():
    endpoints = Endpoints(to_planner="ipc:///a", to_front="ipc:///b", to_executors=["ipc:///c"], from_executors="ipc:///d", rendezvous="file:///e")
    spec = ProcessSpec(server_args=dataclasses.replace(ServerArgs(), page_size=16, dtype="float32"), endpoints=endpoints, rank=3)
    assert ProcessSpec.from_json(spec.to_json()) == spec
