"""Generated pages are current, complete, and the generator notices when they are not."""
import dataclasses
import importlib.machinery
import importlib.util
import re
import subprocess
import sys

import pytest

from kits.structure.source import REPO
from sglane import environ
from sglane.server_args import ServerArgs, flag_of


@pytest.fixture(scope="module")
def gen_docs():
    loader = importlib.machinery.SourceFileLoader("gen_docs", str(REPO / "scripts" / "gen-docs"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gen_docs", loader))
    loader.exec_module(module)
    return module


def test_generated_pages_are_current():
    ran = subprocess.run([sys.executable, str(REPO / "scripts" / "gen-docs"), "--check"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_every_flag_and_variable_is_there(gen_docs):
    arguments, variables = (text for _, text in sorted(gen_docs.pages().items(), reverse=True))
    for item in dataclasses.fields(ServerArgs):
        assert f"`{flag_of(item.name)}`" in arguments
        assert item.metadata["help"].replace("|", "&#124;") in arguments
    names = [name for name in vars(environ) if name.startswith("SGLANE_")]
    assert names
    assert len(names) <= 12, "tuning variables are few; what users set is a flag"
    for name in names:
        assert f"| `{name}` |" in variables


def test_a_stale_page_is_noticed(gen_docs, tmp_path, monkeypatch):
    stale = tmp_path / "server_arguments.md"
    stale.write_text("old")
    monkeypatch.setattr(gen_docs, "REPO", tmp_path)
    monkeypatch.setattr(gen_docs, "pages", lambda: {stale: "new"})
    monkeypatch.setattr(sys, "argv", ["gen-docs", "--check"])
    assert gen_docs.main() == 1
    monkeypatch.setattr(sys, "argv", ["gen-docs"])
    assert gen_docs.main() == 0
    assert stale.read_text() == "new"


def test_a_variable_without_a_comment_is_refused(gen_docs):
    with pytest.raises(SystemExit, match="SGLANE_X"):
        gen_docs.environment_variables("import os\nSGLANE_X = os.environ.get('SGLANE_X')\n")


def test_links_between_pages_exist():
    pages = [REPO / "README.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").rglob("*.md"))]
    missing = [f"{page.name}: {target}" for page in pages for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
               if not (page.parent / target).exists()]
    assert not missing


#: Where a path named in a page may start.
ROOTS = (REPO, REPO / "python" / "sglane", REPO / "test", REPO / "test" / "registered")


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/requirements.md", "docs/performance.md"])
def test_files_named_in_pages_exist(page):
    named = re.findall(r"(?:`|python )((?:[\w.-]+/)+[\w.-]*|[\w/]+\.(?:py|md|sh))[`\s]", (REPO / page).read_text())
    assert named
    missing = [path for path in named if not any((root / path).exists() for root in ROOTS)]
    assert not missing


def test_every_requirement_has_a_row():
    rows = re.findall(r"^\| R(\d+) \|", (REPO / "docs" / "requirements.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 37))
