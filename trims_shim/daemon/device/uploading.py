"""The daemon's side of an uploader: starts the process, gives it jobs, survives its death.

Owns the process, its socket and the table of jobs under way; knows nothing of images. A process is
started on first need, or ahead of it. One that has been idle after work is replaced at once, a dead
one on the next need. A death fails the jobs, each with a clear error, and loses memory that was
kept (``ipc``). If the driver fails one process after the other, none is started for a while, and
jobs fail at once: a load would wait for each to start. Deaths do not count: anybody's file may
cause them.

Jobs are methods that block, for worker threads. Anybody's file may kill the process while it is
parsed, so only one job at a time parses. It is to blame if the process dies then, and the others
may be repeated (:attr:`Job.is_innocent`). One whose file does not answer holds them up only
briefly: then they are parsed beside it, and it stays to blame.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from trims_shim._version import __version__
from trims_shim.children import installed_constant, launch, search_path
from trims_shim.client.session import error_from
from trims_shim.errors import DriverFailure, TrimsError, WireError
from trims_shim.memory.device import DeviceAllocation
from trims_shim.specs import DeviceId
from trims_shim.wire import codec, duties, handover, messages

__all__ = ["Job", "Uploader"]

_logger = logging.getLogger("trims_shim.daemon")

STALL_TIMEOUT_S = 60.0
"""Longest silence of a job. A context on a machine of many GPUs takes up to some ten seconds."""
_PARSING_PATIENCE_S = 2.0
"""Far longer than parsing takes, unless the file's server does not answer."""
_SEND_TIMEOUT_S = 10
_END_PATIENCE_S = 5.0
_START_PATIENCE_S = 5.0
"""Far longer than the system takes to start a program, unless it does not get at its file."""
_FIRST_PAUSE_S = 1.0
_PAUSE_LIMIT_S = 60.0
"""A driver that has come back is used after a minute at the latest."""
_BOOT = (
    "import json, sys; "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from trims_shim.daemon.device.uploader import main; "
    "main(sys.argv[2:])"
)

_ANSWERS = duties.PlanUploadReply | duties.UploadProgress | duties.UploadReply | duties.UploadFailed

_Reply = TypeVar("_Reply")


