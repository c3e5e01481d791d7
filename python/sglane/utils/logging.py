"""Log format of all processes: lines for people, or one JSON object a line."""
import json
import logging
import time
from collections.abc import Iterable

#: Attributes that every log record has; others were given with `extra=`.
PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def setup(level: str, process: str = "", layout: str = "text") -> None:
    """Send everything of this process to standard error. process: tags its lines (the front has no tag). layout: text or json."""
    tag = f" {process}" if process else ""
    handler = logging.StreamHandler()
    if layout == "json":
        handler.setFormatter(JsonFormatter(process or "front"))
    else:
        handler.setFormatter(logging.Formatter(f"[%(asctime)s{tag}] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, process, logger, message; the fields of `extra=`; exception with the traceback."""

    def __init__(self, process: str):
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "process": self._process,
            "logger": record.name, "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in PLAIN_ATTRIBUTES}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)


class QuietPaths(logging.Filter):
    """Drops uvicorn's access lines of some paths: probes would drown everything else."""

    def __init__(self, paths: Iterable[str]):
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args  # (client, method, path with query, HTTP version, status)
        is_access = isinstance(args, tuple) and len(args) == 5
        return not (is_access and str(args[2]).partition("?")[0] in self._paths)  # type: ignore[index]
