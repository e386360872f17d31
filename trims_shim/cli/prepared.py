"""Prepared ONNX models on the command line: how ``trims status`` and ``trims top`` show them."""

from __future__ import annotations

import textwrap

from trims_shim.cli.text import ago, bar, counted, printable, size, table, terminal_width
from trims_shim.wire import admin
from trims_shim.wire.admin import GetStatusReply, PreparedStatus

__all__ = ["RIGHT", "TITLES", "counts", "prepared_lines", "prepared_table", "row_of"]

TITLES = ("KEY", "STATE", "SIZE", "LEASES", "HITS", "USED", "NAMES")
RIGHT = ("SIZE", "LEASES", "HITS", "USED")
_SHOWN = 20


def counts(counters: dict[str, int]) -> dict[str, int]:
    """How requests for prepared models, and preparations, have ended."""
    names = ("hit", "unknown", "preparing", "refused", "made", "failed", "dropped", "damaged")
    return {name: counters.get(f"prepared_{name}", 0) for name in names}


def prepared_lines(reply: GetStatusReply) -> list[str]:
    """Lines above the tables; none if another user's daemon does not tell."""
    storage = reply.storage
    if storage is None:
        return []
    if storage.problem:
        text = f"prepared  no ONNX models: {storage.problem}"
        return textwrap.wrap(
            text, 80, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False
        )
    if not (reply.prepared or any(counts(reply.counters).values())):
        return [f"prepared  no ONNX model yet; there may be {size(storage.budget_bytes)} of them"]
    states = [each.state for each in reply.prepared]
    or_more = ", or more" if len(states) >= admin.PREPARED_IN_REPLY else ""
    became = counts(reply.counters)
    account = bar([(storage.resident_bytes, "#")], storage.budget_bytes)
    return [
        f"prepared  {account} {size(storage.resident_bytes)} of {size(storage.budget_bytes)}",
        f"          in {storage.directory}",
        f"          {counted(states.count('ready'), 'ONNX model')}, {states.count('preparing')} in "
        f"preparation, {states.count('refused')} not servable{or_more};",
        f"          {counted(became['hit'], 'hit')}, {became['made']} made, "
        f"{became['failed']} failed, {became['refused']} refused",
    ]


def prepared_table(reply: GetStatusReply) -> str:
    """The first prepared models, as many as are in the reply or fit a screen."""
    rows = [row_of(each, reply.now_ns) for each in reply.prepared[:_SHOWN]]
    text = table(TITLES, rows, right=RIGHT, width=terminal_width())
    more = len(reply.prepared) - _SHOWN
    return f"{text}\n... {more} more: `trims status --json`" if more > 0 else text


def row_of(each: PreparedStatus, now_ns: int) -> tuple[str, ...]:
    """The cells of a row, in the order of :data:`TITLES`."""
    is_ready = each.state == "ready"
    cells = (
        each.key[:12] or "?",
        f"{each.state}: {each.reason}" if each.reason else each.state,
        size(each.size_bytes) if is_ready else "",
        str(each.leases) if is_ready else "",
        str(each.hits) if is_ready else "",
        ago(each.used_ns, now_ns),
        ", ".join(each.names),
    )
    return tuple(map(printable, cells))
