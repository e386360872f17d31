"""Models in object stores and on web servers, as files of this machine: downloaded once.

The daemon never fetches; this is the client's work, with the client's credentials. Each fetch asks
the remote what it has (one request for a file), so a copy is as current as a download would be. If
there is no answer, the copy that was used last is given, with a warning.

A digest names the content, so with one nothing is asked if there is a copy that was verified with
it.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from trims_shim import config, diagnostics
from trims_shim.errors import ConfigError, RemoteError, RemoteUnreachable, WrongDigest
from trims_shim.late_imports import ensure_imported
from trims_shim.remote.copies import Copies, Partial
from trims_shim.remote.downloading import GivenUp, Remote, download
from trims_shim.remote.listing import Listing, is_web, key_of, name_of, shown, version_of

__all__ = ["Fetched", "Outcome", "fetch"]

_POLL_S = 0.1
_CHANGES_LIMIT = 3
_CHUNK_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_warned: set[str] = set()
"""Keys of URLs whose changes may not be seen, which has been said."""


class Outcome(enum.Enum):
    """Where a copy came from; the value is for people, and for counters."""

    THERE = "there already"
    DOWNLOADED = "downloaded"
    UNREACHABLE = "not asked for: the copy that was there"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A local file or folder."""

    path: str
    outcome: Outcome


