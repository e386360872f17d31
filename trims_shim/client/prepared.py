"""Prepared ONNX models as a client gets them: two files of the daemon's, checked, under a lease.

Owns what an :class:`OpenPreparedReply` means. The files are read by onnxruntime itself, by path;
they are taken only when they are the very files that the daemon verified (``os.stat`` gives the
identities in the reply). A lease keeps them from being evicted while somebody creates a session or
uses one; to lose it costs nobody anything, because what is mapped outlives its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from trims_shim.errors import NotServed, WireError
from trims_shim.specs import Identity
from trims_shim.wire import messages

__all__ = ["PreparedModel", "prepared_model"]

_RENAMED = {"file_changed": "model_changed"}
"""A file that changes while it is loaded is worth a warning. One that changes while it is prepared
is not: this load takes it as it is, and the next one asks again."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A prepared model under a lease; ``path`` is its graph, the weights are beside it.

    ``release`` gives the lease up; it never blocks or raises and is safe in a finalizer.
    """

    path: str
    key: str
    size_bytes: int
    release: Callable[[], None]


def prepared_model(
    reply: messages.OpenPreparedReply, *, name: str, release: Callable[[], None]
) -> PreparedModel:
    """What was granted. ``release`` belongs to the reply's lease; it is called on failure.

    Raises NotServed with the reason: ``preparing``, ``unknown``, that of a refusal, or
    ``prepared_changed`` when the files are not those that were verified. Raises WireError for a
    reply that makes no sense.
    """
    if reply.outcome == "hit":
        try:
            return _hit(reply, name, release)
        except BaseException:
            release()
            raise
    if reply.outcome == "refused":
        reason = _RENAMED.get(reply.reason, reply.reason) or "refused"
        raise NotServed(reason, f"{name}: {reply.message or reply.reason}")
    if reply.outcome in ("preparing", "unknown"):
        raise NotServed(reply.outcome, f"{name} is not prepared yet")
    raise WireError(f"{reply.outcome!r:.60} answers OpenPreparedRequest")


def _hit(
    reply: messages.OpenPreparedReply, name: str, release: Callable[[], None]
) -> PreparedModel:
    if not os.path.isabs(reply.model) or reply.model_identity is None:
        raise WireError(f"a prepared model without a file was granted for {name}")
    _check(reply.model, reply.model_identity, name)
    size_bytes = reply.model_identity.size_bytes
    if reply.weights_identity is not None:
        _check(reply.weights, reply.weights_identity, name)
        size_bytes += reply.weights_identity.size_bytes
    return PreparedModel(reply.model, reply.key, size_bytes, release)


def _check(path: str, identity: Identity, name: str) -> None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise NotServed("prepared_changed", f"{name}: {error}") from error
    if Identity.from_stat(status) != identity:
        raise NotServed("prepared_changed", f"{name}: {path} is not the file that was verified")
