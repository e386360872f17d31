"""Outcomes of futures that a thread sets for all who wait, in this package's services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

__all__ = ["fail", "in_words", "settle"]

_logger = logging.getLogger(__name__)


def settle(future: Future[Any], result: Any) -> None:
    """Set a future's result, past callbacks that want to exit: the thread is everybody's."""
    _tell(future.set_result, result)


def fail(future: Future[Any], error: BaseException, what: str) -> None:
    """As :func:`settle`, with the error that ``what`` raised.

    StopIteration and CancelledError become a RuntimeError: the future of an event loop refuses the
    first, and who awaits that would wait for ever; with the other, who awaits would seem cancelled.
    """
    if isinstance(error, StopIteration | asyncio.CancelledError | CancelledError):
        error = in_words(error, what)
    _tell(future.set_exception, error)


def in_words(error: BaseException, what: str) -> RuntimeError:
    """The error that ``what`` raised, for a future that may not have itself."""
    try:
        said = repr(error)
    # Border: it shows what the program put into it, and somebody waits for the future.
    except Exception:
        said = type(error).__name__
    told = RuntimeError(f"{what} raised {said}")
    told.__cause__ = error
    return told


def _tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    try:
        set_outcome(outcome)
    except BaseException:
        _logger.exception("a callback of a future failed")
