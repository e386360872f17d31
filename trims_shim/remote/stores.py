"""Files of object stores, and of whatever else fsspec knows (extra ``remote``).

The store's own package (s3fs, gcsfs, adlfs) finds credentials as it always does, and fsspec reads
its settings (``FSSPEC_S3_ANON``, ``~/.config/fsspec``).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from typing import Any

from trims_shim import diagnostics
from trims_shim.errors import RemoteError, RemoteUnreachable, TrimsError
from trims_shim.late_imports import ensure_imported
from trims_shim.printable import printable
from trims_shim.remote.listing import Listing, RemoteFile, name_of, shown, without_queries

__all__ = ["StoreFiles"]

_CHUNK_BYTES = 1 << 20
_AHEAD_BYTES = 8 << 20
_TOKENS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum", "mtime"),
    *("LastModified", "last_modified", "updated", "modified", "modify", "created"),
)
"""What file systems call what differs when the content does. Not fsspec's ``ukey``: by default it
hashes all that is known of a file, for sftp also when it was last read. If there is none of these,
all that is known has to do here, too."""


class StoreFiles:
    """One URL of an fsspec file system."""

    def __init__(self, url: str) -> None:
        """Raises RemoteError without fsspec, or without the package of this kind of URL."""
        self._url = url
        self._connect()
        # The others may be used by one thread at a time only.
        self.is_concurrent = bool(self._files.async_impl)

    def list(self) -> Listing:
        """The file, or the files in the folder and below; one request for a file or a page.

        Raises OSError (not there, not allowed), RemoteError.
        """
        try:
            return self._list()
        except RemoteUnreachable:
            if not self._is_lost:
                raise
            return self._list()  # The connection may be of an earlier fetch, and have ended.

    def _connect(self) -> None:
        try:
            ensure_imported("fsspec.core")
            from fsspec.core import url_to_fs
        except ImportError as error:
            text = f'{shown(self._url)} needs fsspec: pip install "trims-shim[remote]"'
            raise RemoteError(text) from error
        with _translated(self._url):  # Some connect at once (ftp, sftp).
            try:
                self._files, self._path = url_to_fs(self._url)
            except (ImportError, ValueError) as error:
                # "Install s3fs to access S3", "Protocol not known: s4"
                raise RemoteError(f"{shown(self._url)} cannot be read: {error}") from error
        self._is_lost = False

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Errors are translated; after one, the next question goes by a new connection."""
        if self._is_lost:
            self._files.clear_instance_cache()  # Kept for the thread, with sftp's socket.
            self._connect()
        try:
            with _translated(self._url):
                yield
        except RemoteUnreachable:
            self._is_lost = not self.is_concurrent
            raise

    def _list(self) -> Listing:
        name = name_of(self._url)
        folder = self._path.rstrip("/") + "/"
        with self._asked():
            self._files.invalidate_cache()
            info = self._files.info(self._path)
            is_folder = info["type"] == "directory"
            found = {}
            if is_folder or self._url.endswith("/"):
                found = self._files.find(self._path, detail=True)
            if not is_folder:  # By its name; an object of a store may have that of a folder.
                found = {place: found[place] for place in found if place.startswith(folder)}
            if not is_folder and not found:
                return Listing((_file(name, self._path, info),))
            for place, info in found.items():
                # Listed are the link's own date (on a mounted disk), and its own size (sftp).
                if info.get("islink") or info.get("type") == "link":
                    found[place] = self._files.info(place)
        # Some stores have an empty object for a folder.
        files = [
            _file(f"{name}/{place.removeprefix(folder)}", place, info)
            for place, info in sorted(found.items())
            if not place.endswith("/")
        ]
        if not files:
            raise FileNotFoundError(errno.ENOENT, "it has no files", shown(self._url))
        return Listing(tuple(files))

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        """Pieces of the bytes from ``start`` on."""
        with self._asked():
            if self.is_concurrent and end is not None:
                yield self._files.cat_file(file.place, start=start, end=end)
                return
            with self._files.open(file.place, "rb") as opened:
                opened.seek(start)
                if end is None or not hasattr(opened, "prefetch"):
                    yield from iter(lambda: opened.read(_CHUNK_BYTES), b"")
                    return
                # sftp's: each 32 KiB would be waited for. All at once might not fit in memory.
                for first in range(start, end, _AHEAD_BYTES):
                    last = min(first + _AHEAD_BYTES, end)
                    opened.prefetch(last)
                    for at in range(first, last, _CHUNK_BYTES):  # paramiko is slow at more
                        yield opened.read(min(_CHUNK_BYTES, last - at))


def _file(name: str, place: str, info: Mapping[str, Any]) -> RemoteFile:
    if info.get("type") in ("directory", "other"):  # Such as a pipe, which seems to be empty.
        raise RemoteError(f"{shown(place)} is no file; a link to a folder is not followed")
    known = {key: info[key] for key in _TOKENS if info.get(key) is not None}
    known = known or {
        key: value
        for key, value in sorted(info.items())
        if key not in ("name", "size", "type") and isinstance(value, str | int | float)
    }
    token = "".join(f"{key}={value};" for key, value in known.items())
    size_bytes = info.get("size")
    return RemoteFile(name, place, size_bytes, token, is_seekable=size_bytes is not None)


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "it is not there", shown(url)) from error
    except PermissionError as error:
        # Also an archived object, or a wrong clock.
        reason = printable(without_queries(error.strerror or str(error)))
        text = f"access is denied: {reason}" if reason else "access is denied"
        raise PermissionError(errno.EACCES, text, shown(url)) from error
    except TrimsError:
        raise
    # Every store raises errors of its own, of no common class.
    except Exception as error:
        diagnostics.pass_on(error)
        reason = without_queries(str(error) or repr(error))
        raise RemoteUnreachable(f"{shown(url)}: not reachable: {reason}") from error
