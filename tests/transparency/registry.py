"""The table of cases: what is compared, and how a case is declared.

Owns the declaration only. A case is a function of a :class:`Work` directory that returns what a
program can observe; :mod:`.observe` makes it comparable, :mod:`.child` runs it, :mod:`.compare`
compares. A case runs twice over the same directory (first load, then a load of a file that is
already resident), so files are made with :meth:`Work.file` unless the case changes them. Between
the passes of cases of onnxruntime (topics ``ort_*``) the daemon finishes what it prepares.
"""

from __future__ import annotations

import importlib
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "CASES",
    "TOPICS",
    "Case",
    "Work",
    "attempt",
    "begin_in_child",
    "case",
    "cases",
    "declare",
    "load_topics",
]

TOPICS = tuple(
    sorted(path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py"))
)
"""Every module ``cases_<topic>`` beside this one."""

OWN_BATCH = {"transformers", "fresh", "ort_fresh", "random"}
"""Topics whose import is slow, that must find nothing imported, or that have small files, have
their own process; all others share the batch ``torch``, or ``onnxruntime``."""


@dataclass
class Work:
    """The directory a case works in, and how it reaches the shim."""

    directory: Path
    enable_shim: Callable[[], None] = lambda: None
    """Imports the shim where there is one; only for cases declared with ``early=False``."""
    notes: dict[str, int] = field(default_factory=dict)

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """The file of that name, written on the first run only: the second finds it resident."""
        path = self.directory / name
        if not path.exists():
            _write_in_child(write, path)
        return path

    def fresh(self, name: str, write: Callable[[Path], object]) -> Path:
        """The file of that name, written anew on each run, for cases that change it."""
        path = self.directory / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        write(path)
        return path


@dataclass(frozen=True)
class Case:
    """One row of the table.

    ``served``: True where the cache must have served at least one load, False where it must have
    served none, None where either is right. ``elided``: the same for load_state_dict's copies.
    ``early``: the shim is imported before the case starts (else the case calls
    ``work.enable_shim()``). ``reason``: what must be counted as the reason of a fallback.
    """

    name: str
    function: Callable[[Work], object]
    topic: str
    served: bool | None = None
    elided: bool | None = None
    early: bool = True
    timeout_s: float = 120.0
    reason: str = ""

    @property
    def is_prepared(self) -> bool:
        """Whether what it loads is made ready between the passes: it is of onnxruntime."""
        return self.topic.startswith("ort_")

    @property
    def min_bytes(self) -> str:
        """``TRIMS_MIN_BYTES``."""
        return "1" if self.is_prepared or self.topic == "random" else "256K"

    @property
    def batch(self) -> str:
        """The process the case runs in."""
        if self.topic in OWN_BATCH:
            return self.topic
        return "onnxruntime" if self.is_prepared else "torch"

    def served_in(self, label: str) -> bool | None:
        """``served``, for a pass: the first one only makes the daemon prepare a model."""
        is_early = self.is_prepared and label == "first"
        return None if is_early and self.served else self.served


CASES: dict[str, Case] = {}


def begin_in_child(work: Callable[[], object]) -> int:
    """Fork a process that does ``work`` and ends, with status 1 if it fails; returns its id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _write_in_child(write: Callable[[Path], object], path: Path) -> None:
    """Write in a forked process: warnings, random numbers and caches of the first run's writing
    must not make it observe something else than the second run, which writes nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # also of a fork beside threads, from Python 3.12 on
        pid = begin_in_child(lambda: write(path))
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError(f"{path.name} could not be written")


def declare(name: str, function: Callable[[Work], object], **options: Any) -> None:
    """Add a case; ``name`` is completed with the topic of the module ``function`` is from."""
    topic = function.__module__.rpartition(".cases_")[2]
    full = f"{topic}.{name}"
    if full in CASES:
        raise ValueError(f"two cases are named {full}")
    CASES[full] = Case(full, function, topic, **options)


def case(**options: Any) -> Callable[[Callable[[Work], object]], Callable[[Work], object]]:
    """Declare the decorated function as a case."""

    def add(function: Callable[[Work], object]) -> Callable[[Work], object]:
        declare(function.__name__, function, **options)
        return function

    return add


def cases(parameters: Mapping[str, Any], **options: Any) -> Callable[[Any], Any]:
    """Declare one case for each named parameter; the function takes it as second argument."""

    def add(function: Any) -> Any:
        for label, value in parameters.items():
            declare(f"{function.__name__}[{label}]", _bound(function, value), **options)
        return function

    return add


def _bound(function: Any, value: Any) -> Callable[[Work], object]:
    def run(work: Work) -> object:
        return function(work, value)

    run.__module__ = function.__module__
    return run


def attempt(function: Callable[..., object], *arguments: Any, **keywords: Any) -> object:
    """What the call returns, or the exception it raises: an error that a case expects.

    An exception that leaves a case is a mistake in the case and fails its test.
    """
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        return error


def load_topics(topics: tuple[str, ...] = TOPICS) -> dict[str, Case]:
    """Import the modules of these topics and return the table."""
    for topic in topics:
        importlib.import_module(f"{__package__}.cases_{topic}")
    return CASES
