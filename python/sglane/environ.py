"""Tuning and debug variables, typed, read once at import. Everything a user normally sets is a flag; flags can be set by variables too."""
import os


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes")


#: Fill pages that became reusable, and rows of new pages, with NaN; any read of them shows.
SGLANE_POISON = _flag("SGLANE_POISON")
#: Audit the ledger after every step and log a digest of the planner's state.
SGLANE_DEBUG_LEDGER = _flag("SGLANE_DEBUG_LEDGER")
#: Fault injection for tests, JSON: {"rank": 1, "point": "forward" | "exchange" | "result" | "backup" | "load" | "ack", "sleep_ms": 50}.
SGLANE_HOLD = os.environ.get("SGLANE_HOLD", "")
#: Compute threads of each executor rank; 0: by step size and the cores that other processes leave free.
SGLANE_NUM_THREADS = int(os.environ.get("SGLANE_NUM_THREADS", "0"))
#: Prefix tokens of a step from which several ranks fetch the prefix one layer ahead (see the page on context-parallel attention).
SGLANE_CP_PREFETCH_MIN_TOKENS = int(os.environ.get("SGLANE_CP_PREFETCH_MIN_TOKENS", "1024"))
#: Folder for what is converted once and used again, such as the tokenizer of a GGUF file; default: ~/.cache/sglane.
SGLANE_CACHE_DIR = os.environ.get("SGLANE_CACHE_DIR") or os.path.expanduser("~/.cache/sglane")
#: How spans travel with --enable-trace, as OpenTelemetry's SDK names it: grpc or http/protobuf. (The SDK reads its other variables itself.)
OTEL_TRACES_PROTOCOL = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"

#: What the name of a variable that sets a flag begins with.
FLAG_PREFIX = "SGLANE_ARG_"


def flag_variables() -> dict[str, str]:
    """The variables that set flags, by their whole name."""
    return {name: value for name, value in os.environ.items() if name.startswith(FLAG_PREFIX)}
