"""The scripts parse, are executable, and `scripts/size` counts what is there."""
import os
import re
import subprocess
import sys
import tomllib

import pytest

from kits.structure.source import REPO, engine_sources
from sglane.entrypoints import page_api

SHELL = ["scripts/lib.sh", "scripts/quickstart", "scripts/test", "scripts/lint", "scripts/clients", ".ci/run"]
EXECUTABLE = ["scripts/quickstart", "scripts/test", "scripts/lint", "scripts/size", "scripts/gen-docs", "scripts/clients", ".ci/run",
              "scripts/cp-memory"]


@pytest.mark.parametrize("path", SHELL)
def test_shell_scripts_parse(path):
    ran = subprocess.run(["bash", "-n", str(REPO / path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("path", EXECUTABLE)
def test_scripts_are_executable(path):
    assert os.access(REPO / path, os.X_OK)


def test_size_counts_the_engine():
    ran = subprocess.run([sys.executable, str(REPO / "scripts" / "size")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    shown = re.search(r"(\d+)  in sglane$", ran.stdout, re.MULTILINE)
    assert shown and int(shown[1]) == sum(source.text.count("\n") for source in engine_sources())


def test_the_pinned_torch_is_the_one_that_runs():
    import torch

    pinned = re.search(r'"torch==([\d.]+)\.\*"', (REPO / "pyproject.toml").read_text())
    assert pinned and torch.__version__.startswith(pinned[1] + ".")


def test_every_file_of_the_page_is_served_and_packed():
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert settings == {"sglane.entrypoints": ["page/*"], "sglane": ["assets/tiny-dsa/*"]}
    assert sorted(path.name for path in page_api.FOLDER.iterdir()) == sorted(name for name, _ in page_api.FILES.values())
