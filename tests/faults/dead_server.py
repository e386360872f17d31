"""A file system whose server stops to answer, as one whose network is gone (FUSE)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import threading
import time

__all__ = ["DeadServer"]

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT_CODE = 1, 2, 3, 14, 15, 18, 25, 26
_STATFS = 17
_SILENT = (_FORGET, 36, 42)
"""With INTERRUPT and BATCH_FORGET; the kernel expects no answer to the others."""
_ENOSYS = 38
_ASYNC_READ = 1
"""As all servers have it; without, the kernel waits for reads even if their process was killed."""
_MNT_FORCE, _MNT_DETACH = 1, 2
_SIZE_BYTES = 4 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class DeadServer:
    """Mounted at ``path``; every name is a file of zeros there.

    Reads are answered once ``is_alive`` is set, and nothing at all after :meth:`die`.
    """

    def __init__(self, path: str, *, valid_s: int = 3600) -> None:
        """``valid_s``: the kernel asks for attributes again then.

        Raises OSError where nothing may be mounted.
        """
        self.path = path
        self.is_alive = False
        self._is_dead = False
        self._valid_s = valid_s
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if _libc.mount(b"dead", path.encode(), b"fuse", 0, options.encode()) != 0:
            error = ctypes.get_errno()
            os.close(self._device)
            raise OSError(error, os.strerror(error), path)
        self.loads = 0
        """How many wait for an answer: one to a read, or to what file system this is."""
        self._made_s = int(time.time()) - 60
        self._nodes: dict[bytes, int] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def die(self) -> None:
        """Answer nothing any more."""
        self._is_dead = True

    def close(self) -> None:
        """Unmount it; whoever waits for an answer gets an error."""
        _libc.umount2(self.path.encode(), _MNT_FORCE)
        _libc.umount2(self.path.encode(), _MNT_DETACH)
        # The last one who knows the device has to go: the connection ends then.
        with contextlib.suppress(OSError):
            os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError:  # unmounted
                return
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if self._is_dead or code in _SILENT or (code == _READ and not self.is_alive):
                self.loads += code in (_READ, _STATFS)
                continue
            answer = self._answer(code, node, request[_IN.size :])
            error = 0 if answer is not None else -_ENOSYS
            data = answer or b""
            with contextlib.suppress(OSError):
                os.write(self._device, _OUT.pack(_OUT.size + len(data), error, unique) + data)

    def _answer(self, code: int, node: int, body: bytes) -> bytes | None:
        if code == _INIT_CODE:
            _, _, read_ahead, _ = struct.unpack_from("<IIII", body)
            return _INIT.pack(7, 31, read_ahead, _ASYNC_READ, 12, 9, 1 << 17, 1, 0, 0, 0)
        if code == _GETATTR:
            return struct.pack("<QII", self._valid_s, 0, 0) + self._attributes(node)
        if code == _LOOKUP:
            node = self._nodes.setdefault(body.rstrip(b"\0"), len(self._nodes) + 2)
            return _ENTRY.pack(node, 0, self._valid_s, self._valid_s, 0, 0) + self._attributes(node)
        if code == _OPEN:
            return struct.pack("<QII", 1, 0, 0)
        if code == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(max(0, min(size, _SIZE_BYTES - offset)))
        return b"" if code in (_RELEASE, _FLUSH) else None

    def _attributes(self, node: int) -> bytes:
        mode = (stat.S_IFDIR | 0o755) if node == 1 else (stat.S_IFREG | 0o644)
        made_s, size = self._made_s, 0 if node == 1 else _SIZE_BYTES
        times = (made_s, made_s, made_s, 1, 1, 1)
        return _ATTRIBUTES.pack(
            node, size, size // 512, *times, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0
        )
