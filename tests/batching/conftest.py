"""What tests of batching change for their time, and put back."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def python_handler() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where pytest was started with it ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


class TimeLimit(Exception):
    """As Celery's."""


@pytest.fixture
def time_limit() -> Iterator[type[Exception]]:
    """What SIGINT raises."""

    def limit(number: int, frame: object) -> None:
        raise TimeLimit

    old = signal.signal(signal.SIGINT, limit)
    yield TimeLimit
    signal.signal(signal.SIGINT, old)
