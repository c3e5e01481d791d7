"""Log format of all processes."""
import logging


def setup(level: str, process: str = "") -> None:
    """Send everything of this process to standard error; `process` tags its lines (the front has no tag)."""
    tag = f" {process}" if process else ""
    logging.basicConfig(level=level.upper(), format=f"[%(asctime)s{tag}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True)
