"""The daemon's side of a preparer: starts the process, talks to it, checks what it says.

A preparer is a process for one model (:mod:`trims_shim.daemon.preparer.main`), in the client's
interpreter. Owns that process and the socket to it. Whatever it says is data of unknown origin: a
model's author may have taken it over. It is ended, with all that it started, as soon as it has
replied, said nonsense or run out of time. If it dies or stalls, the reply is made up here.

:meth:`Preparer.run` blocks: it is for a worker thread.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import logging
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from trims_shim.children import installed_constant, launch
from trims_shim.config import PACKAGE_DIRECTORY
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.errors import WireError
from trims_shim.printable import printable
from trims_shim.specs import PREPARED_MODEL, PREPARED_WEIGHTS
from trims_shim.wire import duties, frames, messages
from trims_shim.wire.duties import PrepareReply, SourceHashed
from trims_shim.wire.handover import clipped

__all__ = ["Order", "Preparer"]

_logger = logging.getLogger("trims_shim.daemon")

_END_PATIENCE_S = 5.0
_PATH_LIMIT = 4096
_FILE_SHARE = 0.45
"""Of the disk's free bytes: there are two large files at a time, and some should stay free."""
_ADVICE = "run `trims stop`, or restart its service"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Imports this very package, whatever the client's interpreter would find under its name, and
# everything else as the client finds it.
_BOOT = (
    "import importlib.machinery, importlib.util, json, sys; "
    "home, paths, *arguments = sys.argv[1:]; "
    "sys.path[:] = json.loads(paths); "
    "spec = importlib.machinery.PathFinder.find_spec('trims_shim', [home]); "
    "module = sys.modules['trims_shim'] = importlib.util.module_from_spec(spec); "
    "spec.loader.exec_module(module); "
    "from trims_shim.daemon.preparer.main import main; "
    "main(arguments)"
)


class Order(NamedTuple):
    """What a preparer is asked, and the Python that it runs in.

    The request's descriptor stays the caller's. Its directory is empty at first; if the reply has
    a reason, the caller removes what is in it.
    """

    request: duties.PrepareRequest
    interpreter: str
    search_path: tuple[str, ...]


class Preparer:
    """Runs preparers. The caller sees to it that one runs at a time, but for those given up."""

    def __init__(self, *, timeout_s: float, anyway_bytes: int = 0, gives_way: bool = True) -> None:
        """``timeout_s`` is for one model, from its start to its reply.

        ``anyway_bytes``: see :func:`trims_shim.daemon.preparer.verifying.share_from`.
        ``gives_way``: at low priority, with a tenth of the share of other processes.
        """
        self.timeout_s = timeout_s
        self._arguments = [str(anyway_bytes), "idle" if gives_way else "normal"]
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._closing = threading.Event()

    def run(self, order: Order, decide: Callable[[SourceHashed], bool]) -> PrepareReply | None:
        """Prepare one model; None if ``decide`` said that its content is not wanted.

        ``decide`` is called from this thread, at most once, and not at all for a model whose files
        cannot be read. Blocks. Raises nothing of its own; what ``decide`` raises passes.
        """
        deadline_s = time.monotonic() + self.timeout_s
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                child = self._start(order, theirs.fileno())
            if isinstance(child, PrepareReply):
                return child
            try:
                return self._converse(order, decide, ours, child, deadline_s)
            finally:
                self._end(child)

    def give_up(self) -> None:
        """End the process that runs, whether or not :meth:`run` returns."""
        with self._lock:
            for child in self._children:
                _kill(child)

    def close(self) -> None:
        """End the process that runs, and start no other. The interrupted run's reply says so."""
        self._closing.set()
        self.give_up()

    def _start(self, order: Order, descriptor: int) -> subprocess.Popen[bytes] | PrepareReply:
        if self._closing.is_set():
            return _failed("stopping", "the daemon is stopping")
        if not _has_package():
            # An environment of one run (`uv run --with`), or a cache that was cleaned.
            message = f"{PACKAGE_DIRECTORY} was removed under the daemon; {_ADVICE}"
            return _failed("preparer_not_started", message)
        if not _is_its_version():
            # What it makes would get the name of what ours makes, or it would not understand us.
            message = f"another trims_shim was installed under the daemon; {_ADVICE}"
            return _failed("preparer_not_started", message)
        try:
            # Not under the lock: it may hang, as the interpreter may be on a server that is gone.
            child = _launch(order, descriptor, self._arguments)
            _limit_files(child.pid, order.request.directory)
        except (OSError, RuntimeError, ValueError) as error:
            return _failed("preparer_not_started", f"{order.interpreter}: {error}")
        with self._lock:
            self._children.add(child)
            if self._closing.is_set():
                _kill(child)
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            _kill(child)
            self._children.discard(child)
        # A process that hangs in the kernel, on a dead disk, is left; the next start reaps it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_PATIENCE_S)

    def _converse(
        self,
        order: Order,
        decide: Callable[[SourceHashed], bool],
        connection: socket.socket,
        child: subprocess.Popen[bytes],
        deadline_s: float,
    ) -> PrepareReply | None:
        def ask(message: object) -> object:
            """Its answer to a message; if there is none, a reply that says why."""
            try:
                frames.send(connection, message, deadline_s=deadline_s)
                answer = frames.receive(connection, deadline_s=deadline_s)
                if isinstance(answer, SourceHashed):
                    _check_hashed(answer)
            except TimeoutError:
                return _failed("preparer_stalled", f"it took more than {self.timeout_s:g} s")
            except WireError as error:
                return _failed("preparer_confused", str(error))
            except OSError:  # It is gone.
                answer = None
            return self._death(order, child) if answer is None else answer

        message = ask(order.request)
        if isinstance(message, SourceHashed):
            if not decide(message):
                return None
            _limit_files(child.pid, order.request.directory)  # Room may have been made for it.
            message = ask(duties.ContentWanted())
        return _checked_reply(message, order.request.directory)

    def _death(self, order: Order, child: subprocess.Popen[bytes]) -> PrepareReply:
        try:
            status = child.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return _failed("preparer_confused", "it closed its socket and went on")
        if self._closing.is_set():
            return _failed("stopping", "the daemon is stopping")
        if status == -signal.SIGKILL:
            # Not the model's doing by itself; most likely there was not enough memory.
            return _failed("preparer_killed", "it was killed; perhaps memory was short")
        how = f"signal {-status}" if status < 0 else f"status {status}"
        reply = _failed("preparer_died", f"it died ({how}); see the daemon's log")
        _logger.warning(
            "the preparer of %s died: %s; it stays with onnxruntime's own way",
            printable(order.request.path) or "a model in memory",
            how,
        )
        return reply


