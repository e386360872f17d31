"""The directory of prepared ONNX models: made, checked, scanned, published into, deleted from.

Owns the names below ``<cache_dir>/prepared``::

    <key>/model.onnx, weights.bin, entry.json    a prepared model; 0400 in a directory of 0700
    <key>.<judge>.refused                        a model that cannot be prepared
    .making-<...>, .removed-<...>                on the way in, on the way out

A model appears by one rename of a complete directory, and goes by a rename, then unlink. Files are
never written to once their directory has its name, because sessions map them. Files of another
user, or that others may write, are not used, and no symbolic link below the directory is followed.

Another version of the package, or other settings, may prepare what these refuse: ``<judge>`` stands
for both. A daemon reads only its own refusals, and deletes the oldest of too many others. Models of
another layout have other keys; it serves none of them, but they count, and go as its own do.

Several daemons may share a directory. Each holds a shared flock on it while it lives. A daemon that
gets an exclusive one is alone, and deletes what others have left half made. Methods may be called
from any thread; all of them block, :meth:`Published.is_sound`, :meth:`has` and :meth:`retire` only
briefly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

from blake3 import blake3

from trims_shim._version import __version__
from trims_shim.daemon.prepared.directory import examine, problem_of, sync
from trims_shim.daemon.prepared.key import LAYOUT_VERSION
from trims_shim.daemon.prepared.manifest import (
    AnyManifest,
    FileStamp,
    Manifest,
    RefusalRecord,
    parse,
    render,
    with_source,
)
from trims_shim.daemon.prepared.values import RUNTIME_LIMIT, Entry, KeepRefusal, Known
from trims_shim.directories import make
from trims_shim.errors import CorruptFile, NotServed, TrimsError
from trims_shim.specs import PREPARED_MODEL, PREPARED_WEIGHTS, Identity

__all__ = ["PreparedFiles", "Published", "Scan"]

_logger = logging.getLogger("trims_shim.daemon")

_MANIFEST = "entry.json"
_REFUSED = ".refused"
_MAKING = ".making-"
_REMOVED = ".removed-"
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_REFUSAL = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]+)?\.refused", re.ASCII)
_JUDGE_DIGITS = 16
_RECORD_LIMIT_BYTES = 8 << 20
_REFUSALS_KEPT = 1000
_ATTEMPTS = 3
_NOT_OF_THE_FILE = frozenset(
    {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}
)
"""Errors of a disk or of this process: they say nothing of a file, and may be gone next time."""


class Published(NamedTuple):
    """A prepared model whose files were there and sound a moment ago; ``weights`` may be empty."""

    manifest: Manifest
    model: str
    model_identity: Identity
    weights: str
    weights_identity: Identity | None
    used_ns: int

    @property
    def entry(self) -> Entry:
        """What the store knows of it."""
        manifest = self.manifest
        size_bytes = self.model_identity.size_bytes
        if self.weights_identity is not None:
            size_bytes += self.weights_identity.size_bytes
        return Entry(
            manifest.key,
            size_bytes,
            manifest.recipe.runtime[:RUNTIME_LIMIT],
            manifest.prepare_ns,
            self.used_ns,
            manifest.names,
        )

    def is_sound(self) -> bool:
        """Whether the files are still the same."""
        is_sound = _identity(self.model) == self.model_identity
        if self.weights_identity is not None:
            is_sound = is_sound and _identity(self.weights) == self.weights_identity
        return is_sound


class Scan(NamedTuple):
    """What was found in the directory."""

    published: tuple[Published, ...] = ()
    refusals: tuple[RefusalRecord, ...] = ()
    others: tuple[Entry, ...] = ()
    """Models of another layout, which another version of the package may be serving."""

    def sources(self) -> Iterator[Known]:
        """What models' files are known to hold."""
        for refusal in self.refusals:
            yield from refusal.sources
        for each in self.published:
            yield from each.manifest.sources


