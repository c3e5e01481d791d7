"""What a client's run is given: the server's address, its own environment and folder, and ways to run commands and to check what they report."""
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.environments import Environment

HERE = Path(__file__).resolve().parent
INSIDE = HERE / "inside"
DATA = HERE / "data"
MODEL_NAME = "smollm2"
#: Tools need a chat template that shows them; the model's own does not. The rest are reports that clients ask for.
SERVER_FLAGS = (
    "--served-model-name", MODEL_NAME, "--enable-metrics", "--enable-cache-report", "--chat-template", str(DATA / "tools.jinja"),
    "--tool-call-parser", "qwen3", "--max-total-tokens", "32768",
)
#: Nothing here may look for a hub, a price list or a proxy.
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*",
    "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1",
}
#: Tokens of a context that holds a few tools and a call.
SHORT_CONTEXT = 512
NUM_LINES_SHOWN = 40
STEP_TIMEOUT_S = 900.0


class ClientFailed(AssertionError):
    """A client ended with an error, or reported what it should not; the message says which."""


def check(condition: object, what: str) -> None:
    """Raises ClientFailed. A plain assert would vanish under `python -O`."""
    if not condition:
        raise ClientFailed(what)


@dataclass
class Bench:
    """One client's place. folder: empty at the start, for reports and logs. tokenizer: a Hugging Face folder of the served model."""

    url: str
    model: str
    tokenizer: Path
    environment: Environment
    folder: Path
    another_url: Callable[[int], str]  # of another server of the same model, by its context length in tokens; started when first asked for
    has_own_server: bool  # the server under test was started here
    num_commands: int = 0

    def short_url(self, context_length: int) -> str:
        """A server for clients that set no limit: its short context bounds what a request can cost. With --base-url: that one."""
        return self.another_url(context_length) if self.has_own_server else self.url

    def run(self, *command: object, env: Mapping[str, str | None] | None = None, timeout_s: float = STEP_TIMEOUT_S,
            may_fail: bool = False) -> str:
        """Run to the end in `folder`; returns its output. Raises ClientFailed if the exit code is not 0, or after timeout_s. env: None unsets."""
        self.num_commands += 1
        words = [str(word) for word in command]
        log = self.folder / f"{self.num_commands}-{Path(words[0]).name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(words, cwd=self.folder, env=self._variables(env), stdin=subprocess.DEVNULL, stdout=file,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise ClientFailed(f"{' '.join(words)}: not done after {timeout_s:.0f} s\n{tail(log)}") from error
            finally:
                end_group(process)
        check(code == 0 or may_fail, f"{' '.join(words)}: exit code {code}\n{tail(log)}")
        return log.read_text(errors="replace")

    def python(self, script: str, *arguments: object, env: Mapping[str, str | None] | None = None) -> str:
        """Run a file of `inside/` by the client's interpreter."""
        return self.run(self.environment.python, INSIDE / script, *arguments, env=env)

    @contextmanager
    def background(self, *command: object) -> Iterator[Path]:
        """A process that lives as long as the block; yields its log."""
        log = self.folder / f"background-{Path(str(command[0])).name}.log"
        with log.open("w") as file:
            process = subprocess.Popen([str(word) for word in command], cwd=self.folder, env=self._variables(None), stdin=subprocess.DEVNULL,
                                       stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                yield log
            finally:
                end_group(process)

    def read_json(self, name: str) -> Any:
        path = self.folder / name
        check(path.is_file(), f"the client wrote no {name}")
        return json.loads(path.read_text())

    def read_lines(self, name: str) -> list[Any]:
        """A file of one JSON value a line."""
        path = self.folder / name
        check(path.is_file(), f"the client wrote no {name}")
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    def _variables(self, more: Mapping[str, str | None] | None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        together = {**inherited, **OFFLINE, "HF_HOME": str(self.folder / "hf"), **(more or {})}
        return {key: value for key, value in together.items() if value is not None}


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-NUM_LINES_SHOWN:])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """A client's children end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10.0)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
