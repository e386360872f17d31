"""What each request does.

A handler returns the reply, or None if it comes later; it raises what is wrong. Names of images are
paths, so they are shown, found and pinned only for their own user; the daemon's own user and root
see all. A request means an image at every tier that has it, unless it names one.
"""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from trims_shim._version import __version__
from trims_shim.daemon.clock import time_of_day_ns
from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.loader import Hashing
from trims_shim.daemon.openings import Openings
from trims_shim.daemon.prepared.serving import PreparedModels
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.tiers import Tier, Tiers
from trims_shim.daemon.values import DropImage, ImageRow
from trims_shim.errors import (
    AccessDenied,
    MalformedMessage,
    NoSpace,
    ReadFailed,
    TrimsError,
    UnknownMessage,
)
from trims_shim.specs import Digest
from trims_shim.wire import admin, messages

__all__ = ["Daemon", "add_counters", "handle"]

_COUNTERS_LIMIT = 512
_COUNTERS_OF_USER = _COUNTERS_LIMIT // 4
"""Names that a user may bring in: else one with made-up names would take the place of others'."""
_COUNTER_LIMIT = 1 << 62
_CHECK_LIMIT = 1000
_CLIENTS_IN_STATUS = 1000
_STATUS_NAMES_LIMIT_BYTES = 256 << 10
_PREPARED_NAMES_LIMIT_BYTES = 64 << 10
"""With 300 bytes an image, 200 a client, 400 a prepared model and 60 KiB of counters: below
messages.CONTROL_MESSAGE_LIMIT_BYTES."""


class Daemon(Front):
    """What the handlers work with: the server, or what stands for it in tests."""

    tiers: Tiers
    openings: Openings
    prepared: PreparedModels
    started_ns: int
    idle_exit_s: float
    config_hash: str
    memory_reason: str
    """Why host memory is of no better kind."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Accept no client any more, finish what is in flight, then end."""

    @abc.abstractmethod
    def check_jobs(self, session: Session) -> None:
        """Raise TooManyRequests if the user may have no further job, with its descriptors."""

    @abc.abstractmethod
    def run_later(self, request: Request, tier: Tier, work: Callable[[], Any]) -> None:
        """Answer with the result of ``work``, in a tier's thread, while other requests go on."""


def handle(daemon: Daemon, request: Request, message: Any) -> Any:
    """Execute a request; return the reply, or None if it comes later.

    Raises UnknownMessage, AccessDenied, UnknownImage, NoSpace...
    """
    handler = _HANDLERS.get(type(message))
    if handler is None:
        raise UnknownMessage(f"{type(message).__name__} is not a request")
    return handler(daemon, request, message)


def _find(
    daemon: Daemon, session: Session, text: str, *, tier: str = "", prefers_pinned: bool = False
) -> Digest:
    user, may_see_all = session.peer.uid, session.is_privileged
    digest = daemon.tiers.find(
        text, user=user, may_see_all=may_see_all, tier=tier, prefers_pinned=prefers_pinned
    )
    if may_see_all or any(each.store.is_named_by(digest, user) for each in daemon.tiers):
        return digest
    raise AccessDenied(f"image {digest[:12]} is not yours; load its file first")


def _status(
    daemon: Daemon, request: Request, message: admin.GetStatusRequest
) -> admin.GetStatusReply:
    session = request.session
    host = daemon.tiers.host
    totals = host.store.totals()
    memory = admin.MemoryStatus(
        host.loader.memory.kind.value,
        daemon.memory_reason,
        totals.budget_bytes,
        totals.resident_bytes,
        totals.reserved_bytes,
        host.lingering_bytes(),
    )
    clients = _client_status(daemon, session)
    may_see_prepared = session.is_privileged
    return admin.GetStatusReply(
        package=__version__,
        protocol=messages.PROTOCOL_VERSION,
        pid=os.getpid(),
        started_ns=time_of_day_ns(daemon.started_ns),
        now_ns=time.time_ns(),
        idle_exit_s=daemon.idle_exit_s,
        config_hash=daemon.config_hash,
        memory=memory,
        images=tuple(_images_status(daemon, session)),
        clients=tuple(clients[:_CLIENTS_IN_STATUS]),
        counters=dict(daemon.counters),
        devices=tuple(each.status() for each in daemon.tiers.devices),
        prepared=tuple(_prepared_status(daemon)) if may_see_prepared else (),
        storage=daemon.prepared.storage() if may_see_prepared else None,
        more_clients=len(clients[_CLIENTS_IN_STATUS:]),
    )