class PreparedFiles:
    """See the module docstring."""

    def __init__(self, directory: str, *, judgement: str = "") -> None:
        """Touches nothing. ``judgement``: see :class:`.directory.PreparedSettings`."""
        self.directory = directory
        self._judgement = judgement
        self._refused = f".{_judge(judgement)}{_REFUSED}"
        self._lock = -1
        self._locked: tuple[int, int] | None = None
        self._left: list[str] = []
        """What could not be deleted; its file system may be read-only for a while."""

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> Scan:
        """Scan the directory; if it does not exist yet, it is made when it is needed.

        Raises NotServed (``prepared_off``) if it cannot be used.
        """
        problem = examine(self.directory)
        if problem:
            raise NotServed("prepared_off", problem)
        if not os.path.isdir(self.directory):
            return Scan()
        self._claim(is_waiting=False)
        return self._scan()

    def close(self) -> None:
        """Give the lock up."""
        self._locked = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- in ---------------------------------------------------------------------------------------

    def make(self) -> str:
        """A fresh directory for a preparer to write in. Raises NotServed, OSError."""
        try:
            make(self.directory)
            problem = examine(self.directory)
        except OSError as error:
            problem = f"{self.directory} cannot be made: {error}"
        if problem:
            raise NotServed("prepared_off", problem)
        self._claim(is_waiting=True)
        left, self._left = self._left, []
        for path in left:
            self.delete(path)
        path = os.path.join(self.directory, f"{_MAKING}{os.getpid()}-{os.urandom(8).hex()}")
        os.mkdir(path, 0o700)
        return path

    def publish(self, making: str, manifest: Manifest) -> Published:
        """Give a complete directory its name; a sound model that has it already wins.

        The stamps in ``manifest`` are filled in here. Raises CorruptFile when ``making`` does not
        hold what it should, or OSError.
        """
        model, weights = _seal(making)
        manifest = manifest._replace(model=model, weights=weights)
        _write(os.path.join(making, _MANIFEST), render(manifest))
        sync(making)
        target = os.path.join(self.directory, manifest.key)
        for _ in range(_ATTEMPTS):
            try:
                os.rename(making, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
                # Another daemon was faster, or has left a damaged model.
                found = self.load(manifest.key)
                if found is not None:
                    return found
                self.delete(self.retire(manifest.key))
            else:
                break
        sync(self.directory)
        published = self.load(manifest.key)
        if published is None:
            raise CorruptFile(f"{target} is not there, or damaged, just after it was published")
        return published

    def load(self, key: str) -> Published | None:
        """The prepared model of a key; None if there is none, or it is not what was verified."""
        try:
            return self._published(key, *self._read_record(key))
        except FileNotFoundError:
            return None
        except (TrimsError, OSError) as error:
            _logger.warning("prepared model %s is not used: %s", key[:12], error)
            return None

    def has(self, key: str) -> bool:
        """Whether a key has a model, sound or not; also where that cannot be found out."""
        try:
            os.lstat(os.path.join(self.directory, key))
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def add_source(self, key: str, known: Known) -> None:
        """Write down one more file that holds the model of an entry or a refusal."""
        path = os.path.join(self.directory, key, _MANIFEST)
        with contextlib.suppress(FileNotFoundError):
            self._replace(path, render(with_source(parse(Manifest, _read(path)), known)))
        path = self._refusal_path(key)
        with contextlib.suppress(FileNotFoundError):
            self._replace(path, render(with_source(parse(RefusalRecord, _read(path)), known)))

    def keep_refusal(self, refusal: KeepRefusal, known: Known | None, refused_ns: int) -> None:
        """Write down that a model cannot be prepared, and what is ``known`` of its files."""
        record = RefusalRecord(
            layout=LAYOUT_VERSION,
            key=refusal.key,
            package=__version__,
            reason=refusal.reason,
            message=refusal.message,
            runtime=refusal.runtime,
            refused_ns=refused_ns,
            names=refusal.names,
            sources=() if known is None else (known,),
            judgement=self._judgement,
        )
        self._replace(self._refusal_path(record.key), render(record))

    def drop_refusal(self, key: str) -> None:
        """Forget that a model cannot be prepared."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._refusal_path(key))

    def touch(self, key: str, used_ns: int) -> None:
        """Note for later daemons when a model was used."""
        with contextlib.suppress(FileNotFoundError):
            times = (used_ns, used_ns)
            os.utime(os.path.join(self.directory, key), ns=times, follow_symlinks=False)

    # --- out --------------------------------------------------------------------------------------

    def retire(self, key: str) -> str | None:
        """Take the name from a model; return the path to :meth:`delete`, empty if there is none.

        None if the model cannot be removed.
        """
        path = os.path.join(self.directory, f"{_REMOVED}{os.getpid()}-{os.urandom(8).hex()}")
        try:
            os.rename(os.path.join(self.directory, key), path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            _logger.warning("prepared model %s cannot be removed: %s", key[:12], error)
            return None
        return path

    def delete(self, path: str | None) -> None:
        """Delete what has lost its name, or never got one; nothing for no path.

        What cannot be deleted now is deleted before something else is made.
        """
        if not path:
            return
        # A link is not followed: a preparer may leave anything.
        if os.path.isdir(path) and not os.path.islink(path):
            # Up to Python 3.12, directories can be too deep for it.
            with contextlib.suppress(RecursionError):
                shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if os.path.lexists(path):
            self._left.append(path)

    # --- inside -----------------------------------------------------------------------------------

    def _replace(self, path: str, data: bytes) -> None:
        """Write a small file anew; a reader sees the old one or the new one."""
        # Not beside a model's own files: nobody looks there for what was left half made.
        fresh = os.path.join(self.directory, f"{_MAKING}{os.urandom(8).hex()}")
        try:
            _write(fresh, data)
            os.rename(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise

    def _refusal_path(self, key: str) -> str:
        return os.path.join(self.directory, key + self._refused)

    def _claim(self, *, is_waiting: bool) -> None:
        """Hold the shared lock of the directory as it is now; delete leftovers if we are alone.

        Another daemon, which is alone yet, may be deleting, for a moment also where we were alone:
        the kernel gives an exclusive lock up before it makes it a shared one. ``is_waiting``: wait
        for it, or it would take what we make for a leftover.
        """
        status = os.stat(self.directory)
        if self._locked == (status.st_dev, status.st_ino):
            return
        self.close()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(self.directory, flags)
        # File systems without locks: leftovers stay, nothing else depends on it.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(self.directory):
                if name.startswith((_MAKING, _REMOVED)):
                    self.delete(os.path.join(self.directory, name))
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH | (0 if is_waiting else fcntl.LOCK_NB))
            self._locked = (status.st_dev, status.st_ino)

    def _scan(self) -> Scan:
        published: list[Published] = []
        others: list[Entry] = []
        refusals: list[RefusalRecord] = []
        foreign: list[str] = []
        for name in sorted(os.listdir(self.directory)):
            if _KEY.fullmatch(name):
                try:
                    status, record = self._read_record(name)
                    if parse(AnyManifest, record).layout == LAYOUT_VERSION:
                        published.append(self._published(name, status, record))
                    else:
                        others.append(self._other(name, status))
                except (TrimsError, OSError) as error:
                    _logger.warning("prepared model %s is not used: %s", name[:12], error)
                    if _is_of_the_file(error):
                        self.delete(self.retire(name))
            elif _REFUSAL.fullmatch(name):
                if name.endswith(self._refused):
                    refusals += self._load_refusal(name)
                else:
                    foreign.append(os.path.join(self.directory, name))
        _delete_oldest(foreign, kept=_REFUSALS_KEPT)
        refusals.sort(key=lambda each: each.refused_ns)
        for each in refusals[:-_REFUSALS_KEPT]:
            self.drop_refusal(each.key)
        return Scan(tuple(published), tuple(refusals[-_REFUSALS_KEPT:]), tuple(others))

    def _read_record(self, key: str) -> tuple[os.stat_result, bytes]:
        """The status of a model's directory, and its record. Raises CorruptFile, OSError."""
        path = os.path.join(self.directory, key)
        status = os.lstat(path)
        problem = problem_of(path, status, may_be_roots=False)
        if problem:
            raise CorruptFile(problem)
        return status, _read(os.path.join(path, _MANIFEST))

    def _published(self, key: str, status: os.stat_result, record: bytes) -> Published:
        """A model of ours. Raises CorruptFile, OSError."""
        path = os.path.join(self.directory, key)
        manifest = parse(Manifest, record)
        if (manifest.layout, manifest.key) != (LAYOUT_VERSION, key):
            raise CorruptFile(
                f"its record is that of {manifest.key[:12]}, of layout {manifest.layout}"
            )
        model = os.path.join(path, PREPARED_MODEL)
        weights = os.path.join(path, PREPARED_WEIGHTS) if manifest.weights is not None else ""
        return Published(
            manifest,
            model,
            _as_stamped(model, manifest.model),
            weights,
            None if manifest.weights is None else _as_stamped(weights, manifest.weights),
            status.st_mtime_ns,
        )

    def _other(self, key: str, status: os.stat_result) -> Entry:
        """What is known of a model of another layout. Raises OSError."""
        path = os.path.join(self.directory, key)
        # Some versions write a new record beside the old one: it may be gone before it is counted.
        found = [_identity(os.path.join(path, name)) for name in os.listdir(path)]
        size_bytes = sum(each.size_bytes for each in found if each is not None)
        return Entry(key, size_bytes, "", 0, status.st_mtime_ns)

    def _load_refusal(self, name: str) -> Iterator[RefusalRecord]:
        path = os.path.join(self.directory, name)
        try:
            record = parse(RefusalRecord, _read(path))
            judged = (record.key + self._refused, record.layout, record.package, record.judgement)
            if judged != (name, LAYOUT_VERSION, __version__, self._judgement):
                raise CorruptFile(f"{name} is of another model, or judged by another package")
        except (TrimsError, OSError) as error:
            _logger.warning("%s is not used: %s", path, error)
            if _is_of_the_file(error):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        else:
            yield record


# --- files ----------------------------------------------------------------------------------------


def _judge(judgement: str) -> str:
    """The part of a refusal's name that stands for package and settings."""
    judge = f"{LAYOUT_VERSION} {__version__} {judgement}".encode()
    return blake3(judge).hexdigest()[:_JUDGE_DIGITS]


def _delete_oldest(paths: list[str], *, kept: int) -> None:
    """Delete all but the newest; perhaps nobody is left who would read them."""
    dated = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((os.lstat(path).st_mtime_ns, path))
    for _, path in sorted(dated)[:-kept]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _is_of_the_file(error: Exception) -> bool:
    return not (isinstance(error, OSError) and error.errno in _NOT_OF_THE_FILE)


def _identity(path: str) -> Identity | None:
    try:
        return Identity.from_stat(os.lstat(path))
    except OSError:
        return None


def _as_stamped(path: str, stamp: FileStamp) -> Identity:
    """Raises CorruptFile, OSError."""
    status = os.lstat(path)
    identity = Identity.from_stat(status)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise CorruptFile(f"{path} is not a file of ours")
    if FileStamp.of(identity) != stamp:
        raise CorruptFile(f"{path} has changed since it was verified")
    return identity


def _seal(making: str) -> tuple[FileStamp, FileStamp | None]:
    """Make what a preparer wrote durable and read-only. Raises CorruptFile, OSError."""
    for name in os.listdir(making):
        if name not in (PREPARED_MODEL, PREPARED_WEIGHTS):
            os.unlink(os.path.join(making, name))
    try:
        model = _seal_file(os.path.join(making, PREPARED_MODEL))
    except FileNotFoundError as error:
        raise CorruptFile(f"the preparer left no {PREPARED_MODEL}") from error
    weights = None
    with contextlib.suppress(FileNotFoundError):
        weights = _seal_file(os.path.join(making, PREPARED_WEIGHTS))
    return model, weights


def _seal_file(path: str) -> FileStamp:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise CorruptFile(f"{path} is not a plain file")
        os.fchmod(descriptor, 0o400)
        os.fsync(descriptor)
        return FileStamp.of(Identity.from_stat(os.fstat(descriptor)))
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        data = file.read(_RECORD_LIMIT_BYTES + 1)
    if len(data) > _RECORD_LIMIT_BYTES:
        raise CorruptFile(f"{path} is too long")
    return data


def _write(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o400), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
