"""Clients of prepared models: who has to wait, what they offer, and what they are told.

Owns the form of the answers. Used by :mod:`trims_shim.daemon.prepared.serving`, in the server's
thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from trims_shim.daemon.front import Front, Request
from trims_shim.daemon.offers import Offer
from trims_shim.daemon.prepared.files import Published
from trims_shim.daemon.prepared.values import Flight, Grant
from trims_shim.errors import NotServed, TooManyRequests, TrimsError
from trims_shim.specs import Identity
from trims_shim.wire import messages
from trims_shim.wire.handover import clipped

__all__ = [
    "EarlyRequests",
    "directory_of_model",
    "flight_of",
    "hit_reply",
    "identity_of",
    "refusal_reply",
]


class EarlyRequests:
    """Requests that arrive before the directory is scanned.

    They wait here, at most a session's limit of open requests, and are then answered all at once. A
    session that ends takes its requests with it.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._waiting: list[tuple[Request, Callable[[], Any]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, request: Request, work: Callable[[], Any]) -> None:
        """Keep a request until :meth:`serve`. Raises TooManyRequests."""
        limit = self._front.sessions.limits.requests
        if sum(1 for each, _ in self._waiting if each.session is request.session) >= limit:
            raise TooManyRequests(f"more than {limit} open requests")
        self._waiting.append((request, work))

    def close_session(self, session: int) -> None:
        """Forget the requests of a session."""
        self._waiting = [each for each in self._waiting if each[0].session.number != session]

    def serve(self) -> None:
        """Serve them all, in the order of arrival."""
        while self._waiting:
            self._front.serve(*self._waiting.pop(0))


def identity_of(offer: Offer) -> Identity | None:
    """The offered file's identity, if there is one. Raises AccessDenied, NotServed."""
    if offer.descriptor < 0:
        return None
    identity = offer.identity()
    if identity.size_bytes == 0:
        raise NotServed("not_a_model", "the offered file is empty")
    return identity


def hit_reply(grant: Grant, published: Published) -> messages.OpenPreparedReply:
    """The files of a model, and the lease."""
    return messages.OpenPreparedReply(
        "hit",
        lease=grant.lease,
        key=grant.key,
        model=published.model,
        model_identity=published.model_identity,
        weights=published.weights,
        weights_identity=published.weights_identity,
    )


def refusal_reply(reason: str, message: str) -> messages.OpenPreparedReply:
    """No model, and why."""
    return messages.OpenPreparedReply("refused", reason=reason, message=clipped(message))


def directory_of_model(
    message: messages.OpenPreparedRequest, offered: Mapping[str, Offer], *, is_elsewhere: bool
) -> str:
    """Where a model's external files are looked for; empty for a model in memory.

    For a client that sees other files it is no path, but a name for the files that it has
    ``offered``, by location, with their identities: what one container lacks another may have.
    """
    if not (message.path and is_elsewhere):
        return os.path.dirname(message.path)
    files = sorted((location, _identity(offer)) for location, offer in offered.items())
    return f"offered-{hashlib.sha256(repr(files).encode()).hexdigest()}"


def flight_of(
    message: messages.OpenPreparedRequest, identity: Identity | None, directory: str
) -> Flight:
    """What a request asks for, as far as it is known before the model is hashed.

    And by which installation, as what one lacks another may have. As a digest, because refusals are
    kept by it, and what a client says of itself may be long.
    """
    is_in_memory = identity is None or not message.path
    model = message.digest or identity if is_in_memory else (identity, directory)
    return hashlib.sha256(repr((model, message.recipe, message.package)).encode()).digest()


def _identity(offer: Offer) -> Identity | None:
    try:
        return offer.identity()
    except TrimsError:
        return None
