"""bfloat16 and float16 in tests: only in child processes, with the setting that they were found to need on this CPU."""

import os
from collections.abc import Callable
from typing import Any

import torch

from recmill.hardware.precision import VARIABLE, Dtype, Finding, probe
from recmill.training import precision

from .group import in_group


class MixedPrecision:
    """What this CPU does with each dtype. Processes that it starts train in it even if that is slow.

    Where a dtype does not work at all they decide as any training does: for float32, which tests then expect.
    """

    def __init__(self, report: Callable[[str, object], None]) -> None:
        self._report = report  # pytest's record_property: conftest.py prints it at the end

    def finding(self, name: Dtype) -> Finding:
        finding = probe(name, threads=1)
        self._report("mixed precision", f"{name}: {finding}")
        return finding

    def works(self, name: Dtype) -> bool:
        return self.finding(name).ratio is not None

    def dtype(self, name: Dtype) -> torch.dtype:
        """Return the dtype to expect."""
        return getattr(torch, name) if self.works(name) else torch.float32

    def run(self, name: Dtype, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of `body`, called in a child process."""
        return self.group(name)(1, body, *arguments, **options)

    def group(self, name: Dtype) -> Callable[..., Any]:
        """Return `in_group` for processes that may use this dtype."""
        finding = self.finding(name)

        def run(procs: int, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            return in_group(procs, _child, finding, body, *arguments, **options)

        return run


def _child(finding: Finding, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if finding.max_isa:
        os.environ[VARIABLE] = finding.max_isa  # nothing was multiplied here yet
    if finding.ratio is not None:
        precision._verdict = lambda precision, world: (True, "as the test wants it")
    return body(*arguments, **options)
