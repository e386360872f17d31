"""When batches under way reach and leave each stage, according to the profile.

If one stage runs at a time, batches go one after the other. If several run at a time, the timetable
is that of a pipeline: a batch starts a stage when it has left the one before, and the batches ahead
have left this one. Stages that run at the same time do not slow each other down in it; policies
account for that separately.
"""

from __future__ import annotations

from collections.abc import Sequence

from trims_shim.batching.staged.mechanism.batches import Batch, Part, PartState
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = ["Level", "Timetable", "levels_of", "together_ns"]

Level = tuple[int, int]
"""(the next stage, the number of requests before it)."""


def levels_of(batch: Batch) -> list[Level]:
    """Return where its parts are, by stage; a running part counts as past its stage."""
    return sorted(
        (part.stage + (part.state is PartState.RUNNING), part.size) for part in batch.parts
    )


def together_ns(profile: StagedProfile, levels: Sequence[Level]) -> int:
    """Return the time until all are through, each level catching up with the next, undisturbed."""
    total_ns = size = 0
    for index, (stage, count) in enumerate(levels):
        size += count
        until = levels[index + 1][0] if index + 1 < len(levels) else len(profile.stages)
        total_ns += profile.remaining_ns(stage, size) - profile.remaining_ns(until, size)
    return total_ns


class Timetable:
    """The timetable of a pipeline. ``free_ns``: when the last batch leaves each stage."""

    __slots__ = ("_now_ns", "_profile", "free_ns")

    def __init__(self, profile: StagedProfile, now_ns: int, free_ns: Sequence[int] = ()) -> None:
        self._profile = profile
        self._now_ns = now_ns
        self.free_ns = list(free_ns) or [now_ns] * len(profile.stages)

    def copy(self) -> Timetable:
        """Return a copy, to try another plan."""
        return Timetable(self._profile, self._now_ns, self.free_ns)

    def add(self, batch: Batch, newcomers: int = 0) -> int:
        """Add a batch under way that ``newcomers`` requests join now; return when it is through."""
        if batch.is_split:
            parts = sorted(batch.parts, key=lambda each: (each.order, -each.stage))
            ends_ns = [self._go_on(part.size, *self._place(part)) for part in parts]
            return max(ends_ns, default=self._now_ns)
        places = sorted((*self._place(part), part.size) for part in batch.parts)
        now_ns, size, at = self._now_ns, newcomers, 0
        for stage, ready_ns, count in places:
            if size:
                now_ns = self._pass(now_ns, size, at, stage)
            now_ns, size, at = max(now_ns, ready_ns), size + count, stage
        return self._go_on(size, at, now_ns)

    def add_size(self, size: int) -> int:
        """Add a new batch; return when it is through."""
        return self._go_on(size, 0, self._now_ns)

    def next_ns(self, size: int) -> int:
        """Return when a batch of ``size`` can start so that it never has to wait."""
        passed_ns = self._profile.passed_ns
        return max(free_ns - passed_ns(stage, size) for stage, free_ns in enumerate(self.free_ns))

    def _place(self, part: Part) -> tuple[int, int]:
        """Return (the stage it can start next, when)."""
        if part.state is not PartState.RUNNING:
            return part.stage, self._now_ns
        size = min(part.size, self._profile.max_batch_size)
        end_ns = max(self._now_ns, part.started_ns + self._profile.stage_ns(part.stage, size))
        self.free_ns[part.stage] = max(self.free_ns[part.stage], end_ns)
        return part.stage + 1, end_ns

    def _go_on(self, size: int, stage: int, now_ns: int) -> int:
        return self._pass(now_ns, size, stage, len(self.free_ns))

    def _pass(self, now_ns: int, size: int, stage: int, until: int) -> int:
        size = min(size, self._profile.max_batch_size)
        for each in range(stage, until):
            now_ns = max(now_ns, self.free_ns[each]) + self._profile.stage_ns(each, size)
            self.free_ns[each] = now_ns
        return now_ns
