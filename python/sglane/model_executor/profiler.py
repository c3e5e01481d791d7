"""Recordings of steps by torch.profiler, as Chrome traces. Nothing runs while none is asked for."""
import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sglane.plan.io_struct import StartProfile

logger = logging.getLogger(__name__)


class StepProfiler:
    """One rank's recording: from a StartProfile to a StopProfile, or to the end of its last step."""

    def __init__(self, rank: int, device: torch.device):
        self._rank = rank
        self._device = device
        self._running: profile | None = None
        self._path = Path()
        self._steps_left: int | None = None

    @property
    def is_on(self) -> bool:
        return self._running is not None

    def start(self, message: StartProfile) -> str:
        """Returns why it cannot, empty if it has begun."""
        if self._running is not None:
            return f"a recording is under way, to {self._path.parent}"
        self._path = Path(message.folder) / f"{message.name}-CP-{self._rank}.trace.json.gz"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()  # a folder that takes no files is better known now
        except OSError as error:
            return f"output_dir: {error}"
        self._steps_left = message.num_steps
        self._running = profile(activities=self._activities(message.activities), with_stack=message.with_stack, record_shapes=message.record_shapes)
        self._running.start()
        logger.info("recording steps to %s", self._path)
        return ""

    def _activities(self, names: list[str]) -> list[ProfilerActivity]:
        """GPU counts where the rank has one."""
        found = [ProfilerActivity.CPU] if "CPU" in names or self._device.type != "cuda" else []
        return [*found, ProfilerActivity.CUDA] if "GPU" in names and self._device.type == "cuda" else found

    def step_ended(self) -> None:
        """Once per step while it is on."""
        if self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            error = self.stop()
            if error:
                logger.error("the recording is lost: %s", error)

    def stop(self) -> str:
        """Write the file. Returns why it cannot, empty if it has."""
        if self._running is None:
            return "no recording is under way"
        running, self._running = self._running, None
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            return f"{self._path}: {error}"
        logger.info("steps were recorded to %s", self._path)
        return ""
