"""Configuration of one server: a frozen dataclass from which the command line, variables, `--config` files and the docs are made.

`ServerArgs.resolve()` validates the combination and fills in what depends on other fields; nothing changes afterwards.
"""
import argparse
import dataclasses
import importlib.util
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from sglane.environ import FLAG_PREFIX, flag_variables
from sglane.plan.io_struct import Endpoints
from sglane.utils.addresses import HostPort, is_wildcard
from sglane.utils.config_file import ConfigFileError, read_config_file

DEFAULT_PORT = 30000
#: Drafts per step: of the draft layer, of prompt lookup, and the most that can be asked for.
DEFAULT_DRAFTS, DEFAULT_LOOKUP_DRAFTS, MOST_DRAFTS = 3, 7, 16
#: How a variable sets a switch.
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
ToolCallFormat = Literal["deepseekv31", "deepseekv32", "glm45", "glm47", "glm5", "qwen3"]
ReasoningFormat = Literal["deepseek-r1", "deepseek-v3", "glm45", "qwen3"]
#: Ports in use from --dist-init-addr on: the ranks' store, the launchers, results for the planner.
NUM_DIST_PORTS = 3
#: Flags that may differ between the nodes of a server; all others must be the same.
NODE_FLAGS = frozenset({
    "config", "model_path", "tokenizer_path", "served_model_name", "chat_template", "host", "port", "skip_server_warmup", "log_level", "log_format",
    "log_requests", "log_requests_level", "api_key", "admin_api_key", "max_body_bytes", "enable_metrics", "enable_trace", "otlp_traces_endpoint",
    "enable_cache_report", "tool_call_parser", "reasoning_parser", "shutdown_timeout_s", "health_timeout_s", "node_rank", "dist_init_addr",
    "speculative_draft_model_path",
})


class ConfigError(ValueError):
    """A flag or a combination of flags is refused; the message names the flag and the reason."""


def arg(default: Any, help: str, group: str, *aliases: str, choices: Sequence[Any] | None = None, secret: bool = False) -> Any:
    """One field: its default, its help text, the group it is listed under, other flag spellings. A secret is never printed."""
    return field(default=default, repr=not secret, metadata={"help": help, "group": group, "aliases": aliases, "choices": choices})


