"""Directories that this process makes for itself, safe from other users."""

from __future__ import annotations

import contextlib
import os
import stat

__all__ = ["directory_of", "existing_parent", "make", "open_own", "roots_problem"]


def make(directory: str, mode: int = 0o700, *, above: int = 0o700, least: int = 0o700) -> None:
    """Make a directory, and those above it that are missing with mode ``above``. Raises OSError.

    ``os.makedirs`` leaves the mode of those above to the umask: with a wide one, others could
    replace what is in them. With a very narrow one (0777, 0277) we could not use what we make. So
    the umask takes nothing of ``least`` away.
    """
    if directory and not os.path.lexists(directory):
        make(os.path.dirname(directory), above, above=above, least=least)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode)
            made = stat.S_IMODE(os.stat(directory).st_mode)
            if mode & least & ~made:
                os.chmod(directory, made | mode & least)


def open_own(path: str, flags: int) -> int:
    """Open a file of this user, made if it is missing; no link is followed. Raises OSError.

    Whatever the umask, the next process of this user can open it, too.
    """
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        made = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if made & 0o600 != 0o600:
            os.fchmod(descriptor, made | 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def directory_of(cache_dir: str, *, cache_home: str, name: str) -> str:
    """Where things of one kind are kept: by the setting, or below the user's cache directory.

    ``name`` is the kind's: ``prepared``, ``remote``. Absolute; the name of a file in it depends on
    nobody's working directory.
    """
    base = os.path.expanduser(cache_dir) if cache_dir else os.path.join(cache_home, "trims")
    return os.path.join(os.path.abspath(base), name)


def existing_parent(path: str) -> str:
    """The path itself, or the nearest directory above it that exists."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def roots_problem(parent: str) -> str:
    """Why root is to make nothing in a directory; empty if it may, or this is not root.

    Under `sudo -E`, HOME is another user's, who could not use what root makes there.
    """
    owner = os.stat(parent).st_uid
    return f"{parent} belongs to user {owner}" if os.geteuid() == 0 != owner else ""
