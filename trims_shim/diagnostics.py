"""What the shim did in this process: counters by event and reason, and one WARNING per cause.

Recording raises no error of ours into a load. If a signal handler of the program raised an
exception while we worked, or another thread put one into this thread, it is passed on to the
program. No lock is taken that a fork or a finalizer could find held: each thread increments
counters of its own, and who reads them adds them up.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from trims_shim.errors import TrimsError
from trims_shim.printable import printable

__all__ = [
    "LogFile",
    "Stats",
    "count",
    "fallback",
    "is_interrupt",
    "is_unseen",
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
"""Packages whose Python code contains the waits of a load."""
_RAISING = frozenset(
    {"blake3", "msgpack", "numpy", "onnxruntime", "safetensors_rust", "torch", "trims_shim", "zmq"}
)
"""Packages, besides Python's own, whose errors can occur in that code."""

_by_thread: dict[int, Counter[str]] = {}
"""Without the interpreter lock, of two threads that increment one counter at once one is lost."""
_ENDED = 0
"""In the place of a thread's identifier, which this never is: the sums of threads that ended."""
_MOST_ENDED = 64
"""A program may start a thread for each request, for weeks, and many identifiers are new ones."""
_reported: Counter[str] = Counter()
_turn = [object()]
"""Taken while somebody computes what is unreported, so that nothing is reported twice."""
_TOLD_AT_ONCE = frozenset({"served", "elided"})
_AT_ONCE_LIMIT_S = 16.0
_paid_until_s = 0.0
"""Each report at once costs a second, and some may be spent ahead: loops of loads pay nothing."""
reporter: Callable[[], None] | None = None
"""Reports the counters to the daemon; never blocks. Set by the client."""
_warned: set[str] = set()

