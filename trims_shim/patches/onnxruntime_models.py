"""The model that a session is made of: an open file, or bytes.

Owns which models are worth a question to the daemon, their descriptors, and the digest of bytes. A
path is opened once, and only if that can have no effect of its own: not a pipe, not a device.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from trims_shim.client.threads import can_start
from trims_shim.config import Config
from trims_shim.daemon.prepared.externals import external_path, is_inside
from trims_shim.errors import MemoryFailure, NotServed
from trims_shim.late_imports import ensure_imported
from trims_shim.memory.limits import available_bytes
from trims_shim.memory.memfd import new_memfd, seal_memfd

__all__ = [
    "Model",
    "absolute",
    "check_size",
    "digest_of",
    "externals",
    "least_bytes",
    "model_of",
    "offered",
    "opened",
]

_ORT_MAGIC = b"ORTM"
"""At offset 4 of a model in onnxruntime's own format, a flat buffer."""
_LEAST_FACTOR = 4
"""A session of 2 MB takes 2 ms, as long as the first question of a process to the daemon."""
_THREADS_LIMIT = 8
_THREADS_WORTH_BYTES = 4 << 20
_LOOK_LIMIT_BYTES = 16 << 20
_OFFERED_FRACTION = 4
"""A copy for the daemon may take one part in this many of the free memory. The program does not
need it, and may be in a cgroup of its own."""
_EXTERNALS_LIMIT = 16
"""A daemon keeps no more than twice as many descriptors of a client."""
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])")
"""StringStringEntryProto {key: "location", value: of up to 127 bytes} in a serialised model."""


class Model(NamedTuple):
    """``path`` as the user gave it, or ``data``; the other one is None. ``name`` is for people."""

    path: str | None
    data: bytes | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.path or "a model of bytes"


def least_bytes(config: Config) -> int:
    """The least size worth a question: creating a smaller session takes hardly longer."""
    return _LEAST_FACTOR * int(config.min_bytes)


def model_of(session: Any) -> Model:
    """What an InferenceSession is about to load. Raises NotServed if that is not for the cache.

    Files are looked at by name and type only; :func:`opened` decides about their content and size,
    and :func:`check_size` about the size of bytes.
    """
    path, data = session._model_path, session._model_bytes
    if not path:
        return Model(None, _bytes_of(data))
    if type(path) is not str:
        raise NotServed("arguments", f"the path is {type(path).__name__}")
    if path.endswith(".ort"):
        raise NotServed("ort_format", f"{path} is in onnxruntime's own format")
    try:
        path.encode()
        status = os.stat(path)
    # No file, no UTF-8, a null byte: onnxruntime has its own error for each.
    except (OSError, ValueError) as error:
        raise NotServed("not_a_file", str(error)) from None
    if not stat.S_ISREG(status.st_mode):
        raise NotServed("not_regular", f"{path} is not a regular file")
    return Model(path, None)


def _bytes_of(data: Any) -> bytes:
    if not isinstance(data, bytes):
        raise NotServed("arguments", f"the model is {type(data).__name__}")
    if data[4:8] == _ORT_MAGIC:
        raise NotServed("ort_format", "the model is in onnxruntime's own format")
    return data


def absolute(path: str) -> str:
    """The path as another process can use it: of the same file, with the same files beside it.

    ``..`` is left to the kernel: after a symbolic link it is not the directory that is written
    before it. Raises NotServed for a path that no message can carry.
    """
    is_plain = os.pardir not in path.split(os.sep)
    try:
        found = os.path.abspath(path) if is_plain else os.path.join(os.getcwd(), path)
        found.encode()
    except (OSError, UnicodeEncodeError) as error:
        raise NotServed("arguments", f"{path} in the working directory: {error}") from None
    return found


@contextlib.contextmanager
def opened(path: str, *, min_bytes: int) -> Iterator[int]:
    """A descriptor of a model file that, with the files its weights are in, is large enough.

    Closed after the block. Raises NotServed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotServed("not_a_file", str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotServed("not_regular", f"{path} is not a regular file")
        size_bytes = status.st_size
        if size_bytes < min_bytes:
            size_bytes += _external_bytes(descriptor, size_bytes, os.path.dirname(path))
        if size_bytes < max(1, min_bytes):
            raise NotServed("small_file", f"{path} has {size_bytes} bytes")
        yield descriptor
    finally:
        os.close(descriptor)


def _external_bytes(descriptor: int, size_bytes: int, directory: str) -> int:
    """Size of the external data that a small file seems to name.

    A guess without parsing: it decides only whether the daemon is asked.
    """
    total = 0
    for name in _external_names(descriptor, size_bytes):
        with contextlib.suppress(OSError, ValueError):
            total += os.stat(os.path.join(os.fsencode(directory), name)).st_size
    return total


def _external_names(descriptor: int, size_bytes: int) -> set[bytes]:
    """Locations that a small file seems to name; none of a large one."""
    if size_bytes > _LOOK_LIMIT_BYTES:
        return set()
    content = os.pread(descriptor, size_bytes, 0)
    matches = _LOCATION.finditer(content)
    return {content[match.end() : match.end() + match[1][0]] for match in matches}


@contextlib.contextmanager
def externals(descriptor: int, path: str) -> Iterator[dict[str, int]]:
    """Descriptors of the external files that a model seems to name, by location.

    For a daemon that sees other files, which refuses the model if one is missing. Closed after the
    block.
    """
    found: dict[str, int] = {}
    try:
        names = _external_names(descriptor, os.fstat(descriptor).st_size)
        for name in sorted(names) if len(names) <= _EXTERNALS_LIMIT else ():
            with contextlib.suppress(OSError, ValueError):
                location = name.decode()
                # onnxruntime refuses others, also where somebody has had them prepared.
                if is_inside(path, location):
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                    found[location] = os.open(external_path(path, location), flags)
                    # The daemon takes the attributes that the kernel has: now they are fresh.
                    os.fstat(found[location])
        yield found
    finally:
        for each in found.values():
            os.close(each)


# --- bytes ----------------------------------------------------------------------------------------


def check_size(data: bytes, *, min_bytes: int) -> None:
    """Raises NotServed for a model that is too small."""
    if len(data) < max(1, min_bytes):
        raise NotServed("small_file", f"a model of {len(data)} bytes")


def digest_of(data: bytes) -> str:
    """The digest, computed by several threads for large models; they end with the call.

    blake3.AUTO would leave a pool of threads behind, and a forked child, which lacks them, hangs.
    """
    ensure_imported("blake3")
    from blake3 import blake3

    threads = min(_THREADS_LIMIT, os.cpu_count() or 1) if len(data) > _THREADS_WORTH_BYTES else 1
    if threads > 1 and not can_start(threads):
        threads = 1  # blake3 would panic, which is no Exception
    digest: str = blake3(data, max_threads=threads).hexdigest()
    return digest


@contextlib.contextmanager
def offered(data: bytes) -> Iterator[int]:
    """A sealed memfd with a copy of these bytes, closed after the block.

    Raises MemoryFailure, also where too little memory is free for a copy that only others need.
    """
    if len(data) > available_bytes() // _OFFERED_FRACTION:
        raise MemoryFailure(f"too little memory is free to copy a model of {len(data)} bytes")
    try:
        descriptor = new_memfd("trims-model")
    except OSError as error:
        raise MemoryFailure(f"no memfd for a model of {len(data)} bytes: {error}") from error
    try:
        try:
            _write(descriptor, data)
            seal_memfd(descriptor)
        except OSError as error:
            raise MemoryFailure(f"a model of {len(data)} bytes: {error}") from error
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
