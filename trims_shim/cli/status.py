"""``trims status`` and ``trims ls``: what the daemon says of itself. Start nothing."""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from trims_shim._version import __version__
from trims_shim.cli.devices import account, device_lines, image_count, short
from trims_shim.cli.exits import Exit
from trims_shim.cli.prepared import RIGHT, counts, prepared_lines, prepared_table
from trims_shim.cli.text import (
    ago,
    counted,
    duration,
    print_json,
    printable,
    size,
    table,
    terminal_width,
)
from trims_shim.client.cache import cache
from trims_shim.client.listing import every_image
from trims_shim.errors import DaemonUnavailable
from trims_shim.wire import codec
from trims_shim.wire.admin import (
    ClientStatus,
    GetStatusReply,
    GetStatusRequest,
    ImageStatus,
)

__all__ = [
    "RESTART_HINT",
    "TITLES",
    "ask",
    "describe",
    "headline",
    "list_images",
    "loads",
    "others",
    "row_of",
    "status",
]

RESTART_HINT = (
    "the daemon-side settings of this shell are not those the daemon was started with (which ones "
    "differ is not known); a daemon that is started anew has them: `trims stop`. If it is a "
    "service, change them there, and restart it"
)
_UPGRADE_HINT = (
    f"this command is of trims_shim {__version__}; if that was installed over the daemon's, no "
    "further models are prepared and no uploaders started, until it is started anew: `trims stop`, "
    "or restart its service"
)
TITLES = ("DIGEST", "SIZE", "TIER", "LEASES", "HITS", "USED", "NAMES")
_IMAGES_SHOWN = 20
_WIDTH = 80
_GLUE = "\xa0"
"""A space where no line ends."""


def ask() -> GetStatusReply:
    """The daemon's status. Raises DaemonUnavailable when none runs."""
    reply: GetStatusReply = cache().request(GetStatusRequest())
    return reply


def status(arguments: argparse.Namespace) -> Exit:
    """Show everything; with ``--json`` also that no daemon runs."""
    try:
        reply = ask()
    except DaemonUnavailable:
        if arguments.json:
            print_json({"running": False, "socket_dir": cache().endpoint.directory})
            return Exit.NO_DAEMON
        raise
    if arguments.json:
        print_json(describe(reply))
    else:
        _show(reply)
    return Exit.OK


def list_images(arguments: argparse.Namespace) -> Exit:
    """The table of images, if only its titles, or JSON."""
    images = every_image(cache())
    if arguments.json:
        print_json([codec.plain(image) for image in images])
    else:
        print(_images(images, time.time_ns()))
    return Exit.OK


def describe(reply: GetStatusReply) -> dict[str, Any]:
    """The reply as JSON-able data, with what this process knows in addition."""
    described: dict[str, Any] = codec.plain(reply) | loads(reply.counters)
    described["clients"] = [codec.plain(client) for client in others(reply)]
    return described | {
        "running": True,
        "socket_dir": cache().endpoint.directory,
        "has_this_shells_settings": reply.config_hash == cache().config.daemon_hash(),
    }


def loads(counters: dict[str, int]) -> dict[str, Any]:
    """How loads have ended, by the daemon's own counters and by those that clients reported."""

    def reported(event: str) -> dict[str, int]:
        prefix = f"client.{event}:"
        return {
            key.removeprefix(prefix): amount
            for key, amount in sorted(counters.items())
            if key.startswith(prefix)
        }

    return {
        "opens": {
            "hits": counters.get("open_hit", 0),
            "misses": counters.get("open_miss", 0),
            "joined": counters.get("open_joined", 0),
            "refused": counters.get("refused", 0),
        },
        "prepared_opens": counts(counters),
        "clients_reported": {
            "served": reported("served"),
            "elided": reported("elided"),
            "fallbacks": reported("fallback"),
            "not_on_device": reported("not_on_device"),
            "made_private": reported("unshared"),
            "bytes_shared": counters.get("client.bytes_shared", 0),
        },
    }