def _images_status(daemon: Daemon, session: Session) -> list[admin.ImageStatus]:
    """As many images as fit a reply, most recently used first."""
    limit = admin.IMAGES_IN_REPLY
    rows = [(tier.name, row) for tier in daemon.tiers for row in tier.store.images(limit)]
    rows.sort(key=lambda each: -each[1].used_ns)
    return _image_statuses(session, rows[:limit])


def _list(
    daemon: Daemon, request: Request, message: admin.ListImagesRequest
) -> admin.ListImagesReply:
    limit = admin.IMAGES_IN_REPLY
    rows = [
        (tier.name, row)
        for tier in daemon.tiers
        for row in tier.store.images_from(message.digest, limit + 1)
        if (row.digest, tier.name) > message
    ]
    rows.sort(key=lambda each: (each[1].digest, each[0]))
    return admin.ListImagesReply(tuple(_image_statuses(request.session, rows[:limit])))


def _image_statuses(
    session: Session, rows: Iterable[tuple[str, ImageRow]]
) -> list[admin.ImageStatus]:
    """Images with their tiers, as they are shown; names are left out before images."""
    found = []
    left = _STATUS_NAMES_LIMIT_BYTES
    may_see_all, user = session.is_privileged, session.peer.uid
    for tier, row in rows:
        names = [path for owner, path in row.names if may_see_all or owner == user]
        fitting, left = _fitting(names, left)
        found.append(_image_status(row, fitting, tier))
    return found


def _fitting(names: Iterable[str], left_bytes: int) -> tuple[tuple[str, ...], int]:
    """The names that fit, and the bytes that are left for others."""
    found = []
    for name in names:
        left_bytes -= len(name.encode(errors="backslashreplace")) + 8
        if left_bytes >= 0:
            found.append(name)
    return tuple(found), left_bytes


def _prepared_status(daemon: Daemon) -> list[admin.PreparedStatus]:
    """As many prepared models as fit a reply: those under way, then by last use, then refused."""
    found = []
    left = _PREPARED_NAMES_LIMIT_BYTES
    for row in daemon.prepared.rows()[: admin.PREPARED_IN_REPLY]:
        names, left = _fitting(row.names, left)
        found.append(row._replace(names=names))
    return found


def _image_status(row: ImageRow, names: tuple[str, ...], tier: str) -> admin.ImageStatus:
    return admin.ImageStatus(
        digest=row.digest,
        size_bytes=row.size_bytes,
        resident_bytes=row.resident_bytes,
        leases=row.leases,
        is_pinned=row.is_pinned,
        loaded_ns=time_of_day_ns(row.loaded_ns),
        used_ns=time_of_day_ns(row.used_ns),
        hits=row.hits,
        load_ns=row.load_ns,
        names=names,
        tier=tier,
    )


def _client_status(daemon: Daemon, session: Session) -> list[admin.ClientStatus]:
    """All that a client may see, itself first."""
    return [
        admin.ClientStatus(
            each.pid or each.peer.pid,
            each.peer.uid,
            each.package,
            daemon.tiers.lease_count(each.number) + daemon.prepared.lease_count(each.number),
            each.requests,
            time_of_day_ns(each.connected_ns),
        )
        for each in (session, *(other for other in daemon.sessions if other is not session))
        if each.is_greeted and (session.is_privileged or each.peer.uid == session.peer.uid)
    ]


def _pin(daemon: Daemon, request: Request, message: admin.PinImageRequest) -> admin.PinImageReply:
    session = request.session
    # What is pinned may be an earlier version of the file.
    digest = _find(daemon, session, message.image, prefers_pinned=not message.is_pinned)
    tiers = daemon.tiers.holding(digest)
    for tier in tiers:
        if message.is_pinned:
            actions = tier.store.pin(digest, session.peer.uid)
        else:
            actions = tier.store.unpin(digest, None if session.is_privileged else session.peer.uid)
        daemon.openings.execute(tier, actions)
    if not message.is_pinned and any(tier.store.is_pinned(digest) for tier in tiers):
        raise AccessDenied(
            f"image {digest[:12]} stays: another user has pinned it; only that one, the daemon's "
            "user or root can unpin it"
        )
    return admin.PinImageReply(digest)


