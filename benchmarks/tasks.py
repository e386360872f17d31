"""The measuring side of :class:`benchmarks.harness.Worker`: one task in a process of its own.

A module of tasks ends with ``main(task, ...)`` and is run as ``python -m MODULE TASK JSON FD``: the
task with this name gets the arguments, and its results go to the descriptor, one a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["emit", "main", "pause", "send"]

_answers = -1
"""The descriptor."""


def send(descriptor: int, result: Mapping[str, Any]) -> None:
    """Write one result."""
    os.write(descriptor, json.dumps(result).encode() + b"\n")


def emit(result: Mapping[str, Any]) -> None:
    """Send a result before the task's end."""
    send(_answers, result)


def pause(result: Mapping[str, Any]) -> None:
    """Send a result, and wait until released."""
    emit(result)
    sys.stdin.readline()


def main(*tasks: Callable[..., Mapping[str, Any] | None]) -> None:
    """Run the task of the command line, and send what it returns.

    The shim, if it is enabled, is imported before everything else, as by a user's program.
    """
    global _answers
    name, arguments, descriptor = sys.argv[1:]
    _answers = int(descriptor)
    if os.environ.get("TRIMS_ENABLED") == "1":
        import trims_shim  # noqa: F401
    result = {task.__name__: task for task in tasks}[name](**json.loads(arguments))
    if result is not None:
        emit(result)
