"""Entry point of a daemon that a client started: standard streams go to the log."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import stat
import sys
from typing import TYPE_CHECKING

from trims_shim.children import be_called
from trims_shim.daemon.background import be_expendable, be_ordinary
from trims_shim.daemon.logs import log_to

if TYPE_CHECKING:
    from typing import TextIO

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 has no brackets for it.

__all__ = ["LogHandler", "main"]

_LOG_LIMIT_BYTES = 1 << 20
_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NPROC,
)


def main(report_descriptor: int) -> None:
    """Run the daemon and exit with its status."""
    be_called("trims-daemon")
    be_expendable()  # Where memory is short, programs go on without it.
    os.set_inheritable(report_descriptor, False)
    _see_all_devices()
    # A program may start us from a thread that blocks signals, and exec keeps the mask. It also
    # keeps ignored signals: with SIGCHLD ignored, the status of a child would be lost.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o022)
    _lift_limits()
    be_ordinary()
    log_to(LogHandler())
    try:
        from trims_shim.daemon.main import run
    except ImportError:
        _run_site()
        from trims_shim.daemon.main import run

    sys.exit(run(report_descriptor=report_descriptor))


def _run_site() -> None:
    """Do what the start without ``site`` has saved: its hooks may be all that finds a package."""
    import site

    paths = list(sys.path)
    site.main()
    sys.path[:] = paths


class LogHandler(_StreamHandler):
    """Writes to standard error, and starts a new file behind it when the old one has become long.

    One old file is kept. Not logging's own rotation: the interpreter, libraries and our child
    processes also write there, without a log record.
    """

    def __init__(self) -> None:
        super().__init__()
        self._path = os.readlink("/proc/self/fd/2")

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.StreamHandler`."""
        super().emit(record)
        with contextlib.suppress(OSError):
            status = os.fstat(2)
            if stat.S_ISREG(status.st_mode) and status.st_size > _LOG_LIMIT_BYTES:
                self._begin_anew()

    def _begin_anew(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed, or there was no room for another
            os.rename(self._path, f"{self._path}.old")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fresh = os.open(self._path, flags, 0o600)
        for stream in (1, 2):
            os.dup2(fresh, stream)
        os.close(fresh)


def _lift_limits() -> None:
    """Lift limits that the program set for itself (`ulimit -S`, `taskset`), not for us."""
    for limit in _LIMITS:
        _, hard = resource.getrlimit(limit)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (hard, hard))
    with contextlib.suppress(OSError):
        # Not all processors: some may be kept free for others (isolcpus).
        os.sched_setaffinity(0, os.sched_getaffinity(0) | os.sched_getaffinity(1))


def _see_all_devices() -> None:
    """Show the daemon all devices: the client that started it may see only some of them.

    With MIG a process sees one instance at most, the first unless this variable names another.
    """
    if "MIG-" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
