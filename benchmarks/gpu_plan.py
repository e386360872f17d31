"""What a run of the GPU benchmark measures, how long it may take, and where its files lie.

Owns the order (the most informative first), the estimate that decides whether a model still fits
into the remaining time, and the directory of checkpoints.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plan import Findings

__all__ = [
    "EVERY_WAY",
    "FULL",
    "TRIAL",
    "Clock",
    "Plan",
    "Run",
    "estimate_s",
    "make_directory",
    "rounds_within",
    "share_s",
]

Result = dict[str, Any]
GIB = 1 << 30

EVERY_WAY = ("vgg16-224", "gpt2", "vgg16-896")
"""Models with every way of loading. Others have the baselines, a hit, and the ideal."""

# Bytes a second that a load of each kind reaches at least, to estimate what fits in the time left.
# They come from published figures of comparable machines, and are no part of any result.
_SLOW_BYTES_PER_S: Mapping[str, float] = {
    "torch.load": 1.0e9,
    "mmap + .to": 2.0e9,
    "safetensors": 2.5e9,
    "fastsafetensors": 4.0e9,
    "ideal": 2.5e9,
    "trims, first load": 1.0e9,
    "trims, first load after a pause": 0.3e9,
    "trims, host hit": 5.0e9,
    "trims, device hit": 100e9,
    "trims safetensors, device hit": 100e9,
    "trims mmap + .to, device hit": 100e9,
}
_SAMPLE_S = 1.0
_SHARE = 0.4
"""Of the time that is left: one model may take it, whatever the others need."""
_WRITE_BYTES_PER_S = 0.8e9


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``device``: cuda, or cpu in a trial run."""

    device: str
    models: tuple[str, ...]
    rounds: int
    map_sizes: tuple[int, ...]
    map_tensors: tuple[int, ...]
    map_subject: tuple[int, int]
    processes: tuple[int, ...]
    shared_model: str
    copied_bytes: int
    is_trial: bool
    is_essential: bool = False
    """Only the baselines, a hit, a first load and the ideal, of every model."""


FULL = Plan(
    device="cuda",
    models=(
        "vgg16-224",
        "gpt2",
        "bert-base",
        "decoder-7b",
        "vit-b16",
        "resnet50",
        "bert-large",
        "vgg16-896",
        "alexnet-227",
        "googlenet",
        "alexnet-454",
        "vgg16-448",
        "alexnet-908",
        "vgg16-672",
        "alexnet-681",
    ),
    rounds=5,
    map_sizes=(64 << 20, 256 << 20, 1 << 30, 4 << 30, 16 << 30),
    map_tensors=(10, 100, 1000),
    map_subject=(15 * 10**9, 400),
    processes=(1, 2, 4, 8),
    shared_model="vgg16-224",
    copied_bytes=8 << 30,
    is_trial=False,
)
TRIAL = Plan(
    device="cpu",
    models=("tiny", "googlenet"),
    rounds=2,
    map_sizes=(4 << 20, 16 << 20),
    map_tensors=(4, 40),
    map_subject=(32 << 20, 40),
    processes=(1, 2),
    shared_model="tiny",
    copied_bytes=16 << 20,
    is_trial=True,
)


class Clock:
    """The time a run may take."""

    def __init__(self, budget_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + budget_s

    def left_s(self) -> float:
        """Seconds until the budget is spent; negative afterwards."""
        return self._end - self._now()

    def has(self, seconds: float) -> bool:
        """Whether a part that takes ``seconds`` still fits."""
        return self.left_s() >= seconds

    def part(self, seconds: float) -> Clock:
        """A clock for a part that may take ``seconds``, but no longer than this clock."""
        return Clock(min(seconds, self.left_s()), self._now)


@dataclass(slots=True)
class Run:
    """Everything a section needs. ``left_out`` says what was not measured, and why.

    ``save`` writes the findings so far; a section calls it as often as it likes.
    """

    plan: Plan
    clock: Clock
    directory: Path
    device_id: str
    findings: Findings = field(default_factory=Findings)
    left_out: list[str] = field(default_factory=list)
    save: Callable[[], None] = lambda: None


def estimate_s(size_bytes: int, sides: tuple[str, ...], rounds: int) -> float:
    """Upper bound of the seconds to make a model's files and to load it in every way."""
    loads = sum(_SAMPLE_S + size_bytes / _SLOW_BYTES_PER_S[side] for side in sides)
    return 2 * size_bytes / _WRITE_BYTES_PER_S + rounds * loads


def share_s(left_s: float, least_s: float, *, of_later_s: float) -> float:
    """How long a model may take that needs ``least_s``, as those after it need ``of_later_s``.

    Where not all fit, the first ones get more rounds, rather than all of them few.
    """
    return max(least_s, _SHARE * left_s, left_s - of_later_s)


def rounds_within(
    sides: Mapping[str, Callable[[], Result]],
    rounds: int,
    clock: Clock,
    *,
    keep: Callable[[dict[str, list[Result]]], None] = lambda results: None,
) -> dict[str, list[Result]]:
    """As :func:`harness.alternate`, but without a round that would outlast the clock.

    The first round always runs: the caller has checked that it fits. ``keep`` gets what there is
    after each: the run may be cut off.
    """
    results: dict[str, list[Result]] = {name: [] for name in sides}
    longest_s = 0.0
    for number in range(rounds):
        if number and not clock.has(longest_s):
            break
        before = clock.left_s()
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            results[name].append(sides[name]())
        longest_s = max(longest_s, before - clock.left_s())
        keep(results)
    return results


def make_directory(needed_bytes: int) -> Path:
    """Make a directory of checkpoints in ``$TRIMS_BENCH_DIR``, memory, or the temp directory.

    In memory (tmpfs) every read comes from the page cache. So the disk does not affect the figures,
    and a small disk is enough.
    """
    chosen = os.environ.get("TRIMS_BENCH_DIR")
    if not chosen:
        chosen = "/dev/shm" if _is_roomy("/dev/shm", needed_bytes) else tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="trims-gpu-", dir=chosen))


def _is_roomy(directory: str, needed_bytes: int) -> bool:
    """Whether the file system has this much room, and the machine twice as much free memory."""
    if not os.access(directory, os.W_OK):
        return False
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if "MemAvailable" in line)
    return shutil.disk_usage(directory).free >= needed_bytes and available >= 2 * needed_bytes
