import pytest

from sglane import environ


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reusable rows hold NaN: whoever reads one shows it."""
    monkeypatch.setattr(environ, "SGLANE_POISON", True)
