"""`llm`, the command line tool."""
import json

from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

MODELS = """\
- model_id: local
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
"""


def run(bench: Bench) -> str:
    user = bench.folder / "user"
    user.mkdir()
    (user / "extra-openai-models.yaml").write_text(MODELS.format(model=bench.model, url=bench.url))
    home = {"LLM_USER_PATH": str(user)}
    program = bench.environment.program("llm")
    common = ("-m", "local", "--key", "none", "-o", "temperature", "0")
    streamed = bench.run(program, *common, "-o", "max_tokens", "24", "What is the capital of France?", env=home)
    whole = bench.run(program, *common, "-o", "max_tokens", "24", "--no-stream", "What is the capital of France?", env=home)
    check("Paris" in streamed, f"no sensible answer: {streamed!r}")
    check(streamed.strip() == whole.strip(), f"streamed {streamed!r}, whole {whole!r}")
    follow_up = bench.run(program, "--continue", "--key", "none", "-o", "max_tokens", "24", "And of Italy?", env=home)
    check(follow_up.strip(), "no answer to a second turn")
    person = json.loads(bench.run(program, *common, "-o", "max_tokens", "120", "--schema", "name, age int", "Invent a person", env=home))
    check(set(person) == {"name", "age"} and isinstance(person["age"], int), f"the schema does not hold: {person}")
    logged = json.loads(bench.run(program, "logs", "--json", "-n", "0", env=home))
    check(len(logged) == 4, f"{len(logged)} answers were logged")
    counted = [entry for entry in logged if entry["input_tokens"] and entry["output_tokens"]]
    check(len(counted) == 4, f"usage of {len(counted)} answers was logged")
    return "prompt streamed and whole, --continue, --schema, usage in its log"


LLM = Client("llm", "0.36", "command line: prompts, --continue, --schema, usage", Packages(("llm==0.36",)), run, is_fast=True)
