"""Text that has no place in a repository: addresses of other machines, paths of one machine, and talk about how it was made."""
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kits.structure.source import REPO, SKIPPED_FOLDERS, Violation

#: Hosts that may be named: this machine, the licence's home, documentation examples (RFC 2606).
ALLOWED_HOSTS = re.compile(r"^(localhost|127\.0\.0\.1|0\.0\.0\.0|www\.apache\.org|([a-z0-9-]+\.)*example(\.(com|org|net))?)$")
URL = re.compile(r"\b(?:https?|git|ssh|ftp)://([a-z0-9][^\s/:\"'`)>{}]*)", re.IGNORECASE)
#: Written in pieces, so that this file passes its own check.
FORBIDDEN = tuple(re.compile(pattern, re.IGNORECASE) for pattern in (
    r"\bpy" r"pi\.org\b", r"python" r"hosted\.org", r"npm" r"js\.org",
    r"(?<![\w.])/(?:wo" r"rk|ro" r"ot|ho" r"me)/\w", r"/op" r"t/(?:wheels|py" r"pi)",
    r"\bhelper ses" r"sion", r"\bthis work" r"place\b", r"\bsub-?ag" r"ent\b", r"\bcontract" r"\.md\b", r"\bdesign" r"\.md\b",
    r"\bpart \d of \d\b", r"\brequirements? R\d", r"\bissue #?\d+\b",
))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".cfg", ".json", ".jinja", ""}


def check_words(texts: Mapping[str, str]) -> list[Violation]:
    """`texts`: path -> content."""
    violations = []
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            found = [match.group(0) for pattern in FORBIDDEN for match in pattern.finditer(line)]
            found += [host for host in URL.findall(line) if not ALLOWED_HOSTS.match(host.lower())]
            violations += [Violation(path, number, f"'{word}' does not belong here") for word in found]
    return violations


def tracked_files() -> list[str]:
    """Paths that git tracks or would track; empty without git."""
    if shutil.which("git") is None:
        return []
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.splitlines()


def repository_texts() -> dict[str, str]:
    """Every text file that git tracks or would track; without git, every text file outside build folders."""
    names = tracked_files() or [str(path.relative_to(REPO)) for path in REPO.rglob("*")]
    texts = {}
    for name in names:
        path = Path(REPO, name)
        if path.is_file() and path.suffix in TEXT_SUFFIXES and not SKIPPED_FOLDERS.intersection(path.relative_to(REPO).parts):
            texts[name] = path.read_text(errors="replace")
    return texts
