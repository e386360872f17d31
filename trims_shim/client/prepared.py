"""Prepared ONNX models as a client gets them: two files of the daemon's, checked, under a lease.

Owns the meaning of an :class:`OpenPreparedReply`. onnxruntime itself reads the files, by path. They
are used only if they are the very files that the daemon verified (``os.stat`` gives the identities
in the reply), before onnxruntime opens them and afterwards. In another container than the daemon's
their directory may have another name. A lease keeps them from eviction while
a session is created or used. Losing it is harmless, because mapped files outlive their names.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from trims_shim.errors import NotServed, WireError
from trims_shim.specs import Identity
from trims_shim.wire import messages

__all__ = ["PreparedLease", "PreparedModel", "prepared_model"]

_RENAMED = {"file_changed": "model_changed"}
"""A change of the file during a load is worth a warning. A change during preparation is not: this
load takes the file as it is, and the next one asks again."""


class PreparedLease:
    """A lease that ends with the last reference to it, or to :meth:`release`.

    So no interrupt loses it, wherever it comes between the reply and the end of the session.
    """

    __slots__ = ("__weakref__", "_end")

    def __init__(self, release: Callable[[], None]) -> None:
        self._end = weakref.finalize(self, release)
        self._end.atexit = False

    def release(self) -> None:
        """Give it up now; a second call does nothing."""
        self._end()


class PreparedModel(NamedTuple):
    """A prepared model under a lease; ``path`` is its graph, the weights are beside it.

    ``check`` raises NotServed (``prepared_changed``) if other files have their names by now.
    ``release`` gives up the lease; it never blocks or raises and is safe in a finalizer. The lease
    lives until then, or as long as something holds ``release``.
    """

    path: str
    key: str
    size_bytes: int
    check: Callable[[], None]
    release: Callable[[], None]


def prepared_model(
    reply: messages.OpenPreparedReply, *, name: str, release: Callable[[], None], directory: str
) -> PreparedModel:
    """Return the granted model. ``release`` is of the reply's lease, and is called on failure.

    ``directory`` is where this process expects prepared models to be.

    Raises NotServed with the reason: ``preparing``, ``unknown``, that of a refusal, or
    ``prepared_changed`` when the files are not the verified ones. Raises WireError for a senseless
    reply.
    """
    if reply.outcome == "hit":
        try:
            return _hit(reply, name, release, directory)
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
    reply: messages.OpenPreparedReply, name: str, release: Callable[[], None], directory: str
) -> PreparedModel:
    if not os.path.isabs(reply.model) or reply.model_identity is None:
        raise WireError(f"a prepared model without a file was granted for {name}")
    model = _located(reply.model, reply.model_identity, directory)
    files = {model: reply.model_identity}
    if reply.weights_identity is not None:
        files[_beside(model, reply.weights)] = reply.weights_identity

    def check() -> None:
        for path, identity in files.items():
            _check(path, identity, name)

    check()
    size_bytes = sum(identity.size_bytes for identity in files.values())
    return PreparedModel(model, reply.key, size_bytes, check, release)


def _located(path: str, identity: Identity, directory: str) -> str:
    """The daemon's path, unless this file is found in a model's place below ``directory`` only."""
    ours = os.path.join(directory, *path.split(os.sep)[-2:])
    for each in (path, ours):
        with contextlib.suppress(OSError, ValueError):
            if Identity.from_stat(os.stat(each, follow_symlinks=False)) == identity:
                return each
    return path


def _beside(model: str, path: str) -> str:
    return os.path.join(os.path.dirname(model), os.path.basename(path))


def _check(path: str, identity: Identity, name: str) -> None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise NotServed("prepared_changed", f"{name}: {error}") from error
    except ValueError as error:  # a null byte
        raise WireError(f"{path!r:.80} is not the path of a file") from error
    if Identity.from_stat(status) != identity:
        raise NotServed("prepared_changed", f"{name}: {path} is not the file that was verified")
