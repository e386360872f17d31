"""The uploader: the process that has a CUDA context, so that the daemon needs none.

Owns the parsing of files that anybody may have written, and every mapping of device memory on the
daemon's behalf. It speaks the uploader's messages of :mod:`trims_shim.wire.duties` over the socket
it was started with, and works on one device. It keeps nothing between jobs, except the memory
itself where the backend is ``ipc``. It ends when the daemon's end of the socket closes, for
whatever reason. It sees its device only, or also the peers that it copies from. The daemon's side
is :class:`trims_shim.daemon.device.uploading.Uploader`.

A job is a thread. The main thread only receives, so that the daemon's packets never pile up. A
source that becomes shorter while it is parsed causes SIGBUS and the end of this process, so the
daemon lets one job at a time parse, and others beside it only if that takes long
(:mod:`trims_shim.daemon.device.uploading`). Once parsed, a source is only read with pread.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trims_shim.children import be_called
from trims_shim.daemon.logs import log_to
from trims_shim.errors import (
    DriverFailure,
    FileChanged,
    FormatError,
    NoSpace,
    ReadFailed,
    TrimsError,
    UnsupportedFormat,
    WireError,
)
from trims_shim.formats.device_layout import DeviceLayout, layout_of, layout_of_numbers
from trims_shim.memory import copying, peer_copy
from trims_shim.memory.device import DeviceAllocation, DeviceMemory, map_allocations
from trims_shim.memory.driver import OUT_OF_MEMORY, driver
from trims_shim.specs import DeviceId
from trims_shim.wire import duties, handover
from trims_shim.wire.handover import Packet

if TYPE_CHECKING:
    Inbox = queue.SimpleQueue[Packet | None]

__all__ = ["main", "plan"]

_logger = logging.getLogger("trims_shim.daemon")

_JOBS = duties.PlanUploadRequest | duties.DownloadRequest | duties.CopyImageRequest
"""Messages that begin a job."""
_OUTLINE_FLOOR_BYTES = 1 << 20
"""An outline is host memory that the device's budget pays for. It may be as large as the tensors,
or as this: half of the least device memory that an image takes."""


def main(arguments: Sequence[str]) -> None:
    """Serve the socket whose descriptor is the first argument; device and backend follow."""
    descriptor, device, backend = arguments
    be_called("trims-uploader")
    # A daemon in a terminal finishes its loads after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to(logging.StreamHandler())
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    status = 0
    # It takes a tenth of a second, and no memory of the device; a job that needs it waits for it.
    threading.Thread(target=_wake_driver, daemon=True).start()
    with copying.kept_buffers():
        try:
            _Jobs(connection, device, backend).run()
        # Border: nothing else would write it down, see below.
        except Exception:
            _logger.exception("uploader of %s", device)
            status = 1
        # Neither the interpreter's end nor the block's is run: jobs under way are in the driver or
        # in a read, and use the buffers.
        os._exit(status)


def _wake_driver() -> None:
    with contextlib.suppress(DriverFailure):  # the job that needs the driver says why
        driver()


def plan(source: int, request: duties.PlanUploadRequest) -> DeviceLayout:
    """Plan where the tensors of a source will be.

    Raises FormatError if it is not a model file, or takes more memory than it is worth; FileChanged
    when it has become shorter; ReadFailed.
    """
    _await_answer(source, request)
    if request.is_numbers:
        _refuse_model(source, request)
    layout = _layout(source, request.size_bytes, request.name, is_numbers=request.is_numbers)
    outline_bytes = sum(span.size_bytes for span in layout.outline())
    if layout.size_bytes > request.limit_bytes:
        raise UnsupportedFormat(
            f"{request.name}: its tensors are so small that they would take {layout.size_bytes} "
            f"bytes of the device, more than the {request.limit_bytes} of a file of its size"
        )
    if outline_bytes > max(layout.size_bytes, _OUTLINE_FLOOR_BYTES):
        raise UnsupportedFormat(f"{request.name}: most of it ({outline_bytes} bytes) is no tensor")
    return layout


def _refuse_model(source: int, request: duties.PlanUploadRequest) -> None:
    """Raise UnsupportedFormat if numbers are a model file: all who load it would get numbers."""
    try:
        _layout(source, request.size_bytes, request.name, is_numbers=False)
    except FormatError:
        return
    raise UnsupportedFormat(f"{request.name} is a model file; a device holds it by its tensors")


def _await_answer(source: int, request: duties.PlanUploadRequest) -> None:
    """Wait until a source's server answers, in this thread only. Raises ReadFailed.

    A page of its mapping is waited for with Python's lock held, and no other thread runs.
    """
    try:
        for offset in (0, request.size_bytes - 1):  # parsing begins at either end
            os.pread(source, 1, offset)
    except OSError as error:
        raise ReadFailed(f"{request.name}: {error}") from error


def _layout(descriptor: int, size_bytes: int, name: str, *, is_numbers: bool) -> DeviceLayout:
    if is_numbers:
        return layout_of_numbers(size_bytes)
    try:
        mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
    except ValueError as error:
        raise FileChanged(f"{name} became shorter before it was read; load it again") from error
    except OSError as error:
        raise ReadFailed(f"{name}: {error}") from error
    # It is unmapped with its last reference, because an error's traceback still refers to it.
    return layout_of(mapping)


class _Jobs:
    """The jobs of this process, each in a thread, and the device memory that they keep."""

    def __init__(self, connection: socket.socket, device: DeviceId, backend: str) -> None:
        """``connection`` is blocking and stays the caller's."""
        self._device = device
        self._backend = backend
        self._connection = connection
        self._inboxes: dict[int, Inbox] = {}
        self._delivering = threading.Lock()
        """Held so that no descriptor reaches a job that has ended."""
        self._memory: dict[int, DeviceAllocation] = {}
        self._holding = threading.Lock()
        self._readers: Counter[int] = Counter()
        """How many jobs read the memory of a job, which must not be freed meanwhile."""

    def run(self) -> None:
        """Serve until the other end closes."""
        while True:
            try:
                packet = handover.receive(self._connection)
            except ConnectionError:  # The daemon is gone, and did not read all answers.
                return
            except (WireError, OSError) as error:
                _logger.error("uploader of %s: %s", self._device, error)
                return
            if packet is None:
                return
            self._route(packet)

    def _route(self, packet: Packet) -> None:
        message = packet.message
        if isinstance(message, _JOBS):
            self._begin(packet)
        elif isinstance(message, duties.JobRelease):
            self._deliver(message.job, None)
            self._free(message.job)
        elif not self._deliver(message.job, packet) and packet.descriptor is not None:
            os.close(packet.descriptor)  # A part of a job that has failed.

    def _begin(self, packet: Packet) -> None:
        request = packet.message
        held = [] if packet.descriptor is None else [packet.descriptor]
        inbox: Inbox = queue.SimpleQueue()
        self._inboxes[request.job] = inbox
        try:
            threading.Thread(target=self._serve, args=(request, held, inbox), daemon=True).start()
        except RuntimeError as error:  # no more threads: other jobs go on
            failed = _failed(request.job, ReadFailed(f"uploader: {error}"))
            self._end(request.job, held, inbox, failed)

    def _hold(self, job: int) -> DeviceAllocation | None:
        """The memory of a job, if there is any; it then takes one more :meth:`_free`."""
        with self._holding:
            memory = self._memory.get(job)
            if memory is not None:
                self._readers[job] += 1
            return memory

    def _free(self, job: int) -> None:
        """Free the memory of a job, unless somebody reads it, who calls this afterwards."""
        with self._holding:
            if job not in self._memory:
                return
            self._readers[job] -= 1
            if self._readers[job] >= 0:
                return
            del self._readers[job]
            memory = self._memory.pop(job)
        try:
            memory.close()
        except DriverFailure as error:  # the memory of all others would end with this process
            _logger.error("memory of job %d cannot be freed: %s", job, error)

    def _deliver(self, job: int, packet: Packet | None) -> bool:
        with self._delivering:
            inbox = self._inboxes.get(job)
            if inbox is not None:
                inbox.put(packet)
            return inbox is not None

    def _serve(self, request: Any, held: list[int], inbox: Inbox) -> None:
        reply: Any
        try:
            if isinstance(request, duties.PlanUploadRequest):
                reply = self._upload(request, held, inbox)
            elif isinstance(request, duties.CopyImageRequest):
                reply = self._copy(request, held, inbox)
            else:
                reply = self._download(request, held, inbox)
        except TrimsError as error:
            reply = _failed(request.job, error)
        # Border: the daemon waits for an answer, whatever a file has done to the parser.
        except Exception as error:
            _logger.exception("job %d failed", request.job)
            reply = _failed(request.job, ReadFailed(f"{type(error).__name__}: {error}"))
        self._end(request.job, held, inbox, reply)

    def _end(self, job: int, held: list[int], inbox: Inbox, reply: Any) -> None:
        """Close what a job was given, and answer, unless there is no reply."""
        with self._delivering:
            del self._inboxes[job]
        handover.close_all([*held, *_unread(inbox)])
        if reply is not None:
            self._send(reply)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # The daemon is gone, and the main thread sees it too.
            handover.send(self._connection, message)

    # --- jobs -------------------------------------------------------------------------------------

    def _upload(
        self, request: duties.PlanUploadRequest, held: list[int], inbox: Inbox
    ) -> duties.UploadReply | None:
        """``held``: descriptors to close afterwards. Returns None if the daemon gave the job up."""
        (source,) = held
        layout = plan(source, request)
        self._send(duties.PlanUploadReply(request.job, layout.size_bytes, layout.fingerprint()))
        # The daemon makes the memory meanwhile: a first context takes longer than that.
        index = self._index()
        begin = inbox.get()
        if begin is None:
            return None
        allocations = begin.message.allocations
        outline, *parts = _collect(1 + len(allocations), held, inbox)
        with self._placed(request.job, layout, parts, allocations) as address:
            digest = copying.upload(
                source,
                layout,
                address,
                outline,
                device_index=index,
                is_hashed=request.is_hashed,
                on_progress=lambda done: self._report(request.job, done),
                name=request.name,
            )
            driver().synchronize(index)
            # What was read has to match the plan, because clients compute the layout again. Not
            # by fingerprints: whoever writes the file could make two layouts of one fingerprint.
            name, is_numbers = request.name, request.is_numbers
            if _layout(outline, layout.file_bytes, name, is_numbers=is_numbers) != layout:
                raise FileChanged(f"{request.name} changed while it was being read; load it again")
        made = self._memory.get(request.job)
        if made is None:
            return duties.UploadReply(request.job, digest)
        return duties.UploadReply(request.job, digest, made.allocations, made.handles)

    def _index(self) -> int:
        """The device's number, once it has a context. Raises NoSpace if that does not fit."""
        index = driver().index_of(self._device)
        try:
            with driver().context(index):
                return index
        except DriverFailure as error:
            if error.result == OUT_OF_MEMORY:
                raise NoSpace(f"{self._device}: no room for a context: {error}") from error
            raise

    @contextlib.contextmanager
    def _placed(
        self, job: int, layout: DeviceLayout, parts: Sequence[int], allocations: Sequence[int]
    ) -> Iterator[int]:
        """Yield the address of writable zeros; memory of ``ipc`` is freed if the block fails."""
        if self._backend == "vmm":
            with self._mapped(parts, allocations, is_writable=True) as address:
                self._clear(address, sum(allocations))
                yield address
            return
        memory = DeviceMemory(self._device, self._backend).create(layout.size_bytes)
        try:
            self._clear(memory.address, sum(memory.allocations))
            yield memory.address
        except BaseException:
            memory.close()
            raise
        self._memory[job] = memory

    def _clear(self, address: int, size_bytes: int) -> None:
        """Fill new memory with zeros: between its records an image would show what was there.

        That may be of a file that not all who get the image may read.
        """
        with driver().context(self._index()):
            stream = driver().new_stream()
            try:
                driver().clear(address, size_bytes, stream)
                driver().synchronize_stream(stream)
            finally:
                driver().destroy_stream(stream)

    def _download(
        self, request: duties.DownloadRequest, held: list[int], inbox: Inbox
    ) -> duties.UploadReply:
        count = len(request.allocations) if self._backend == "vmm" else 0
        outline, *parts, target = _collect(2 + count, held, inbox)
        with self._readable(request, parts) as address:
            digest = self._read_back(request, outline, address, target)
        return duties.UploadReply(request.job, digest)

    def _copy(
        self, request: duties.CopyImageRequest, held: list[int], inbox: Inbox
    ) -> duties.UploadReply:
        count = len(request.allocations)
        outline, *parts = _collect(1 + 2 * count, held, inbox)
        index = self._index()
        with (
            self._mapped(parts[:count], request.allocations, is_writable=False) as source,
            self._mapped(parts[count:], request.allocations, is_writable=True) as target,
        ):
            size = sum(request.allocations)
            peer_copy.copy(
                source,
                target,
                size,
                device_index=index,
                on_progress=lambda done: self._report(request.job, done),
            )
            digest = ""
            if request.is_hashed:
                with open(os.devnull, "wb") as nowhere:
                    digest = self._read_back(
                        request, outline, target, nowhere.fileno(), done_bytes=size
                    )
        return duties.UploadReply(request.job, digest)

    def _read_back(
        self,
        request: duties.DownloadRequest | duties.CopyImageRequest,
        outline: int,
        address: int,
        target: int,
        *,
        done_bytes: int = 0,
    ) -> str:
        """Write an image that is mapped here to a file; return the digest of what was written.

        ``done_bytes``: the job's progress so far.
        """
        what, is_numbers = "the image's outline", request.is_numbers
        return copying.download(
            outline,
            _layout(outline, request.size_bytes, what, is_numbers=is_numbers),
            address,
            target,
            device_index=driver().index_of(self._device),
            on_progress=lambda done: self._report(request.job, done_bytes + done),
        )

    @contextlib.contextmanager
    def _mapped(
        self, parts: Sequence[int], allocations: Sequence[int], *, is_writable: bool
    ) -> Iterator[int]:
        mapping = map_allocations(self._device, parts, allocations, is_writable=is_writable)
        try:
            yield mapping.address
        finally:
            mapping.unmap()

    @contextlib.contextmanager
    def _readable(self, request: duties.DownloadRequest, parts: Sequence[int]) -> Iterator[int]:
        if self._backend == "vmm":
            with self._mapped(parts, request.allocations, is_writable=False) as address:
                yield address
            return
        memory = self._hold(request.memory)
        if memory is None:
            raise DriverFailure(f"job {request.memory} has no memory here; load the model again")
        try:
            yield memory.address
        finally:
            self._free(request.memory)

    def _report(self, job: int, done_bytes: int) -> None:
        self._send(duties.UploadProgress(job, done_bytes))


def _collect(count: int, held: list[int], inbox: Inbox) -> list[int]:
    """The descriptors of the parts 0 to ``count - 1`` of a job."""
    found = []
    for number in range(count):
        packet = inbox.get()
        if packet is None or packet.descriptor is None or packet.message.part != number:
            raise WireError(f"part {number} of {count} did not come")
        found.append(packet.descriptor)
        held.append(packet.descriptor)
    return found


def _unread(inbox: Inbox) -> list[int]:
    """The descriptors that a job has not taken out of its inbox."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            packet = inbox.get_nowait()
            if packet is not None and packet.descriptor is not None:
                found.append(packet.descriptor)
    return found


def _failed(job: int, error: TrimsError) -> duties.UploadFailed:
    return duties.UploadFailed(job, type(error).__name__, handover.clipped(str(error)))
