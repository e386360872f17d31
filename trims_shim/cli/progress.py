"""Progress: for ``warm`` and ``fetch`` a bar on a terminal (with rich); else lines, or nothing.

The command learns of a load only at its end, so a bar counts whole files, in bytes, but those that
are downloaded; the rate is that of the files that were loaded. Goes to stderr, so that stdout stays
data.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trims_shim.cli.saying import say
from trims_shim.cli.text import end_of, printable, size

if TYPE_CHECKING:
    import rich.progress

__all__ = ["Progress"]


_TEXT_WIDTH = 42
"""With a spinner, a bar of a few characters and figures, that fills a line of 80."""
_LEAST_OF_A_PATH = 12
_MOVED = ("loaded", "downloaded")
"""Outcomes that took time by the size of the file."""


class Progress:
    """A context manager; ``begin`` and ``end`` around each file, in the order of ``sizes``."""

    def __init__(self, sizes: Sequence[int], *, is_quiet: bool) -> None:
        self._sizes = list(sizes)
        self._is_quiet = is_quiet
        self._number = 0
        self._path = ""
        self._start = 0.0
        self._is_waiting = False
        self._bar = _new_bar() if sizes and not is_quiet and sys.stderr.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=sum(sizes))

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, path: str) -> None:
        """A file is being loaded."""
        self._path, self._start, self._is_waiting = printable(path), time.monotonic(), False
        if self._bar is not None:
            self._bar.update(self._task, description=end_of(self._path, _TEXT_WIDTH))

    def wait(self, reason: str) -> None:
        """Another process is still at the file; called again and again meanwhile."""
        if self._bar is not None:
            seconds = time.monotonic() - self._start
            state = f"{reason}, {seconds:.0f} s"
            room = _TEXT_WIDTH - len(state) - 2
            text = f"{end_of(self._path, room)}, {state}" if room >= _LEAST_OF_A_PATH else state
            self._bar.update(self._task, description=text)
        elif not (self._is_quiet or self._is_waiting):
            say(f"{self._place()}: {reason} ...")
        self._is_waiting = True

    def reach(self, done_bytes: int, size_bytes: int) -> None:
        """So much of the file, whose size may not have been known before, is there."""
        self._sizes[self._number] = size_bytes
        if self._bar is not None:
            before_bytes = sum(self._sizes[: self._number])
            done_bytes += before_bytes
            self._bar.update(self._task, total=sum(self._sizes), completed=done_bytes)

    def end(self, outcome: str, *, error: str, note: str) -> None:
        """A file is there, or has failed; a note is shown beside the outcome."""
        place, size_bytes = self._place(), self._sizes[self._number]
        self._number += 1
        if self._is_quiet:
            return
        seconds = max(1e-6, time.monotonic() - self._start)
        rate = f", {size(size_bytes / seconds)}/s" if outcome in _MOVED else ""
        line = error or f"{outcome}, {size(size_bytes)} in {seconds:.2f} s{rate}"
        line += note and f"; {note}"
        text = f"{place}: {printable(line)}"
        if self._bar is None:
            say(text)
            return
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._bar.update(self._task, completed=sum(self._sizes[: self._number]))

    def _place(self) -> str:
        return f"[{self._number + 1}/{len(self._sizes)}] {self._path}"


def _new_bar() -> rich.progress.Progress | None:
    with contextlib.suppress(ImportError):
        import rich.console
        import rich.progress as bars
        from rich.table import Column

        console = rich.console.Console(stderr=True)
        if not console.width:  # COLUMNS=0: it would print nothing
            return None
        return bars.Progress(
            bars.SpinnerColumn(),  # as the bar stands still while a file is loaded
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=None),
            bars.DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
            bars.TransferSpeedColumn(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
    return None
