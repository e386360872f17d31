"""Values between the store of prepared models and its users: requests, events, answers, actions.

:mod:`trims_shim.daemon.prepared.store` gets events from its users, who execute its actions. What a
model is (:class:`Content`, :class:`Known`) is written to the disk, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from trims_shim.specs import Digest, Identity

__all__ = [
    "RUNTIME_LIMIT",
    "Action",
    "Answer",
    "Asking",
    "Content",
    "DropEntry",
    "DropRefusal",
    "Entry",
    "Failure",
    "Flight",
    "Grant",
    "KeepRefusal",
    "Known",
    "Start",
    "Unknown",
    "Verdict",
    "Wait",
]

RUNTIME_LIMIT = 64
"""Characters of what a client or a file calls its runtime that are kept, to be shown."""

Flight: TypeAlias = Hashable
"""What a client asked for, as far as it is known before the model is hashed."""


class Content(NamedTuple):
    """What a model is: its digest, and that of each file that holds its weights, by location.

    ``place`` is empty if nobody else may change these files. Else it tells them from all others:
    what was hashed may not be what was read afterwards, so it must not stand for equal files.
    """

    digest: Digest
    externals: tuple[tuple[str, Digest], ...] = ()
    place: str = ""


class Known(NamedTuple):
    """A model's file of this identity has this content.

    With external files, only if it is found in ``directory``, and while their identities are
    ``externals`` (in the order of ``content.externals``). If that is no absolute path, it stands
    for the very files (:func:`~trims_shim.daemon.prepared.clients.directory_of_model`).
    """

    identity: Identity
    content: Content
    directory: str = ""
    externals: tuple[Identity, ...] = ()


class Entry(NamedTuple):
    """A prepared model that exists."""

    key: str
    size_bytes: int
    runtime: str
    prepare_ns: int
    used_ns: int
    names: tuple[str, ...] = ()


class Asking(NamedTuple):
    """A client's request; ``key`` is empty while the content of the offered file is not known."""

    session: int
    flight: Flight
    key: str
    name: str
    runtime: str


class Failure(NamedTuple):
    """Why a model was not prepared, or will not be, at least for now."""

    reason: str
    message: str
    is_lasting: bool


class Grant(NamedTuple):
    """The entry exists, and is leased."""

    lease: int
    key: str


class Start(NamedTuple):
    """Prepare the model."""

    job: int


@dataclass(frozen=True, slots=True)
class Wait:
    """It is being prepared, or about to be."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """There is no such entry. The request may not start anything, but may be followed by one."""


Answer: TypeAlias = Grant | Start | Wait | Unknown | Failure


class DropEntry(NamedTuple):
    """Delete the files of an entry."""

    key: str
    size_bytes: int


class KeepRefusal(NamedTuple):
    """Write down that a model cannot be prepared, for later daemons."""

    key: str
    reason: str
    message: str
    runtime: str
    names: tuple[str, ...]


class DropRefusal(NamedTuple):
    """Forget a refusal that was written down."""

    key: str


Action: TypeAlias = DropEntry | KeepRefusal | DropRefusal


class Verdict(NamedTuple):
    """Whether to go on with a preparation, and the actions that make room, or note why not."""

    is_wanted: bool
    actions: tuple[Action, ...] = ()
