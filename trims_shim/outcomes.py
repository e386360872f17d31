"""Outcomes of futures that a thread sets for all who wait, in this package's services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

__all__ = ["awaitable", "tell"]

_logger = logging.getLogger(__name__)


def tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    """Set a future's outcome, past callbacks that want to exit: the thread is everybody's."""
    try:
        set_outcome(outcome)
    except BaseException:
        _logger.exception("a callback of a future failed")


def awaitable(error: BaseException, what: str) -> BaseException:
    """The error that ``what`` raised, for futures that may be awaited; else a RuntimeError.

    The future of an event loop refuses StopIteration: who awaits that would wait for ever. With
    CancelledError, who awaits would seem cancelled.
    """
    if not isinstance(error, StopIteration | asyncio.CancelledError | CancelledError):
        return error
    told = RuntimeError(f"{what} raised {error!r}")
    told.__cause__ = error
    return told
