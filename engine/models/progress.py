"""Progress of one long copy: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)


class Progress:
    """Context manager; `update(done)` with bytes done so far."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._told = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            # here, not above: rich is needed at the first start only, and start-up time is a feature
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        else:
            log.info("%s (%d MiB)", self._title, self._total >> 20)
        return self

    def update(self, done: int) -> None:
        """Tell that `done` of the total are there; a log line at every fourth."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(done, self._total))
            return
        quarter = 4 * done // max(self._total, 1)
        if quarter > self._told:
            self._told = quarter
            log.info("%s: %d %%", self._title, 25 * min(quarter, 4))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
