"""``trims top``: the cache, live. Drawn with rich (extra ``cli``); starts nothing.

Asking counts neither as use of an image nor of the daemon: a daemon that is only watched becomes
idle, and exits.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from typing import TYPE_CHECKING, Literal

from trims_shim.cli.devices import short
from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import TITLES, row_of
from trims_shim.cli.status import ask, describe, headline
from trims_shim.cli.text import ago, counted, print_json, printable, size
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
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in ("digest", "size", "tier", "leases", "hits", "used"):
        side: Literal["left", "right"] = "left" if title in ("digest", "tier") else "right"
        table.add_column(title, justify=side, no_wrap=True)
    # The only column that is narrowed if there is no room.
    table.add_column("names")
    for image in now.images:
        table.add_row(
            image.digest[:12] + (" pinned" if image.is_pinned else ""),
            size(image.size_bytes),
            short(image.tier),
            str(image.leases),
            str(image.hits),
            ago(image.used_ns, now.now_ns),
            _End(printable(", ".join(image.names))),
            style="bold" if image.leases else None,
        )
    lines = [*headline(now), _rates(now, before)]
    tables = [table, _draw_prepared(now)] if now.prepared else [table]
    return Group(Text("\n".join(line for line in lines if line)), *tables)


def _draw_prepared(now: GetStatusReply) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    *titles, names = TITLES
    for title in titles:
        side: Literal["left", "right"] = "left" if title in ("KEY", "STATE") else "right"
        table.add_column(title.lower(), justify=side, no_wrap=True)
    table.add_column(names.lower())
    for each in now.prepared:
        *cells, last = row_of(each, now.now_ns)
        style = "bold" if each.leases else None
        table.add_row(*cells, _End(last), style=style)
    return table


class _End:
    """A text of which the end is shown where there is no room: paths begin alike."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len
        from rich.text import Text

        text, room = self._text, options.max_width
        if cell_len(text) > room:
            text = text[-room:]
            while cell_len(text) >= room > 0:
                text = text[1:]
            text = f"…{text}"
        yield Text(text, no_wrap=True)

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
