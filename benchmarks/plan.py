"""A run of the host benchmark: its plan, its model files, and its findings so far.

Owns the sizes and repetitions, the preparation of model files, and the two checks that a comparison
must pass: equal bytes, and weights that really lie in the shared segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Daemon, daemon, run_once
from benchmarks.process_memory import drop_cached, warm_cached
from benchmarks.report import Curve, Row

__all__ = [
    "FULL",
    "SERVED_FRACTION",
    "SMOKE",
    "Findings",
    "Model",
    "Plan",
    "check_equal",
    "prepare",
    "run_until_served",
    "served_note",
    "warm_daemon",
]

SERVED_FRACTION = 0.95
"""Share of the weights' bytes that must lie in the segment; small tensors may be copied."""
_WARM_RUNS = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how often."""

    rounds: int
    models: tuple[str, ...]
    pretrained: tuple[str, ...]
    """Models that transformers loads."""
    tiny: tuple[str, ...]
    miss_models: tuple[str, ...]
    shared_model: str
    processes: int
    open_clients: int
    open_duration_s: float
    with_shim: bool
    is_smoke: bool


FULL = Plan(
    rounds=5,
    models=("mobilenet", "resnet50", "vgg16", "gpt2-medium"),
    pretrained=("gpt2-medium",),
    tiny=("tiny-100k", "tiny-1m"),
    miss_models=("resnet50", "vgg16", "gpt2-medium"),
    shared_model="vgg16",
    processes=8,
    open_clients=16,
    open_duration_s=3.0,
    with_shim=True,
    is_smoke=False,
)
SMOKE = Plan(
    rounds=2,
    models=("mobilenet",),
    pretrained=(),
    tiny=("tiny-100k",),
    miss_models=("mobilenet",),
    shared_model="mobilenet",
    processes=2,
    open_clients=2,
    open_duration_s=0.5,
    with_shim=True,
    is_smoke=True,
)


@dataclass(slots=True)
class Findings:
    """The results of a run so far."""

    rows: list[Row] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Model:
    """One architecture with its files; ``pretrained`` is empty if the plan has none."""

    name: str
    size_bytes: int
    tensors: int
    pt: str
    safetensors: str
    pretrained: str

    @property
    def title(self) -> str:
        """Name and size for people."""
        mega = self.size_bytes / 1e6
        return f"{self.name} ({mega:.0f} MB)" if mega >= 1 else f"{self.name} ({mega:.1f} MB)"


def prepare(name: str, *, is_pretrained: bool = False) -> Model:
    def made(file_format: str) -> dict[str, Any]:
        return run_once("checkpoint", architecture=name, file_format=file_format)

    pt, safetensors = made("pt"), made("safetensors")
    for file in (pt, safetensors):
        drop_cached(file["path"])
        warm_cached(file["path"])
    pretrained = made("transformers")["path"] if is_pretrained else ""
    return Model(name, pt["size_bytes"], pt["tensors"], pt["path"], safetensors["path"], pretrained)


def check_equal(what: str, runs: Sequence[dict[str, Any]], findings: Findings) -> None:
    if len({run["checksum"] for run in runs}) != 1:
        findings.faults.append(f"{what}: the weights differ between the variants")


def served_note(what: str, runs: Sequence[dict[str, Any]], findings: Findings) -> str:
    shared = min(run["shared"] for run in runs)
    if shared >= SERVED_FRACTION:
        return ""
    findings.faults.append(f"{what}: only {shared:.0%} of the weights were in a shared segment")
    return "[red]not served by the cache[/]"


def run_until_served(side: Callable[[], dict[str, Any]]) -> None:
    """Load until loads map. An image that is a variant is made only after the second load."""
    for _ in range(_WARM_RUNS):
        if side()["shared"] >= SERVED_FRACTION:
            return


@contextlib.contextmanager
def warm_daemon(plan: Plan, *paths: str) -> Iterator[Daemon | None]:
    if not plan.with_shim:
        yield None
        return
    with daemon() as own:
        for path in paths:
            own.warm(path)
        yield own