def _has_package() -> bool:
    """Whether preparers can import what the daemon has imported; it may be in an archive."""
    home = os.path.dirname(PACKAGE_DIRECTORY)
    return importlib.machinery.PathFinder.find_spec("trims_shim", [home]) is not None


def _is_its_version() -> bool:
    """Whether a preparer would make what this daemon expects, or nothing is known of that."""
    protocol = installed_constant("wire/messages.py", "PROTOCOL_VERSION", messages.PROTOCOL_VERSION)
    layout = installed_constant("daemon/prepared/key.py", "LAYOUT_VERSION", LAYOUT_VERSION)
    return (protocol, layout) == (str(messages.PROTOCOL_VERSION), str(LAYOUT_VERSION))


def _failed(reason: str, message: str) -> PrepareReply:
    return PrepareReply(reason=reason, message=message, is_lasting=False)


def _check_hashed(message: SourceHashed) -> None:
    """Raises WireError for what no preparer of ours would say."""
    digests = [message.digest, *(each.digest for each in message.externals)]
    texts = [text for each in message.externals for text in (each.location, each.path)]
    if not all(map(_DIGEST.fullmatch, digests)):
        raise WireError("a digest of another form")
    if not all(0 < len(text) <= _PATH_LIMIT and "\0" not in text for text in texts):
        raise WireError("an external file without a usable name")
    if not all(os.path.isabs(each.path) for each in message.externals):
        raise WireError("an external file with a relative path")


def _checked_reply(message: object, directory: str) -> PrepareReply:
    if not isinstance(message, PrepareReply):
        return _failed("preparer_confused", f"it said {type(message).__name__}")
    if not message.reason:
        for name in (PREPARED_MODEL, PREPARED_WEIGHTS):
            if not _is_file(os.path.join(directory, name)):
                return _failed("preparer_confused", f"it did not write {name}")
    elif not _REASON.fullmatch(message.reason):
        return _failed("preparer_confused", "it gave a reason of another form")
    return PrepareReply(
        message.reason, clipped(message.message), message.is_lasting, clipped(message.probe)
    )


def _is_file(path: str) -> bool:
    """Whether it is a file of ours with one name, so that nobody else can have it open to write."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _launch(order: Order, descriptor: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    files = order.request.externals or ()
    # Paths relative to the working directory would let whoever owns that choose the code.
    paths = [path for path in order.search_path if os.path.isabs(path)]
    # onnxruntime chooses kernels by its variables. Here they are those of whoever started the
    # daemon, and prepared models are for everybody.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("ORT_")}
    # From 1.31 on onnxruntime reports its use; nobody uses it here.
    environment.update(TRIMS_ENABLED="0", ORT_DISABLE_TELEMETRY="1")
    return launch(
        [
            order.interpreter,
            "-I",
            "-S",
            "-c",
            _BOOT,
            os.path.dirname(PACKAGE_DIRECTORY),
            json.dumps(paths),
            str(descriptor),
            *arguments,
        ],
        environment=environment,
        descriptors=(descriptor, order.request.source, *(each.source for each in files)),
    )


def _limit_files(pid: int, directory: str) -> None:
    """Let a process write no file that fills the disk together with another one like it.

    A model of a few bytes may have constants of any size, which onnxruntime computes and saves.
    """
    with contextlib.suppress(OSError):
        status = os.statvfs(directory)
        free_bytes = status.f_bavail * status.f_frsize
        limit = int(_FILE_SHARE * free_bytes)
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        # The hard limit could not be raised again when there is more room.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it started. Not once it was waited for: the number may be another's."""
    if child.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
