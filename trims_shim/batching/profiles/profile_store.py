"""Latency profiles as files: those that a user names, and those that batchers keep for themselves.

A file is the JSON of :mod:`trims_shim.batching.profiles.profile_json`. Reading a bad file that a
user named raises. The store's own files are a convenience: a broken one is ignored, with one
warning for each, and written anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import re
import stat
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import (
    JsonFormat,
    largest_of,
    latencies_of,
)
from trims_shim.config import Config
from trims_shim.diagnostics import pass_on
from trims_shim.directories import existing_parent, make, roots_problem
from trims_shim.errors import CorruptFile, FormatError
from trims_shim.replacing import target_of

__all__ = [
    "ProfileStore",
    "SavedProfile",
    "key_text",
    "load_profile",
    "load_saved",
    "machine_text",
    "save_profile",
]

_logger = logging.getLogger(__name__)

_FORMAT = JsonFormat("trims latency profile", "latency profile", 1, "trims batch profile")
_OURS = re.compile(r".*-[0-9a-f]{16}\.json|\.trims-.*", re.DOTALL)
"""Profiles, and temporary files that a writer left behind."""
_LIMIT_FILES = 1000
"""Inputs of very many shapes make as many keys, and keys may hold values that differ by process."""


@dataclass(frozen=True, slots=True)
class SavedProfile:
    """The content of a profile's file.

    ``latencies_ns`` by batch size; ``pads`` as in
    :meth:`~trims_shim.batching.profiles.profile.LatencyProfile.measured`. The texts tell readers
    and the store of which batcher, inputs and machine the profile is.
    """

    latencies_ns: Mapping[int, float]
    max_batch_size: int
    pads: bool = False
    name: str = ""
    key: str = ""
    machine: str = ""
    note: str = ""

    @property
    def profile(self) -> LatencyProfile:
        """The profile it describes."""
        return LatencyProfile.measured(
            self.latencies_ns, max_batch_size=self.max_batch_size, pads=self.pads
        )


def save_profile(path: str | os.PathLike[str], saved: SavedProfile) -> None:
    """Write or replace a user's file; a link stays one. Raises OSError."""
    _write(target_of(path), saved)


def _write(path: str, saved: SavedProfile) -> None:
    fields = {
        "name": saved.name,
        "key": saved.key,
        "machine": saved.machine,
        "note": saved.note,
        "max_batch_size": saved.max_batch_size,
        "pads": saved.pads,
        "latencies_ns": {str(size): round(each) for size, each in saved.latencies_ns.items()},
    }
    _FORMAT.write(path, fields)


def load_profile(path: str | os.PathLike[str]) -> LatencyProfile:
    """The profile in a file. Raises OSError, and FormatError if it is not one."""
    return load_saved(path).profile


def load_saved(path: str | os.PathLike[str]) -> SavedProfile:
    """The content of a profile's file. Raises OSError, and FormatError if it is not one."""
    name, fields = os.fspath(path), _FORMAT.read(path)
    latencies_ns, largest = latencies_of(name, fields), largest_of(name, fields)
    texts = {each: str(fields.get(each, "")) for each in ("name", "key", "machine", "note")}
    return SavedProfile(latencies_ns, largest, bool(fields.get("pads")), **texts)


# --- the profiles that batchers keep --------------------------------------------------------------


class ProfileStore:
    """A directory of profiles by batcher's name and input's key, for any number of processes.

    It is a convenience: missing and bad files raise nothing. Profiles of other machines (home
    directories are shared) are not found. If there are too many files, the oldest are deleted.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._warned: set[str] = set()

    @classmethod
    def of(cls, config: Config) -> ProfileStore:
        """Beside the prepared models: in ``cache_dir``, or the user's cache directory."""
        base = os.path.expanduser(config.cache_dir) or os.path.join(config.cache_home, "trims")
        return cls(os.path.join(os.path.abspath(base), "profiles"))

    def path(self, name: str, key: Hashable = None) -> str:
        """Where the profile of this batcher and key is, or would be."""
        return self._path(name, key_text(key))

    def _path(self, name: str, key: str) -> str:
        text = "\n".join((name, key, machine_text()))
        # Readable for users, unique by the digest. Names of files are limited in bytes.
        safe = "".join(each if each.isalnum() or each in "-_." else "_" for each in name)
        readable = safe.encode()[-80:].decode(errors="ignore")
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return os.path.join(self.directory, f"{readable.lstrip('.')}-{digest}.json")

    def load(self, name: str, key: Hashable = None) -> SavedProfile | None:
        """The profile of this batcher and key on this machine; None if there is no good one."""
        text = self._text_of(name, key)
        if text is None:
            return None
        path = self._path(name, text)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CorruptFile(f"{path} is no plain file")  # reading a pipe would block
            saved = load_saved(path)
        except FileNotFoundError:
            return None
        except (OSError, FormatError) as error:
            self._warn(f"{error}; it is ignored, and measured anew")
            return None
        is_it = (saved.name, saved.key, saved.machine) == (name, text, machine_text())
        return saved if is_it else None

    def save(self, name: str, key: Hashable, saved: SavedProfile) -> bool:
        """Write or replace the profile; False, with a warning, where that fails."""
        text = self._text_of(name, key)
        if text is None:
            return False
        whole = replace(saved, name=name, key=text, machine=machine_text())
        try:
            directory = os.path.abspath(self.directory)
            if problem := roots_problem(existing_parent(directory)):
                raise PermissionError(problem)
            make(directory)
            _write(self._path(name, text), whole)
            self._prune()
        except OSError as error:
            # Not by its text, which names the file, of which each key has another.
            cause = f"{name}: {error.strerror or error}"
            self._warn(f"the latency profile of {name} is not kept: {error}", cause=cause)
            return False
        return True

    def _text_of(self, name: str, key: Hashable) -> str | None:
        """None, with a warning, if the ``repr`` of a part raises, or it is nested too deeply."""
        try:
            return key_text(key)
        except Exception as error:  # of any kind; in the policy it would fail all who wait
            pass_on(error)
            cause = type(error).__name__
            self._warn(f"latency profiles of {name} are not kept for a key without text: {cause}")
            return None

    def _prune(self) -> None:
        # The directory may hold files of others, which stay.
        with os.scandir(self.directory) as entries:
            ours = [entry for entry in entries if _OURS.fullmatch(entry.name)]
            files = [entry for entry in ours if entry.is_file(follow_symlinks=False)]
        if len(files) <= _LIMIT_FILES:
            return
        with contextlib.suppress(FileNotFoundError):  # another process deletes them, too
            for entry in sorted(files, key=lambda each: each.stat().st_mtime_ns)[:-_LIMIT_FILES]:
                os.unlink(entry.path)

    def _warn(self, message: str, *, cause: str = "") -> None:
        """Once for each cause; without one, for each message."""
        cause = cause or message
        if cause not in self._warned:
            self._warned.add(cause)
            _logger.warning("%s", message)


def key_text(key: Hashable) -> str:
    """A key as text that is the same in every process: sorted sets, types by their names."""
    if isinstance(key, frozenset):
        return "{" + ", ".join(sorted(key_text(each) for each in key)) + "}"
    if isinstance(key, tuple):
        return "(" + ", ".join(key_text(each) for each in key) + ")"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return repr(key)


@functools.cache
def machine_text() -> str:
    """What decides a machine's speed: its processor, and how many of them this process may use."""
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.partition(":")[2].strip() for line in file if "model name" in line), "")
    is_linux = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count()
    return f"{platform.machine()} {model} x{processors}"
