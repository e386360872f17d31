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
