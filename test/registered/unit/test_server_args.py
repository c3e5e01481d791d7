"""Flags: defaults, refusals with the flag's name and the reason, the way to a child process and back."""
import dataclasses
import typing

import pytest

from sglane.plan.io_struct import Endpoints
from sglane.server_args import (
    ConfigError,
    ProcessSpec,
    ServerArgs,
    build_parser,
    fields_of_variables,
    flag_of,
    parse_args,
    refuse_peer_between_nodes,
    scalar_of,
    secrets,
)


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


TWO_NODES = {"cp_size": 4, "enable_cp_shared_kv": True, "nnodes": 2, "dist_init_addr": "node0:5000"}


@pytest.mark.parametrize(("changes", "word"), [
    ({"page_size": 0}, "--page-size"),
    ({"max_running_requests": 0}, "--max-running-requests"),
    ({"max_total_tokens": -5}, "--max-total-tokens"),
    ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
    ({"chunked_prefill_size": -2}, "--chunked-prefill-size"),
    ({"mem_fraction_static": 1.0}, "--mem-fraction-static"),
    ({"port": 70000}, "--port"),
    ({"log_requests_level": 4}, "--log-requests-level"),
    ({"api_key": " "}, "--api-key"),
    ({"max_body_bytes": 0}, "--max-body-bytes"),
    ({"schedule_conservativeness": -0.1}, "--schedule-conservativeness"),
    ({"cp_size": 2}, "--enable-cp-shared-kv"),
    ({"cp_exchange": "peer"}, "--cp-exchange peer needs --cp-size"),
    ({"cp_exchange": "peer", "device": "cuda", "cp_size": 2, "enable_cp_shared_kv": True}, "--cp-exchange peer is for CPU ranks"),
    ({"enable_cp_shared_kv": True}, "--cp-size"),
    ({"hicache_size": 4.0}, "--hicache-size needs --enable-hierarchical-cache"),
    ({"hicache_ratio": 3.0}, "--hicache-ratio needs --enable-hierarchical-cache"),
    ({"hicache_write_policy": "write_through_selective"}, "--hicache-write-policy needs --enable-hierarchical-cache"),
    ({"enable_hierarchical_cache": True, "hicache_size": 0.0}, "--hicache-size must be greater than 0"),
    ({"enable_hierarchical_cache": True, "hicache_ratio": -1.0}, "--hicache-ratio must be greater than 0"),
    ({"nnodes": 0}, "--nnodes must be at least 1"),
    ({"node_rank": 1}, "--node-rank must be between 0 and --nnodes - 1 = 0, got 1"),
    ({"node_rank": -1}, "--node-rank"),
    ({"dist_timeout_s": 0.0}, "--dist-timeout-s"),
    ({"dist_init_addr": "node0:5000"}, "--dist-init-addr needs --nnodes > 1"),
    ({**TWO_NODES, "dist_init_addr": None}, "--nnodes > 1 needs --dist-init-addr"),
    ({**TWO_NODES, "nnodes": 3}, "--cp-size 4 cannot be spread evenly over --nnodes 3"),
    ({**TWO_NODES, "node_rank": 2}, "--node-rank must be between 0 and --nnodes - 1 = 1, got 2"),
    ({**TWO_NODES, "dist_init_addr": "node0"}, "--dist-init-addr node0: must be HOST:PORT"),
    ({**TWO_NODES, "dist_init_addr": "::1:5000"}, "--dist-init-addr ::1:5000: an IPv6 address needs brackets"),
    ({**TWO_NODES, "dist_init_addr": "0.0.0.0:5000"}, "--dist-init-addr 0.0.0.0:5000: other nodes cannot connect to it"),
    ({**TWO_NODES, "dist_init_addr": "node0:65534"}, "--dist-init-addr node0:65534: 3 ports are needed"),
])
def test_a_refusal_names_the_flag(changes, word):
    with pytest.raises(ConfigError, match=word):
        dataclasses.replace(ServerArgs(), **changes).resolve()


