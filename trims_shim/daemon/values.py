"""Values between the store of a tier and its users: openings, actions, rows of a snapshot.

:mod:`trims_shim.daemon.store` gets events from the server, which executes its actions in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from trims_shim.errors import TrimsError
from trims_shim.specs import AS_IS, Digest, Identity, Variant

__all__ = [
    "Action",
    "AdoptSegment",
    "Announce",
    "DiscardSegment",
    "DropImage",
    "GrantLease",
    "IdentityKey",
    "ImageRow",
    "Ingested",
    "NameKey",
    "Opening",
    "RefuseRequest",
    "StartIngest",
    "Totals",
]

IdentityKey = tuple[int, Identity, Variant]
"""(user, identity, variant)."""
NameKey = tuple[int, str]
"""(user, path)."""


class Opening(NamedTuple):
    """A client's request for an image, with the proof already checked.

    The image is a ``variant`` of the file.
    """

    session: int
    request: int
    user: int
    identity: Identity
    name: str
    variant: Variant = AS_IS

    @property
    def key(self) -> IdentityKey:
        """What the image is looked up by."""
        return (self.user, self.identity, self.variant.key)

    @property
    def image_bytes(self) -> int:
        """Size of the image."""
        return self.variant.size_bytes(self.identity.size_bytes)


class Ingested(NamedTuple):
    """A load that ended well. ``is_settled``: the identity may be trusted from now on."""

    digest: Digest
    resident_bytes: int
    is_settled: bool
    load_ns: int


class StartIngest(NamedTuple):
    """Read the file of this request; ``is_likely_known``: hash first, an equal image may exist.

    ``is_only_hashed``: there is no room to load it; it fails if no equal image exists.
    """

    ingest: int
    opening: Opening
    is_likely_known: bool
    is_only_hashed: bool = False


class AdoptSegment(NamedTuple):
    """The loaded segment is the image of this digest from now on."""

    ingest: int
    digest: Digest


class DiscardSegment(NamedTuple):
    """The loaded segment is not needed: an image of equal content exists."""

    ingest: int


class GrantLease(NamedTuple):
    """Send the segment and the reply."""

    opening: Opening
    lease: int
    digest: Digest
    outcome: str
    is_settled: bool


class RefuseRequest(NamedTuple):
    """Answer with an error."""

    opening: Opening
    error: TrimsError


@dataclass(frozen=True, slots=True)
class DropImage:
    """Give up the segment of this image.

    The other fields are what the store knew of it, for a tier that takes it over.
    """

    digest: Digest
    size_bytes: int = field(default=0, compare=False)
    identities: tuple[IdentityKey, ...] = field(default=(), compare=False)
    names: tuple[NameKey, ...] = field(default=(), compare=False)


class Announce(NamedTuple):
    """Publish an event."""

    event: str
    digest: Digest
    size_bytes: int


Action: TypeAlias = (
    StartIngest | AdoptSegment | DiscardSegment | GrantLease | RefuseRequest | DropImage | Announce
)


class ImageRow(NamedTuple):
    """One image in a snapshot. ``names`` are (user, path) pairs.

    ``hits`` are the opens that took an image that was there, or being loaded.
    """

    digest: Digest
    size_bytes: int
    resident_bytes: int
    leases: int
    is_pinned: bool
    loaded_ns: int
    used_ns: int
    hits: int
    load_ns: int
    names: tuple[NameKey, ...]


class Totals(NamedTuple):
    """The account of the tier."""

    budget_bytes: int
    resident_bytes: int
    reserved_bytes: int
