"""Clients of prepared models: what they offer, and what they are told.

Owns the form of the answers. Used by :mod:`trims_shim.daemon.prepared.models`, in the server's
thread.
"""

from __future__ import annotations

import os

from trims_shim.daemon.offers import Offer
from trims_shim.daemon.prepared.events import Flight, Grant
from trims_shim.daemon.prepared.files import Published
from trims_shim.errors import NotServed
from trims_shim.specs import Identity
from trims_shim.wire import messages
from trims_shim.wire.handover import clipped

__all__ = [
    "flight_of",
    "hit_reply",
    "identity_of",
    "refusal_reply",
]


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


def flight_of(message: messages.OpenPreparedRequest, identity: Identity | None) -> Flight:
    """What a request asks for, as far as it is known before the model is hashed."""
    if identity is None or not message.path:
        return message.digest or identity, message.recipe
    return identity, os.path.dirname(message.path), message.recipe
