"""The store of one tier: which images exist, who leases them, what is loading, what must go.

A pure state machine, ``(state, event, now) -> (state, actions)``: no I/O, no clock, no thread. The
server feeds it events and executes the actions in order.

Rules
1. An image is keyed by its digest. Identities only point at digests; they are trusted for the user
   who proved them (device numbers are reused, so another user's equal identity proves nothing) and
   only when *settled*: a file whose change time was too close to the moment of reading is read
   again next time. An untrusted identity is a hint that hashing alone may be enough. One file may
   have several images: the bytes themselves, and variants (:class:`~trims_shim.specs.Variant`).
2. One load per user and identity; further requests wait for it (single flight). If the identity is
   then not trusted, the file may have changed before they came and after it was read: it is hashed
   once more for them. Two loads that end with one digest share one image; the second segment is
   discarded.
3. Bytes are reserved before a load starts and become resident bytes when it ends. Reserved plus
   resident plus withheld (evicted but still mapped somewhere, or not to be had on the machine)
   never exceeds the budget. A load that does not fit, but whose image is probably resident,
   reserves nothing: the file is only hashed, and if that fails, the hint is forgotten.
4. A leased, pinned or held image is never evicted. Without room the request is refused, and the
   client loads privately. A hold is the daemon's own, while it copies the image to another tier,
   or reads a file that probably equals it.
   When the machine needs memory back, images go that the policy would keep, too.
5. A closed session leaves no lease and no waiter. A load without waiters runs to its end: somebody
   wanted the model a moment ago, and its first reader may come back.
6. Lease and load numbers are unique across the tiers of a daemon, which share the counter: a client
   gives a lease up by its number alone.
7. An image that comes from another tier (:meth:`Store.admit`) takes free room only, never another
   image's place. What was known of it there (:class:`DropImage`) is then known of it here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trims_shim.daemon.eviction import Candidate, EvictionPolicy
from trims_shim.daemon.leases import Leases
from trims_shim.daemon.values import (
    Action,
    AdoptSegment,
    Announce,
    DiscardSegment,
    DropImage,
    GrantLease,
    IdentityKey,
    ImageRow,
    Ingested,
    NameKey,
    Opening,
    RefuseRequest,
    StartIngest,
    Totals,
)
from trims_shim.errors import NoSpace, TrimsError, UnknownImage
from trims_shim.printable import size
from trims_shim.specs import AS_IS, Digest, Identity, Variant

__all__ = ["DIGITS_NEEDED", "Store"]

DIGITS_NEEDED = 6
"""Of a digest, to name an image."""
_IDENTITIES_LIMIT = 65536
_NAMES_PER_IMAGE = 16
"""Of each user: else one with many names for it could make others lose what they call theirs."""
_NAMES_LIMIT = 8192
"""Of all images, however small they are. A name may take 16 KiB: in all half of what counts as
bloat (:mod:`trims_shim.daemon.control`)."""


@dataclass(slots=True)
class _Image(Candidate):
    size_bytes: int
    holds: int = 0
    hits: int = 0
    names: OrderedDict[NameKey, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Ingest:
    """A load. ``first`` is the request that began it; None for an image of another tier.

    ``hinted`` is the image that the file probably equals. It is held until the load has ended.
    ``late`` came after it had begun.
    """

    keys: tuple[IdentityKey, ...]
    names: tuple[NameKey, ...]
    size_bytes: int
    reserved_bytes: int
    first: Opening | None = None
    waiters: list[Opening] = field(default_factory=list)
    hinted: _Image | None = None
    late: list[Opening] = field(default_factory=list)

    def requests(self) -> list[Opening]:
        return self.waiters + self.late


_Key = TypeVar("_Key", bound=Hashable)


class _Pointers(Generic[_Key]):
    """Which image a key means, for a limited number of keys: those that were used last.

    Indexed by image, too: forgetting one must not take longer the more others there are, because
    many go at once, and nobody is served meanwhile.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[_Key, Digest] = OrderedDict()
        self._keys: dict[Digest, dict[_Key, None]] = {}

    def get(self, key: _Key) -> Digest | None:
        """None if the key is not known."""
        return self._digests.get(key)

    def point(self, key: _Key, digest: Digest) -> None:
        """Point a key at an image; it was used now."""
        if self._digests.get(key) != digest:
            self.remove(key)
            self._digests[key] = digest
            self._keys.setdefault(digest, {})[key] = None
            if len(self._digests) > _IDENTITIES_LIMIT:
                self.remove(next(iter(self._digests)))
        self._digests.move_to_end(key)

    def forget(self, digest: Digest) -> tuple[_Key, ...]:
        """Forget an image; return its keys."""
        keys = tuple(self._keys.pop(digest, ()))
        for key in keys:
            del self._digests[key]
        return keys

    def remove(self, key: _Key) -> None:
        """Forget a key."""
        digest = self._digests.pop(key, None)
        if digest is None:
            return
        keys = self._keys[digest]
        del keys[key]
        if not keys:
            del self._keys[digest]


