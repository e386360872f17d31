"""Values on the command line, as types for argparse; imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

__all__ = ["address", "count", "counts", "line", "not_negative", "output", "positive", "shares"]

_LOOPBACK = "127.0.0.1"
_N = TypeVar("_N", int, float)
_MOST = 1e9
"""As milliseconds 11 days. Far larger ones, in nanoseconds, are more than can be reckoned with."""


def _read(text: str, parse: Callable[[str], _N], is_fine: Callable[[_N], bool], what: str) -> _N:
    try:
        number = parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    if not is_fine(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _read(text, int, lambda number: number >= 1, "a whole number from 1 on")


def positive(text: str) -> float:
    """A number above 0, within a sensible range."""
    what = f"a number above 0, from {1 / _MOST:g} to {_MOST:g}"
    return _read(text, float, lambda number: 1 / _MOST <= number <= _MOST, what)


def not_negative(text: str) -> float:
    """A number from 0 on, within a sensible range."""
    what = f"a number from 0 on, of at most {_MOST:g}"
    return _read(text, float, lambda number: 0 <= number <= _MOST, what)


def counts(text: str) -> tuple[int, ...]:
    """``3,224,224``."""
    return tuple(count(part) for part in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    """``0.2,0.4``."""
    return tuple(positive(part) for part in text.split(","))


def line(text: str) -> tuple[float, float]:
    """``ALPHA,BETA``, not both of them 0."""
    alpha, comma, beta = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers: ALPHA,BETA")
    line = not_negative(alpha), not_negative(beta)
    if not sum(line):
        raise argparse.ArgumentTypeError("a batch has to take some time")
    return line


def address(text: str) -> tuple[str, int]:
    """``9464``, ``0.0.0.0:9464`` or ``[::]:9464``: a host, by default this machine, and a port."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    try:
        host.encode("idna")  # as sockets do
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{host!r} cannot be the name of a host") from None
    what = "a port from 0 to 65535, or HOST:PORT"
    return host, _read(port, int, lambda number: 0 <= number <= 65535, what)


def output(text: str) -> str:
    """A file that can be written; checked before minutes of work begin."""
    directory = os.path.dirname(os.path.realpath(text))  # where the temporary file will be
    if not os.path.isdir(directory):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such directory")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a directory")
    if not os.path.basename(text):  # Perhaps a variable that was not set.
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file")
    if os.path.exists(text) and not os.path.isfile(text):
        # A rename would put a file in the place of /dev/null.
        raise argparse.ArgumentTypeError(f"{text!r} is a device or a pipe, not a file")
    if not os.access(directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: its directory cannot be written")
    return text
