"""Record some steps with torch's profiler, for the timeline."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


class ProfiledSteps:
    """Profiles the steps after `steps[0]` up to `steps[1]`, and writes them to `directory`."""

    def __init__(self, steps: Sequence[int], directory: Path | None, rank: int, device: torch.device) -> None:
        self._first, self._end = (steps[0], steps[1]) if steps and directory else (-1, -1)
        self._directory = directory
        self._rank = rank
        self._device = device
        self._profile: Any = None

    def before(self, step: int) -> bool:
        """Begin or end the window before the step that follows `step` finished ones; return whether it did."""
        if step != self._first and (self._profile is None or step < self._end):
            return False
        if step == self._first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
        else:
            self.close()
        return True

    def close(self) -> None:
        """End the window, if it is open, and write it."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        assert self._directory is not None
        path = self._directory / f"kineto-{self._rank}-{self._first}.json.gz"
        try:
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk
            log.warning("%s: the profile could not be written (%s). Training continues.", path, error)
