"""The names of files in errors: Python gives them where it opens a file, not where it reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["naming"]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Give an OSError without a file's name this one: reading fails without saying where."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
