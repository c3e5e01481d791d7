"""The conformance fixtures of the package canitoolcall, where it is installed."""
import json

import pytest

from kits.parsing import Format, Parsed, assert_chunking_is_irrelevant

fixtures = pytest.importorskip("canitoolcall.fixtures")

#: Prefix of the first model's name -> (tool call parser, reasoning parser).
MODELS = {
    "deepseek-ai/DeepSeek-V3.1": ("deepseekv31", "deepseek-v3"),
    "deepseek-ai/DeepSeek-V3.2": ("deepseekv32", "deepseek-v3"),
    "zai-org/GLM-4.5": ("glm45", "glm45"),
    "zai-org/GLM-4.7": ("glm47", "glm45"),
    "zai-org/GLM-5": ("glm5", "glm45"),
    "Qwen/Qwen3-": ("qwen3", "qwen3"),
}
FAMILIES = ("deepseek", "glm", "qwen3-hermes")


def parsers_of(fixture):
    return next((names for prefix, names in MODELS.items() if fixture.reference_model.startswith(prefix)), None)


def load():
    return [fixture for fixture in fixtures.load_fixtures(families=FAMILIES) if parsers_of(fixture)]


def form_of(fixture):
    family = fixtures.load_family(fixture.family)
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = family.reference_for(fixture.reference_model).default_generation_prompt
    tool_calls, reasoning = parsers_of(fixture)
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    return Format(tool_calls, reasoning, tools, prompt)


@pytest.mark.parametrize("fixture", load(), ids=lambda fixture: fixture.id)
def test_fixture(fixture):
    text, form = fixture.raw_output, form_of(fixture)
    if len(text) > 2000:
        parsed = form.parse([text], fixture.truncated)
        assert form.parse(text, fixture.truncated) == parsed
    else:
        parsed = assert_chunking_is_irrelevant(form, text, fixture.truncated)
    if fixture.expected is None:
        assert not parsed.calls
        if fixture.expected_error.accept == ("no_tool_calls",):
            assert "<tool_call" not in parsed.text
        return
    expected = fixture.expected
    wanted = Parsed(expected.content or "", expected.reasoning_content or "", [(call.name, call.arguments) for call in expected.tool_calls])
    assert parsed == wanted
    assert json.dumps(parsed.calls) == json.dumps(wanted.calls)  # types too: true is not 1


def test_every_format_has_fixtures():
    assert {parsers_of(fixture)[0] for fixture in load()} == {"deepseekv31", "deepseekv32", "glm45", "glm47", "glm5", "qwen3"}
