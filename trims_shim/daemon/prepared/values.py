"""Values between the store of prepared models and its users: requests, events, answers, actions.

:mod:`trims_shim.daemon.prepared.store` gets events from its users, who execute its actions. What a
model is (:class:`Content`, :class:`Known`) is written to the disk, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class Content:
    """What a model is: its digest, and that of each file that holds its weights, by location.

    ``place`` is empty if nobody else may change these files. Else it tells them from all others:
    what was hashed may not be what was read afterwards, so it must not stand for equal files.
    """

    digest: Digest
    externals: tuple[tuple[str, Digest], ...] = ()
    place: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """A model's file of this identity has this content.

    With external files, only if it is found in ``directory``, and while their identities are
    ``externals`` (in the order of ``content.externals``).
    """

    identity: Identity
    content: Content
    directory: str = ""
    externals: tuple[Identity, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A prepared model that exists."""

    key: str
    size_bytes: int
    runtime: str
    prepare_ns: int
    used_ns: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """A client's request; ``key`` is empty while the content of the offered file is not known."""

    session: int
    flight: Flight
    key: str
    name: str
    runtime: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model was not prepared, or will not be, at least for now."""

    reason: str
    message: str
    is_lasting: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """The entry exists, and is leased."""

    lease: int
    key: str


@dataclass(frozen=True, slots=True)
class Start:
    """Prepare the model."""

    job: int


@dataclass(frozen=True, slots=True)
class Wait:
    """It is being prepared, or about to be."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """There is no such entry. The request may not start anything, but may be followed by one."""


Answer: TypeAlias = Grant | Start | Wait | Unknown | Failure


@dataclass(frozen=True, slots=True)
class DropEntry:
    """Delete the files of an entry."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class KeepRefusal:
    """Write down that a model cannot be prepared, for later daemons."""

    key: str
    reason: str
    message: str
    runtime: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropRefusal:
    """Forget a refusal that was written down."""

    key: str


Action: TypeAlias = DropEntry | KeepRefusal | DropRefusal


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on with a preparation, and the actions that make room for it."""

    is_wanted: bool
    actions: tuple[Action, ...] = ()
