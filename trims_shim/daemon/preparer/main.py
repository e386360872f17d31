"""The preparer: the process that makes one prepared ONNX model, and ends.

It runs in the client's interpreter with the client's onnxruntime, at low priority, on files that
anybody may have written: what kills it costs this one preparation. It speaks the preparer's
messages of :mod:`trims_shim.wire.duties` over the socket it was started with
(:mod:`trims_shim.wire.frames`), writes only to the directory that it was given, and ends when the
daemon does. The daemon's side of it is :class:`trims_shim.daemon.prepared.preparing.Preparer`.

The steps of :func:`prepare`: hash the files, ask whether the content is wanted, create and run the
original, let onnxruntime save the optimised model, put that into its final form, and check that a
session of it equals the original in everything a program can see. Nothing is published from here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence

from trims_shim.children import be_called
from trims_shim.daemon import background
from trims_shim.daemon.preparer import cuda as preparer_cuda
from trims_shim.daemon.preparer import optimising, recipes, verifying
from trims_shim.daemon.preparer.installation import installation
from trims_shim.daemon.preparer.model_files import ModelFiles
from trims_shim.daemon.preparer.optimising import Refusal, Sessions
from trims_shim.errors import CorruptFile, MessageTooLarge, TrimsError, WireError
from trims_shim.specs import PREPARED_MODEL, PREPARED_WEIGHTS, Identity
from trims_shim.wire import duties, frames, messages
from trims_shim.wire.duties import PrepareReply, PrepareRequest, SourceHashed
from trims_shim.wire.handover import clipped

__all__ = ["main", "prepare"]

_logger = logging.getLogger("trims_shim.daemon")

_DISK_FACTOR = 3
"""Free disk space, in sizes of the source, for what onnxruntime saves, and for its final form."""


class _NotWanted(Exception):
    """The daemon has this content already."""


def main(arguments: Sequence[str]) -> None:
    """Do the one job that comes over the socket whose descriptor is the first argument.

    The second argument is for :func:`trims_shim.daemon.preparer.verifying.share_from`; the third
    is the priority, ``idle`` or ``normal``.
    """
    descriptor, anyway_bytes, priority = arguments
    be_called("trims-preparer")
    background.be_expendable()
    if priority == "idle":
        background.give_way()
    verifying.share_from(int(anyway_bytes))
    # A daemon in a terminal finishes its work after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    warnings.simplefilter("ignore")
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    with contextlib.suppress(OSError, WireError):  # The daemon is gone: nobody to tell.
        _serve(connection)
    # Skip the interpreter's end: nobody waits for onnxruntime to free its memory.
    os._exit(0)


def _serve(connection: socket.socket) -> None:
    request = frames.receive(connection)
    if not isinstance(request, PrepareRequest):
        return
    for source in (request.source, *(each.source for each in request.externals or ())):
        os.set_inheritable(source, False)

    def ask(hashed: SourceHashed) -> bool:
        try:
            frames.send(connection, hashed)
            answer = frames.receive(connection)
        except MessageTooLarge as error:
            raise Refusal("too_many_files", str(error)) from error
        except OSError as error:  # Not the model's fault, as any other one here would be.
            raise WireError(f"the daemon is gone: {error}") from error
        if not isinstance(answer, duties.ContentWanted):
            os._exit(0)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        return True

    reply = prepare(request, ask)
    if reply is not None:
        frames.send(connection, reply)


def _end_with(connection: socket.socket) -> None:
    """End with the connection: it closes when the daemon is gone, or wants no answer."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(0)


def prepare(
    request: PrepareRequest, on_hashed: Callable[[SourceHashed], bool]
) -> PrepareReply | None:
    """Write and verify ``model.onnx`` and ``weights.bin``; None when ``on_hashed`` says no.

    The descriptor in the request stays the caller's. ``on_hashed`` is not called for files that
    cannot be read. Never raises for what is wrong with a model: then the reply has the reason, and
    the directory may hold anything. Blocks for seconds to minutes.
    """
    try:
        return _prepare(request, on_hashed)
    except _NotWanted:
        return None
    except Refusal as refusal:
        return _refused(refusal.reason, refusal, is_lasting=refusal.is_lasting)
    except WireError:
        raise
    except TrimsError as error:
        return _refused(error.reason, error)
    except MemoryError as error:
        return _refused("no_memory", error)
    # Border: any other failure costs this one preparation.
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return _refused("no_memory", error)
        _logger.exception("preparing %s", request.path or "a model in memory")
        return _refused("preparer_failed", f"{type(error).__name__}: {error}")


def _refused(reason: str, message: object, *, is_lasting: bool = False) -> PrepareReply:
    return PrepareReply(reason=reason, message=clipped(str(message)), is_lasting=is_lasting)


