"""Files that users keep (profiles, pictures), replaced as a whole.

A file is written under another name and then renamed, so a reader sees the old one or the new one.
It has the mode of the old one, or that of any new file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import BinaryIO

__all__ = ["replace_file", "target_of", "write_all"]

_PERMISSIONS = 0o777
"""Not setuid: the old file may be another user's, and the new one is ours."""


def target_of(path: str | os.PathLike[str]) -> str:
    """The file that a user means: a link is to stay one."""
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of ``content`` to an unbuffered file, which may take less at a time."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def replace_file(path: str, content: bytes) -> None:
    """Write a file under another name, then rename it. Raises OSError."""
    # Not by tempfile, whose files are for their owner only.
    temporary = os.path.join(os.path.dirname(path), f".trims-{secrets.token_hex(8)}")
    pid = os.getpid()
    try:
        # Unbuffered: a child that a signal handler forks in the middle would write it, too.
        with open(temporary, "xb", buffering=0) as file:
            with contextlib.suppress(OSError):  # none yet, or a file system without modes
                os.fchmod(file.fileno(), os.stat(path).st_mode & _PERMISSIONS)
            write_all(file, content)
        os.replace(temporary, path)
    except BaseException as error:
        if pid == os.getpid():  # Else it is such a child, and the file its parent's.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from error
        raise