class Store:
    """See the module docstring. Every mutating method returns the actions to execute, in order."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        policy: EvictionPolicy,
        footprint_bytes: Callable[[int], int] = lambda size: size,
        numbers: Iterator[int] | None = None,
        tier: str = "host tier",
        settings: str = "TRIMS_HOST",
    ) -> None:
        """``footprint_bytes`` says what a segment for a file of some size will cost.

        ``numbers`` is the counter shared with other tiers; ``tier`` names this tier in messages,
        and its settings begin with ``settings``.
        """
        self._budget_bytes = budget_bytes
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._tier = tier
        self._settings = settings
        self._policy = policy
        self._footprint_bytes = footprint_bytes
        self._images: OrderedDict[Digest, _Image] = OrderedDict()
        """In the order of their last use."""
        self._pins: dict[Digest, set[int]] = {}
        """The users who have pinned an image; it is in here while there is one."""
        self._resident_bytes = self._reserved_bytes = 0
        self._identities: _Pointers[IdentityKey] = _Pointers()
        self._hints: _Pointers[tuple[Identity, Variant]] = _Pointers()
        self._names: defaultdict[int, OrderedDict[tuple[Digest, str], None]]
        self._names = defaultdict(OrderedDict)
        """By user, names by which images were asked for, with those asked for last at the end."""
        self._ingests: dict[int, _Ingest] = {}
        self._loading: dict[IdentityKey, int] = {}
        self._leases: Leases[Digest] = Leases(self._numbers)

    # --- requests -------------------------------------------------------------------------------

    def open(self, opening: Opening, now_ns: int, *, withheld_bytes: int = 0) -> list[Action]:
        """A client wants the image of a file it has proved it can read.

        ``withheld_bytes``: the part of the budget that cannot be used at present.
        """
        digest = self._identities.get(opening.key)
        if digest is not None:
            self._identities.point(opening.key, digest)
            return [self._grant(opening, digest, "hit", now_ns, is_settled=True)]
        ingest = self._loading.get(opening.key)
        if ingest is not None:
            self._ingests[ingest].late.append(opening)
            return []
        try:
            return self._start(opening, [opening], now_ns, withheld_bytes)
        except NoSpace as error:
            return [RefuseRequest(opening, error)]

    def load(
        self,
        opening: Opening,
        now_ns: int,
        *,
        withheld_bytes: int = 0,
        before_ns: float = math.inf,
    ) -> list[Action]:
        """Load an image for later requests: nobody waits for it. Without room, do nothing.

        Only images that were last used before ``before_ns`` make room.
        """
        if self.is_hit(opening):
            return []
        try:
            return self._start(opening, [], now_ns, withheld_bytes, before_ns)
        except NoSpace:
            return []

    def admit(
        self,
        size_bytes: int,
        *,
        identities: tuple[IdentityKey, ...] = (),
        names: tuple[NameKey, ...] = (),
        withheld_bytes: int = 0,
    ) -> int:
        """Reserve room for an image of ``size_bytes`` from another tier; return its load's number.

        Raises NoSpace if it does not fit without evicting anything.
        """
        needed = self._footprint_bytes(size_bytes)
        lacking = self._missing_bytes(needed, withheld_bytes)
        if lacking > 0:
            raise self._no_space("an image of another tier", needed, lacking, withheld_bytes)
        ingest = next(self._numbers)
        self._begin(ingest, _Ingest(identities, names, size_bytes, needed))
        return ingest

    def ingest_done(self, ingest: int, result: Ingested, now_ns: int) -> list[Action]:
        """The segment is filled and sealed, or an equal image was found."""
        load = self._end(ingest)
        actions: list[Action] = []
        image = self._images.get(result.digest)
        if image is None:
            image = _Image(
                result.digest,
                result.resident_bytes,
                loaded_ns=now_ns,
                used_ns=now_ns,
                opens=0,
                load_ns=result.load_ns,
                size_bytes=load.size_bytes,
            )
            self._images[result.digest] = image
            self._resident_bytes += image.resident_bytes
            if not load.requests():
                self._policy.used(image)
            actions.append(AdoptSegment(ingest, result.digest))
            actions.append(Announce("loaded", image.digest, image.size_bytes))
        else:
            actions.append(DiscardSegment(ingest))
        self._remember(load.keys, result)
        for name in load.names:
            self._name(image, name)
        for opening in load.requests() if result.is_settled else load.waiters:
            outcome = "miss" if opening is load.first else "joined"
            actions.append(
                self._grant(opening, image.digest, outcome, now_ns, is_settled=result.is_settled)
            )
        if load.late and not result.is_settled:
            # As if there were no room: it needs none.
            actions += self._start(load.late[0], load.late, now_ns, self._budget_bytes)
        return actions

    def ingest_failed(self, ingest: int, error: TrimsError) -> list[Action]:
        """The file could not be read; every waiting request is told why."""
        load = self._end(ingest)
        if not load.reserved_bytes:  # It was only hashed.
            for key in load.keys:
                self._hints.remove(key[1:])
        return [RefuseRequest(opening, error) for opening in load.requests()]

    def release(self, session: int, lease: int, now_ns: int) -> bool:
        """The client gave a lease up; False when it does not hold it."""
        digest = self._leases.release(session, lease)
        if digest is None:
            return False
        self._use(digest, now_ns)
        return True

    def close_session(self, session: int, now_ns: int) -> None:
        """The connection is gone, and with it its leases and its place in every queue."""
        for digest in self._leases.close_session(session):
            self._use(digest, now_ns)
        for load in self._ingests.values():
            load.waiters = [each for each in load.waiters if each.session != session]
            load.late = [each for each in load.late if each.session != session]

    def pin(self, digest: Digest, user: int) -> list[Action]:
        """Keep an image until this user unpins it. Raises UnknownImage."""
        image = self._image(digest)
        is_first = not self.is_pinned(digest)
        self._pins.setdefault(digest, set()).add(user)
        return [Announce("pinned", digest, image.size_bytes)] if is_first else []

    def unpin(self, digest: Digest, user: int | None) -> list[Action]:
        """Allow an image to go as far as this user is concerned; None: all. Raises UnknownImage."""
        image = self._image(digest)
        users = self._pins.pop(digest, set())
        left = set() if user is None else users - {user}
        if left:
            self._pins[digest] = left
        return [Announce("unpinned", digest, image.size_bytes)] if users and not left else []

    def hold(self, digest: Digest) -> None:
        """Keep an image until :meth:`unhold` was called as often. Raises UnknownImage."""
        self._image(digest).holds += 1

    def unhold(self, digest: Digest) -> None:
        """Undo one :meth:`hold`."""
        self._image(digest).holds -= 1

    def evict(self, digest: Digest) -> list[Action]:
        """Drop one image. Raises UnknownImage, or NoSpace saying why it has to stay."""
        image = self._image(digest)
        leases, is_pinned = self._leases.of(digest), self.is_pinned(digest)
        if leases or is_pinned:
            why = "is pinned; unpin it first" if is_pinned else "is in use"
            raise NoSpace(f"image {digest[:12]} {why} (leases: {leases})")
        if image.holds:
            raise NoSpace(f"image {digest[:12]} is being copied or compared; try again")
        return self._drop(image)

    def forget(self, digest: Digest) -> list[Action]:
        """Drop an image whose memory is lost, with all its leases; nothing if it is unknown."""
        image = self._images.get(digest)
        return [] if image is None else self._drop(image)

    def relieve(self, wanted_bytes: int) -> list[Action]:
        """Drop free images until ``wanted_bytes`` are given back, or none is left.

        Those that the policy would keep go last.
        """
        victims = self._choose_victims(wanted_bytes, is_forced=True)
        return [action for image in victims for action in self._drop(image)]

    def expire(self, before_ns: int) -> list[Action]:
        """Drop free images that nobody has used since ``before_ns``."""
        old = itertools.takewhile(lambda image: image.used_ns < before_ns, self._images.values())
        victims = [image for image in old if self._is_free(image)]
        return [action for image in victims for action in self._drop(image)]

    def evict_all(self) -> list[Action]:
        """Drop every image that is not leased, pinned or held."""
        actions: list[Action] = []
        for image in list(self._free()):
            actions += self._drop(image)
        return actions

    # --- questions --------------------------------------------------------------------------------

    def matching(self, text: str) -> list[Digest]:
        """The images that a digest prefix means; none for one of less than DIGITS_NEEDED."""
        if len(text) < DIGITS_NEEDED:
            return []
        prefix = text.lower()  # once: it may be long, and there may be many images
        return [digest for digest in self._images if digest.startswith(prefix)]

    def named(
        self, name: str, *, user: int, may_see_all: bool = True, is_pinned: bool = False
    ) -> Digest | None:
        """The image that was last asked for by a name; of the pinned ones if ``is_pinned``.

        Names that ``user`` gave come first, because anybody can call an image by anybody's path;
        others' names and pins count only when ``may_see_all``.
        """
        owners = {
            owner: digest
            for owner, names in self._names.items()
            if may_see_all or owner == user
            for digest, path in names
            if path == name
            and (not is_pinned or self.is_pinned(digest, by=None if may_see_all else user))
        }
        return owners.get(user) or next(iter(owners.values()), None)

    def is_named_by(self, digest: Digest, user: int) -> bool:
        """Whether a user has asked for an image."""
        image = self._images.get(digest)
        return image is not None and any(owner == user for owner, _ in image.names)

    def is_hit(self, opening: Opening) -> bool:
        """Whether :meth:`open` would need no room: the image is there, or being loaded."""
        return self._identities.get(opening.key) is not None or opening.key in self._loading

    def needs_file(self, opening: Opening) -> bool:
        """Whether a load may begin with this request's file later; one of those that wait."""
        load = self._ingests.get(self._loading.get(opening.key, 0))
        return load is not None and load.late[:1] == [opening]

    def trusted_digest(
        self, user: int, identity: Identity, variant: Variant = AS_IS
    ) -> Digest | None:
        """What the file of this identity holds, if this user has proved it and it is resident."""
        return self._identities.get((user, identity, variant.key))

    def is_resident(self, digest: Digest) -> bool:
        """Whether there is an image of this digest."""
        return digest in self._images

    def is_pinned(self, digest: Digest, *, by: int | None = None) -> bool:
        """Whether this user has pinned an image; None: any user."""
        users = self._pins.get(digest, set())
        return bool(users) if by is None else by in users

    def grow(self, budget_bytes: int) -> None:
        """Raise the budget, if that is more than it is."""
        if budget_bytes > self._budget_bytes:
            self._budget_bytes = budget_bytes
            self._policy.resized(budget_bytes)

    def is_needed(self) -> bool:
        """Whether any image is leased or pinned."""
        return bool(self._leases or self._pins)

    def totals(self) -> Totals:
        """The account of the tier."""
        return Totals(self._budget_bytes, self._resident_bytes, self._reserved_bytes)

    def images(self, limit: int | None = None) -> list[ImageRow]:
        """Resident images, most recently used first; at most ``limit``."""
        return [*map(self._row, itertools.islice(reversed(self._images.values()), limit))]

    def images_from(self, digest: str, limit: int) -> list[ImageRow]:
        """Resident images by digest, from this one on; at most ``limit``."""
        digests = heapq.nsmallest(limit, (each for each in self._images if each >= digest))
        return [self._row(self._images[each]) for each in digests]

    def _row(self, image: _Image) -> ImageRow:
        return ImageRow(
            image.digest,
            image.size_bytes,
            image.resident_bytes,
            self._leases.of(image.digest),
            self.is_pinned(image.digest),
            image.loaded_ns,
            image.used_ns,
            image.hits,
            image.load_ns,
            tuple(image.names),
        )

    def lease_count(self, session: int | None = None) -> int:
        """Leases of one session, or of all."""
        return len(self._leases) if session is None else self._leases.of_session(session)

    def ingest_count(self) -> int:
        """Loads under way."""
        return len(self._ingests)

    def waiters(self, ingest: int) -> list[Opening]:
        """The requests that wait for a load."""
        return self._ingests[ingest].requests() if ingest in self._ingests else []

    # --- inside -----------------------------------------------------------------------------------

    def _start(
        self,
        opening: Opening,
        waiters: list[Opening],
        now_ns: int,
        withheld_bytes: int,
        before_ns: float = math.inf,
    ) -> list[Action]:
        """Raises NoSpace."""
        needed = self._footprint_bytes(opening.image_bytes)
        digest = self._hints.get(opening.key[1:])
        hinted = None if digest is None else self._images[digest]
        is_only_hashed = hinted is not None and self._missing_bytes(needed, withheld_bytes) > 0
        actions: list[Action] = []
        if hinted is not None and is_only_hashed:
            self._use(hinted.digest, now_ns)
            needed = 0
        else:
            actions = self._make_room(opening.name, needed, withheld_bytes, before_ns)
        ingest = next(self._numbers)
        load = _Ingest(
            (opening.key,),
            ((opening.user, opening.name),),
            opening.image_bytes,
            needed,
            opening,
            waiters,
            hinted,
        )
        self._begin(ingest, load)
        self._loading[opening.key] = ingest
        start = StartIngest(
            ingest, opening, is_likely_known=hinted is not None, is_only_hashed=is_only_hashed
        )
        return [*actions, start]

    def _make_room(
        self, name: str, needed_bytes: int, withheld_bytes: int, before_ns: float
    ) -> list[Action]:
        """Raises NoSpace."""
        missing = self._missing_bytes(needed_bytes, withheld_bytes)
        chosen = self._choose_victims(missing, before_ns=before_ns)
        # All or nothing: no image is dropped for a request that is still refused.
        lacking = missing - sum(image.resident_bytes for image in chosen)
        if lacking > 0:
            raise self._no_space(name, needed_bytes, lacking, withheld_bytes)
        return [action for image in chosen for action in self._drop(image)]

    def _missing_bytes(self, needed_bytes: int, withheld_bytes: int) -> int:
        used = self._resident_bytes + self._reserved_bytes + withheld_bytes
        return used + needed_bytes - self._budget_bytes

    def _choose_victims(
        self, missing_bytes: int, *, is_forced: bool = False, before_ns: float = math.inf
    ) -> list[_Image]:
        """Free images in the policy's order, as many as are needed or there are.

        Last used before ``before_ns``. ``is_forced``: at last also those that the policy would
        keep.
        """
        if missing_bytes <= 0:
            return []
        old = itertools.takewhile(lambda image: image.used_ns < before_ns, self._free())
        order = self._policy.rank(old)
        chosen: dict[Digest, _Image] = {}
        for candidate in itertools.chain(order, self._free()) if is_forced else order:
            if candidate.digest in chosen:
                continue
            chosen[candidate.digest] = self._images[candidate.digest]
            missing_bytes -= candidate.resident_bytes
            if missing_bytes <= 0:
                break
        return list(chosen.values())

    def _free(self) -> Iterator[_Image]:
        """Images that may be evicted, least recently used first."""
        return (each for each in self._images.values() if self._is_free(each))

    def _no_space(self, name: str, needed: int, lacking: int, withheld_bytes: int) -> NoSpace:
        """``lacking`` may be small beside the rest, whose sizes are rounded."""
        totals = self.totals()
        is_within_budget = self._missing_bytes(needed, 0) <= 0
        advice = (
            f"free memory, or lower {self._settings}_HEADROOM_BYTES"
            if is_within_budget
            else f"raise {self._settings}_BYTES"
        )
        return NoSpace(
            f"{name}: {size(needed)} do not fit the {self._tier}: {size(lacking)} too many; budget "
            f"{size(totals.budget_bytes)}, resident {size(totals.resident_bytes)}, loading "
            f"{size(totals.reserved_bytes)}, still mapped elsewhere, left to "
            f"programs or not to be had {size(withheld_bytes)}; {advice} and run `trims stop`"
            f"{self._how_to_evict()}"
        )

    def _how_to_evict(self) -> str:
        """The end of an advice: what makes room for another image among those that are here."""
        if not self._images:
            return ""
        if all(image.holds or self._leases.of(image.digest) for image in self._images.values()):
            return ", or end programs that use the images (`trims status`)"
        pinned_bytes = sum(self._images[each].resident_bytes for each in self._pins)
        kept = f", which keeps the {size(pinned_bytes)} that are pinned: `trims unpin`"
        return f", or run `trims evict --all`{kept if pinned_bytes else ''}"

    def _grant(
        self, opening: Opening, digest: Digest, outcome: str, now_ns: int, *, is_settled: bool
    ) -> GrantLease:
        image = self._images[digest]
        lease = self._leases.grant(opening.session, digest)
        self._use(digest, now_ns)
        image.opens += 1
        image.hits += outcome != "miss"
        self._policy.used(image)
        self._name(image, (opening.user, opening.name))
        return GrantLease(opening, lease, digest, outcome, is_settled)

    def _name(self, image: _Image, name: NameKey) -> None:
        """Note a name that an image was asked for by; beyond a limit the oldest goes.

        Of all names, it is the oldest of the user who has most: others keep theirs.
        """
        user, path = name
        image.names[name] = None
        image.names.move_to_end(name)
        of_user = [each for each in image.names if each[0] == user]
        for oldest in of_user[:-_NAMES_PER_IMAGE]:
            self._forget_name(image, oldest)
        self._names[user][image.digest, path] = None
        self._names[user].move_to_end((image.digest, path))
        if sum(map(len, self._names.values())) > _NAMES_LIMIT:
            most = max(self._names, key=lambda each: len(self._names[each]))
            digest, path = next(iter(self._names[most]))
            self._forget_name(self._images[digest], (most, path))

    def _forget_name(self, image: _Image, name: NameKey) -> None:
        user, path = name
        del image.names[name]
        self._names[user].pop((image.digest, path))

    def _remember(self, keys: tuple[IdentityKey, ...], result: Ingested) -> None:
        for key in keys:
            self._hints.point(key[1:], result.digest)
            if result.is_settled:
                self._identities.point(key, result.digest)

    def _use(self, digest: Digest, now_ns: int) -> None:
        self._images[digest].used_ns = now_ns
        self._images.move_to_end(digest)

    def _begin(self, ingest: int, load: _Ingest) -> None:
        self._ingests[ingest] = load
        self._reserved_bytes += load.reserved_bytes
        if load.hinted is not None:
            load.hinted.holds += 1

    def _end(self, ingest: int) -> _Ingest:
        load = self._ingests.pop(ingest)
        self._reserved_bytes -= load.reserved_bytes
        if load.hinted is not None:
            load.hinted.holds -= 1
        for key in load.keys:
            if self._loading.get(key) == ingest:
                del self._loading[key]
        return load

    def _drop(self, image: _Image) -> list[Action]:
        del self._images[image.digest]
        self._policy.gone(image)
        self._resident_bytes -= image.resident_bytes
        self._pins.pop(image.digest, None)
        self._leases.forget(image.digest)
        for user, path in image.names:
            self._names[user].pop((image.digest, path))
        keys = self._identities.forget(image.digest)
        self._hints.forget(image.digest)
        return [
            DropImage(image.digest, image.size_bytes, keys, tuple(image.names)),
            Announce("evicted", image.digest, image.size_bytes),
        ]

    def _image(self, digest: Digest) -> _Image:
        try:
            return self._images[digest]
        except KeyError:
            raise UnknownImage(f"no resident image {digest[:12]}; `trims ls` shows them") from None

    def _is_free(self, image: _Image) -> bool:
        digest = image.digest
        return not (self.is_pinned(digest) or image.holds or self._leases.of(digest))
