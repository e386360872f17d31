"""A run of the onnxruntime benchmark: its plan, its daemon, and its findings so far.

Owns the sizes and repetitions, the daemon with its directory of prepared models, and the two checks
that a comparison must pass: equal output bits, and weights that the process really mapped from the
prepared model (as the kernel reports it, /proc/PID/maps).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import Clock, rounds_within
from benchmarks.harness import Daemon, WorkerFailed, daemon, run_once
from benchmarks.plan import Findings
from benchmarks.process_memory import drop_cached, warm_cached
from benchmarks.report import Row, Target, compared

__all__ = [
    "FULL",
    "MODULE",
    "NOT_SLOWER",
    "OFF",
    "SMOKE",
    "Model",
    "Plan",
    "Prepared",
    "Run",
    "alternated",
    "check_equal",
    "check_served",
    "cost",
    "find_model",
    "prepared_models",
    "session",
]

Result = dict[str, Any]
MODULE = "benchmarks.ort_tasks"
OFF = {"TRIMS_ORT_PREPACK": "off"}
NOT_SLOWER = 0.95
"""Ratio that still counts as "not slower": equal runs differ as much on a shared machine."""
_PREPARE_DEADLINE_S = 120.0
_POLL_S = 0.02
_LEFT_ALONE = "small_file"
_MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how often. ``runs`` are inferences of one process, after warm-ups."""

    rounds: int
    models: tuple[str, ...]
    every_way: tuple[str, ...]
    first_models: tuple[str, ...]
    shared_model: str
    processes: tuple[int, ...]
    memory_rounds: int
    runs: int
    is_smoke: bool


FULL = Plan(
    rounds=5,
    models=("bert-base", "gpt2", "resnet50", "mobilenetv2", "minilm", "perceptron"),
    every_way=("bert-base", "gpt2", "minilm"),
    first_models=("bert-base", "resnet50", "mobilenetv2"),
    shared_model="bert-base",
    processes=(1, 2, 4),
    memory_rounds=3,
    runs=7,
    is_smoke=False,
)
SMOKE = Plan(
    rounds=2,
    models=("mobilenetv2", "perceptron"),
    every_way=("mobilenetv2",),
    first_models=("mobilenetv2",),
    shared_model="mobilenetv2",
    processes=(1, 2),
    memory_rounds=1,
    runs=2,
    is_smoke=True,
)


@dataclass(slots=True)
class Run:
    """Everything a section needs. ``left_out`` says what was not measured, and why.

    ``save`` writes the findings so far; a section calls it after each model.
    """

    plan: Plan
    clock: Clock
    findings: Findings = field(default_factory=Findings)
    left_out: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether ``what`` still fits; if not, it is noted as left out."""
        if self.clock.has(seconds):
            print(f"{what}: {self.clock.left_s():.0f} s left", file=sys.stderr, flush=True)
            return True
        self.left_out.append(f"{what}: no time left")
        return False

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Run a part. If it fails, note a fault and go on; save the findings."""
        try:
            yield
        except Exception as error:  # the other parts are useful without this one
            self.findings.faults.append(f"{what}: {type(error).__name__}: {error}")
        self.save()


@dataclass(frozen=True, slots=True)
class Model:
    """An exported model."""

    name: str
    path: str
    size_bytes: int

    @property
    def title(self) -> str:
        """Name and size for people."""
        mega = self.size_bytes / _MEGA
        return f"{self.name} ({mega:.0f} MB)" if mega >= 10 else f"{self.name} ({mega:.1f} MB)"


@functools.cache
def _exported(name: str) -> Result:
    return run_once("export", module=MODULE, name=name)


def find_model(name: str) -> Model:
    """A model's file, brought into the page cache as after a normal read."""
    made = _exported(name)
    drop_cached(made["path"])
    warm_cached(made["path"])
    return Model(name, made["path"], made["size_bytes"])


@dataclass(frozen=True, slots=True)
class Entry:
    """A prepared model: seconds from the first request for it, and its files."""

    prepare_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A private daemon and its directory of prepared models."""

    daemon: Daemon
    directory: Path

    def prepare(self, model: Model, settings: Mapping[str, str] | None = None) -> Entry | None:
        """Create a session that misses, and wait until its model is prepared.

        None if the daemon leaves the model to onnxruntime (too small, or no gain).
        """
        entries, refusals = self._found("*/entry.json"), self._found("*.refused")
        facts = session(model, self, settings=settings)()
        deadline = time.time() + _PREPARE_DEADLINE_S
        while not (new := self._found("*/entry.json") - entries):
            if _LEFT_ALONE in facts["fallbacks"] or self._found("*.refused") - refusals:
                return None
            if time.time() > deadline:
                raise WorkerFailed(f"{model.name} was not prepared: see the daemon's log")
            time.sleep(_POLL_S)
        end = time.time()
        (manifest,) = new
        # Blocks, not lengths: the gaps of alignment take no space.
        size_bytes = sum(file.stat().st_blocks * 512 for file in manifest.parent.iterdir())
        return Entry(end - facts["began"], size_bytes)

    def _found(self, pattern: str) -> set[Path]:
        found = self.directory.glob(pattern)
        return {each for each in found if not each.parent.name.startswith(".")}


@contextlib.contextmanager
def prepared_models() -> Iterator[Prepared]:
    """A private daemon with an empty directory of prepared models."""
    with daemon() as own:
        cache = own.socket_directory / "cache" / "trims"
        starter = own.socket_directory / "starter"
        starter.write_bytes(os.urandom(4096))
        run_once("start", module=MODULE, environment=own.environment, path=str(starter))
        yield Prepared(own, cache / "prepared")


def session(
    model: Model,
    prepared: Prepared | None,
    *,
    how: str = "path",
    settings: Mapping[str, str] | None = None,
    entries: Mapping[str, str] | None = None,
    runs: int = 0,
) -> Callable[[], Result]:
    """Create one session in a fresh process, with the cache if ``prepared`` is given."""
    arguments: Result = {"model": model.path, "how": how, "entries": entries or {}, "runs": runs}
    environment = None
    if prepared is not None:
        environment = prepared.daemon.environment | dict(settings or {})
        arguments["prepared"] = str(prepared.directory)
    return lambda: run_once("session", module=MODULE, environment=environment, **arguments)


def alternated(run: Run, sides: Mapping[str, Callable[[], Result]]) -> dict[str, list[Result]]:
    """Return results of each side, round by round, after a round that is not counted."""
    for side in sides.values():
        side()
    return rounds_within(sides, run.plan.rounds, run.clock)


def check_equal(what: str, runs: Sequence[Result], findings: Findings) -> None:
    """Note a fault unless all sides gave the same bits."""
    if len({run["checksum"] for run in runs}) != 1:
        findings.faults.append(f"{what}: the outputs differ between the variants")


def check_served(what: str, runs: Sequence[Result], findings: Findings) -> str:
    """Note a fault, and return a remark, unless every process mapped the prepared model."""
    if all(run["mapped_bytes"] for run in runs):
        return ""
    findings.faults.append(f"{what}: not every session came from the prepared model")
    return "[red]not served by the cache[/]"


def cost(
    measurement: str,
    model: Model,
    baseline: Sequence[float],
    shim: Sequence[float],
    *,
    unit: str = "times as long",
    target: Target | None = None,
    note: str = "",
    measured: str = "s",
) -> Row:
    """Make a row for a cost of the cache: 1 means as without it, less is better."""
    row = compared(
        measurement,
        model.title,
        baseline,
        shim,
        target=target,
        slower_is="shim",
        note=note,
    )
    return dataclasses.replace(row, unit=unit, measured=measured)