def fetch(
    url: str,
    *,
    digest: str | None = None,
    progress: Callable[[int, int], None] = lambda done_bytes, size_bytes: None,
    waiting: Callable[[], None] = lambda: None,
) -> Fetched:
    """The local copy of what a URL names; see :func:`trims_shim.fetch`.

    ``progress`` gets the bytes that are there, and those of the whole; ``waiting`` is called now
    and then while another process downloads it.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{url!r} is no URL; give text, such as 'https://host/model.pt'")
    key = key_of(url)
    expected = "" if digest is None else _checked(digest)
    copies = Copies.of(config.current())
    copies.prepare()
    if expected and (path := _path_of(copies, f"{key}-{version_of(expected)}", url)):
        return _fetched(path, Outcome.THERE)
    try:
        fetching = _Fetching(url, key, expected, copies, _remote(url), progress, waiting)
        return fetching.run()
    except RemoteUnreachable as error:
        newest = "" if expected else copies.newest(key)
        path = newest and _path_of(copies, newest, url)
        if not path:
            raise
        text = "%s; the copy from before is used, which may not be current"
        diagnostics.log(logging.WARNING, text, error)
        return _fetched(path, Outcome.UNREACHABLE)


def _remote(url: str) -> Remote:
    if is_web(url):
        ensure_imported("trims_shim.remote.web")
        from trims_shim.remote.web import WebFiles

        return WebFiles(url)
    ensure_imported("trims_shim.remote.stores")
    from trims_shim.remote.stores import StoreFiles

    return StoreFiles(url)


def _path_of(copies: Copies, name: str, url: str) -> str:
    """What is in a copy; empty if there is nothing."""
    directory = copies.use(name)
    path = os.path.join(directory, name_of(url))
    return path if directory and os.path.lexists(path) else ""


def _fetched(path: str, outcome: Outcome) -> Fetched:
    diagnostics.count("fetched", outcome.name.lower())
    return Fetched(path, outcome)


@dataclass(frozen=True, slots=True)
class _Fetching:
    """One call of :func:`fetch`."""

    url: str
    key: str
    digest: str
    copies: Copies
    remote: Remote
    progress: Callable[[int, int], None]
    waiting: Callable[[], None]

    def run(self) -> Fetched:
        listing = self.remote.list()
        if self.digest and listing.is_folder:
            raise ConfigError(f"{shown(self.url)} is a folder, and a digest is of one file")
        changes, has_waited = 0, False
        while changes < _CHANGES_LIMIT:
            name = f"{self.key}-{version_of(self.digest) if self.digest else listing.version}"
            if path := self._whole_path(name, listing):
                return _fetched(path, Outcome.THERE)
            self.copies.prepare()  # It may have been deleted while others were waited for.
            # What is there of a download is of one version, whichever digest it should have.
            partial = self.copies.claim(f"{self.key}-{listing.version}")
            if partial is None:
                self._wait(is_first=not has_waited)
                has_waited = True
                continue
            try:
                if self._whole_path(name, listing):
                    partial.discard()
                    continue
                is_here = self._take_over(partial, listing)
                now = listing if is_here else self._download(partial, listing)
                # Another process may have checked the same digest, of another version, and use it.
                if now.version == listing.version and not self._whole_path(name, listing):
                    path = os.path.join(self.copies.publish(partial, name), name_of(self.url))
                    return _fetched(path, Outcome.THERE if is_here else Outcome.DOWNLOADED)
                partial.discard()  # It may have bytes of two versions.
                listing, changes = now, changes + 1
            except OSError as error:
                if isinstance(error, FileNotFoundError | NotADirectoryError):
                    partial.check()
                if error.errno not in _FULL:
                    raise
                partial.discard()
                raise OSError(error.errno, error.strerror, self.copies.directory) from error
            finally:
                partial.release()
        raise RemoteError(f"{shown(self.url)} changes while it is downloaded; try again")

    def _whole_path(self, name: str, listing: Listing) -> str:
        """The path of a copy that has all files; empty if there is none."""
        path = _path_of(self.copies, name, self.url)
        directory = os.path.dirname(path)
        is_whole = path and all(
            _is_whole(os.path.join(directory, file.name), file.size_bytes) for file in listing.files
        )
        return path if is_whole else ""

    def _take_over(self, partial: Partial, listing: Listing) -> bool:
        """Whether a copy that was fetched without the digest has it, and was copied.

        Not linked: what is left of it, should this process be killed, is written to.
        """
        here = self._whole_path(f"{self.key}-{listing.version}", listing) if self.digest else ""
        if not here or _digest_of(here) != self.digest:
            return False
        self.copies.make_room(os.path.getsize(here) - partial.size_bytes())
        shutil.copyfile(here, os.path.join(partial.path, name_of(self.url)))
        return True

    def _wait(self, *, is_first: bool) -> None:
        if is_first:
            text = "%s is being downloaded by another process, which is waited for"
            diagnostics.log(logging.INFO, text, shown(self.url))
        self.waiting()
        time.sleep(_POLL_S)

    def _download(self, partial: Partial, listing: Listing) -> Listing:
        """Complete a download; what the remote has then, which may be something else."""
        size_bytes = listing.size_bytes
        is_seen = all(file.token or file.size_bytes == 0 for file in listing.files)
        if not is_seen and self.key not in _warned:
            _warned.add(self.key)
            text = "%s: the remote says neither ETag nor date; a change of equal size is not seen"
            diagnostics.log(logging.WARNING, text, shown(self.url))
        diagnostics.log(logging.INFO, "%s: downloading %d bytes", shown(self.url), size_bytes)
        self.copies.make_room(size_bytes - partial.size_bytes())
        try:
            download(
                self.remote,
                listing,
                partial.path,
                progress=lambda done_bytes: self.progress(done_bytes, size_bytes),
                make_room=self.copies.make_room,
            )
        except GivenUp:
            raise
        except (RemoteUnreachable, FileNotFoundError):
            now = self.remote.list()
            if now.version == listing.version:
                raise
            return now  # For example, it is shorter, and the rest is not there any more.
        now = self.remote.list()
        if now.version == listing.version and self.digest:
            found = _digest_of(os.path.join(partial.path, name_of(self.url)))
            if found != self.digest:
                partial.discard()
                raise WrongDigest(
                    f"{shown(self.url)}: its digest is {found}, not {self.digest} as was asked for"
                )
        return now


def _is_whole(path: str, size_bytes: int | None) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return size_bytes is None or found.st_size == size_bytes


# --- digests --------------------------------------------------------------------------------------


def _checked(digest: str) -> str:
    """As :func:`_digest_of` writes it. Raises ConfigError for another form."""
    # No other kind: two files with the same md5 or sha1 can be made.
    if not isinstance(digest, str) or not re.fullmatch("sha256:[0-9a-f]{64}", digest.lower()):
        raise ConfigError(f"{digest!r} is no digest; write sha256: and 64 hexadecimal digits")
    return digest.lower()


def _digest_of(path: str) -> str:
    computed = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            computed.update(chunk)
    return f"sha256:{computed.hexdigest()}"
