"""What the shim did in this process: counters by event and reason, and one WARNING per cause.

Recording raises nothing into a load but what is not ours: the exception of a signal handler of the
program, or one that another thread put into this one, which came while we were waiting, goes on to
the program. Counters are plain dictionary increments under the interpreter lock, so no lock is
taken that a fork or a finalizer could find held.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from trims_shim.errors import TrimsError

__all__ = [
    "LogFile",
    "Stats",
    "count",
    "fallback",
    "is_interrupt",
    "log",
    "pass_on",
    "reason_of",
    "reset_after_fork",
    "signalled",
    "stats",
    "take_unreported",
]

_logger = logging.getLogger("trims_shim")
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_WAITING = frozenset({"trims_shim", "zmq"})
"""Packages in whose Python code a load waits."""
_RAISING = frozenset(
    {"blake3", "msgpack", "numpy", "onnxruntime", "safetensors_rust", "torch", "trims_shim", "zmq"}
)
"""Packages, beside Python's own, whose errors that code may meet."""

_totals: Counter[str] = Counter()
_reported: Counter[str] = Counter()
_warned: set[str] = set()

EXPECTED_REASONS = frozenset(
    {
        "small_file",
        "not_a_file",
        "not_a_model",
        "not_regular",
        "legacy_format",
        "unsupported_format",
        "shared_mapping",
        "device",
        "device_off",
        "daemon_unavailable",
        "partial_file",
        # Sessions of onnxruntime: what the client leaves alone.
        "arguments",
        "config_entry",
        "model_config",
        "options_unknown",
        "ort_format",
        "provider",
        "random_seed",
        "session_option",
        # What the daemon answers.
        "busy",
        "model_changed",
        "not_python",
        "other_namespace",
        "other_user",
        "prepared_off",
        "preparing",
        "stopping",
        "unknown",
        "unsettled_file",
        # What it has found out about a model.
        "does_not_reload",
        "does_not_run",
        "ep_context",
        "external_data_of_bytes",
        "external_missing",
        "external_path",
        "invalid_model",
        "metadata_differs",
        "no_file",
        "no_gain",
        "not_relaid",
        "not_saved",
        "outputs_differ",
        "too_many_files",
        "unknown_model",
    }
)
"""Reasons of loads that the shim leaves alone by design: counted, never warned about."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of this process.

    ``served``: loads that took their bytes from the cache; ``hits``, ``misses``, ``joined``: images
    that were there, were read for this process, or were being read for another; ``fallbacks``:
    loads that went to the framework's own loader, by reason; ``events``: everything, as
    ``event:reason``.
    """

    served: int
    hits: int
    misses: int
    joined: int
    elided_copies: int
    bytes_shared: int
    fallbacks: dict[str, int]
    events: dict[str, int]


def count(event: str, reason: str = "", amount: int = 1) -> None:
    """Add to a counter."""
    _totals[f"{event}:{reason}" if reason else event] += amount


def fallback(reason: str, error: BaseException | None = None, *, what: str = "") -> None:
    """Count a load that goes to the framework's own loader; warn once per unexpected reason.

    Raises what a signal handler or another thread raised here.
    """
    pass_on(error)
    count("fallback", reason)
    if reason in EXPECTED_REASONS:
        log(logging.DEBUG, "%s: the framework's own loader is used (%s)", what, reason)
        return
    if reason in _warned:
        return
    _warned.add(reason)
    log(
        logging.WARNING,
        "%s: the framework's own loader is used (%s): %s. Run `trims info` for details.",
        what or "load",
        reason,
        error,
    )


def log(level: int, text: str, *arguments: object, error: BaseException | None = None) -> None:
    """Log a message, with the traceback of ``error``.

    Raises what a signal handler raised, and nothing that a logging handler of the program did: the
    program would fail of what is ours alone.
    """
    try:
        _logger.log(level, text, *arguments, exc_info=error)
    # Border: see above.
    except Exception as failure:
        pass_on(failure)


