"""The engine behind a batcher of a staged model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from trims_shim.batching.drivers.engine import Engine
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.drivers.dispatch import StagedDispatch
from trims_shim.batching.staged.drivers.functions import StagedFunction
from trims_shim.batching.staged.drivers.learning import StagedLearning
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.profiles.profiling import measure_stages
from trims_shim.batching.staged.profiles.width import measure_width
from trims_shim.batching.staged.stage_statistics import StagedStats, StageRecord, StageStats

__all__ = ["StagedEngine", "UnboundEngine"]


class StagedEngine(Engine):
    """An engine whose threads run stages, or a model of one stage as a plain function."""

    function: StagedFunction

    @property
    def model(self) -> StagedModel:
        """The staged model."""
        return self.function.model

    def stage_stats(self) -> StagedStats:
        """Return the statistics of stages so far."""
        dispatch = next(iter(self.dispatches()), None)
        if isinstance(dispatch, StagedDispatch):
            return dispatch.stages.snapshot()
        if dispatch is None:  # before the first request
            return StageRecord(len(self.function.model)).snapshot()
        stats = dispatch.stats()
        stage = StageStats(stats.batch_sizes, stats.busy_total_s)
        return StagedStats(
            stats.batches, stretches=0, splits=0, failures=0, stages=(stage,), whole=stats.batches
        )

    def _measured(self, request: Request, *, repeats: int, limit_ns: int) -> LatencyProfile:
        staged, entry = self.function, request.payload
        learning = self.options.learning
        assert isinstance(learning, StagedLearning)
        sizes = learning.sizes_to_measure()

        def batch(size: int) -> Sequence[Any]:
            return staged.arguments_of([entry] * size)

        how: Any = {"repeats": repeats, "clock": self.options.clock_ns, "limit_ns": limit_ns}
        durations_ns = measure_stages(staged.model, batch, sizes, lane=staged.lanes[0], **how)
        width = None
        if len(staged.lanes) > 1 and staged.model.loop is None:
            width = measure_width(staged.model, batch, sizes, lanes=staged.lanes, **how)
        return learning.measured_stages(request.key, durations_ns, width=width)


class UnboundEngine(StagedEngine):
    """The class's engine of a method whose model belongs to the instance: it answers no call."""

    def threads(self) -> NoReturn:
        """See :class:`Engine`. Raises TypeError."""
        raise TypeError(
            f"{self.function.name}: its model is that of an instance; call it as the method of one"
        )

    def warm(self, request: Request, *, repeats: int, limit_s: float) -> LatencyProfile:
        """See :class:`Engine`. Raises TypeError."""
        self.threads()
