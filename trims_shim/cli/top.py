"""``trims top``: the cache, live. Drawn with rich (extra ``cli``); starts nothing.

Asking counts neither as use of an image nor of the daemon: a daemon that is only watched becomes
idle, and exits.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import RIGHT
from trims_shim.cli.prepared import TITLES as PREPARED_TITLES
from trims_shim.cli.prepared import row_of as prepared_row
from trims_shim.cli.status import TITLES, ask, describe, headline, row_of
from trims_shim.cli.text import counted, end_of, print_json
from trims_shim.errors import DaemonUnavailable
from trims_shim.wire.admin import GetStatusReply

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

__all__ = ["top"]

_RATES = (
    ("open_hit", "hits"),
    ("open_miss", "misses"),
    ("prepared_hit", "prepared"),
    ("refused", "refusals"),
)


def top(arguments: argparse.Namespace) -> Exit:
    """Draw until Ctrl-C; once with ``--once`` or when stdout is not a terminal."""
    if arguments.json:
        print_json(describe(ask()))
        return Exit.OK
    if importlib.util.find_spec("rich") is None:
        print(
            "trims top draws with rich, which is not installed: "
            "run `pip install 'trims-shim[cli]'`, or use `trims status`",
            file=sys.stderr,
        )
        return Exit.FAILED
    if arguments.once or not sys.stdout.isatty():
        from rich.console import Console

        Console().print(_draw(ask(), None))
        return Exit.OK
    return _live(arguments.interval)


def _live(interval_s: float) -> Exit:
    from rich.live import Live

    before, now = None, ask()
    try:
        with Live(_draw(now, None), screen=True, auto_refresh=False) as live:
            while True:
                live.update(_draw(now, before), refresh=True)
                time.sleep(interval_s)
                before, now = now, ask()
    except KeyboardInterrupt:
        return Exit.OK
    except DaemonUnavailable:
        print("the daemon has gone")
        return Exit.NO_DAEMON


def _draw(now: GetStatusReply, before: GetStatusReply | None) -> Group:
    from rich.console import Group
    from rich.text import Text

    lines = [*headline(now), _rates(now, before)]
    images = [(row_of(each, now.now_ns), each.leases) for each in now.images]
    prepared = [(prepared_row(each, now.now_ns), each.leases) for each in now.prepared]
    tables = [_table(TITLES, images)]
    if prepared:
        tables.append(_table(PREPARED_TITLES, prepared))
    return Group(Text("\n".join(line for line in lines if line)), *tables)


def _table(titles: Sequence[str], rows: Sequence[tuple[tuple[str, ...], int]]) -> Table:
    """Rows with leases are bold."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    *others, names = titles
    for title in others:
        side: Literal["left", "right"] = "right" if title in RIGHT else "left"
        table.add_column(title.lower(), justify=side, no_wrap=True)
    # The only column that is narrowed if there is no room.
    table.add_column(names.lower())
    for (*cells, last), leases in rows:
        table.add_row(*cells, _End(last), style="bold" if leases else None)
    return table


class _End:
    """A text of which the end is shown where there is no room."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(end_of(self._text, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        return Measurement(1, cell_len(self._text))


def _rates(now: GetStatusReply, before: GetStatusReply | None) -> str:
    """Rates per second since the last picture."""
    if before is None or now.pid != before.pid or now.now_ns <= before.now_ns:
        return ""
    seconds = (now.now_ns - before.now_ns) / 1e9
    rates = [
        f"{(now.counters.get(key, 0) - before.counters.get(key, 0)) / seconds:.1f} {name}/s"
        for key, name in _RATES
    ]
    return f"rate      {', '.join(rates)}; {counted(len(now.clients) - 1, 'client')}"
