"""One virtual environment for each client, made once and kept in a cache folder; torch and transformers are shared by those that want them."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: Named first, so that no client's requirement brings another build of torch.
SHARED = ("torch==2.13.*", "transformers==5.24.*", "numpy", "requests")
STAMP = "packages.json"
INSTALL_TIMEOUT_S = 1800


class InstallFailed(RuntimeError):
    """pip could not make an environment; the message carries the end of its output."""


@dataclass(frozen=True)
class Packages:
    """What one client needs. alone: without their own requirements. unwanted: removed after the rest was installed."""

    pinned: tuple[str, ...]
    alone: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    shares_torch: bool = False


@dataclass(frozen=True)
class Environment:
    """A virtual environment that is ready."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


class Environments:
    def __init__(self, cache: Path):
        self._cache = cache

    def of(self, name: str, packages: Packages) -> Environment:
        """Make it, unless it is there with the same packages. Raises InstallFailed."""
        environment = Environment(self._cache / name)
        stamp = environment.folder / STAMP
        want = json.dumps([packages.pinned, packages.alone, packages.unwanted, packages.shares_torch and SHARED, sys.version])
        if stamp.is_file() and stamp.read_text() == want:
            return environment
        shared = self.of("shared", Packages(SHARED)) if packages.shares_torch else None
        shutil.rmtree(environment.folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(environment.folder)])
        if shared is not None:
            (environment.site_packages / "shared.pth").write_text(f"{shared.site_packages}\n")
        for group, *options in ((packages.alone, "--no-deps"), (packages.pinned,)):
            if group:
                torch = [SHARED[0]] if shared is not None and not options else []
                run([str(environment.python), "-m", "pip", "install", "--quiet", "--no-compile", *options, *torch, *group])
        if packages.unwanted:
            run([str(environment.python), "-m", "pip", "uninstall", "--quiet", "--yes", *packages.unwanted])
        stamp.write_text(want)
        return environment


def run(command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    ran = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         timeout=INSTALL_TIMEOUT_S)
    if ran.returncode != 0:
        raise InstallFailed(f"{' '.join(command)}: exit code {ran.returncode}\n{ran.stdout[-3000:]}")
