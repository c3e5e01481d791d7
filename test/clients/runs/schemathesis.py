"""`schemathesis` sends what /openapi.json allows, and what it does not, and holds the answers to it."""
import re

from clients.bench import Bench, check
from clients.client import Client
from clients.environments import Packages

NUM_EXAMPLES = 6
#: Tokens: most requests are made up, many set no limit, and some ask for 128 choices.
CONTEXT_LENGTH = 64
#: No key is set, and nothing here is created or deleted. What a model can make of a valid body (a grammar, tokens that fit) is not in any schema.
NOT_FOR_US = "ignored_auth,object_level_authorization,use_after_free,ensure_resource_availability,positive_data_acceptance,negative_data_rejection"

#: Routes that stop everybody's work, as they should; a valid request would end the run.
OPERATOR = "^/(pause_generation|continue_generation|start_profile|stop_profile)$"


def run(bench: Bench) -> str:
    schema = f"{bench.short_url(CONTEXT_LENGTH)}/openapi.json"
    output = bench.run(
        bench.environment.program("schemathesis"), "run", schema, "--checks", "all", "--exclude-checks", NOT_FOR_US,
        "--exclude-path-regex", OPERATOR, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", NUM_EXAMPLES, "--seed", 1,
        "--request-timeout", 300, "--max-response-time", 300,
        "--suppress-health-check", "all", "--report", "junit", "--report-dir", "report", "--no-color",
    )
    found = re.search(r"(\d+) generated", output)
    check(found and int(found[1]) > 100, f"too few cases: {output[-1000:]}")
    assert found is not None
    return f"{found[1]} cases in 4 phases: no 5xx but declared ones, no undeclared status, content type or shape"


SCHEMATHESIS = Client("schemathesis", "4.32.5", "every route of /openapi.json, with valid and broken requests",
                      Packages(("schemathesis==4.32.5",)), run)
