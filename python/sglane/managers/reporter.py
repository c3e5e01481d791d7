"""The planner's log lines and throughput, in the words that log parsers of SGLang servers read."""
import logging
import time
from typing import Any

from sglane.managers.queue_times import QueueTimes
from sglane.managers.scheduler import Scheduler
from sglane.plan.io_struct import RequestOutput
from sglane.plan.step_plan import Backup, Load, StepPlan, TicketEnded

logger = logging.getLogger(__name__)

#: Seconds over which the generation throughput is averaged.
THROUGHPUT_WINDOW_S = 2.0


class Reporter:
    """Watches the scheduler from outside; changes nothing."""

    def __init__(self, scheduler: Scheduler, decode_log_interval: int):
        self._scheduler = scheduler
        self._decode_log_interval = decode_log_interval
        self._num_decode_steps = 0
        self._window_start_s = time.monotonic()
        self._window_tokens = 0
        self._seen: dict[str, Any] = {}  # of speculation, at the last decode line
        self.queue_times = QueueTimes()
        self.gen_throughput = 0.0  # output tokens per second; 0 when idle

    def request_arrived(self, rid: str) -> None:
        self.queue_times.arrived(rid, time.monotonic())

    def outputs_taken(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish is not None:
                self.queue_times.ended(output.rid)

    def step_issued(self, plan: StepPlan) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            orders: list[Load | Backup] = [*plan.loads, *plan.backups]
            for order in orders:
                kind = "load" if isinstance(order, Load) else "backup"
                logger.debug("[hicache] step %d orders %s %d: %d pages", plan.step, kind, order.ticket, len(order.host_pages) // 4)
        step = self._scheduler.last_step
        now_s = time.monotonic()
        for rid in step.started_rids:
            self.queue_times.admitted(rid, now_s)
        if step.num_extend_tokens:
            load = self._scheduler.load()
            logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d, #pending-token: %d, ",
                step.num_starts, step.num_extend_tokens, step.num_cached_tokens, load["token_usage"],
                load["num_running_reqs"], load["num_waiting_reqs"], load["num_waiting_uncached_tokens"],
            )
        if step.num_continues:
            self._num_decode_steps += 1
            if self._num_decode_steps % self._decode_log_interval == 0:
                load = self._scheduler.load()
                logger.info(
                    "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %sgen throughput (token/s): %.2f, #queue-req: %d",
                    load["num_running_reqs"], load["num_used_tokens"], load["token_usage"], self._acceptance(), self.gen_throughput,
                    load["num_waiting_reqs"],
                )

    def _acceptance(self) -> str:
        """Of the verify steps since the last line; empty without speculation."""
        report = self._scheduler.speculation.report()
        if report is None:
            return ""
        seen, self._seen = self._seen, report
        steps, drafts, accepted = (report[name] - seen.get(name, 0) for name in ("num_verify_steps", "num_drafts", "num_accepted"))
        return f"accept len: {1 + accepted / max(steps, 1):.2f}, accept rate: {accepted / max(drafts, 1):.2f}, "

    def ticket_ended(self, message: TicketEnded) -> None:
        logger.debug("[hicache] rank %d ended its part of %s %d: %d bytes in %.2f ms", message.rank, "load" if message.is_load else "backup",
                     message.ticket, message.num_bytes, message.duration_s * 1e3)

    def tick(self) -> None:
        """Once per loop turn: renew the throughput figure."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._window_start_s
        if elapsed_s >= THROUGHPUT_WINDOW_S:
            total = self._scheduler.totals.num_output_tokens
            self.gen_throughput = (total - self._window_tokens) / elapsed_s
            self._window_tokens, self._window_start_s = total, now_s
