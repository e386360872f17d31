"""What each control request does, apart from opening images (which may have to wait).

A handler returns (reply, actions); errors of the tree become ErrorReply. Names of images are paths,
so they are shown, found and pinned only for their own user; the daemon's own user and root see all.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trims_shim._version import __version__
from trims_shim.daemon import ingest
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.store import Action, DropImage, ImageRow
from trims_shim.errors import AccessDenied, MalformedMessage, UnknownMessage
from trims_shim.wire import messages

if TYPE_CHECKING:
    from trims_shim.daemon.server import Server

__all__ = ["Later", "add_counters", "handle"]

Outcome = tuple[Any, list[Action]]
"""(reply, actions); the reply may be None (not answered) or :class:`Later`."""
_COUNTERS_LIMIT = 512
_COUNTER_LIMIT = 1 << 62
_IMAGES_IN_STATUS = 1000
_CLIENTS_IN_STATUS = 1000
_STATUS_NAMES_LIMIT_BYTES = 256 << 10
"""With 300 bytes an image and 200 a client: below messages.CONTROL_MESSAGE_LIMIT_BYTES."""


@dataclass(frozen=True, slots=True)
class Later:
    """A reply that a worker thread computes, so that the loop goes on meanwhile."""

    work: Callable[[], Any]


def handle(server: Server, session: Session, message: Any) -> Outcome:
    """Execute a request. Raises UnknownMessage, AccessDenied, UnknownImage, NoSpace..."""
    handler = _HANDLERS.get(type(message))
    if handler is None:
        raise UnknownMessage(f"{type(message).__name__} is not a request")
    return handler(server, session, message)


def _is_privileged(session: Session) -> bool:
    return session.peer.uid in (0, os.geteuid())


def _find(server: Server, session: Session, text: str) -> str:
    user, may_see_all = session.peer.uid, _is_privileged(session)
    digest = server.store.find(text, user=user, may_see_all=may_see_all)
    if not may_see_all:
        row = next(each for each in server.store.images() if each.digest == digest)
        if user not in {owner for owner, _ in row.names}:
            raise AccessDenied(f"image {digest[:12]} is not yours")
    return digest


def _status(server: Server, session: Session, message: messages.GetStatusRequest) -> Outcome:
    totals = server.store.totals()
    memory = messages.MemoryStatus(
        server.loader.memory.kind.value,
        server.memory_reason,
        totals.budget_bytes,
        totals.resident_bytes,
        totals.reserved_bytes,
        server.known_lingering_bytes(),
    )
    reply = messages.GetStatusReply(
        package=__version__,
        protocol=messages.PROTOCOL_VERSION,
        pid=os.getpid(),
        started_ns=server.started_ns,
        now_ns=time.time_ns(),
        idle_exit_s=server.idle_exit_s,
        config_hash=server.config_hash,
        memory=memory,
        images=tuple(_images_status(server, session)),
        clients=tuple(_client_status(server, session)[:_CLIENTS_IN_STATUS]),
        counters=dict(server.counters),
    )
    return reply, []


def _images_status(server: Server, session: Session) -> list[messages.ImageStatus]:
    """As many images as fit a reply, most recently used first; names go before images do."""
    found = []
    left = _STATUS_NAMES_LIMIT_BYTES
    for row in server.store.images()[:_IMAGES_IN_STATUS]:
        image = _image_status(row, session)
        names = []
        for name in image.names:
            left -= len(name.encode(errors="backslashreplace")) + 8
            if left >= 0:
                names.append(name)
        found.append(dataclasses.replace(image, names=tuple(names)))
    return found


def _image_status(row: ImageRow, session: Session) -> messages.ImageStatus:
    names = tuple(
        path for owner, path in row.names if _is_privileged(session) or owner == session.peer.uid
    )
    return messages.ImageStatus(
        digest=row.digest,
        size_bytes=row.size_bytes,
        resident_bytes=row.resident_bytes,
        leases=row.leases,
        is_pinned=row.is_pinned,
        loaded_ns=row.loaded_ns,
        used_ns=row.used_ns,
        hits=max(0, row.opens - 1),
        load_ns=row.load_ns,
        names=names,
    )


def _client_status(server: Server, session: Session) -> list[messages.ClientStatus]:
    return [
        messages.ClientStatus(
            each.pid or each.peer.pid,
            each.peer.uid,
            each.package,
            server.store.lease_count(each.number),
            each.requests,
            each.connected_ns,
        )
        for each in server.sessions
        if each.is_greeted and (_is_privileged(session) or each.peer.uid == session.peer.uid)
    ]


def _pin(server: Server, session: Session, message: messages.PinImageRequest) -> Outcome:
    digest = _find(server, session, message.image)
    return messages.PinImageReply(digest), server.store.pin(digest, is_pinned=message.is_pinned)


def _evict(server: Server, session: Session, message: messages.EvictImageRequest) -> Outcome:
    sizes = {image.digest: image.resident_bytes for image in server.store.images()}
    if message.image:
        actions = server.store.evict(_find(server, session, message.image))
    elif _is_privileged(session):
        actions = server.store.evict_all()
    else:
        raise AccessDenied("only the daemon's own user may evict everything; name an image")
    digests = tuple(each.digest for each in actions if isinstance(each, DropImage))
    freed = sum(sizes[digest] for digest in digests)
    return messages.EvictImageReply(digests, freed), actions


def _verify(server: Server, session: Session, message: messages.VerifyImageRequest) -> Outcome:
    digest = _find(server, session, message.image)
    segment = server.loader.segment(digest)
    # A hold of its own: the image may be evicted while a worker hashes it.
    descriptor = os.dup(segment.descriptor)

    def work() -> messages.VerifyImageReply:
        try:
            computed = ingest.hash_segment(descriptor, segment.size_bytes)
        finally:
            os.close(descriptor)
        return messages.VerifyImageReply(digest, computed)

    return Later(work), []


def add_counters(server: Server, report: messages.StatsReport) -> None:
    """Add a client's counters to the totals. Raises MalformedMessage for too many or too long."""
    if any(len(key) > 100 for key in report.counters):
        raise MalformedMessage("a counter's name is too long")
    for key, amount in report.counters.items():
        name = f"client.{key}"
        if name in server.counters or len(server.counters) < _COUNTERS_LIMIT:
            total = server.counters[name] + max(0, min(amount, 1 << 50))
            # It has to fit an integer of msgpack, or no status could be sent any more.
            server.counters[name] = min(total, _COUNTER_LIMIT)


def _stop(server: Server, session: Session, message: messages.StopDaemonRequest) -> Outcome:
    if not _is_privileged(session):
        raise AccessDenied("only the daemon's own user may stop it")
    server.stop()
    return messages.StopDaemonReply(os.getpid()), []


_HANDLERS: dict[type, Callable[[Server, Session, Any], Outcome]] = {
    messages.GetStatusRequest: _status,
    messages.PinImageRequest: _pin,
    messages.EvictImageRequest: _evict,
    messages.VerifyImageRequest: _verify,
    messages.StopDaemonRequest: _stop,
}
