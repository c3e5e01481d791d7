"""Entry point of the planner process: `python -m sglane.managers`, its ProcessSpec as JSON on standard input."""
import logging
import signal
import sys

import setproctitle

from sglane.managers.planner import EngineFailure, Planner
from sglane.mem_cache.kv_ledger import LedgerError
from sglane.server_args import ConfigError, ProcessSpec
from sglane.utils import logging as log
from sglane.utils.parent import die_with_parent


def main() -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach every process of a server; the front says when to stop
        signal.signal(number, signal.SIG_IGN)
    spec = ProcessSpec.from_json(sys.stdin.buffer.read())
    setproctitle.setproctitle("sglane::planner")
    log.setup(spec.server_args.log_level, "planner", spec.server_args.log_format)
    planner = Planner(spec)
    try:
        planner.start()
        planner.run()
    except (EngineFailure, ConfigError, LedgerError, AssertionError) as error:
        logging.getLogger(__name__).exception("the planner ends")
        planner.fail(f"{type(error).__name__}: {error}")
        planner.close()
        return 1
    planner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
