"""Opening images: which request waits for which load, and the execution of the stores' decisions.

Owns the table of requests that are not answered yet. An opening waits for its tier to exist, then
for the load that its store starts or joins; a grant is the segment's descriptors over the handover
socket, then the reply. Used by the server's thread only.

A load onto a device takes the image from another device that has it and that the driver can copy
from (NVLink is many times faster than the way from host memory, PCIe between devices as fast), else
from the host tier, else from the file. Images evicted from a device are copied to the host tier if
there is room.

A variant of an image (its bytes aligned, converted or stacked) takes as much host memory again, or
more, and serves only later requests. So it is loaded when it is offered for the second time, if it
would still be there should the third come as late; and no client waits for it: a client that offers
it makes a private copy unless the image is there, or about to be.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

from trims_shim.daemon import clock, descriptors
from trims_shim.daemon.device.peer_copying import PeerImage
from trims_shim.daemon.front import INTERNAL_ERROR, Front, Request
from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.loader import Finished
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.recent import Recent
from trims_shim.daemon.sessions import Session
from trims_shim.daemon.tiers import DeviceTier, Tier, Tiers
from trims_shim.daemon.values import (
    Action,
    AdoptSegment,
    Announce,
    DiscardSegment,
    DropImage,
    GrantLease,
    IdentityKey,
    Opening,
    RefuseRequest,
    StartIngest,
)
from trims_shim.daemon.waiting import WaitingRequests
from trims_shim.errors import (
    AccessDenied,
    DaemonUnavailable,
    FileChanged,
    NoSpace,
    ReadFailed,
    TooManyRequests,
    TrimsError,
    UnsupportedFormat,
)
from trims_shim.memory import copying
from trims_shim.memory.device import DeviceSegment
from trims_shim.printable import printable
from trims_shim.specs import AS_IS, HOST_TIER, PIECES_LIMIT, Digest, Variant
from trims_shim.wire import messages

__all__ = ["Openings"]

_logger = logging.getLogger("trims_shim.daemon")

_ASKED_LIMIT = 4096
"""Of one model with experts, there are some hundred."""
_FOR_NEWCOMERS = 64
"""Descriptors that images leave to further clients. Each takes three at most while it loads."""
_ALLOCATIONS_IN_A_PACKET = 32
"""At 80 bytes each: below messages.HANDOVER_PACKET_LIMIT_BYTES."""


class _Copy(NamedTuple):
    """A load that takes its image from ``source``, where it is held until the load has ended.

    ``is_promoted``: if that fails, from the host tier.
    """

    source: DeviceTier
    digest: Digest
    is_promoted: bool


class Openings:
    """See the module docstring."""

    def __init__(self, front: Front, tiers: Tiers, *, keep_unused_s: float = math.inf) -> None:
        """``keep_unused_s``: how long an image stays that nobody uses."""
        self.keep_unused_s = keep_unused_s
        self._front = front
        self._tiers = tiers
        self._waiting = WaitingRequests()
        self._copies: dict[int, _Copy] = {}
        """By the number of the load."""
        self._promoted: dict[int, Digest] = {}
        """Images of the host tier that a device's load reads, by its number. They are held there
        until it has ended: dropped, their memory would be in no account."""
        self._asked: Recent[IdentityKey, int] = Recent(_ASKED_LIMIT)
        """Variants that were offered and not loaded, and when that was."""

    def open(self, request: Request, message: messages.OpenImageRequest) -> None:
        """Take a request; it is answered now or later. Raises TrimsError instead of answering."""
        offer = self._front.take_offer(request, message.ticket)
        try:
            self._check_limits(request)
            opening = _opening(request, offer)
        except BaseException:
            offer.close()
            raise
        self._waiting.put(request, offer)
        self._tiers.when_ready(offer.message.tier, lambda tier: self._begin(opening, tier))

    def offer(self, session: Session, offer: messages.FileOffer) -> None:
        """Open the image of an offered file if that takes no waiting; else the offer stands."""
        # Negative: clients number their requests from 1 on.
        request = Request(session, -1 - offer.ticket)
        try:
            self._offer(request, offer)
        # Border: a bug costs one client its connection, not all of them the daemon.
        except Exception:
            _logger.exception("offer of %s failed", printable(offer.name[:200]))
            self._front.counters["internal_errors"] += 1
            self._front.end_session(session, INTERNAL_ERROR)

    def _offer(self, request: Request, offer: messages.FileOffer) -> None:
        tier = self._tiers.ready(offer.tier)
        opening = None if tier is None else self._resident(request, offer, tier)
        if tier is None or opening is None:
            is_optional = offer.variant != AS_IS and offer.tier == HOST_TIER
            is_loading = is_optional and self._consider(request, offer)
            self._front.answer(request, messages.OfferReply(offer.ticket, is_loading=is_loading))
            return
        taken = self._front.take_offer(request, offer.ticket)
        self._waiting.put(request, taken)
        try:
            self.execute(tier, tier.store.open(opening, clock.now_ns()))
        finally:
            self._waiting.pop(request.session.number, request.number)
            taken.close()

    def _resident(self, request: Request, offer: messages.FileOffer, tier: Tier) -> Opening | None:
        """None if the request has to wait, or will be refused and should be told why."""
        try:
            self._check_limits(request)
            opening = _opening(request, request.session.offers[offer.ticket])
        except TrimsError:
            return None
        digest = tier.store.trusted_digest(opening.user, opening.identity, opening.variant)
        if digest is None:
            return None
        device = _device_grant(tier.loader.segment(digest))
        is_short = device is None or len(device.allocations) <= _ALLOCATIONS_IN_A_PACKET
        return opening if is_short else None

    def _consider(self, request: Request, offer: messages.FileOffer) -> bool:
        """Whether a variant is there or being loaded; load it on its second offer.

        The offer stands if this returns True.
        """
        host = self._tiers.host
        try:
            opening = _opening(request, request.session.offers[offer.ticket])
        except TrimsError:
            return True  # It is refused when it is requested, and told why.
        if host.store.is_hit(opening):
            return True
        with self._front.take_offer(request, offer.ticket) as taken:
            now_ns = clock.now_ns()
            before_ns = self._asked.pop(opening.key, -math.inf)
            actions: list[Action] = []
            if now_ns - before_ns < self.keep_unused_s * 1e9 and self._has_descriptors(host):
                withheld = host.withheld_bytes(opening.image_bytes)
                # Else variants that have no room beside each other would take turns, load by load.
                actions = host.store.load(
                    opening, now_ns, withheld_bytes=withheld, before_ns=before_ns
                )
                self.execute(host, actions, offer=taken)
            if not actions:
                self._asked.put(opening.key, now_ns)
        return False

    def execute(
        self,
        tier: Tier,
        actions: list[Action],
        *,
        offer: Offer | None = None,
        may_demote: bool = True,
        meter: Meter | None = None,
    ) -> None:
        """Execute what a tier's store decided, in order; a load that starts takes ``offer``.

        Without one it takes that of its request, which has waited for the load of ``meter``.
        """
        for action in actions:
            if isinstance(action, StartIngest):
                self._start_or_refuse(tier, action, offer, meter)
            elif isinstance(action, AdoptSegment):
                tier.loader.adopt(action.ingest, action.digest)
            elif isinstance(action, DiscardSegment):
                tier.loader.discard(action.ingest)
            elif isinstance(action, DropImage):
                self._drop(tier, action, may_demote=may_demote)
            elif isinstance(action, GrantLease):
                self._grant(tier, action)
            elif isinstance(action, RefuseRequest):
                self._refuse(action.opening, action.error)
            elif isinstance(action, Announce):
                self._front.counters[f"images_{action.event}"] += 1
                self._front.publish(action)

    def finish(self) -> None:
        """Go on with what worker threads have finished."""
        for tier in self._tiers:
            for finished in tier.loader.take_finished():
                self._end_copy(tier, finished.ingest)
                self.execute(tier, _after(tier, finished), meter=finished.meter)
            for finish_job in tier.loader.take_jobs():
                finish_job()
        for device in self._tiers.devices:
            for digest in device.loader.lost():
                self.execute(device, device.store.forget(digest), may_demote=False)
            self._relieve_shortages(device)

    def report_progress(self) -> None:
        """Tell waiting clients how far their loads are."""
        for tier in self._tiers:
            for ingest, meter in tier.loader.meters().items():
                progress = messages.Progress(meter.done_bytes)
                for opening in tier.store.waiters(ingest):
                    waiting = self._waiting.get(opening.session, opening.request)
                    if waiting is not None:
                        self._front.answer(waiting.request, progress)

    def relieve_pressure(self) -> None:
        """Give up unused images before a machine, or a device, runs out of memory."""
        for tier in self._tiers:
            missing = tier.missing_bytes()
            if missing > 0:
                actions = tier.store.relieve(missing)
                self._front.counters["evicted_under_pressure"] += len(actions) // 2
                self.execute(tier, actions)

    def expire(self) -> None:
        """Give up images that nobody has used for long."""
        if self.keep_unused_s == math.inf:
            return
        before_ns = clock.now_ns() - int(self.keep_unused_s * 1e9)
        for tier in self._tiers:
            actions = tier.store.expire(before_ns)
            if actions:
                self._front.counters["expired"] += len(actions) // 2
                # Host memory would not keep it either.
                self.execute(tier, actions, may_demote=False)

    def _relieve_shortages(self, tier: DeviceTier) -> None:
        """Let loads that the driver had no memory for try again, whatever the account says."""
        for shortage in tier.loader.take_shortages():
            missing = shortage.wanted_bytes - tier.loader.leaving_bytes()
            actions = tier.store.relieve(missing)
            self._front.counters["evicted_under_pressure"] += len(actions) // 2
            is_relieved = bool(actions) or missing < shortage.wanted_bytes
            self.execute(tier, actions, may_demote=shortage.may_demote)
            shortage.answer(is_relieved=is_relieved)

    def withdraw(self, session: Session, ticket: int) -> None:
        """Forget what a client has asked for under a ticket, or end the lease it got for it."""
        offer = session.offers.pop(ticket, None)
        if offer is not None:
            offer.close()
        self._waiting.withdraw(session.number, ticket)
        lease, its_ticket = session.granted
        if its_ticket == ticket:
            self._tiers.release(session.number, lease, clock.now_ns())

    def close_session(self, session: int) -> None:
        """Forget the requests of a closed connection."""
        self._waiting.close_session(session)

    # --- opening ----------------------------------------------------------------------------------

    def _check_limits(self, request: Request) -> None:
        limits = self._front.sessions.limits
        session, user = request.session.number, request.session.peer.uid
        if self._waiting.get(session, request.number) is not None:
            raise TooManyRequests(f"request {request.number} is open")
        if self._waiting.count(session) >= limits.requests:
            raise TooManyRequests(f"more than {limits.requests} open requests")
        if self._waiting.count_of_user(user) >= limits.requests_per_user:
            raise TooManyRequests(f"more than {limits.requests_per_user} open requests of a user")
        if self._tiers.lease_count(session) >= limits.leases:
            raise TooManyRequests(f"more than {limits.leases} leases")
        if self._front.is_stopping:
            raise DaemonUnavailable("the daemon is stopping; load again")

    def _begin(self, opening: Opening, tier: Tier | TrimsError) -> None:
        """Open the image now that its tier is there, or will not be."""
        waiting = self._waiting.get(opening.session, opening.request)
        if waiting is None:
            return
        try:
            if isinstance(tier, TrimsError):
                self._refuse(opening, tier)
                return
            is_hit = tier.store.is_hit(opening)
            if not (is_hit or self._has_descriptors(tier)):
                reason = (
                    "images hold half of the daemon's file descriptors, or clients need the rest "
                    "(see `ulimit -n`)"
                )
                self._refuse(opening, NoSpace(f"{opening.name}: {reason}"))
                return
            withheld = 0 if is_hit else tier.withheld_bytes(opening.image_bytes)
            actions = tier.store.open(opening, clock.now_ns(), withheld_bytes=withheld)
            self.execute(tier, actions, offer=waiting.offer)
        # Border: a bug costs one request, even one taken up later, not the daemon.
        except Exception as error:
            self._refuse(opening, error)
        finally:
            if isinstance(tier, TrimsError) or not tier.store.needs_file(opening):
                waiting.offer.close()

    def _has_descriptors(self, tier: Tier) -> bool:
        """Whether one more image may hold descriptors: half of all are for clients.

        Gives unused images up for it, those of its own tier first.
        """
        for each in (tier, *(other for other in self._tiers if other is not tier)):
            while self._are_for_clients():
                actions = each.store.relieve(1)
                if not actions:
                    break
                self.execute(each, actions, may_demote=False)
        return not self._are_for_clients()

    def _are_for_clients(self) -> bool:
        """Whether the descriptors that are left are for clients, also for some who may still come.

        Of few, the daemon's own and those of clients may be more than half.
        """
        limit = descriptors.limit()
        reserved = self._front.sessions.missing_controls() + min(_FOR_NEWCOMERS, limit // 8)
        return self._tiers.descriptor_count() >= limit // 2 or descriptors.are_scarce(reserved)

    def _start_or_refuse(
        self, tier: Tier, action: StartIngest, offer: Offer | None, meter: Meter | None
    ) -> None:
        opening = action.opening
        waiting = self._waiting.get(opening.session, opening.request)
        if offer is None and waiting is not None and waiting.offer.descriptor >= 0:
            offer = waiting.offer
        if offer is not None:
            self._start(tier, action, offer, meter)
            return
        # The client that kept its file open has given up; others wait.
        error = FileChanged(f"{opening.name} may have changed while it was read; load it again")
        self.execute(tier, tier.store.ingest_failed(action.ingest, error))

    def _start(self, tier: Tier, action: StartIngest, offer: Offer, meter: Meter | None) -> None:
        """Begin a load; on a device it takes the image from another tier if it can."""
        digest = None
        if isinstance(tier, DeviceTier) and not action.is_only_hashed:
            opening = action.opening
            asked = opening.user, opening.identity, opening.variant
            digest = self._tiers.trusted_digest(*asked)
        if digest is None or not isinstance(tier, DeviceTier):
            tier.loader.start(action, offer.take(), meter=meter)
            return
        is_promoted = self._promote(digest, offer)
        if is_promoted:
            self._tiers.host.store.hold(digest)
            self._promoted[action.ingest] = digest
        source = self._begin_copy(tier, action.ingest, digest, is_promoted=is_promoted)
        if source is None and is_promoted:
            self._front.counters["images_promoted"] += 1
        known = digest if is_promoted else ""
        tier.loader.start(action, offer.take(), digest=known, source=source)

    def _promote(self, digest: Digest, offer: Offer) -> bool:
        """Put the host tier's image, if there is one, in the place of the file."""
        host = self._tiers.host
        if not host.store.is_resident(digest):
            return False
        try:
            offer.replace(host.loader.segment(digest).descriptor)
        except OSError:  # Out of descriptors: the file does as well.
            return False
        return True

    def _begin_copy(
        self, tier: DeviceTier, ingest: int, digest: Digest, *, is_promoted: bool
    ) -> PeerImage | None:
        """Hold the image on another device and return it; None if it has to come from elsewhere."""
        peer = self._tiers.peer_with(digest, tier)
        if peer is None:
            return None
        try:
            segment = peer.loader.segment(digest).hold()
        except OSError:  # Out of descriptors.
            return None
        peer.store.hold(digest)
        self._copies[ingest] = _Copy(peer, digest, is_promoted)
        return PeerImage(digest, segment)

    def _end_copy(self, tier: Tier, ingest: int) -> None:
        promoted = self._promoted.pop(ingest, None)
        if promoted is not None:
            self._tiers.host.store.unhold(promoted)
        copy = self._copies.pop(ingest, None)
        if copy is None or not isinstance(tier, DeviceTier):
            return
        copy.source.store.unhold(copy.digest)
        is_copied = tier.loader.was_copied(ingest)
        self._front.counters["images_copied_from_peer" if is_copied else "peer_copies_failed"] += 1
        if not is_copied and copy.is_promoted:
            self._front.counters["images_promoted"] += 1

    # --- actions ----------------------------------------------------------------------------------

    def _drop(self, tier: Tier, action: DropImage, *, may_demote: bool) -> None:
        host = self._tiers.host
        is_wanted = (
            may_demote
            and isinstance(tier, DeviceTier)
            and not host.store.is_resident(action.digest)
            and not self._front.is_stopping
        )
        ingest = self._room_for(action) if is_wanted else None
        if ingest is None or not isinstance(tier, DeviceTier):
            tier.loader.drop(action.digest)
            return
        self._front.counters["images_demoted"] += 1
        tier.loader.demote(
            action.digest, ingest, to=host.loader.memory, deliver=host.loader.deliver
        )

    def _room_for(self, action: DropImage) -> int | None:
        """Begin the host tier's load that takes an image over; None if it does not fit."""
        host = self._tiers.host
        try:
            return host.store.admit(
                action.size_bytes,
                identities=action.identities,
                names=action.names,
                withheld_bytes=host.withheld_bytes(action.size_bytes),
            )
        except NoSpace:
            return None

    def _grant(self, tier: Tier, grant: GrantLease) -> None:
        waiting = self._waiting.get(grant.opening.session, grant.opening.request)
        if waiting is None:  # The client has given the load up.
            tier.store.release(grant.opening.session, grant.lease, clock.now_ns())
            return
        self._front.counters[f"open_{grant.outcome}"] += 1
        session, ticket = waiting.request.session, waiting.offer.message.ticket
        session.granted = (grant.lease, ticket)
        segment = tier.loader.segment(grant.digest)
        try:
            for part, descriptor in enumerate(_parts(segment)):
                packet = messages.SegmentGrant(ticket, grant.lease, part)
                self._front.hand_over(session, packet, descriptor)
        except OSError as error:
            self._front.end_session(session, f"the client does not take its segments: {error}")
            return
        reply = messages.OpenImageReply(
            grant.lease,
            grant.digest,
            segment.size_bytes,
            grant.outcome,
            grant.is_settled,
            _device_grant(segment),
        )
        self._answer(grant.opening, reply)

    def _refuse(self, opening: Opening, error: Exception) -> None:
        self._front.counters["refused"] += 1
        self._answer(opening, self._front.error_reply(error))

    def _answer(self, opening: Opening, message: Any) -> None:
        waiting = self._waiting.pop(opening.session, opening.request)
        if waiting is None:
            return
        # First: a lock that the program took on its open file lasts as long as we have it open.
        waiting.offer.close()
        if waiting.request.routing is None:
            message = messages.OfferReply(waiting.offer.message.ticket, message)
        self._front.answer(waiting.request, message)