@dataclass(frozen=True)
class ServerArgs:
    """All flags. Sizes in tokens unless the name says otherwise; None means: derived in `resolve()` or by the engine."""

    config: str | None = arg(None, "YAML file with flags, one `name: value` a line; the command line and variables go before it", "Configuration")

    model_path: str | None = arg(None, "Hugging Face folder, GGUF file, or tiny-dsa (small, DSA with a NextN layer); default: SmolLM2-135M-Instruct",
                                 "Model", "--model")
    tokenizer_path: str | None = arg(None, "tokenizer folder; default: the model's", "Model")
    served_model_name: str | None = arg(None, "name in /v1/models; default: the model path's last part", "Model")
    chat_template: str | None = arg(None, "file with a Jinja chat template; default: the tokenizer's", "Model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = arg("auto", "type of weights and KV cache; auto: the checkpoint's", "Model")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto: cuda if there is one", "Model")
    context_length: int | None = arg(None, "longest prompt + output in tokens; default: the model's", "Model")
    skip_tokenizer_init: bool = arg(False, "no tokenizer: /generate takes and returns token ids only", "Model")

    host: str = arg("127.0.0.1", "address to listen on", "HTTP server")
    port: int = arg(DEFAULT_PORT, "port to listen on", "HTTP server")
    skip_server_warmup: bool = arg(False, "do not run a request before the ready line", "HTTP server")
    log_level: Literal["debug", "info", "warning", "error"] = arg("info", "level of the log", "HTTP server")
    log_format: Literal["text", "json"] = arg("text", "lines for people, or one JSON object a line", "HTTP server")
    log_requests: bool = arg(False, "log every request when it comes and when it ends", "HTTP server")
    log_requests_level: int = arg(2, "0: sizes and times; 1: and sampling parameters; 2: and the first 2048 tokens and characters; 3: and everything",
                                  "HTTP server")
    api_key: str | None = arg(None, "requests need `Authorization: Bearer KEY`; probes and /metrics stay open", "HTTP server", secret=True)
    admin_api_key: str | None = arg(None, "flush_cache and abort_request need this key", "HTTP server", secret=True)
    max_body_bytes: int = arg(64 << 20, "largest request body; a larger one is a 413", "HTTP server")
    enable_metrics: bool = arg(False, "serve /metrics for Prometheus", "HTTP server")
    enable_trace: bool = arg(False, "send a span of every request to an OpenTelemetry collector; needs the extra `trace`", "HTTP server")
    otlp_traces_endpoint: str | None = arg(None, "collector as host:port or URL; default: OTEL_EXPORTER_OTLP_*, then localhost", "HTTP server")
    enable_cache_report: bool = arg(False, "report cached_tokens in OpenAI usage", "HTTP server")
    tool_call_parser: ToolCallFormat | None = arg(None, "how the model writes tool calls; default: requests with tools are refused", "HTTP server")
    reasoning_parser: ReasoningFormat | None = arg(None, "how the model writes its thoughts; default: they stay in the text", "HTTP server")
    shutdown_timeout_s: float = arg(60.0, "seconds that running requests get to finish after SIGTERM", "HTTP server")
    health_timeout_s: float = arg(20.0, "seconds without a sign of life after which /health is 503", "HTTP server")
    watchdog_timeout_s: float = arg(300.0, "seconds without progress in a step after which the server ends", "HTTP server", "--watchdog-timeout")

    max_running_requests: int | None = arg(None, "requests that run at once; default 64 on CPU, 256 on CUDA", "Scheduler")
    max_queued_requests: int | None = arg(None, "requests that may wait; one more is refused with 503", "Scheduler")
    max_total_tokens: int | None = arg(None, "KV pool size over all lanes; default: from the memory budget", "Scheduler")
    mem_fraction_static: float | None = arg(None, "share of the device memory for weights and KV pool; default 0.5 on CPU, 0.85 on CUDA", "Scheduler")
    page_size: int = arg(64, "tokens per page", "Scheduler")
    chunked_prefill_size: int = arg(2048, "most prompt tokens in one step; -1: whole prompts", "Scheduler")
    schedule_policy: Literal["fcfs", "lpm"] = arg("fcfs", "order of waiting requests: arrival, or longest prefix match", "Scheduler")
    schedule_conservativeness: float = arg(1.0, "scales the tokens held back for running requests", "Scheduler")
    disable_overlap_schedule: bool = arg(False, "issue a step only after the result of the one before", "Scheduler")
    disable_radix_cache: bool = arg(False, "no prefix reuse between requests", "Scheduler")
    stream_interval: int = arg(1, "tokens per streamed chunk", "Scheduler")
    incremental_streaming_output: bool = arg(False, "events of /generate have what is new, not all text and tokens so far", "Scheduler")
    decode_log_interval: int = arg(40, "steps between two decode log lines", "Scheduler")

    enable_layerwise_nvtx_marker: bool = arg(False, "name steps and layers for profilers: NVTX on CUDA, on CPU in recordings", "Profiling")

    grammar_backend: Literal["xgrammar", "llguidance", "none"] = arg(
        "xgrammar", "library for structured output; llguidance: an extra, no structural tags; none: such requests are refused", "Structured output")

    cp_size: int = arg(1, "context-parallel ranks; each stores and computes the tokens of its own pages", "Context parallelism", "--attn-cp-size")
    enable_cp_shared_kv: bool = arg(False, "one copy of the KV cache per CP group (required for --cp-size > 1)", "Context parallelism",
                                    "--enable-kv-cache-sharding")
    cp_strategy: Literal["zigzag"] = arg("zigzag", "owner policy of prefill pages", "Context parallelism")
    cp_exchange: Literal["auto", "peer", "collective"] = arg(
        "auto", "how ranks see each other's rows: peer: shared memory (CPU ranks of one host); collective: gloo or NCCL; auto: peer where it can be",
        "Context parallelism")

    cp_scratch_tokens: int = arg(131072, "prefix tokens that one layer's attention holds at once, in two tiles; longer prefixes are streamed",
                                 "Context parallelism")

    speculative_algorithm: Literal["EAGLE", "NEXTN", "NGRAM"] | None = arg(
        None, "drafts that decoding verifies: EAGLE or NEXTN (the same): by the model's NextN layer; NGRAM: what followed the same tokens earlier",
        "Speculation")
    speculative_num_steps: int | None = arg(None, "drafts per step; default 3, with NGRAM 7", "Speculation")
    speculative_eagle_topk: int = arg(1, "branches of a draft; only 1 is supported: a chain", "Speculation")
    speculative_num_draft_tokens: int | None = arg(None, "tokens that a step verifies: always --speculative-num-steps + 1", "Speculation")
    speculative_draft_model_path: str | None = arg(None, "folder with the NextN layer; default: the model's own", "Speculation",
                                                    "--speculative-draft-model")
    speculative_max_rows: int | None = arg(None, "tokens that a step verifies in all; with many requests drafts get shorter; default 48 on CPU",
                                           "Speculation")
    speculative_ngram_min_match_window_size: int = arg(1, "fewest tokens that must be the same as earlier", "Speculation")
    speculative_ngram_max_match_window_size: int = arg(12, "most tokens that are compared", "Speculation")

    enable_hierarchical_cache: bool = arg(False, "keep what leaves the device in host memory, and load it back on a hit", "Hierarchical cache",
                                          "--enable-hicache")
    hicache_size: float | None = arg(None, "host memory of each rank in GB (10^9 bytes), for all planes; goes before --hicache-ratio",
                                     "Hierarchical cache")
    hicache_ratio: float = arg(2.0, "host pages for each device page; fewer, with a warning, where memory is short", "Hierarchical cache")
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = arg(
        "write_through", "back up every page when it is computed, or only what was hit twice; write_back is refused", "Hierarchical cache")
    hicache_io_backend: Literal["direct", "kernel"] = arg("direct", "how pages are copied; kernel is refused", "Hierarchical cache")
    hicache_mem_layout: Literal["page_first_direct", "page_first", "layer_first", "page_head"] = arg(
        "page_first_direct", "how a record lies in host memory; the others are refused", "Hierarchical cache")
    hicache_storage_backend: str | None = arg(None, "refused: there is no third tier", "Hierarchical cache")

    nnodes: int = arg(1, "hosts of this server; each runs --cp-size / --nnodes ranks", "Nodes")
    node_rank: int = arg(0, "this host's number; 0 has the HTTP server and the planner, the others only ranks", "Nodes")
    dist_init_addr: str | None = arg(None, "HOST:PORT of node 0, the same on all nodes; uses three ports from PORT on", "Nodes")
    dist_timeout_s: float = arg(600.0, "seconds that nodes wait for each other at the start, and ranks for the last one to load", "Nodes",
                                "--dist-timeout")

    def resolve(self) -> "ServerArgs":
        """Validate; raises ConfigError naming the flag."""
        positive = ("page_size", "cp_size", "max_running_requests", "max_queued_requests", "max_total_tokens", "context_length",
                    "stream_interval", "decode_log_interval", "max_body_bytes", "cp_scratch_tokens")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag_of(name)} must be at least 1, got {value}")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ConfigError(f"--chunked-prefill-size must be at least 1, or -1 for whole prompts, got {self.chunked_prefill_size}")
        if self.mem_fraction_static is not None and not 0.0 < self.mem_fraction_static < 1.0:
            raise ConfigError(f"--mem-fraction-static must be between 0 and 1, got {self.mem_fraction_static}")
        if not 0 <= self.log_requests_level <= 3:
            raise ConfigError(f"--log-requests-level must be between 0 and 3, got {self.log_requests_level}")
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ConfigError(f"{flag_of(name)} must not be empty")
        if self.otlp_traces_endpoint is not None and not self.enable_trace:
            raise ConfigError("--otlp-traces-endpoint needs --enable-trace")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.cp_size > 1 and not self.enable_cp_shared_kv:
            raise ConfigError("--cp-size > 1 needs --enable-cp-shared-kv: a replicated KV cache is not supported")
        if self.enable_cp_shared_kv and self.cp_size == 1:
            raise ConfigError("--enable-cp-shared-kv needs --cp-size > 1: there is nothing to share on one rank")
        if self.cp_exchange == "peer" and self.device == "cuda":
            raise ConfigError("--cp-exchange peer is for CPU ranks: GPU ranks cannot map each other's KV pools yet; use collective, or auto")
        if self.cp_exchange != "auto" and self.cp_size == 1:
            raise ConfigError(f"--cp-exchange {self.cp_exchange} needs --cp-size > 1: one rank has nobody to exchange rows with")
        if self.grammar_backend == "llguidance" and importlib.util.find_spec("llguidance") is None:
            raise ConfigError("--grammar-backend llguidance needs the package llguidance: pip install 'sglane[llguidance]'")
        if self.schedule_conservativeness < 0:
            raise ConfigError(f"--schedule-conservativeness must not be negative, got {self.schedule_conservativeness}")
        self._check_hicache()
        self._check_speculation()
        self._check_nodes()
        return self

    def num_drafts(self) -> int:
        """Drafts that a step verifies at most; 0: no speculation."""
        if self.speculative_algorithm is None:
            return 0
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        if self.speculative_num_draft_tokens is not None:
            return self.speculative_num_draft_tokens - 1
        return DEFAULT_LOOKUP_DRAFTS if self.looks_up_prompts() else DEFAULT_DRAFTS

    def uses_draft_layer(self) -> bool:
        return self.speculative_algorithm in ("EAGLE", "NEXTN")

    def looks_up_prompts(self) -> bool:
        return self.speculative_algorithm == "NGRAM"

    def draft_path(self) -> str | None:
        """Folder with the draft layer; empty: the model's own; None: it is not used."""
        return (self.speculative_draft_model_path or "") if self.uses_draft_layer() else None

    def _check_speculation(self) -> None:
        if self.speculative_algorithm is None:
            for item in dataclasses.fields(self):
                if item.name.startswith("speculative_") and getattr(self, item.name) != item.default:
                    raise ConfigError(f"{flag_of(item.name)} needs --speculative-algorithm")
            return
        if self.speculative_eagle_topk != 1:
            raise ConfigError(f"--speculative-eagle-topk {self.speculative_eagle_topk} is not supported: drafts are chains; use 1")
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps is not None and tokens is not None and tokens != steps + 1:
            raise ConfigError(f"--speculative-num-draft-tokens {tokens} does not fit --speculative-num-steps {steps}: it must be {steps + 1}")
        flag = "speculative_num_steps" if steps is not None or tokens is None else "speculative_num_draft_tokens"
        if not 1 <= self.num_drafts() <= MOST_DRAFTS:
            raise ConfigError(f"{flag_of(flag)} {getattr(self, flag)} asks for {self.num_drafts()} drafts per step; 1 to {MOST_DRAFTS} are possible")
        if self.speculative_max_rows is not None and self.speculative_max_rows < 1:
            raise ConfigError(f"--speculative-max-rows must be at least 1, got {self.speculative_max_rows}")
        if self.looks_up_prompts() and self.speculative_draft_model_path is not None:
            raise ConfigError("--speculative-draft-model-path is for EAGLE and NEXTN: NGRAM has no draft layer")
        for item in dataclasses.fields(self):
            if item.name.startswith("speculative_ngram_") and getattr(self, item.name) != item.default and not self.looks_up_prompts():
                raise ConfigError(f"{flag_of(item.name)} is for --speculative-algorithm NGRAM")
        least, most = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        if not 1 <= least <= most:
            raise ConfigError(f"--speculative-ngram-min-match-window-size {least} must be between 1 and the largest one, which is {most}")

    def _check_hicache(self) -> None:
        refused = {
            "hicache_write_policy": ("write_back", "a page that leaves the device would have to wait for its copy"),
            "hicache_io_backend": ("kernel", "it needs copy kernels for GPUs, which this release does not have; use direct"),
        }
        for name, (value, why) in refused.items():
            if getattr(self, name) == value:
                raise ConfigError(f"{flag_of(name)} {value} is not supported: {why}")
        if self.hicache_mem_layout != "page_first_direct":
            raise ConfigError(f"--hicache-mem-layout {self.hicache_mem_layout} is not supported: pages are whole on the device, and so are their "
                              "records; use page_first_direct")
        if self.hicache_storage_backend is not None:
            raise ConfigError(f"--hicache-storage-backend {self.hicache_storage_backend} is not supported: there is no third tier")
        if self.hicache_size is not None and self.hicache_size <= 0:
            raise ConfigError(f"--hicache-size must be greater than 0, got {self.hicache_size:g}")
        if self.hicache_ratio <= 0:
            raise ConfigError(f"--hicache-ratio must be greater than 0, got {self.hicache_ratio:g}")
        if not self.enable_hierarchical_cache:
            for item in dataclasses.fields(self):
                if item.name.startswith("hicache_") and getattr(self, item.name) != item.default:
                    raise ConfigError(f"{flag_of(item.name)} needs --enable-hierarchical-cache")
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError("--enable-hierarchical-cache needs prefix reuse: it and --disable-radix-cache exclude each other")

    def _check_nodes(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes must be at least 1, got {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank must be between 0 and --nnodes - 1 = {self.nnodes - 1}, got {self.node_rank}")
        if self.dist_timeout_s <= 0:
            raise ConfigError(f"--dist-timeout-s must be greater than 0, got {self.dist_timeout_s:g}")
        if self.cp_size % self.nnodes:
            raise ConfigError(f"--cp-size {self.cp_size} cannot be spread evenly over --nnodes {self.nnodes}")
        if self.nnodes == 1 and self.dist_init_addr is not None:
            raise ConfigError("--dist-init-addr needs --nnodes > 1: ranks of one host meet without it")
        if self.nnodes > 1:
            if self.dist_init_addr is None:
                raise ConfigError("--nnodes > 1 needs --dist-init-addr HOST:PORT, an address of node 0")
            self.dist_address()
            refuse_peer_between_nodes(self.cp_exchange, self.nnodes)

    def dist_address(self) -> HostPort:
        """--dist-init-addr in its parts. Raises ConfigError."""
        text = self.dist_init_addr or ""
        try:
            address = HostPort.parse(text)
        except ValueError as error:
            raise ConfigError(f"--dist-init-addr {text}: {error}") from error
        if is_wildcard(address.host):
            raise ConfigError(f"--dist-init-addr {text}: other nodes cannot connect to it, give an address of node 0")
        if address.port + NUM_DIST_PORTS - 1 > 65535:
            raise ConfigError(f"--dist-init-addr {text}: {NUM_DIST_PORTS} ports are needed from there on, the last port is 65535")
        return address

    @property
    def ranks_per_node(self) -> int:
        return self.cp_size // self.nnodes

    def ranks_of_node(self) -> range:
        """The ranks that this node runs."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)

    def offers_grammars(self) -> bool:
        """Structured output is possible: there is a library, and text to match."""
        return self.grammar_backend != "none" and not self.skip_tokenizer_init


def refuse_peer_between_nodes(cp_exchange: str, nnodes: int) -> None:
    """peer is shared memory, so all ranks must be on one host (auto is collective between hosts). Raises ConfigError."""
    if cp_exchange == "peer" and nnodes > 1:
        raise ConfigError(f"--cp-exchange peer needs all ranks on one host, but --nnodes is {nnodes}: use collective, or auto")


def secrets() -> list[str]:
    """Fields that are never shown."""
    return [item.name for item in dataclasses.fields(ServerArgs) if not item.repr]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def scalar_of(kind: Any) -> Any:
    """`int | None` -> int; other types as they are."""
    if typing.get_origin(kind) is Literal:
        return kind
    return [member for member in (typing.get_args(kind) or (kind,)) if member is not type(None)][0]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglane.launch_server", description="Start an sglane server.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    hints = typing.get_type_hints(ServerArgs)
    groups: dict[str, Any] = {}
    for item in dataclasses.fields(ServerArgs):
        title = item.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        flags = [flag_of(item.name), *item.metadata["aliases"]]
        kind = hints[item.name]
        common = {"dest": item.name, "default": item.default, "help": item.metadata["help"]}
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)  # --no-X beats a file
            continue
        scalar = scalar_of(kind)
        if typing.get_origin(scalar) is Literal:
            group.add_argument(*flags, choices=typing.get_args(scalar), **common)
        else:
            group.add_argument(*flags, type=scalar, **common)
    return parser


def spellings() -> dict[str, str]:
    """Every name of a flag, without dashes in front and with `-` as `_` -> the field."""
    fields = dataclasses.fields(ServerArgs)
    aliases = {alias.removeprefix("--").replace("-", "_"): item.name for item in fields for alias in item.metadata["aliases"]}
    return {**aliases, **{item.name: item.name for item in fields}}


def fields_of_file(path: str) -> dict[str, Any]:
    """The values of a --config file by field, checked for their type. Raises ConfigError naming file and key."""
    known, hints = spellings(), typing.get_type_hints(ServerArgs)
    found: dict[str, Any] = {}
    try:
        values: Mapping[str, Any] = read_config_file(path)
    except ConfigFileError as error:
        raise ConfigError(f"--config: {error}") from error
    for key, value in values.items():
        if key not in known or known[key] == "config":
            raise ConfigError(f"--config {path}: there is no flag named {key!r}")
        if known[key] in found:
            raise ConfigError(f"--config {path}: {known[key]} is given twice, also as {key}")
        try:
            found[known[key]] = msgspec.convert(value, hints[known[key]])
        except msgspec.ValidationError as error:
            raise ConfigError(f"--config {path}: {key}: {error}") from error
    return found


def fields_of_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """The values of SGLANE_ARG_* by field. Raises ConfigError naming the variable; values that may be secret are not repeated."""
    known, hints = spellings(), typing.get_type_hints(ServerArgs)
    found: dict[str, Any] = {}
    for variable, text in variables.items():
        name = known.get(variable.removeprefix(FLAG_PREFIX).lower())
        if name is None or variable != variable.upper():
            raise ConfigError(f"{variable}: there is no flag of this name")
        if name in found:
            raise ConfigError(f"{variable}: {flag_of(name)} is set by another variable too")
        try:
            found[name] = value_of(text, hints[name])
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"{variable}: {error}") from error
    return found


def value_of(text: str, kind: Any) -> Any:
    """A variable's text as the type of a field. Raises ValueError or ValidationError."""
    scalar = scalar_of(kind)
    if scalar is bool:
        if text.lower() not in SWITCH:
            raise ValueError(f"must be one of {', '.join(SWITCH)}, got {text!r}")
        return SWITCH[text.lower()]
    return msgspec.convert(text, scalar, strict=False) if scalar in (int, float) else msgspec.convert(text, scalar)


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Command line > SGLANE_ARG_* variables > --config file > defaults. Exits with a usage message on a bad value."""
    parser, variables = build_parser(), flag_variables()
    try:
        parser.set_defaults(**fields_of_variables(variables))
        path = parser.parse_args(argv).config
        if path is not None:
            parser.set_defaults(**{**fields_of_file(path), **fields_of_variables(variables)})
        return ServerArgs(**vars(parser.parse_args(argv))).resolve()
    except ConfigError as error:
        blamed = [name for name in variables if blames(str(error), name)]
        parser.error(f"{error} ({', '.join(blamed)} in the environment)" if blamed else str(error))


def blames(message: str, variable: str) -> bool:
    """Whether a message names the flag of a variable."""
    name = spellings().get(variable.removeprefix(FLAG_PREFIX).lower())
    return name is not None and re.search(rf"{flag_of(name)}(?![\w-])", message) is not None


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process is told on its standard input, as JSON."""

    server_args: ServerArgs
    endpoints: Endpoints
    rank: int = 0

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> "ProcessSpec":
        return msgspec.json.decode(data, type=ProcessSpec)
