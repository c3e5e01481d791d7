"""Formats in which models write tool calls, by the name that `--tool-call-parser` gives them."""
from sglane.entrypoints.parsers.tool_calls.deepseek_v31 import DeepSeekV31
from sglane.entrypoints.parsers.tool_calls.dsml import Dsml
from sglane.entrypoints.parsers.tool_calls.format import Format
from sglane.entrypoints.parsers.tool_calls.glm import Glm
from sglane.entrypoints.parsers.tool_calls.hermes import Hermes

#: The GLM generations differ in white space only, which one reader accepts either way; what is forced follows the generation.
FORMATS: dict[str, Format] = {
    "deepseekv31": DeepSeekV31(),
    "deepseekv32": Dsml(),
    "glm45": Glm("\n"),
    "glm47": Glm(),
    "glm5": Glm(),
    "qwen3": Hermes(),
}
