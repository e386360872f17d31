"""What an ensemble's program and its workers tell each other, through a socket of the two alone.

A message is a pickled object. After :class:`OpenBuffer` comes a descriptor; after :class:`Answer`
come its parts, as raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trims_shim.ensemble.dispatch import Job

__all__ = [
    "Answer",
    "AskMemory",
    "CloseBuffer",
    "Failure",
    "Layout",
    "Memory",
    "OpenBuffer",
    "Ready",
    "RunJob",
    "SetUp",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of some samples (:func:`~.payloads.dumped`) lie in a buffer."""

    buffer: int
    spans: tuple[tuple[int, int], ...]
    """Offset and size of each, in bytes."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """To a worker, first: what it runs, and where."""

    member: str
    device: str
    load: bytes
    """Pickled: it may need the main module, which has to be imported first."""
    main: Mapping[str, Any]
    """What ``multiprocessing`` hands to processes that it spawns."""


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """To a worker: here is shared memory, by a descriptor."""

    number: int


@dataclass(frozen=True, slots=True)
class CloseBuffer:
    """To a worker: that memory is no longer used."""

    number: int


@dataclass(frozen=True, slots=True)
class RunJob:
    """To a worker: answer some rows of the samples at ``layout``."""

    job: Job
    layout: Layout


@dataclass(frozen=True, slots=True)
class AskMemory:
    """To a worker: how much memory do you use?"""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: the model is loaded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """From a worker: the result of a job, in parts that follow."""

    job: Job
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """From a worker: loading (no job), or a job, has failed."""

    job: Job | None
    summary: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Memory:
    """From a worker: its memory, in bytes; see :mod:`.footprint`."""

    shared_bytes: int
    peak_bytes: int