def _prepare(request: PrepareRequest, on_hashed: Callable[[SourceHashed], bool]) -> PrepareReply:
    if request.protocol != messages.PROTOCOL_VERSION:
        raise Refusal("other_protocol", f"protocol {request.protocol}", is_lasting=False)
    recipes.check(request.recipe)
    offered = request.externals
    files = ModelFiles(request.source, request.path, None if offered is None else dict(offered))
    try:
        reply = _tried(request, files, on_hashed)
    except Refusal:
        # Is this a refusal of what was hashed, or of what has taken its place since?
        files.check_unchanged()
        raise
    # Sessions have opened the files again since they were hashed.
    files.check_unchanged()
    return reply


def _tried(
    request: PrepareRequest, files: ModelFiles, on_hashed: Callable[[SourceHashed], bool]
) -> PrepareReply:
    files.hash()
    refusal = _refusal_of(files)
    if not on_hashed(files.hashed):
        raise _NotWanted
    if refusal is not None:
        raise refusal
    _check_room(request.directory, _DISK_FACTOR * files.size_bytes + files.copied_bytes)
    _check_runtime(request)
    sessions = preparer_cuda.sessions_of(request.recipe)
    with files.loadable(request.directory) as path:
        reference = verifying.observe(lambda: sessions.original(path))
        return _made(request, sessions, path, reference)


def _refusal_of(files: ModelFiles) -> Refusal | None:
    """A lasting refusal of the content; raised later, so that the content is hashed and known."""
    try:
        files.look_inside()
    except Refusal as refusal:
        if not refusal.is_lasting:
            raise
        return refusal
    return None


def _made(
    request: PrepareRequest, sessions: Sessions, path: str, reference: verifying.Reference
) -> PrepareReply:
    """With packed weights, or without if the failure may lie in them."""
    message = ""
    if request.recipe.prepack == "share":
        try:
            return _attempt(request, sessions, path, reference, is_packed=True)
        except Refusal as refusal:
            if refusal.reason in ("disk_full", "metadata_differs", "no_gain"):
                raise
            message = f"without packed weights: {refusal.reason}: {refusal}"
    reply = _attempt(request, sessions, path, reference, is_packed=False)
    return PrepareReply(message=clipped(message), probe=reply.probe)


def _attempt(
    request: PrepareRequest,
    sessions: Sessions,
    path: str,
    reference: verifying.Reference,
    *,
    is_packed: bool,
) -> PrepareReply:
    directory = request.directory
    sessions.save(path, directory, is_packed=is_packed)
    optimising.place(directory, source=path)
    placed = _placed(directory)
    with optimising.refusing_full_disks(directory):
        try:
            sessions.complete(directory)
            placed = _placed(directory)
            note = verifying.verify(
                reference, lambda: sessions.prepared(directory), weights_bytes=placed[1].size_bytes
            )
            sessions.check_casts(directory)
        except OSError:  # Of the disk, and true whatever it has left of the files.
            raise
        except Exception:
            _check_placed(directory, placed)
            raise
    _check_placed(directory, placed)
    return PrepareReply(probe=clipped(note))


def _check_placed(directory: str, placed: list[Identity]) -> None:
    """Whatever was found: is it true of what was made, or was that deleted or replaced?"""
    if _placed(directory) != placed:
        raise CorruptFile(f"the files in {directory} have changed while they were verified")


def _placed(directory: str) -> list[Identity]:
    """What identifies the published pair. Raises OSError if one is gone."""
    paths = (os.path.join(directory, name) for name in (PREPARED_MODEL, PREPARED_WEIGHTS))
    return [Identity.from_stat(os.stat(path, follow_symlinks=False)) for path in paths]


def _check_room(directory: str, needed_bytes: int) -> None:
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < needed_bytes:
        raise optimising.disk_full(directory)


def _check_runtime(request: PrepareRequest) -> None:
    """Raises Refusal unless exactly the client's onnxruntime is imported here."""
    try:
        found = installation()
    # Border: an installation may be broken in any way.
    except Exception as error:
        raise Refusal(
            "not_importable",
            f"{sys.executable} cannot import {request.package or 'onnxruntime'}: "
            f"{type(error).__name__}: {error}",
            is_lasting=False,
        ) from error
    recipe = request.recipe
    wanted = request.package or found.package
    is_there = os.path.realpath(found.package) == os.path.realpath(wanted)
    if not is_there or (found.runtime, found.build) != (recipe.runtime, recipe.build):
        raise Refusal(
            "other_onnxruntime",
            f"{found.package} has {found.runtime} ({found.build}), and the client has "
            f"{recipe.runtime} ({recipe.build}) from {request.package or 'its own files'}",
            is_lasting=False,
        )
