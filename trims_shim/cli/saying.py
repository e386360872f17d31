"""What commands say to people, on stderr. Imports nothing heavy."""

from __future__ import annotations

import os
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Print a line to stderr. Work goes on if nobody reads it, or it cannot be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
