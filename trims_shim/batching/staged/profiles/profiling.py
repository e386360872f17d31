"""Measure a staged model: each stage at each batch size, and into how many stages to cut it.

Both run the model without knowing what it is made of. No clock of its own, no threads.
:mod:`trims_shim.batching.staged.profiles.diversity` judges the measurements, and
:mod:`trims_shim.batching.staged.profiles.profile_files` keeps them.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.batching.drivers.lanes import CpuLane, Lane
from trims_shim.batching.profiles.profiling import measure
from trims_shim.batching.staged.activations import EarlyExit
from trims_shim.batching.staged.model import Stage, StagedModel
from trims_shim.batching.torch_settings import without_graph
from trims_shim.errors import StagingError

__all__ = [
    "MAX_TRIES",
    "StagePasses",
    "StagesTry",
    "best_try",
    "measure_stages",
    "try_stages",
]

MAX_TRIES = 8
"""DVABatch (ATC'22), section 6: no model needed more, and all took less than ten minutes."""
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)
"""The paper finds 20 stages too many."""
_STAGE_COST_NS = 100_000
"""The batcher's overhead for a stage of a batch: a pass of the policy, rows taken and joined. An
empty stage adds 65 us to a lone request (Python 3.11), and more with others under way."""
_PATIENCE = 2
"""The number of tries in a row without a better one that ends the search."""

MakeBatch = Callable[[int], Sequence[Any]]
"""Takes a batch size and returns the arguments of the first stage."""


def measure_stages(
    stages: Iterable[Stage],
    make_batch: MakeBatch,
    sizes: Sequence[int],
    *,
    clock: Callable[[], int],
    repeats: int = 5,
    limit_ns: int | None = None,
    lane: Lane | None = None,
) -> list[dict[int, int]]:
    """Return for each stage its median durations by batch size, in nanoseconds of ``clock``.

    Sizes take turns, and ``repeats`` and ``limit_ns`` are as in
    :func:`~trims_shim.batching.profiles.profiling.measure`. Of a Loop, one step is measured. After
    an early exit, later stages are measured with the remaining rows; a stage that no row reached
    has no durations.
    """
    passes = StagePasses(stages, make_batch, clock=clock, lane=lane)
    measure(passes.run, sizes, repeats=repeats, clock=clock, limit_ns=limit_ns)
    return passes.median_ns()


