"""``trims top``: the cache, live. Drawn with rich (extra ``cli``); starts nothing.

Asking counts neither as use of an image nor of the daemon: a daemon that is only watched becomes
idle, and exits.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trims_shim.cli.arguments import refuse
from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import RIGHT
from trims_shim.cli.prepared import TITLES as PREPARED_TITLES
from trims_shim.cli.prepared import row_of as prepared_row
from trims_shim.cli.saying import say
from trims_shim.cli.status import TITLES, ask, describe, headline, row_of
from trims_shim.cli.text import counted, end_of, print_json
from trims_shim.errors import DaemonUnavailable
from trims_shim.wire.admin import GetStatusReply

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

__all__ = ["top"]

_LINES_AROUND = 4
"""Of a table: its titles, the line below them, and empty ones."""
_LEAST_ROWS = 4
_LEAST_OF_A_NAME = 12
_BETWEEN = 2
"""Spaces between columns."""
_RATES = (
    ("open_hit", "hits"),
    ("open_miss", "misses"),
    ("prepared_hit", "prepared"),
    ("refused", "refusals"),
)


def top(arguments: argparse.Namespace) -> Exit:
    """Draw until Ctrl-C; once with ``--once``, or if stdout is no terminal, or a dumb one."""
    if arguments.json or arguments.once:
        refuse(arguments, ("--interval",), "with --json or --once")
    if arguments.json:
        print_json(describe(ask()))
        return Exit.OK
    if importlib.util.find_spec("rich") is None:
        say(
            "trims top draws with rich, which is not installed: "
            "run `pip install 'trims-shim[cli]'`, or use `trims status`"
        )
        return Exit.FAILED
    from rich.console import Console

    console = Console()
    # On a dumb terminal, rich shows nothing of what is live.
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        console.print(_draw(ask(), None, console.width))
        return Exit.OK
    return _live(arguments.interval)


def _live(interval_s: float) -> Exit:
    from rich.live import Live

    before, now = None, ask()
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(_draw(now, before, *live.console.size), refresh=True)
                time.sleep(interval_s)
                before, now = now, ask()
    except KeyboardInterrupt:
        return Exit.OK
    except DaemonUnavailable:
        print("the daemon has gone")
        return Exit.NO_DAEMON


def _draw(
    now: GetStatusReply, before: GetStatusReply | None, width: int, height: float = math.inf
) -> Group:
    """A picture that is so high at most, if that leaves room for a few rows of each table."""
    from rich.console import Console, Group
    from rich.text import Text

    lines = [line for line in (*headline(now), _rates(now, before)) if line]
    head = Text("\n".join(lines))
    images = [(row_of(each, now.now_ns), each.leases) for each in now.images]
    prepared = [(prepared_row(each, now.now_ns), each.leases) for each in now.prepared]
    tables = 2 if prepared else 1
    # On a narrow terminal, lines are wrapped.
    head_lines = len(head.wrap(Console(width=width), width))
    room = height - head_lines - _LINES_AROUND * tables
    most = max(_LEAST_ROWS, room - len(prepared))
    drawn = [_table(TITLES, images, width=width, most=most)]
    if prepared:
        most = max(_LEAST_ROWS, room - min(len(images), most))
        drawn.append(_table(PREPARED_TITLES, prepared, width=width, most=most))
    return Group(head, *drawn)


def _table(
    titles: Sequence[str],
    rows: Sequence[tuple[tuple[str, ...], int]],
    *,
    width: int,
    most: float,
) -> Table:
    """Rows with leases are bold. Where names would have no room, the columns before them go."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    *others, names = titles
    shown = rows if len(rows) <= most else rows[: int(most) - 1]
    del others[_fitting(others, [cells for cells, _ in shown], width) :]
    for title in others:
        side: Literal["left", "right"] = "right" if title in RIGHT else "left"
        table.add_column(title.lower(), justify=side, no_wrap=True)
    # The only column that is narrowed if there is no room.
    table.add_column(names.lower())
    for (*cells, last), leases in shown:
        # No str, which may have rich's markup: the daemon may be another user's.
        texts = map(Text, cells[: len(others)])
        table.add_row(*texts, _End(last), style="bold" if leases else None)
    if len(shown) < len(rows):
        table.add_row(f"... {len(rows) - len(shown)} more")
    return table


def _fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """How many columns leave room for a name; the first one stays in any case."""
    used = 0
    for number, title in enumerate(titles):
        used += max(len(title), *(len(cells[number]) for cells in rows), 0) + _BETWEEN
        if number and used + _LEAST_OF_A_NAME > width:
            return number
    return len(titles)


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
    clients = counted(len(now.clients) - 1 + now.more_clients, "client")
    return f"rate      {', '.join(rates)}; {clients}"
