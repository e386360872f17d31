"""How commands of ``trims`` end."""

from __future__ import annotations

import enum

__all__ = ["Exit"]


class Exit(enum.IntEnum):
    """Exit statuses, documented in ``trims --help``; ``trims run`` has those of its program.

    Usage is wrong where other words are needed whatever there is. A file, an object or a device
    that is named and not there, or of another kind, is a failure.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """One line for the help."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.OK: "done",
    Exit.FAILED: "refused, failed, damage found, or what is named is not there",
    Exit.USAGE: "wrong usage, or a setting that cannot be used",
    Exit.NO_DAEMON: "no daemon runs (and none was started)",
    Exit.NOT_EXECUTABLE: "run: the command cannot be executed",
    Exit.NOT_FOUND: "run: no such command",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
}
