import pytest

from sglane import environ


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Reusable rows hold NaN: whoever reads one shows it."""
    monkeypatch.setattr(environ, "SGLANE_POISON", True)