def headline(reply: GetStatusReply) -> list[str]:
    """The lines above the tables, also for ``trims top``."""
    memory = reply.memory
    became = loads(reply.counters)
    opens, clients = became["opens"], became["clients_reported"]
    on_devices = (
        f"on GPUs   {_by_reason(clients['not_on_device'])} not shared there; made private "
        f"{_by_reason(clients['made_private'])}"
    )
    uptime = duration((reply.now_ns - reply.started_ns) / 1e9)
    lines = [
        f"daemon    pid {reply.pid}, trims_shim {reply.package}, up {uptime}, "
        + (f"exits when idle for {duration(reply.idle_exit_s)}" if reply.idle_exit_s else "stays"),
        f"memory    {memory.kind}",
        *(_wrapped(f"          not {memory.reason}") if memory.reason else ()),
        f"host      {account(memory)}",
        *device_lines(reply),
        *prepared_lines(reply),
        f"opens     {counted(opens['hits'], 'hit')}, {counted(opens['misses'], 'miss')}, "
        f"{opens['joined']} joined, {opens['refused']} refused",
        *_loads(clients),
        *(_wrapped(on_devices) if reply.devices else ()),
    ]
    return [printable(line) for line in lines]  # The daemon may be another user's.


def _loads(clients: dict[str, Any]) -> list[str]:
    """What frameworks asked for, which ``trims warm`` is none of."""
    if not clients["served"] and not clients["fallbacks"]:
        return ["loads     none by torch or other libraries yet; what was warmed counts as opens"]
    return [
        *_wrapped(
            f"loads     served {_by_reason(clients['served'])}; copies elided "
            f"{_by_reason(clients['elided'])}; {size(clients['bytes_shared'])} shared"
        ),
        *_wrapped(f"fallbacks {_by_reason(clients['fallbacks'])}"),
    ]


def _wrapped(line: str) -> list[str]:
    """Reasons may be many."""
    lines = textwrap.wrap(
        line, _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False
    )
    return [each.replace(_GLUE, " ") for each in lines]


def _by_reason(counts: dict[str, int]) -> str:
    if not counts:
        return "0"
    # Clients choose these names, and may be other users.
    reasons = ", ".join(f"{printable(name)}{_GLUE}{count}" for name, count in counts.items())
    return f"{sum(counts.values())} ({reasons})"


def others(reply: GetStatusReply) -> list[ClientStatus]:
    """Every client but this command, which is the first."""
    return list(reply.clients[1:])


def _show(reply: GetStatusReply) -> None:
    print("\n".join(headline(reply)))
    print(f"socket    {cache().endpoint.directory}")
    if cache().endpoint.owner() == os.geteuid():  # not another's, with settings of his
        if reply.config_hash != cache().config.daemon_hash():
            print("\n".join(_wrapped(f"note      {RESTART_HINT}")))
        if reply.package != __version__:
            print("\n".join(_wrapped(f"note      {_UPGRADE_HINT}")))
    print(f"\n{printable(image_count(reply))}")
    if reply.images:
        print(_images(reply.images[:_IMAGES_SHOWN], reply.now_ns))
    if len(reply.images) > _IMAGES_SHOWN:
        print(f"... {len(reply.images) - _IMAGES_SHOWN} more: `trims ls`")
    if reply.prepared:
        print(f"\nprepared ONNX models\n{prepared_table(reply)}")
    clients = others(reply)
    print(f"\n{counted(len(clients) + reply.more_clients, 'client')}")
    if clients:
        print(_clients(clients, reply.now_ns))
    if reply.more_clients:
        print(f"... {reply.more_clients} more")


def _images(images: Sequence[ImageStatus], now_ns: int) -> str:
    rows = [row_of(image, now_ns) for image in images]
    return table(TITLES, rows, right=RIGHT, width=terminal_width())


def row_of(image: ImageStatus, now_ns: int) -> tuple[str, ...]:
    """The cells of a row, in the order of :data:`TITLES`."""
    cells = (
        image.digest[:12] + (" pinned" if image.is_pinned else ""),
        size(image.size_bytes),
        short(image.tier),
        str(image.leases),
        str(image.hits),
        ago(image.used_ns, now_ns),
        ", ".join(image.names),
    )
    return tuple(map(printable, cells))


def _clients(clients: list[ClientStatus], now_ns: int) -> str:
    titles = ("PID", "USER", "LEASES", "REQUESTS", "CONNECTED", "TRIMS_SHIM")
    rows = [
        (
            str(client.pid),
            str(client.user),
            str(client.leases),
            str(client.requests),
            ago(client.connected_ns, now_ns),
            printable(client.package),
        )
        for client in clients
    ]
    return table(titles, rows, right=titles[:-1])