def test_ranks_of_nodes():
    nodes = [dataclasses.replace(ServerArgs(), **TWO_NODES, node_rank=rank).resolve() for rank in (0, 1)]
    assert [list(node.ranks_of_node()) for node in nodes] == [[0, 1], [2, 3]]
    assert str(nodes[0].dist_address().at(2)) == "node0:5002"
    assert list(ServerArgs().ranks_of_node()) == [0]


def test_shared_memory_between_nodes_is_refused():
    for cp_exchange, nnodes in (("auto", 2), ("collective", 2), ("peer", 1)):
        refuse_peer_between_nodes(cp_exchange, nnodes)
    with pytest.raises(ConfigError, match="--cp-exchange peer needs all ranks on one host, but --nnodes is 2"):
        refuse_peer_between_nodes("peer", 2)


def test_a_grammar_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--grammar-backend llguidance needs the package"):
        dataclasses.replace(ServerArgs(), grammar_backend="llguidance").resolve()


@pytest.mark.parametrize("words", [
    ["--no-such-flag"], ["--cp-size", "2"], ["--page-size", "many"], ["--dtype", "int3"], ["--disaggregation-mode", "prefill"],
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


# --- secrets ------------------------------------------------------------------------------------------------------------


def test_secrets_are_not_printed():
    args = parse_args(["--api-key", "kept-quiet", "--admin-api-key", "also-quiet"])
    assert (args.api_key, args.admin_api_key) == ("kept-quiet", "also-quiet")
    assert "quiet" not in repr(args) and "quiet" not in str(args)
    assert secrets() == ["api_key", "admin_api_key"]


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        return str(path)
    return write


def test_command_line_beats_file_beats_default(file):
    path = file("page-size: 16\nschedule_policy: lpm\nhealth-timeout-s: 3\nenable_cache_report: true\nmodel: null\n")
    args = parse_args(["--config", path, "--page-size", "8"])
    assert (args.page_size, args.schedule_policy, args.health_timeout_s, args.enable_cache_report) == (8, "lpm", 3.0, True)
    assert (args.model_path, args.port) == (None, 30000)
    assert parse_args(["--config", path, "--no-enable-cache-report"]).enable_cache_report is False
    assert parse_args(["--page-size", "64", "--config", path]).page_size == 64, "a default on the command line beats the file too"


def test_other_spellings_and_combinations_in_a_file(file):
    args = parse_args(["--config", file("attn-cp-size: 2\nenable-kv-cache-sharding: true\nmodel: somewhere\n")])
    assert (args.cp_size, args.enable_cp_shared_kv, args.model_path) == (2, True, "somewhere")
    assert parse_args(["--config", file("# nothing\n")]).page_size == 64


@pytest.mark.parametrize(("text", "word"), [
    ("no-such-flag: 3", "no_such_flag"),
    ("config: other.yaml", "config"),
    ("page-size: many", "page_size"),
    ("page-size: 1.5", "page_size"),
    ("page-size: true", "page_size"),
    ("enable-metrics: 'yes'", "enable_metrics"),
    ("api-key: 1234", "api_key"),
    ("schedule-policy: lifo", "schedule_policy"),
    ("page-size: 0", "--page-size"),
    ("cp-size: 2", "--enable-cp-shared-kv"),
    ("page-size: 8\npage-size: 16", "page-size"),
    ("page-size: 8\npage_size: 16", "page_size"),
    ("cp-size: 2\nattn-cp-size: 2", "attn_cp_size"),
    ("- page-size", "list"),
    ("page-size: [", "not valid YAML"),
    ("model: !!python/name:os.system", "not valid YAML"),
    ("3: 4", "3"),
])
def test_a_wrong_file_is_refused_by_name(file, capsys, text, word):
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", file(text)])
    assert ended.value.code == 2
    assert word in capsys.readouterr().err.partition("error: ")[2]


def test_a_missing_file(capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse_args(["--config", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


# --- variables ----------------------------------------------------------------------------------------------------------


def test_command_line_beats_variables_beat_file(file, monkeypatch):
    path = file("page-size: 16\nschedule_policy: lpm\nhealth-timeout-s: 3\nstream-interval: 5\n")
    variables = {"PAGE_SIZE": "32", "HEALTH_TIMEOUT_S": "7.5", "ENABLE_METRICS": "yes", "PORT": "31000", "MODEL": "there", "API_KEY": "1234"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SGLANE_ARG_{name}", value)
    args = parse_args(["--config", path, "--port", "0", "--health-timeout-s", "9"])
    assert (args.page_size, args.schedule_policy, args.health_timeout_s, args.stream_interval, args.port) == (32, "lpm", 9.0, 5, 0)
    assert (args.enable_metrics, args.model_path, args.api_key) == (True, "there", "1234")
    assert parse_args(["--no-enable-metrics"]).enable_metrics is False
    monkeypatch.setenv("SGLANE_ARG_CONFIG", path)
    args = parse_args([])
    assert (args.page_size, args.stream_interval, args.port) == (32, 5, 31000)


def test_every_flag_has_a_variable(monkeypatch):
    samples = {bool: "true", int: "3", float: "0.5", str: "text"}
    hints = typing.get_type_hints(ServerArgs)
    for item in dataclasses.fields(ServerArgs):
        scalar = scalar_of(hints[item.name])
        choices = typing.get_args(scalar)
        found = fields_of_variables({f"SGLANE_ARG_{item.name.upper()}": choices[-1] if choices else samples[scalar]})
        assert type(found[item.name]) is (str if choices else scalar)


@pytest.mark.parametrize(("name", "value"), [
    ("NO_SUCH_FLAG", "1"), ("page_size", "16"), ("PAGE_SIZE", "many"), ("PAGE_SIZE", "1.5"), ("PAGE_SIZE", ""), ("PAGE_SIZE", "0"),
    ("ENABLE_METRICS", "maybe"), ("SCHEDULE_POLICY", "lifo"), ("MEM_FRACTION_STATIC", "nan"), ("CP_SIZE", "2"), ("CONFIG", "/does/not/exist"),
    ("ATTN_CP_SIZE", "x"), ("API_KEY", " "),
])
def test_a_wrong_variable_is_refused_by_name(monkeypatch, capsys, name, value):
    monkeypatch.setenv(f"SGLANE_ARG_{name}", value)
    with pytest.raises(SystemExit) as ended:
        parse_args([])
    assert ended.value.code == 2
    assert f"SGLANE_ARG_{name}" in capsys.readouterr().err.partition("error: ")[2]


def test_two_variables_for_one_flag():
    with pytest.raises(ConfigError, match="SGLANE_ARG_MODEL_PATH"):
        fields_of_variables({"SGLANE_ARG_MODEL": "a", "SGLANE_ARG_MODEL_PATH": "b"})


@pytest.mark.parametrize(("fields", "drafts"), [
    ({}, 0), ({"speculative_algorithm": "EAGLE"}, 3), ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 5}, 5),
    ({"speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 3}, 2), ({"speculative_algorithm": "NGRAM"}, 7),
    ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}, 2)])
def test_drafts_per_step(fields, drafts):
    args = ServerArgs(**fields).resolve()
    assert args.num_drafts() == drafts
    assert (args.uses_draft_layer(), args.looks_up_prompts()) == (args.draft_path() is not None, fields.get("speculative_algorithm") == "NGRAM")


@pytest.mark.parametrize(("fields", "words"), [
    ({"speculative_num_steps": 3}, "--speculative-num-steps needs --speculative-algorithm"),
    ({"speculative_max_rows": 3}, "--speculative-max-rows needs --speculative-algorithm"),
    ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
    ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, "-num-draft-tokens 3.*must be 4"),
    ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 0}, "--speculative-num-steps 0"),
    ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 18}, "--speculative-num-draft-tokens 18"),
    ({"speculative_algorithm": "EAGLE", "speculative_max_rows": 0}, "--speculative-max-rows"),
    ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"}, "--speculative-draft-model-path is for EAGLE"),
    ({"speculative_algorithm": "EAGLE", "speculative_ngram_max_match_window_size": 4}, "--speculative-ngram-max-match-window-size is for"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 13}, "--speculative-ngram-min-match-window-size 13"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 0}, "--speculative-ngram-min-match-window-size 0")])
def test_flags_of_speculation_that_do_not_fit(fields, words):
    with pytest.raises(ConfigError, match=words):
        ServerArgs(**fields).resolve()