def _evict(
    daemon: Daemon, request: Request, message: admin.EvictImageRequest
) -> admin.EvictImageReply:
    """From all tiers, the image is dropped; from one, whose memory is wanted, it may move."""
    if message.image:
        digest = _find(daemon, request.session, message.image, tier=message.tier)
        tiers = daemon.tiers.holding(digest, tier=message.tier)
    elif request.session.is_privileged:
        digest = ""
        tiers = [daemon.tiers.named(message.tier)] if message.tier else list(daemon.tiers)
    else:
        raise AccessDenied("only the daemon's own user may evict everything; name an image")
    dropped: dict[Digest, None] = {}
    freed_bytes = 0
    refusal: NoSpace | None = None
    for tier in tiers:
        before = tier.store.totals()
        try:
            actions = tier.store.evict(digest) if digest else tier.store.evict_all()
        except NoSpace as error:
            refusal = error
            continue
        freed_bytes += before.resident_bytes - tier.store.totals().resident_bytes
        dropped.update((each.digest, None) for each in actions if isinstance(each, DropImage))
        daemon.openings.execute(tier, actions, may_demote=bool(message.tier))
    if refusal is not None and not dropped:
        raise refusal
    return admin.EvictImageReply(tuple(dropped), freed_bytes)


def _verify(daemon: Daemon, request: Request, message: admin.VerifyImageRequest) -> None:
    """Hash an image at every tier that has it, or at the named one."""
    daemon.check_jobs(request.session)
    digest = _find(daemon, request.session, message.image, tier=message.tier)
    tiers = daemon.tiers.holding(digest, tier=message.tier)
    with contextlib.ExitStack() as held:
        hashings: dict[str, Hashing] = {}
        for tier in tiers:
            try:
                hashings[tier.name] = tier.loader.hashing(digest)
            except OSError as error:  # out of descriptors
                raise ReadFailed(f"image {digest[:12]} cannot be read: {error}") from error
            held.callback(hashings[tier.name].close)
        closing = held.pop_all()

    def work() -> admin.VerifyImageReply:
        with closing:
            checks = tuple(_check(tier, hashing) for tier, hashing in hashings.items())
        others = [each.computed for each in checks if each.computed != digest]
        return admin.VerifyImageReply(digest, others[0] if others else digest, checks)

    daemon.run_later(request, tiers[0], work)


def _check(tier: str, hashing: Hashing) -> admin.TierCheck:
    try:
        return admin.TierCheck(tier, hashing.compute())
    except TrimsError as error:
        return admin.TierCheck(tier, "", str(error)[:_CHECK_LIMIT])


def add_counters(front: Front, session: Session, report: messages.StatsReport) -> None:
    """Add a client's counters to the totals. Raises MalformedMessage for too long a name."""
    if any(len(key.encode()) > messages.COUNTER_NAME_LIMIT for key in report.counters):
        raise MalformedMessage("a counter's name is too long")
    user = session.peer.uid
    for key, amount in report.counters.items():
        name = f"client.{key}"
        if name not in front.counters:
            is_full = len(front.counters) >= _COUNTERS_LIMIT
            if is_full or front.counters_of_user[user] >= _COUNTERS_OF_USER:
                continue
            front.counters_of_user[user] += 1
        total = front.counters[name] + max(0, min(amount, 1 << 50))
        # It has to fit an integer of msgpack: else no status could be sent any more.
        front.counters[name] = min(total, _COUNTER_LIMIT)


def _stop(
    daemon: Daemon, request: Request, message: admin.StopDaemonRequest
) -> admin.StopDaemonReply:
    if not request.session.is_privileged:
        raise AccessDenied("only the daemon's own user may stop it")
    daemon.stop()
    return admin.StopDaemonReply()


_HANDLERS: dict[type, Callable[[Daemon, Request, Any], Any]] = {
    messages.OpenImageRequest: lambda daemon, *asked: daemon.openings.open(*asked),
    messages.OpenPreparedRequest: lambda daemon, *asked: daemon.prepared.open(*asked),
    admin.EvictPreparedRequest: lambda daemon, *asked: daemon.prepared.evict(*asked),
    admin.GetStatusRequest: _status,
    admin.ListImagesRequest: _list,
    admin.PinImageRequest: _pin,
    admin.EvictImageRequest: _evict,
    admin.VerifyImageRequest: _verify,
    admin.StopDaemonRequest: _stop,
}
