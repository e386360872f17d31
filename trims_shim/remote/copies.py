"""The directory of copies: found, made, held, counted and deleted.

Owns the names below ``<cache_dir>/remote``::

    <key>-<version>/<name>             a copy: a file, or a folder of files; 0400 below 0700
    <key>-<version>.partial/<name>     one that is being downloaded, or will be resumed
    .removed-<...>                     on the way out

``key`` stands for a URL, ``version`` for what the remote said of it, or for a digest. A copy
appears by one rename of a complete directory, and goes by a rename, then unlink. So who has a file
open keeps it, whatever happens to its name.

All processes of a user share the directory, without a daemon. The kernel knows who uses what, by
flocks on the directories of copies. Shared: the process that asked for the copy lives (or a child
that it forked), and has not asked for two newer ones, nor for very many others, so it is not
deleted. Exclusive: it is being downloaded, or deleted. A lock ends with its holder, however that
ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from trims_shim.client.descriptors import OwnDescriptor
from trims_shim.config import Config, ShareOrSize
from trims_shim.daemon.prepared.directory import (
    examine,
    examined,
    problem_of,
    space_of,
    sync,
)
from trims_shim.directories import directory_of, make
from trims_shim.errors import RemoteError
from trims_shim.printable import size

__all__ = ["Copies", "Copy", "Partial"]

_PARTIAL = ".partial"
_REMOVED = ".removed-"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_VERSIONS_HELD = 2
"""Of one URL: a server that runs for months and takes each new model would keep all on disk. The
one before the newest may still be in use, until what is loaded from the newest replaces it."""
_PROGRAMS_SHARE = 4
"""Three of four descriptors are left to the program, which may take ever new URLs for as long."""
_held: dict[str, OwnDescriptor] = {}
"""By path, the descriptors that keep the shared locks of this process."""
_asked: dict[str, int] = {}
"""By path, the number of the last call that asked for it: ascending."""
_numbers = itertools.count()
_filling: set[OwnDescriptor] = set()
"""Descriptors with exclusive locks. A forked child closes them: it would hold the locks, too."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy on disk, or part of one; ``used_ns`` is 0 for what is to go first."""

    name: str
    size_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Partial:
    """A directory to download into; nobody else does as long as this process lives."""

    path: str
    descriptor: OwnDescriptor

    def release(self) -> None:
        """Leave it to whoever goes on; nothing if it is a copy now."""
        if self.descriptor in _filling:
            _unlock(self.descriptor)
            _filling.discard(self.descriptor)

    def size_bytes(self) -> int:
        """How much has been downloaded."""
        return sum(_sizes(self.path))

    def check(self) -> None:
        """Raises RemoteError if others have deleted it; its name may be another's since."""
        if not _is_at(self.descriptor, self.path):
            raise RemoteError(f"{self.path} was deleted by others meanwhile; fetch it again")

    def discard(self) -> None:
        """Delete it."""
        if _is_at(self.descriptor, self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        self.release()


class Copies:
    """See the module docstring. Methods may be called from any thread or process."""

    def __init__(self, directory: str, budget: ShareOrSize) -> None:
        """Touches nothing."""
        self.directory = directory
        self._budget = budget

    @classmethod
    def of(cls, config: Config) -> Copies:
        """Those of this user, by the settings."""
        directory = directory_of(config.cache_dir, cache_home=config.cache_home, name="remote")
        return cls(directory, config.remote_bytes)

    def check(self) -> None:
        """Raises RemoteError if others may change the directory, or it cannot be had."""
        if problem := examine(self.directory):
            raise RemoteError(f"no remote model can be kept here: {problem}")

    def check_eviction(self) -> None:
        """Raises RemoteError if others may change the directory, or nothing in it can be deleted.

        Below a link of somebody else, anything might be.
        """
        if os.path.lexists(self.directory) and (problem := examined(self.directory)):
            raise RemoteError(f"no copy of a remote model can be deleted: {problem}")

    def prepare(self) -> None:
        """Make the directory. Raises RemoteError as :meth:`check`, which comes first, OSError."""
        self.check()
        if not os.path.lexists(self.directory):
            make(self.directory)
            self.check()

    # --- in use -----------------------------------------------------------------------------------

    def use(self, name: str) -> str:
        """The directory of a copy, which stays as the module says; empty if there is none."""
        path = os.path.join(self.directory, name)
        held = _held.get(path)
        if held is None or not _is_at(held, path):
            held = _opened(path)
            if held is None:
                return ""
            try:
                # Who holds it exclusively is about to delete it, or has just made it.
                fcntl.flock(held.number, fcntl.LOCK_SH)
            except BaseException:  # also an interrupt: it may take long
                held.close()
                raise
            if not _is_at(held, path):
                held.close()
                return ""
            _hold(path, held)
        else:
            _asked[path] = next(_numbers)
        with contextlib.suppress(FileNotFoundError):
            if not problem_of(path, os.lstat(path), may_be_roots=False):
                os.utime(path, follow_symlinks=False)
                return path
        return ""

    def newest(self, key: str) -> str:
        """The name of the copy of a URL that was used last; empty if there is none."""
        own = [each for each in self.copies(key) if not each.name.endswith(_PARTIAL)]
        return max(own, key=lambda each: each.used_ns).name if own else ""

    # --- in ---------------------------------------------------------------------------------------

    def claim(self, name: str) -> Partial | None:
        """The directory to download a copy into, perhaps with what others have left there.

        None as long as another thread or process downloads this one.
        """
        path = os.path.join(self.directory, name + _PARTIAL)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        descriptor = _opened(path)
        if descriptor is None:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(path)  # A file, or a link, has its name; else it has just gone.
            return None
        _filling.add(descriptor)
        partial = Partial(path, descriptor)
        is_claimed = False
        try:
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                # Who left it may have ended just before it got its name.
                _set_modes(path, 0o600)
                is_claimed = True
        except BlockingIOError:
            pass
        finally:
            if not is_claimed:
                partial.release()
        return partial if is_claimed else None

    def publish(self, partial: Partial, name: str) -> str:
        """Give a complete download its name; its directory then. Raises OSError, RemoteError."""
        path = os.path.join(self.directory, name)
        partial.check()
        _set_modes(partial.path, 0o400)  # Not after: whenever this ends, a copy is read-only.
        _sync_all(partial.path)
        try:
            os.rename(partial.path, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            self._remove(path)  # What is there is damaged.
            os.rename(partial.path, path)
        sync(self.directory)
        os.utime(path, follow_symlinks=False)
        fcntl.flock(partial.descriptor.number, fcntl.LOCK_SH)
        # The kernel gives the exclusive lock up first: the copy can go in between.
        if not _is_at(partial.descriptor, path):
            raise RemoteError(f"{path} was evicted as soon as it was there; fetch it again")
        _filling.discard(partial.descriptor)
        _hold(path, partial.descriptor)
        return path

    # --- out --------------------------------------------------------------------------------------

    def make_room(self, needed_bytes: int) -> None:
        """Delete what was not used for longest until budget and disk have room for so many bytes.

        What is in use stays: the budget decides only what is kept. Raises OSError (ENOSPC) if the
        disk is full all the same.
        """
        copies = sorted(self.copies(), key=lambda each: each.used_ns)
        total_bytes = sum(each.size_bytes for each in copies)
        space = space_of(self.directory)
        budget_bytes = self.budget_bytes()
        if needed_bytes > space.spare_bytes + total_bytes:
            copies = []  # Perhaps the remote lies: for nothing, nothing is deleted.
        for each in copies:
            is_kept = total_bytes + needed_bytes <= budget_bytes
            if is_kept and needed_bytes <= space.spare_bytes:
                return
            if self.evict(each.name):
                total_bytes -= each.size_bytes
                space = space_of(self.directory)
        lacking_bytes = needed_bytes - space.spare_bytes
        if lacking_bytes > 0:
            raise OSError(
                errno.ENOSPC,
                f"{size(needed_bytes)} are needed, {size(lacking_bytes)} more than there are to "
                "spare; make room, or set TRIMS_CACHE_DIR to a directory on another disk",
                self.directory,
            )

    def budget_bytes(self) -> int:
        """How much is kept that nobody uses. Raises OSError."""
        return self._budget.of(space_of(self.directory).total_bytes)

    def evict(self, name: str) -> bool:
        """Delete a copy, or part of one; whether it could be, which no process may use."""
        path = os.path.join(self.directory, name)
        descriptor = _opened(path)
        if descriptor is None:
            return False
        try:
            fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(descriptor, path):
                return False
            self._remove(path)
        except BlockingIOError:
            return False
        finally:
            _unlock(descriptor)
        return True

    def copies(self, key: str = "") -> list[Copy]:
        """What is there, or what is there of one URL."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                if not name.startswith(f"{key}-" if key else ""):
                    continue
                path = os.path.join(self.directory, name)
                with contextlib.suppress(FileNotFoundError):
                    used_ns = 0 if name.startswith(_REMOVED) else os.lstat(path).st_mtime_ns
                    found.append(Copy(name, sum(_sizes(path)), used_ns))
        return found

    def _remove(self, path: str) -> None:
        with contextlib.suppress(IsADirectoryError):
            os.unlink(path)  # A file, or a link, has its name.
            return
        # Half a copy must not have its name, whenever this process ends.
        removed = os.path.join(self.directory, f"{_REMOVED}{secrets.token_hex(8)}")
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


# --- locks ----------------------------------------------------------------------------------------


def _opened(path: str) -> OwnDescriptor | None:
    try:
        number = os.open(path, _OPEN_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    descriptor = OwnDescriptor(number)
    if not descriptor.is_open():  # A lock on it would never be given up.
        os.close(number)
        raise OSError(errno.EIO, "its file system does not say which directory it is", path)
    return descriptor


def _unlock(descriptor: OwnDescriptor) -> None:
    """Give a lock up, and the descriptor; a child that was just forked may have both."""
    with contextlib.suppress(OSError):
        if descriptor.is_open():
            fcntl.flock(descriptor.number, fcntl.LOCK_UN)
    descriptor.close()


def _is_at(descriptor: OwnDescriptor, path: str) -> bool:
    """Whether a directory still has this name, and no other thread has closed the descriptor."""
    with contextlib.suppress(OSError):
        is_same = os.path.samestat(os.fstat(descriptor.number), os.lstat(path))
        return is_same and descriptor.is_open()
    return False


def _hold(path: str, descriptor: OwnDescriptor) -> None:
    replaced = []
    while _held.setdefault(path, descriptor) is not descriptor:  # perhaps it is another thread's
        replaced.append(_held.pop(path, None))
    _asked[path] = next(_numbers)
    key = path.rpartition("-")[0]
    held = sorted(_held.copy(), key=lambda each: _asked.get(each, 0))
    own = [each for each in held if each.rpartition("-")[0] == key]
    older = {*own[:-_VERSIONS_HELD], *held[: -_most_held()]}
    for path in older:
        _asked.pop(path, None)
    for each in (*replaced, *(_held.pop(path, None) for path in older)):
        if each is not None:
            each.close()


def _most_held() -> int:
    limit = os.sysconf("SC_OPEN_MAX")
    return sys.maxsize if limit < 0 else max(_VERSIONS_HELD, limit // _PROGRAMS_SHARE)


def _after_fork_in_child() -> None:
    for descriptor in _filling:
        descriptor.close()
    _filling.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


# --- files ----------------------------------------------------------------------------------------


def _files(path: str) -> Iterator[str]:
    for directory, _, names in os.walk(path):
        for name in names:
            yield os.path.join(directory, name)


def _sizes(path: str) -> Iterator[int]:
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            yield os.lstat(file).st_size


def _set_modes(path: str, mode: int) -> None:
    for file in _files(path):
        if not os.path.islink(file):
            os.chmod(file, mode)


def _sync_all(path: str) -> None:
    for file in _files(path):
        sync(file)
    for directory, _, _ in os.walk(path):
        sync(directory)
