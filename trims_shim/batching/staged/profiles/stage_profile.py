"""How long each stage of a model takes: the basis of every decision between stages."""

from __future__ import annotations

from collections.abc import Sequence

from trims_shim.batching.profiles.profile import LatencyProfile

__all__ = ["WIDE", "StagedProfile"]

WIDE = 0.7
"""From this width on, two batches at once are better than one at any load. Below it, that depends
on the load: docs/decisions/0011."""


class StagedProfile(LatencyProfile):
    """The latency of a batch in each stage; as a :class:`LatencyProfile`, that of the whole model.

    ``preferred``: for each stage, the smallest batch size beyond which a batch twice as large takes
    about twice as long, so that larger batches gain nothing (DVABatch, ATC'22, section 3).
    ``width``: what stages gain from running at the same time, from 0 (nothing: together they take
    as long as one after the other) to 1 (the share of the device's best throughput that one leaves
    is free for the other); None if it was not measured.
    ``sure``: for each stage, the largest size that was known before or has run several times;
    latencies of larger sizes are optimistic guesses.

    Sizes beyond the largest known one take proportionally longer. They occur in batches that were
    under way when the maximum was reduced.

    Raises ValueError for no stages, values out of range, or not one size for each stage.
    """

    __slots__ = ("_rest", "preferred", "stages", "sure", "width")

    def __init__(
        self,
        stages: Sequence[LatencyProfile],
        *,
        preferred: Sequence[int] | None = None,
        width: float | None = None,
        sure: Sequence[int] | None = None,
    ) -> None:
        if width is not None and not 0 <= width <= 1:
            raise ValueError(f"width is {width}; it is a share")
        self.width = width
        if not stages:
            raise ValueError("a staged profile needs at least one stage")
        largest = min(stage.max_batch_size for stage in stages)
        self.stages = tuple(stages)
        self.preferred = (largest,) * len(stages) if preferred is None else tuple(preferred)
        self.sure = (largest,) * len(stages) if sure is None else tuple(sure)
        for kind, sizes in (("preferred", self.preferred), ("sure", self.sure)):
            if len(sizes) != len(stages):
                raise ValueError(f"{len(sizes)} {kind} sizes for {len(stages)} stages")
        if min(self.preferred) < 1:
            raise ValueError(f"a stage prefers batches of {min(self.preferred)}; 1 is the least")
        # rest[stage][size]: from this stage to the end.
        rest = [[0] * (largest + 1)]
        for stage in reversed(self.stages):
            after = rest[-1]
            rest.append(
                [0, *(after[size] + stage.latency_ns(size) for size in range(1, largest + 1))]
            )
        self._rest = rest[::-1]
        super().__init__(self._rest[0][1:])

    @classmethod
    def even(cls, whole: LatencyProfile, stages: int) -> StagedProfile:
        """Make a profile of stages that take equally long, if only the whole is known."""
        part = LatencyProfile(
            max(1, whole.taken_ns(size) / stages) for size in range(1, whole.max_batch_size + 1)
        )
        return cls([part] * stages)

    def latency_ns(self, size: int) -> int:
        """See :class:`LatencyProfile`; for any size."""
        table = self._table
        # Without calling _at: rules ask some hundred times for each profile.
        return table[size] if size < len(table) else _at(table, size)

    def stage_ns(self, stage: int, size: int) -> int:
        """Return the latency of one stage; 0 for an empty batch."""
        return _at(self._rest[stage], size) - _at(self._rest[stage + 1], size)

    def remaining_ns(self, stage: int, size: int) -> int:
        """Return the time from the start of ``stage`` to the end of the model: T_remain.

        ``stage`` may be one past the last. 0 for an empty batch.
        """
        return _at(self._rest[stage], size)

    def passed_ns(self, stage: int, size: int) -> int:
        """Return the time from the start of the model to the start of ``stage``."""
        return _at(self._rest[0], size) - _at(self._rest[stage], size)

    def limited(self, max_batch_size: int) -> StagedProfile:
        """Return the same profile up to a smaller size."""
        stages = [stage.limited(max_batch_size) for stage in self.stages]
        preferred = [min(size, max_batch_size) for size in self.preferred]
        sure = [min(size, max_batch_size) for size in self.sure]
        return StagedProfile(stages, preferred=preferred, width=self.width, sure=sure)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StagedProfile)
            and self.stages == other.stages
            and self.preferred == other.preferred
            and self.sure == other.sure
            and self.width == other.width
        )

    __hash__ = None

    def __repr__(self) -> str:
        return (
            super()
            .__repr__()
            .replace("<LatencyProfile of", f"<StagedProfile of {len(self.stages)} stages, of", 1)
        )


def _at(table: Sequence[int], size: int) -> int:
    largest = len(table) - 1
    return table[size] if size <= largest else table[largest] * size // largest
