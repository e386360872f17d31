"""How the daemon and its uploaders log: to standard error, in lines for people or for journald."""

from __future__ import annotations

import logging
import os

__all__ = ["log_to"]

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(message)s"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))
"""From which level on a line has which of syslog's priorities (sd-daemon(3))."""


def log_to(handler: logging.Handler) -> None:
    """Log what is of interest by ``handler``, which writes to standard error."""
    handler.setFormatter(_ForJournal() if _is_journal() else logging.Formatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _ForJournal(logging.Formatter):
    """journald adds time and process by itself, and finds the priority before each line."""

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        priority = next(each for level, each in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _is_journal() -> bool:
    """Whether standard error is the stream that the service manager names (systemd.exec(5))."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
