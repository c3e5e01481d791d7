"""Parsed Python files and what a rule says about them."""
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

REPO = Path(__file__).resolve().parents[3]
PACKAGE_ROOT = REPO / "python"
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "node_modules"}


@dataclass(frozen=True)
class Source:
    """One file: path relative to the repository, dotted module name, text, syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, module: str, text: str, path: str | None = None) -> Self:
        """`module` as it would be imported; a package's `__init__` goes by the package's name."""
        path = path or "python/" + module.replace(".", "/") + ".py"
        return cls(path, module, text, ast.parse(text, filename=path))

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


@dataclass(frozen=True, order=True)
class Violation:
    """A broken rule at a line of a file."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def engine_sources() -> list[Source]:
    """Every file of the package `sglane`."""
    return [read(path, PACKAGE_ROOT) for path in python_files(PACKAGE_ROOT / "sglane")]


def all_sources() -> list[Source]:
    """Every Python file of the repository: package, tests, benchmarks, scripts."""
    return [read(path, REPO) for path in python_files(REPO)]


def python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(REPO).parts):
            yield path


def read(path: Path, import_root: Path) -> Source:
    parts = list(path.relative_to(import_root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return Source.parse(".".join(parts), path.read_text(), str(path.relative_to(REPO)))
