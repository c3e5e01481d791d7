"""Tiny checkpoints for tests, made once per machine: `tiny("deepseek_v32_fp8")` is a folder (see make_tiny)."""
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from kits.tiny_configs import CHECKPOINTS, FAMILIES, LATENT_FAMILIES, RELEASED

__all__ = ["CHECKPOINTS", "FAMILIES", "LATENT_FAMILIES", "RELEASED", "cache_folder", "tiny"]

KITS = Path(__file__).parent
#: What the checkpoints are made by; a change of these makes new ones.
SOURCES = ("fp8_blocks.py", "make_tiny.py", "oracle.py", "tiny_configs.py", "tiny_reference.py")
LIBRARIES = ("torch", "transformers")


def tiny(name: str) -> Path:
    """Folder of one of CHECKPOINTS or RELEASED; its family is made first if it is not there. Safe in parallel processes."""
    if name not in CHECKPOINTS + RELEASED:
        raise KeyError(f"{name} is none of {CHECKPOINTS + RELEASED}")
    family = max((family for family in FAMILIES if name.startswith(family)), key=len)
    folder = cache_folder()
    done = folder / f"{family}.done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{family}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make_family(family, folder)
                done.touch()
    return folder / name


def make_family(family: str, folder: Path) -> None:
    """In a process of its own: transformers is large, and changes settings of the process that imports it."""
    scratch = folder / f"{family}.making"
    shutil.rmtree(scratch, ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": str(KITS.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "kits.make_tiny", "--out", str(scratch), "--family", family], check=True, env=environment,
                   stdout=subprocess.DEVNULL)
    for path in scratch.iterdir():
        shutil.rmtree(folder / path.name, ignore_errors=True)
        path.rename(folder / path.name)
    scratch.rmdir()


def cache_folder() -> Path:
    """SGLANE_TEST_CACHE or ~/.cache/sglane-tests, and in it a folder per version of the kit and its libraries."""
    root = Path(os.environ.get("SGLANE_TEST_CACHE") or Path.home() / ".cache" / "sglane-tests")
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((KITS / name).read_bytes())
    for name in LIBRARIES:
        digest.update(metadata.version(name).encode())
    return root / digest.hexdigest()[:16]