EXPECTED_REASONS = frozenset(
    {
        "small_file",
        "excluded",
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
        # Sessions of onnxruntime that the client leaves alone.
        "arguments",
        "config_entry",
        "model_config",
        "options_unknown",
        "ort_format",
        "provider",
        "random_seed",
        "session_option",
        # Answers of the daemon.
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
        # The daemon's findings about a model.
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
    """Counters of this process, see :func:`trims_shim.stats`."""

    served: int
    hits: int
    misses: int
    joined: int
    elided_copies: int
    bytes_shared: int
    fallbacks: dict[str, int]
    events: dict[str, int]


def count(event: str, reason: str = "", amount: int = 1) -> None:
    """Add to a counter. What the cache did for the program is reported at once, if it is rare."""
    thread = threading.get_ident()
    ours = _by_thread.get(thread)
    if ours is None:
        _add_up_ended()
        ours = _by_thread.setdefault(thread, Counter())
    ours[f"{event}:{reason}" if reason else event] += amount
    if event in _TOLD_AT_ONCE:
        _report()


def fallback(reason: str, error: BaseException | None = None, *, what: str = "") -> None:
    """Count a load that goes to the framework's own loader; warn once per unexpected reason.

    Raises the exception of a signal handler or another thread, if ``error`` comes from one.
    """
    pass_on(error)
    count("fallback", reason)
    if reason in EXPECTED_REASONS:
        why = f": {error}" if error is not None else ""
        log(logging.DEBUG, "%s: the framework's own loader is used (%s)%s", what, reason, why)
        return
    if reason in _warned:
        return
    _warned.add(reason)
    _report()
    log(
        logging.WARNING,
        "%s: the framework's own loader is used (%s): %s. Run `trims info` for details.",
        what or "load",
        reason,
        str(error).removeprefix(f"{what}: ") or type(error).__name__,
    )


def log(level: int, text: str, *arguments: object, error: BaseException | None = None) -> None:
    """Log a message, with the traceback of ``error``.

    Passes on an exception of a signal handler. Drops errors of the program's logging handlers:
    messages of ours must not make the program fail.
    """
    try:
        _logger.log(level, text, *map(_shown, arguments), exc_info=error)
    # Border: see above.
    except Exception as failure:
        pass_on(failure)


def _shown(argument: object) -> object:
    """As it may be in a log: the name of a file steers no terminal, and begins no line."""
    if not isinstance(argument, (str, BaseException)):
        return argument
    text = str(argument)
    return argument if text.isprintable() else printable(text)


def is_unseen(record: logging.LogRecord) -> bool:
    """Whether no handler of the program's shows a record: stderr would have its line twice."""
    handlers = logging.getLogger().handlers if _logger.propagate else ()
    return not any(
        record.levelno >= each.level and _is_standard(getattr(each, "stream", None))
        for each in handlers
    )


def _is_standard(stream: Any) -> bool:
    """Whether it is the process's standard output or error."""
    try:
        return stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # none, one in memory, or closed
        return False


def reason_of(error: BaseException) -> str:
    """Return the reason under which an error is counted; ``internal_error`` for foreign ones."""
    return error.reason if isinstance(error, TrimsError) else "internal_error"


def pass_on(error: BaseException | None) -> None:
    """If this error comes from a signal handler or another thread, raise that exception."""
    raised = None if error is None else signalled(error)
    if raised is not None:
        raise raised


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is no fault of the called code: no Exception, or raised from outside."""
    return not isinstance(error, Exception) or signalled(error) is not None


def signalled(error: BaseException) -> BaseException | None:
    """Return the exception of a signal handler or another thread that this error is or stems from.

    Follows ``from`` only, not the context: that may be an error that the program was handling.
    """
    thrown = next((cause for cause in _causes(error) if _is_thrown_in(cause)), None)
    if thrown is not None:
        return thrown
    foreign = [(cause, code) for cause in _causes(error) for code in _foreign_codes(cause)]
    if not foreign:
        return None
    handlers = {_code_of(signal.getsignal(number)) for number in range(1, signal.NSIG)}
    return next((cause for cause, code in foreign if code in handlers), None)


def _is_thrown_in(error: BaseException) -> bool:
    """Whether another thread put the error here (PyThreadState_SetAsyncExc: stopit and others).

    Its class is then unknown to the code where it was raised. It has no arguments, because the
    interpreter makes it from a class alone; libraries give a reason. Of Python's own classes only
    TimeoutError counts: a bare error of another class may be a fault of the code here.
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


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a function, a method, a partial of one, or an object that is called."""
    if not callable(handler):  # SIG_DFL, SIG_IGN, None
        return None
    called = getattr(handler, "func", handler)
    named = called if hasattr(called, "__code__") else type(called).__call__
    code: CodeType | None = getattr(named, "__code__", None)
    return code


def _foreign_codes(error: BaseException) -> Iterator[CodeType]:
    """Yield the code outside this package that an error came through; for most errors, none."""
    place = error.__traceback__
    while place is not None:
        code = place.tb_frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            yield code
        place = place.tb_next


def _add_up_ended() -> None:
    """Where there are many, add the counters of threads that have ended to those before them."""
    # Not sys._current_frames(): it makes frames for threads of all interpreters, with the memory of
    # the one that asks, and theirs fail to free them (CPython 3.12 to 3.13).
    if len(_by_thread) < _MOST_ENDED + 2 * len(sys._current_exceptions()):
        return
    try:
        turn = _turn.pop()
    except IndexError:
        return
    try:
        ended = _by_thread.setdefault(_ENDED, Counter())
        kept = {_ENDED, *sys._current_exceptions()}
        for thread in [each for each in list(_by_thread) if each not in kept]:
            ours = _by_thread.pop(thread)
            # A new thread may have got the identifier meanwhile, and be counting.
            is_used = thread in sys._current_exceptions()
            if not is_used or _by_thread.setdefault(thread, ours) is not ours:
                ended.update(ours)
    finally:
        _turn.append(turn)


def _totals() -> dict[str, int]:
    """Add the counters of all threads up."""
    totals: Counter[str] = Counter()
    for ours in list(_by_thread.values()):
        for name, number in dict(ours).items():  # a copy: other threads may add events meanwhile
            totals[name] += number
    return dict(totals)


def stats() -> Stats:
    """Return a snapshot of the counters of this process."""
    events = _totals()
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


def _report() -> None:
    global _paid_until_s
    now_s = time.monotonic()
    if reporter is None or _paid_until_s >= now_s + _AT_ONCE_LIMIT_S:
        return
    _paid_until_s = max(_paid_until_s, now_s) + 1.0
    try:
        reporter()
    # Border: see above.
    except Exception as error:
        pass_on(error)


def take_unreported() -> dict[str, int]:
    """Return the counters since the last call, for the daemon's totals; none while another does."""
    try:
        turn = _turn.pop()
    except IndexError:
        return {}
    try:
        found = _totals().items()
        delta = {name: n - _reported[name] for name, n in found if n > _reported[name]}
        _reported.update(delta)
        return delta
    finally:
        _turn.append(turn)


def reset_after_fork() -> None:
    """Start from zero in a forked child, so that the parent's counts are not reported twice."""
    global _paid_until_s
    _paid_until_s = 0.0
    _by_thread.clear()
    _reported.clear()
    _turn[:] = [object()]


class LogFile(logging.FileHandler):
    """Appends to a file, which is opened for its first line, and anew where it was renamed.

    If it cannot be opened, lines go to stderr, with the reason; FileHandler would raise the error
    into the code that logs.
    """

    def __init__(self, path: str) -> None:
        # Names of files may be anything.
        super().__init__(path, delay=True, errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line. Never raises."""
        try:
            self._follow_name()
            super().emit(record)
        except OSError as error:
            said = copy.copy(record)
            said.msg, said.args = "%s (TRIMS_LOG_FILE: %s)", (record.getMessage(), error)
            stderr = logging.StreamHandler()
            stderr.setFormatter(self.formatter)
            stderr.emit(said)

    def _follow_name(self) -> None:
        """Open the file anew if its name is another's now, or nobody's, as logrotate leaves it.

        Not logging's WatchedFileHandler, whose module imports sockets and pickling.
        """
        if self.stream is None or self._is_named(self.stream.fileno()):
            return
        with contextlib.suppress(OSError):  # As in a chroot: the old file still takes lines.
            renamed, self.stream = self.stream, self._open()
            renamed.close()

    def _is_named(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(descriptor))
        except OSError:
            return False