class StagePasses:
    """Runs the whole model and records how long each stage took.

    The first run of a size allocates and compiles, so it does not count, as in ``measure``.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        make_batch: MakeBatch,
        *,
        clock: Callable[[], int],
        lane: Lane | None = None,
    ) -> None:
        self._stages = list(stages)
        self._make_batch = make_batch
        self._clock = clock
        self._lane = lane or CpuLane()
        self._runs: Counter[int] = Counter()
        self._durations_ns = [defaultdict[int, list[int]](list) for _ in self._stages]

    def run(self, size: int) -> None:
        """Run one batch of this size through all stages. Raises what they raise."""
        arguments = self._make_batch(size)
        is_counted = self._runs[size] > 0
        self._runs[size] += 1
        rows = size
        with self._lane.enter(), without_graph():
            for number, stage in enumerate(self._stages):
                value, duration_ns = self._timed(stage, arguments)
                if is_counted:
                    self._durations_ns[number][rows].append(duration_ns)
                if isinstance(value, EarlyExit):
                    rows -= sum(map(bool, value.finished))
                    value = value.rest
                if not rows:
                    break
                arguments = (value,)

    def _timed(self, stage: Stage, arguments: Sequence[Any]) -> tuple[Any, int]:
        started_ns = self._clock()
        value = stage(*arguments)
        self._lane.finish(value)
        return value, max(1, self._clock() - started_ns)

    def median_ns(self) -> list[dict[int, int]]:
        """Return the median durations of each stage by batch size."""
        return self._each(statistics.median)

    def least_ns(self) -> list[dict[int, int]]:
        """Return the least durations of each stage by batch size: noise makes no run faster."""
        return self._each(min)

    def _each(self, typical: Callable[[Sequence[int]], float]) -> list[dict[int, int]]:
        return [
            {size: round(typical(found)) for size, found in sorted(each.items())}
            for each in self._durations_ns
        ]

    @property
    def unsteadiness(self) -> float:
        """By which share medians exceed minima: the median over all stages and sizes."""
        shares = [
            statistics.median(found) / min(found) - 1
            for each in self._durations_ns
            for found in each.values()
        ]
        return statistics.median(shares) if shares else 0.0


# --- the number of stages -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StagesTry:
    """A model cut into some number of stages, and its durations by batch size."""

    model: StagedModel
    whole_ns: dict[int, int]
    """Of the model in one stage, measured in turns with the stages."""
    total_ns: dict[int, int]
    """Of all stages."""
    longest_ns: dict[int, int]
    """Of the longest stage."""

    @property
    def cost(self) -> float:
        """The latency of a request that arrives while a batch runs, in units of ``whole_ns``.

        It waits for the end of a stage, which is taken as half of the longest one, and then passes
        all stages. With more stages the wait is shorter and the passage longer.
        """
        return statistics.fmean(
            (total_ns + self.longest_ns[size] / 2 + _STAGE_COST_NS * len(self.model))
            / self.whole_ns[size]
            for size, total_ns in self.total_ns.items()
        )


def try_stages(
    slice_into: Callable[[int], StagedModel],
    make_batch: MakeBatch,
    sizes: Sequence[int],
    *,
    clock: Callable[[], int],
    limit_ns: int,
    repeats: int = 5,
    lane: Lane | None = None,
    on_try: Callable[[StagesTry], None] | None = None,
) -> list[StagesTry]:
    """Cut the model into 1, 2, 3, 4, 6, 8, ... stages until more are no better; see ``best_try``.

    ``slice_into(n)`` may return fewer stages or raise StagingError if nothing is left to cut. Makes
    at most ``MAX_TRIES`` tries, and starts none after ``limit_ns`` but the first. Raises
    StagingError if not even one stage can be made.
    """
    end_ns = clock() + limit_ns
    whole = slice_into(1)
    tries: list[StagesTry] = []
    for candidate in _CANDIDATES[:MAX_TRIES]:
        left_ns = end_ns - clock()
        model = _cut(slice_into, candidate, tries) if tries else whole
        if model is None or (tries and left_ns <= 0):
            break
        found = _tried(
            model,
            StagePasses(whole, make_batch, clock=clock, lane=lane),
            StagePasses(model, make_batch, clock=clock, lane=lane),
            # Sizes for which a slow model had no time in the first try are left out later.
            sizes=list(tries[0].total_ns) if tries else sizes,
            repeats=repeats,
            clock=clock,
            limit_ns=max(0, left_ns) // (MAX_TRIES - len(tries)),
        )
        tries.append(found)
        if on_try is not None:
            on_try(found)
    return tries


def _cut(
    slice_into: Callable[[int], StagedModel], count: int, tries: Sequence[StagesTry]
) -> StagedModel | None:
    """Return the next model to try; None if that is not worth it or not possible."""
    if len(tries) - 1 - tries.index(best_try(tries)) >= _PATIENCE:
        return None
    try:
        model = slice_into(count)
    except StagingError:
        return None
    return model if len(model) > len(tries[-1].model) else None


def _tried(
    model: StagedModel,
    whole: StagePasses,
    parts: StagePasses,
    *,
    sizes: Sequence[int],
    repeats: int,
    clock: Callable[[], int],
    limit_ns: int,
) -> StagesTry:
    """Measure both in turns, so that a machine that is busy for a while makes both slower."""

    def run(size: int) -> None:
        whole.run(size)
        parts.run(size)

    measure(run, sizes, repeats=repeats, clock=clock, limit_ns=limit_ns)
    (whole_ns,), parts_ns = whole.least_ns(), parts.least_ns()
    measured = list(whole_ns)
    return StagesTry(
        model,
        whole_ns,
        {size: sum(stage[size] for stage in parts_ns) for size in measured},
        {size: max(stage[size] for stage in parts_ns) for size in measured},
    )


def best_try(tries: Sequence[StagesTry]) -> StagesTry:
    """Return the try that costs least; of equal ones, that with fewer stages."""
    return min(tries, key=lambda each: each.cost)