def _opening(request: Request, offer: Offer) -> Opening:
    identity, asked = offer.identity(), offer.message
    name, variant = asked.name, asked.variant
    if variant != AS_IS:
        _check(variant, asked.tier, identity.size_bytes)
    if variant.size_bytes(identity.size_bytes) == 0:
        raise ReadFailed(f"{name[:200]} is empty")
    session, user = request.session.number, request.session.peer.uid
    return Opening(session, request.number, user, identity, name, variant)


def _check(variant: Variant, tier: str, file_bytes: int) -> None:
    """Raise AccessDenied or UnsupportedFormat for a variant that is not made."""
    lead_bytes, conversion, piece_bytes, pieces = variant
    is_made, how = tier == HOST_TIER or variant == Variant.in_one_piece(file_bytes), ""
    if pieces or piece_bytes:
        last = file_bytes - piece_bytes
        is_made &= (
            lead_bytes == 0
            and piece_bytes > 0
            and 0 < len(pieces) <= min(PIECES_LIMIT, file_bytes // piece_bytes)
            and all(0 <= offset <= last for offset in pieces)
        )
        how += f" is {len(pieces)} pieces of {piece_bytes} bytes and"
    if conversion is not None:
        # Else numbers of the file would lie across the borders of the image's.
        is_made &= conversion.is_possible and all(
            each % conversion.source_bytes == 0 for each in (lead_bytes, piece_bytes, *pieces)
        )
        source, target = conversion
        how += f" is converted from {source[:20]!r} to {target[:20]!r} and"
    if not (is_made and 0 <= lead_bytes < messages.LEAD_LIMIT_BYTES):
        raise AccessDenied(f"no image at {tier[:80]!r}{how} has {lead_bytes} bytes before the file")
    if conversion is not None and not copying.can_convert():
        raise UnsupportedFormat(
            "the daemon was installed without a compiler, so it has no copy engine that converts "
            "numbers; install trims_shim where there is one"
        )


def _after(tier: Tier, finished: Finished[Any]) -> list[Action]:
    result, error = finished.result, finished.error
    is_known = finished.segment is None
    if result is not None and is_known and not tier.store.is_resident(result.digest):
        error = FileChanged("the equal image was evicted meanwhile; load it again")
    if error is not None:
        return tier.store.ingest_failed(finished.ingest, error)
    assert result is not None
    return tier.store.ingest_done(finished.ingest, result, clock.now_ns())


def _parts(segment: Any) -> tuple[int, ...]:
    """The descriptors that a client gets, in order."""
    if isinstance(segment, DeviceSegment):
        return (segment.outline, *segment.descriptors)
    return (segment.descriptor,)


def _device_grant(segment: Any) -> messages.DeviceGrant | None:
    if not isinstance(segment, DeviceSegment):
        return None
    return messages.DeviceGrant(
        segment.backend, segment.layout, segment.allocations, segment.handles
    )
