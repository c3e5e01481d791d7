"""A front with a fake planner behind it; the tokenizer is the default model's."""
import pytest

from kits.front import Front
from sglane.configs.model_config import load_model_config
from sglane.entrypoints.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def config():
    return load_model_config(None, None)


@pytest.fixture(scope="session")
def tokenizer(config):
    return TextTokenizer(config.source.path, None)


@pytest.fixture(scope="module")
def front(config, tokenizer):
    with Front(config, tokenizer, enable_cache_report=True) as running:
        yield running


@pytest.fixture(autouse=True)
def calm(request):
    """The planner steps at full speed and remembers nothing of earlier tests."""
    if "front" in request.fixturenames:
        front = request.getfixturevalue("front")
        front.calm()
    yield
