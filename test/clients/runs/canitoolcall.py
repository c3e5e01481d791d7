"""`canitoolcall probe`: tool calls, whole and streamed.

Whether a model of 135M parameters decides to call a tool is not the server's doing. What is held: every request is answered, no protocol error, no
marker leaks, nothing but well-formed calls of offered tools, and a stream has the shape of the whole answer. A scenario may only fail for a call
that the model did not make or an answer that it did not give.
"""
import re

from clients.bench import SHORT_CONTEXT, Bench, check
from clients.client import Client
from clients.environments import Packages

#: Two requests in three go on to the end of the context.
TIMEOUT_S = 900
#: Parts of the probe's verdicts that speak of the model's decisions alone.
OF_THE_MODEL = (
    r"expected at least \d+ tool call\(s\) .*", r"expected calls .* in order, got .*", r"expected no tool call, got .*",
    r"expected a content answer, got none", r"argument values lost .*",
)


def run(bench: Bench) -> str:
    url = f"{bench.short_url(SHORT_CONTEXT)}/v1"
    bench.run(bench.environment.program("canitoolcall"), "probe", "--base-url", url, "--model", bench.model, "--timeout", TIMEOUT_S,
              "--concurrency", 6, "--json", "probe.json", may_fail=True)
    outcomes = bench.read_json("probe.json")["outcomes"]
    check(len(outcomes) == 27, f"{len(outcomes)} outcomes")
    faults = [f"{outcome['scenario_id']} {outcome['check']} stream={outcome['stream']}: {outcome['status']} {outcome['detail']}"
              for outcome in outcomes if not is_fair(outcome)]
    check(not faults, "\n".join(faults))
    passed = [outcome for outcome in outcomes if outcome["status"] == "pass"]
    alike = [outcome for outcome in passed if outcome["check"] == "stream_equals_nonstream"]
    return f"9 scenarios, whole and streamed: {len(passed)} of 27 pass, {len(alike)} of 9 pairs alike, the rest are the model's decisions"


def is_fair(outcome: dict) -> bool:
    if outcome["status"] == "pass":
        return True
    parts = str(outcome["detail"]).split("; ")
    return outcome["status"] == "fail" and outcome["check"] == "scenario" and all(
        any(re.fullmatch(pattern, part, re.DOTALL) for pattern in OF_THE_MODEL) for part in parts
    )


CANITOOLCALL = Client("canitoolcall", "0.1.1", "probe: nine tool call scenarios, whole and streamed",
                      Packages(("canitoolcall==0.1.1", "jsonschema")), run, is_fast=True)
