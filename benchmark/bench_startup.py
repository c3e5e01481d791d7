"""Start of a server until `/ready` says yes: wall time, and CPU seconds of each of its processes. Flags after `--` go to the server.

    PYTHONPATH=python python benchmark/bench_startup.py --repeats 3 -- --model-path FOLDER
"""
import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import psutil

#: Seconds that one start may take.
PATIENCE_S = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(flags: list[str]) -> tuple[float, dict[str, float]]:
    """Wall seconds to ready, and CPU seconds by process. Raises RuntimeError with the log if the server ends or takes too long."""
    port, begin_s = free_port(), time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "sglane.launch_server", "--port", str(port), *flags]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not is_ready(port):
                if server.poll() is not None or time.monotonic() - begin_s > PATIENCE_S:
                    log.seek(0)
                    raise RuntimeError(f"no server:\n{log.read()}")
                time.sleep(0.02)
            wall_s = time.monotonic() - begin_s
            family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            return wall_s, {name_of(process): sum(process.cpu_times()[:2]) for process in family}
        finally:
            server.terminate()
            server.wait(60.0)


def is_ready(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/ready", timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def name_of(process: psutil.Process) -> str:
    title = process.cmdline()[0]
    return title.removeprefix("sglane::") if title.startswith("sglane::") else "front"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    for _ in range(given.repeats):
        wall_s, cpu_s = start(given.flags)
        print(f"ready after {wall_s:.2f} s; CPU s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in cpu_s.items()), flush=True)


if __name__ == "__main__":
    main()