class Uploader:
    """The uploader of one device, whichever process that is at the moment."""

    def __init__(
        self,
        device: DeviceId,
        *,
        backend: str,
        idle_s: float,
        peers: Sequence[DeviceId] = (),
        on_death: Callable[[], None] = lambda: None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """``peers``: further devices that the process sees, to copy from them.

        ``on_death`` is called when a process that keeps memory has died, from another thread.
        """
        self.device = device
        self._visible = (device, *peers)
        self.backend = backend
        self._idle_s = idle_s
        self._on_death = on_death
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._parsing = threading.Lock()
        self._process: _Process | None = None
        self._starting: Future[_Process] | None = None
        self._patient_until_s = 0.0
        self._next_job = 1
        self._is_closed = False
        self._next_pause_s = 0.0  # After a single failure there is none.
        self._paused_until_s = -math.inf
        self._failure = ""

    def start(self) -> None:
        """Start a process ahead of the first job, if that is possible."""
        with self._lock, contextlib.suppress(DriverFailure):  # that job is told why
            self._usable()

    @contextlib.contextmanager
    def job(self) -> Iterator[Job]:
        """A job in the running process, or in a new one. Raises DriverFailure."""
        with self._lock:
            process = self._usable()
            number, self._next_job = self._next_job, self._next_job + 1
            process.inboxes[number] = queue.SimpleQueue()
            process.has_worked = True
        job = Job(number, process, parsing=self._parsing, stall_timeout_s=self._stall_timeout_s)
        try:
            yield job
            self._next_pause_s = 0.0
        finally:
            job.end()
            with self._lock:
                process.inboxes.pop(number, None)
                process.idle_since_s = time.monotonic()
                if process.is_condemned and not process.inboxes:
                    process.end()
                    self._pause(process.failure)

    def free(self, job: int) -> None:
        """Free the memory that a job made; its process may be gone, and the memory with it.

        Never waits for the lock: whoever has it may wait for a process to start.
        """
        process = self._process
        if process is not None and job in process.memory:
            process.idle_since_s = time.monotonic()  # First: without memory it may be replaced.
            process.memory.discard(job)
            process.tell(duties.JobRelease(job))

    def keeps(self, job: int) -> bool:
        """Whether the memory that a job made exists."""
        process = self._process
        return process is not None and not process.is_dead and job in process.memory

    @property
    def pid(self) -> int | None:
        """The running process's pid, or None."""
        process = self._process
        return None if process is None or process.is_dead else process.pid

    def tend(self) -> None:
        """Tell the process what it had no room for. Call it now and then; it never waits."""
        process = self._process
        if process is not None:
            process.tell_rest()

    def is_idle(self) -> bool:
        """Whether a process has worked and has been idle for a while. Never waits."""
        process = self._process
        if process is None or process.inboxes or process.memory or not process.has_worked:
            return False
        return time.monotonic() - process.idle_since_s >= self._idle_s

    def retire_if_idle(self) -> None:
        """Replace a process for which :meth:`is_idle` holds by a new one.

        The old one's context goes, and the next job need not wait for a process to start.
        Call it now and then; it never waits for the lock, but for the new process to start.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            process = self._process
            if process is not None and self.is_idle():
                self._process = None
                process.end()
                with contextlib.suppress(DriverFailure):  # the next job tries again
                    self._usable()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process, jobs and memory included; returns when it is gone.

        One that hangs as it is started is not waited for: it ends with this process, or then.
        """
        self._is_closed = True
        with self._lock:
            process, self._process = self._process, None
            starting, self._starting = self._starting, None
        if starting is not None:
            starting.add_done_callback(_end_started)
        if process is not None:
            process.end()
            process.join()

    def _usable(self) -> _Process:
        if self._is_closed:
            raise DriverFailure("the daemon is stopping; load again")
        process = self._process
        if process is None or process.is_dead or process.is_condemned:
            if time.monotonic() < self._paused_until_s:
                raise DriverFailure(
                    f"the driver failed several uploaders of {self.device} in a row, so none is "
                    f"started for up to {_PAUSE_LIMIT_S:g} s: {self._failure}"
                )
            process = self._process = self._started()
        return process

    def _started(self) -> _Process:
        """A new process; a start that hangs, with the disk of the interpreter, holds up no job."""
        try:
            if self._starting is None:
                self._starting = _in_thread(self._new)
                self._patient_until_s = time.monotonic() + _START_PATIENCE_S
            starting = self._starting
            wait([starting], timeout=max(0.0, self._patient_until_s - time.monotonic()))
            if not starting.done():
                raise DriverFailure(
                    f"the uploader of {self.device} did not start within {_START_PATIENCE_S:g} s; "
                    "it is used once it has"
                )
            self._starting = None
            return starting.result()
        except (OSError, RuntimeError) as error:
            raise DriverFailure(
                f"the uploader of {self.device} cannot be started: {error}; see `trims info`"
            ) from error

    def _new(self) -> _Process:
        if not _is_its_version():
            # What it puts on the device, and how, may not be what our clients expect.
            raise DriverFailure(
                f"the uploader of {self.device} cannot be started: another trims_shim was "
                "installed under the daemon; run `trims stop`, or restart its service"
            )
        return _Process(self.device, self._visible, self.backend, self._on_death)

    def _pause(self, failure: str) -> None:
        """Start no process for a while, as the driver has failed one; longer from time to time."""
        self._failure = failure
        self._paused_until_s = time.monotonic() + self._next_pause_s
        self._next_pause_s = min(_PAUSE_LIMIT_S, max(_FIRST_PAUSE_S, 2 * self._next_pause_s))


class Job:
    """One upload, download or copy. Used by one thread; blocks until the process answers."""

    def __init__(
        self, number: int, process: _Process, *, parsing: threading.Lock, stall_timeout_s: float
    ) -> None:
        self.number = number
        self.is_innocent = False
        """The process died, but not of this job, which may be repeated."""
        self._process = process
        self._inbox = process.inboxes[number]
        self._parsing = parsing
        self._stall_timeout_s = stall_timeout_s
        self._is_planned = False
        self._is_blamed = False

    def plan(
        self,
        source: int,
        *,
        size_bytes: int,
        limit_bytes: int,
        is_hashed: bool,
        name: str,
        is_numbers: bool = False,
    ) -> duties.PlanUploadReply:
        """Have a source parsed. Raises FormatError, FileChanged, DriverFailure..."""
        request = duties.PlanUploadRequest(
            self.number, size_bytes, limit_bytes, is_hashed, handover.clipped(name), is_numbers
        )
        is_alone = self._parsing.acquire(timeout=_PARSING_PATIENCE_S)
        try:
            self._send(request, source)
            self._is_planned, self._is_blamed = True, is_alone
            planned = self._wait(duties.PlanUploadReply, _ignore)
            self._is_blamed = False
        finally:
            if is_alone:
                self._parsing.release()
        if not 0 < planned.device_bytes <= limit_bytes:
            raise WireError(f"the uploader plans {planned.device_bytes} bytes of {limit_bytes}")
        return planned

    def upload(
        self,
        memory: DeviceAllocation | None,
        outline: int,
        on_progress: Callable[[int], None],
    ) -> duties.UploadReply:
        """Go on with a planned job; ``memory`` None: the process makes it, until it is freed."""
        if memory is None and not self._process.will_keep(self.number):
            self.is_innocent = True
            raise DriverFailure(f"the uploader of {self._process.device} ends; load again")
        allocations = () if memory is None else memory.allocations
        try:
            self._send(duties.UploadRequest(self.number, allocations))
            self._is_planned = False
            self._send_parts(outline, *(() if memory is None else memory.descriptors))
            return self._wait(duties.UploadReply, on_progress)
        except TrimsError:
            self._process.memory.discard(self.number)
            raise

    def download(
        self,
        outline: int,
        target: int,
        *,
        size_bytes: int,
        allocations: tuple[int, ...],
        descriptors: tuple[int, ...],
        memory: int,
        is_numbers: bool = False,
    ) -> duties.UploadReply:
        """Write an image back to ``target``; ``memory`` is the job that made its memory, or 0."""
        request = duties.DownloadRequest(self.number, size_bytes, allocations, memory, is_numbers)
        self._send(request)
        self._send_parts(outline, *descriptors, target)
        return self._wait(duties.UploadReply, _ignore)

    def copy(
        self,
        outline: int,
        source: tuple[int, ...],
        memory: DeviceAllocation,
        *,
        size_bytes: int,
        is_hashed: bool,
        on_progress: Callable[[int], None],
        is_numbers: bool = False,
    ) -> duties.UploadReply:
        """Copy an image from the allocations of another device to equal ones of this one."""
        request = duties.CopyImageRequest(
            self.number, size_bytes, memory.allocations, is_hashed, is_numbers
        )
        self._send(request)
        self._send_parts(outline, *source, *memory.descriptors)
        return self._wait(duties.UploadReply, on_progress)

    def end(self) -> None:
        """Release the job if it was planned and not uploaded."""
        if self._is_planned:
            self._process.tell(duties.JobRelease(self.number))

    def _send_parts(self, *descriptors: int) -> None:
        for part, descriptor in enumerate(descriptors):
            self._send(duties.UploadPart(self.number, part), descriptor)

    def _send(self, message: Any, descriptor: int | None = None) -> None:
        try:
            self._process.send(message, descriptor)
        except OSError as error:
            # Its death arrives through the inbox; a process that lives and does not read must go.
            self._process.kill()
            raise self._death(f"does not take jobs ({error})") from error

    def _wait(self, kind: type[_Reply], on_progress: Callable[[int], None]) -> _Reply:
        while True:
            try:
                message = self._inbox.get(timeout=self._stall_timeout_s)
            except queue.Empty:
                self._is_blamed = True
                self._process.kill()
                raise self._death(f"said nothing for {self._stall_timeout_s:g} s") from None
            if message is None:
                raise self._death("died")
            if isinstance(message, duties.UploadProgress):
                on_progress(message.done_bytes)
            elif isinstance(message, duties.UploadFailed):
                self._is_planned = False
                raise self._failure(message)
            elif isinstance(message, kind):
                return message
            else:
                raise WireError(f"the uploader answered with {type(message).__name__}")

    def _death(self, what: str) -> DriverFailure:
        self._is_planned = False
        self.is_innocent = not self._is_blamed
        return DriverFailure(
            f"the uploader of {self._process.device} {what}; see the daemon's log, and load again"
        )

    def _failure(self, message: duties.UploadFailed) -> TrimsError:
        error = error_from(messages.ErrorReply(message.error, message.message))
        if isinstance(error, DriverFailure):
            self._process.condemn(self.number, str(error))
        return error


def _ignore(done_bytes: int) -> None:
    """Nobody watches this part of a job."""


class _Process:
    """One uploader process, with the thread that listens to it and reaps it."""

    def __init__(
        self,
        device: DeviceId,
        visible: Sequence[DeviceId],
        backend: str,
        on_death: Callable[[], None],
    ) -> None:
        """Start it. Raises OSError, RuntimeError (no thread, or in a subinterpreter)."""
        self.device = device
        self.inboxes: dict[int, queue.SimpleQueue[Any]] = {}
        self.memory: set[int] = set()
        self.idle_since_s = time.monotonic()
        self.has_worked = False
        self.is_dead = False
        self.is_condemned = False
        self.failure = ""
        self._is_ended = False
        self._on_death = on_death
        self._sending = threading.Lock()
        self._telling = threading.Lock()
        self._untold: collections.deque[bytes] = collections.deque()
        self._deciding = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            with theirs:
                self._child = _launch(theirs.fileno(), device, visible, backend)
            undo.callback(self._child.wait)
            undo.callback(self._child.kill)
            self.pid = self._child.pid  # The listener names it, and may have to at once.
            timeout = struct.pack("ll", _SEND_TIMEOUT_S, 0)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
            undo.pop_all()

    def will_keep(self, job: int) -> bool:
        """Let it keep memory that a job is about to make. False: it is to end with its jobs."""
        with self._deciding:
            if not self.is_condemned:
                self.memory.add(job)
            return not self.is_condemned

    def condemn(self, job: int, failure: str) -> None:
        """Let it take no other jobs: one has failed, and may have broken its context for good.

        Not if it keeps memory of other images, which has to stay there all the same.
        """
        with self._deciding:
            if self.memory <= {job}:
                self.is_condemned, self.failure = True, failure

    def send(self, message: Any, descriptor: int | None) -> None:
        """Send a packet; waits a little for a process that does not read. Raises OSError."""
        with self._sending:
            handover.send(self._connection, message, descriptor=descriptor)

    def tell(self, message: Any) -> None:
        """Send a message without an answer. Never waits: what finds no room is told later."""
        self._untold.append(codec.encode(message))
        self.tell_rest()

    def tell_rest(self) -> None:
        """Send what found no room before: many images may go faster than their memory is freed."""
        flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        with self._telling, contextlib.suppress(OSError):
            while self._untold:
                self._connection.send(self._untold[0], flags)
                self._untold.popleft()

    def end(self) -> None:
        """Close this side of the socket, upon which the process ends."""
        self._is_ended = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it now. It gets no more jobs, even before the listener has noticed."""
        self.is_dead = True
        with contextlib.suppress(OSError):
            self._child.kill()

    def join(self) -> None:
        """Wait until it is gone."""
        self._listener.join(2 * _END_PATIENCE_S)

    def _listen(self) -> None:
        while True:
            try:
                packet = handover.receive(self._connection)
            except ConnectionError:  # It is gone, and did not read all that it was sent.
                break
            except (WireError, OSError) as error:
                _logger.error("uploader %d of %s: %s", self.pid, self.device, error)
                break
            if packet is None:
                break
            if packet.descriptor is not None:
                os.close(packet.descriptor)
            if not isinstance(packet.message, _ANSWERS):
                kind = type(packet.message).__name__
                _logger.error("uploader %d of %s said %s", self.pid, self.device, kind)
                break
            inbox = self.inboxes.get(packet.message.job)
            if inbox is not None:
                inbox.put(packet.message)
        self._bury()

    def _bury(self) -> None:
        self.is_dead = True
        status = self._reap()
        if not self._is_ended:
            _logger.warning("uploader %d of %s died: %s", self.pid, self.device, status)
        for inbox in list(self.inboxes.values()):
            inbox.put(None)
        with self._sending:
            self._connection.close()
        if self.memory and not self._is_ended:
            self._on_death()

    def _reap(self) -> str:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            status = self._child.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._child.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"


def _in_thread(work: Callable[[], _Process]) -> Future[_Process]:
    """Do something that may never end. Raises RuntimeError (no thread)."""
    future: Future[_Process] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _end_started(starting: Future[_Process]) -> None:
    if starting.exception() is None:
        starting.result().end()


def _is_its_version() -> bool:
    """Whether a process would run this daemon's version, or nothing is known of that."""
    protocol = installed_constant("wire/messages.py", "PROTOCOL_VERSION", messages.PROTOCOL_VERSION)
    version = installed_constant("_version.py", "__version__", __version__)
    return (protocol, version) == (str(messages.PROTOCOL_VERSION), __version__)


def _launch(
    descriptor: int, device: DeviceId, visible: Sequence[DeviceId], backend: str
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    # Ids are valid whatever devices the daemon itself sees; an instance of MIG is visible alone.
    environment.update(TRIMS_ENABLED="0", CUDA_VISIBLE_DEVICES=",".join(visible))
    return launch(
        [
            sys.executable,
            "-I",
            *([] if "site" in sys.modules else ["-S"]),  # as this process
            "-c",
            _BOOT,
            json.dumps(search_path()),
            str(descriptor),
            device,
            backend,
        ],
        environment=environment,
        descriptors=(descriptor,),
    )
