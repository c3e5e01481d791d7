"""Run clients against a server and print what came out: `scripts/clients [NAME...] [--fast] [--list] [--base-url URL]`."""
import argparse
import contextlib
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from clients.bench import SERVER_FLAGS, Bench, ClientFailed
from clients.catalog import CLIENTS, Client
from clients.environments import Environments, InstallFailed
from kits.server import Server, ServerFailed

START_TIMEOUT_S = 300.0
DEFAULT_CACHE = "~/.cache/sglane/clients"
FAILURES = (ClientFailed, InstallFailed, ServerFailed, AssertionError, KeyError, IndexError, TypeError, ValueError, OSError, httpx.HTTPError,
            subprocess.SubprocessError)


@dataclass(frozen=True)
class Outcome:
    client: Client
    ran: str  # what it did, or why it failed
    passed: bool
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    args = read_arguments(argv)
    chosen = choose(args.names, args.fast)
    if args.list:
        for client in chosen:
            print(f"{client.name:<18} {client.version:<10} {'fast' if client.is_fast else '':<5} {client.about}")
        return 0
    cache = Path(args.cache).expanduser().resolve()
    work = cache / "runs" / time.strftime("%Y%m%d-%H%M%S")
    environments = Environments(cache)
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers and clients end with us
    with contextlib.ExitStack() as servers:
        if args.base_url is None:
            print("== starting a server", file=sys.stderr, flush=True)
        url = args.base_url or servers.enter_context(Server(*SERVER_FLAGS, start_timeout_s=START_TIMEOUT_S)).url
        url = url.rstrip("/").removesuffix("/v1")
        model, tokenizer = model_of(url), Path(args.tokenizer).resolve() if args.tokenizer else tokenizer_folder(url, cache)

        @functools.cache
        def another_url(context_length: int) -> str:
            return servers.enter_context(Server(*SERVER_FLAGS, "--context-length", str(context_length), start_timeout_s=START_TIMEOUT_S)).url

        def bench_of(client: Client) -> Bench:
            folder = work / client.name
            folder.mkdir(parents=True)
            return Bench(url, model, tokenizer, environments.of(client.environment, client.packages), folder, another_url, args.base_url is None)

        for client in chosen:
            print(f"== {client.name} {client.version}", file=sys.stderr, flush=True)
            outcomes.append(run_client(client, bench_of))
            if not outcomes[-1].passed:
                print(f"{client.name} FAILED: {outcomes[-1].ran}", file=sys.stderr, flush=True)
    print(table(outcomes))
    all_passed = all(outcome.passed for outcome in outcomes)
    if all_passed and not args.keep:
        shutil.rmtree(work)
    else:
        print(f"reports and logs: {work}")
    return 0 if all_passed else 1


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/clients", description="Run unmodified clients against a real server and check what they report.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients to run; default: all (see --list)")
    parser.add_argument("--fast", action="store_true", help="only the clients that take seconds")
    parser.add_argument("--list", action="store_true", help="show the clients and run nothing")
    parser.add_argument("--base-url", metavar="URL", help="a server that runs already, started with: " + " ".join(SERVER_FLAGS[2:]))
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of the served model; default: the server's own, from this disk")
    parser.add_argument("--cache", metavar="FOLDER", default=DEFAULT_CACHE, help="keeps virtual environments between runs; default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the clients' reports and logs also when all passed")
    args = parser.parse_args(argv)
    unknown = set(args.names) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"no client is named {min(unknown)!r}; there are " + ", ".join(client.name for client in CLIENTS))
    return args


def choose(names: Sequence[str], only_fast: bool) -> list[Client]:
    """In the order of the catalog."""
    return [client for client in CLIENTS if (not names or client.name in names) and (client.is_fast or not only_fast)]


def model_of(url: str) -> str:
    answer = httpx.get(f"{url}/v1/models", timeout=30.0, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


def tokenizer_folder(url: str, cache: Path) -> Path:
    """A Hugging Face folder of the server's tokenizer. One that lies in a GGUF file is written out."""
    answer = httpx.get(f"{url}/model_info", timeout=30.0, trust_env=False)
    answer.raise_for_status()
    path, model_type = Path(answer.json()["tokenizer_path"]), answer.json()["model_type"]
    if path.is_dir():
        return path
    from sglane.entrypoints.tokenizer import load_hf_tokenizer  # seconds to import

    folder = cache / "tokenizer"
    load_hf_tokenizer(str(path)).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))  # some clients ask what kind of model it is of
    return folder


def run_client(client: Client, bench_of: Callable[[Client], Bench]) -> Outcome:
    """Install it, run it, time the run."""
    start = time.monotonic()
    try:
        bench = bench_of(client)
        start = time.monotonic()
        ran, passed = client.run(bench), True
    except FAILURES as error:
        ran, passed = f"{type(error).__name__}: {error}", False
    return Outcome(client, ran, passed, time.monotonic() - start)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("client", "version", "result", "seconds", "what ran")]
    for outcome in outcomes:
        rows.append((outcome.client.name, outcome.client.version, "pass" if outcome.passed else "FAIL", f"{outcome.seconds:.0f}",
                     outcome.ran.splitlines()[0][:100]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
