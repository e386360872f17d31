"""Where prepared ONNX models are kept, and whether they can be.

Owns the settings of the directory and the checks of it: its owner, who may write to it, how much
room there is, and whether its file system keeps deleted files for those who map them. The checks
make and change nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import NamedTuple

from trims_shim.config import Config, ShareOrSize
from trims_shim.daemon.file_systems import is_in_memory
from trims_shim.directories import directory_of, existing_parent, roots_problem

__all__ = [
    "PreparedSettings",
    "Space",
    "examine",
    "examined",
    "problem_of",
    "space_of",
    "sync",
]

_MARGIN_BYTES = 1 << 30
_MARGIN_SHARE = 20
"""One part in this many of a file system is left to others, at most :data:`_MARGIN_BYTES`."""
_DIRECTORY_LIMIT_BYTES = 1500
"""The names of two files in it go into one packet; see messages.HANDOVER_PACKET_LIMIT_BYTES."""
_MOUNTS = "/proc/self/mountinfo"
_SHARED_BETWEEN_MACHINES = frozenset({"afs", "cifs", "fuse.sshfs", "nfs", "nfs4", "smb3", "smbfs"})
"""File systems on which another machine's daemon, which knows nothing of our leases, may delete
files mapped here. Pages not in memory are then gone, and a session that reads them is killed."""


class PreparedSettings(NamedTuple):
    """The settings of prepared models. ``problem``: why there are none, if that is known.

    ``judgement``: as text, the other settings that may decide that a model is not worth it.
    """

    directory: str
    budget: ShareOrSize
    problem: str = ""
    judgement: str = ""

    @classmethod
    def of(cls, config: Config) -> PreparedSettings:
        """What the daemon's settings say."""
        problem = ""
        if config.prepared_bytes.of(1 << 60) == 0:
            problem = f"TRIMS_PREPARED_BYTES={config.text('prepared_bytes')}"
        elif not os.path.isabs(os.path.expanduser(config.cache_dir or "/")):
            # The daemon does not know a client's working directory.
            problem = f"TRIMS_CACHE_DIR={config.cache_dir} is not an absolute path"
        directory = directory_of(config.cache_dir, cache_home=config.cache_home, name="prepared")
        if len(os.fsencode(directory)) > _DIRECTORY_LIMIT_BYTES:
            problem = (
                f"{directory[:80]}... is too long a name; set TRIMS_CACHE_DIR to a shorter one"
            )
        return cls(
            directory,
            config.prepared_bytes,
            problem,
            config.text("prepare_anyway_bytes"),
        )


class Space(NamedTuple):
    """A file system; ``spare_bytes`` is how much of it may be used, negative if it is full.

    ``is_memory``: files in it take memory.
    """

    total_bytes: int
    spare_bytes: int
    is_memory: bool


def examine(directory: str) -> str:
    """Why a directory cannot hold prepared models, and advice; empty if it can. Makes nothing."""
    problem = examined(directory)
    return problem and f"{problem}; set TRIMS_CACHE_DIR to a local directory of yours"


def examined(directory: str) -> str:
    """As :func:`examine`, for a directory that has to be this one: without the advice."""
    base = os.path.dirname(directory)
    try:
        problem = problem_of(base, os.stat(base), may_be_roots=True)
        if not problem:
            problem = problem_of(directory, os.lstat(directory), may_be_roots=False)
        problem = problem or _machines_problem(directory)
        if not problem and not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            problem = f"{directory} cannot be written"
    except FileNotFoundError:
        parent = existing_parent(directory)
        is_usable = os.access(parent, os.W_OK | os.X_OK)
        problem = "" if is_usable else f"{directory} cannot be made: {parent} cannot be written"
        problem = problem or roots_problem(parent) or _machines_problem(parent)
    except OSError as error:
        problem = str(error)
    return problem


def space_of(directory: str) -> Space:
    """The file system that a directory is in, or will be. Raises OSError."""
    descriptor = os.open(existing_parent(directory), os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstatvfs(descriptor)
        is_memory = is_in_memory(descriptor)
    finally:
        os.close(descriptor)
    total = found.f_blocks * found.f_frsize
    margin = min(_MARGIN_BYTES, total // _MARGIN_SHARE)
    return Space(total, found.f_bavail * found.f_frsize - margin, is_memory)


def problem_of(path: str, status: os.stat_result, *, may_be_roots: bool) -> str:
    """Why a directory is not to be used; empty if it is safe from other users."""
    owners = (os.geteuid(), 0) if may_be_roots else (os.geteuid(),)
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid not in owners:
        return f"{path} belongs to user {status.st_uid}"
    # In a sticky directory (/tmp) others cannot rename what is ours.
    is_sticky = may_be_roots and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        return f"{path} is writable by others (run `chmod go-w {path}`)"
    return ""


def sync(path: str) -> None:
    """Write a file or directory, which is no link, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have nothing to sync in a directory, and say so with EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _machines_problem(path: str) -> str:
    kind = _file_system_of(path)
    if kind in _SHARED_BETWEEN_MACHINES:
        return f"{path} is on {kind}, where other machines may delete what is in use here"
    return ""


def _file_system_of(path: str) -> str:
    """The type of the file system that a path is in; empty if it cannot be found out.

    On btrfs it cannot: subvolumes have device numbers that no mount has. btrfs is not shared.
    """
    with contextlib.suppress(OSError):
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        with open(_MOUNTS, errors="replace") as file:
            for line in file:
                mount, _, rest = line.partition(" - ")
                if mount.split(" ")[2:3] == [number]:
                    return rest.partition(" ")[0]
    return ""