def reason_of(error: BaseException) -> str:
    """Under which an error is counted; what is none of ours is ``internal_error``."""
    return error.reason if isinstance(error, TrimsError) else "internal_error"


def pass_on(error: BaseException | None) -> None:
    """Raise what a signal handler or another thread raised here, where this error comes from it."""
    raised = None if error is None else signalled(error)
    if raised is not None:
        raise raised


def is_interrupt(error: BaseException) -> bool:
    """Whether it is no fault of what was called: no Exception, or raised from outside of it."""
    return not isinstance(error, Exception) or signalled(error) is not None


def signalled(error: BaseException) -> BaseException | None:
    """What a signal handler or another thread raised, if this error is, or was made ``from``, it.

    The context of an error is not looked at: that may be what the program was handling before.
    """
    thrown = next((cause for cause in _causes(error) if _is_thrown_in(cause)), None)
    if thrown is not None:
        return thrown
    foreign = [(cause, code) for cause in _causes(error) for code in _foreign_codes(cause)]
    if not foreign:
        return None
    handlers = {
        getattr(signal.getsignal(number), "__code__", None) for number in range(1, signal.NSIG)
    }
    return next((cause for cause, code in foreign if code in handlers), None)


def _is_thrown_in(error: BaseException) -> bool:
    """Whether another thread put it here (PyThreadState_SetAsyncExc, by which stopit and others
    end threads): an error of a class that nothing knows in the place where it was raised. It has no
    arguments, as the interpreter makes it of a class alone; what a library raises says why.

    Of Python's own classes only TimeoutError: a bare one of another may be what went wrong here.
    """
    kind = type(error)
    package = kind.__module__.partition(".")[0]
    is_known = package in _RAISING or package in sys.stdlib_module_names
    if error.args or error.__traceback__ is None or (is_known and kind is not TimeoutError):
        return False
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    module = str(place.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _WAITING


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _foreign_codes(error: BaseException) -> Iterator[CodeType]:
    """What an error came through, but for this package, which most errors never leave."""
    place = error.__traceback__
    while place is not None:
        code = place.tb_frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            yield code
        place = place.tb_next


def stats() -> Stats:
    """A snapshot of the counters of this process."""
    events = dict(_totals)
    fallbacks = {
        key.partition(":")[2]: value for key, value in events.items() if key.startswith("fallback:")
    }
    return Stats(
        served=sum(value for key, value in events.items() if key.startswith("served:")),
        hits=events.get("open:hit", 0) + events.get("open:local", 0),
        misses=events.get("open:miss", 0),
        joined=events.get("open:joined", 0),
        elided_copies=sum(v for key, v in events.items() if key.startswith("elided:")),
        bytes_shared=events.get("bytes_shared", 0),
        fallbacks=fallbacks,
        events=events,
    )


def take_unreported() -> dict[str, int]:
    """Counters since the last call, for the daemon's totals."""
    # A snapshot first: subtraction iterates in Python, while other threads may add events.
    delta = Counter(dict(_totals)) - _reported
    _reported.update(delta)
    return dict(delta)


def reset_after_fork() -> None:
    """In a forked child: start from zero, so that the parent's counts are not reported twice."""
    _totals.clear()
    _reported.clear()


class LogFile(logging.FileHandler):
    """Appends to a file, which is opened for its first line.

    Where that cannot be opened, lines go to stderr, with the reason; FileHandler would raise it
    into whatever logs.
    """

    def __init__(self, path: str) -> None:
        # Names of files may be anything.
        super().__init__(path, delay=True, errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line. Never raises."""
        try:
            super().emit(record)
        except OSError as error:
            said = copy.copy(record)
            said.msg, said.args = "%s (TRIMS_LOG_FILE: %s)", (record.getMessage(), error)
            stderr = logging.StreamHandler()
            stderr.setFormatter(self.formatter)
            stderr.emit(said)
