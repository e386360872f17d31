"""Outcomes of futures that a thread sets for all who wait, in this package's services."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

__all__ = ["fail", "for_futures", "settle", "stands_for"]

_logger = logging.getLogger(__name__)


def settle(future: Future[Any], result: Any) -> None:
    """Set a future's result, past callbacks that want to exit: the thread is everybody's."""
    _tell(future.set_result, result)


def fail(future: Future[Any], error: BaseException, what: str) -> None:
    """As :func:`settle`, with the error that ``what`` raised, :func:`for_futures`."""
    _tell(future.set_exception, for_futures(error, what))


def for_futures(error: BaseException, what: str) -> BaseException:
    """The error that ``what`` raised, as futures may have it.

    StopIteration and CancelledError become a RuntimeError: the future of an event loop refuses the
    first, and who awaits that would wait for ever; with the other, who awaits would seem cancelled.
    """
    loops = sys.modules.get("asyncio.exceptions")  # it takes 50 ms; who has none raises none of it
    reserved = StopIteration, CancelledError, getattr(loops, "CancelledError", ())
    # By its type: a user's error may raise one when it is asked for its class.
    if not issubclass(type(error), reserved):
        return error
    try:
        said = repr(error)
    # Border: it shows what the program put into it, and somebody waits for the future.
    except Exception:
        said = type(error).__name__
    told = RuntimeError(f"{what} raised {said}")
    told.__cause__ = error
    return told


def stands_for(result: object, errors: type | tuple[type, ...]) -> bool:
    """Whether a result is one of these errors, or the class of one; asked of its type."""
    kind = type(result)
    return issubclass(result if issubclass(kind, type) else kind, errors)  # type: ignore[arg-type]


def _tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    try:
        set_outcome(outcome)
    except BaseException:
        _logger.exception("a callback of a future failed")
