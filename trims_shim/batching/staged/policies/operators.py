"""Operator diversity: a batch goes on in parts where larger batches gain nothing (split).

Operators prefer different batch sizes: if 8 items fill the next one, 16 take it twice as long. If
smaller parts take no longer in total, the first part is done sooner and the last one no later.
DVABatch (ATC'22, section 6) splits where ``T_remain(bs) >= 2 T_remain(bs / 2)``. Here several ways
to split are compared by cost. Parts that take slightly longer in total are worth it if no requests
wait, and not if many do; parts that take no longer always are.

A batch is not split if that would make a request late that is in time otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Part
from trims_shim.batching.staged.policies.staged_auto import RUN_NS, StagedAuto
from trims_shim.batching.staged.profiles.diversity import has_operator_diversity
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = ["OperatorDiversity", "ways_to_split"]

_MOST_PARTS = 8
"""More parts gain little: in k even parts a request waits (k + 1) / 2k of the whole on average."""
_LONGER = 0.05
"""All parts may take this share longer than the whole: more makes the next burst late."""
_SAVES = 0.1
"""The share of the remaining time that a split has to save: it is final, and profiles err."""


class OperatorDiversity(StagedAuto):
    """Splits into the parts that save most, in models that have operator diversity."""

    _judged: LatencyProfile | None = None
    _is_diverse = False

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        if not 2 <= part.size <= self.profile.max_batch_size:
            return ()
        best: Sequence[int] = ()
        best_ns = 0.0
        for sizes, saved_ns in self._worthwhile(now_ns, part.stage, part.size):
            if saved_ns > best_ns and not self._makes_late(now_ns, part, sizes):
                best, best_ns = sizes, saved_ns
        return best if best and self._has_diversity() else ()

    def splitting_saves_ns(self, now_ns: int, size: int) -> float:
        """Return what a split of a new batch saves at the border where it saves most.

        In requests x ns, like :meth:`cost_ns`.
        """
        if not self._has_diversity():
            return 0.0
        borders = range(1, len(self.staged.stages))
        ways = (way for stage in borders for way in self._worthwhile(now_ns, stage, size))
        return max((saved_ns for _, saved_ns in ways), default=0.0)

    def _worthwhile(
        self, now_ns: int, stage: int, size: int
    ) -> Iterator[tuple[Sequence[int], float]]:
        """Yield ways to split before ``stage``, and what each saves beyond the least it has to."""
        remaining_ns = self.staged.remaining_ns
        rest_ns = remaining_ns(stage, size)
        whole_ns = self.parts_cost_ns(now_ns, stage, (size,)) - _SAVES * rest_ns * size
        for sizes in ways_to_split(self.staged, stage, size):
            if sum(remaining_ns(stage, each) for each in sizes) <= (1 + _LONGER) * rest_ns:
                yield sizes, whole_ns - self.parts_cost_ns(now_ns, stage, sizes)

    def next_split(self, now_ns: int, part: Part) -> int | None:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`.

        Evaluated as if its later stages began now with the current queue, which is still the queue
        then if no event occurs.
        """
        if part.size < 2 or not self._has_diversity():
            return None
        stages = range(part.stage + 1, len(self.staged.stages))
        return next((each for each in stages if self.split(now_ns, part.at(each))), None)

    def _has_diversity(self) -> bool:
        if self._judged is not self.profile:
            self._judged = self.profile
            self._is_diverse = has_operator_diversity(self.staged)
        return self._is_diverse

    def parts_cost_ns(self, now_ns: int, stage: int, sizes: Sequence[int]) -> float:
        """Return the cost of going on in parts of these sizes, one after the other."""
        remaining_ns = self.staged.remaining_ns
        run_ns = RUN_NS * (len(self.staged.stages) - stage)
        ends_ns = list(accumulate(remaining_ns(stage, size) + run_ns for size in sizes))
        answers = list(zip(ends_ns, sizes, strict=True))
        return self.cost_ns(now_ns, answers, next_ns=ends_ns[-1], queued=len(self.queue))

    def _makes_late(self, now_ns: int, part: Part, sizes: Sequence[int]) -> bool:
        """Whether a request is late in parts of these sizes that is in time in the whole."""
        profile, stage = self.staged, part.stage
        start_ns, stretch = now_ns + self.margin_ns, self.stretches[-1]
        whole_ns = start_ns + int(stretch * profile.remaining_ns(stage, part.size))
        ends_ns = accumulate(int(stretch * profile.remaining_ns(stage, size)) for size in sizes)
        requests = iter(part.requests)
        return any(
            whole_ns <= request.deadline_ns < start_ns + end_ns
            for size, end_ns in zip(sizes, ends_ns, strict=True)
            for request in _next(requests, size)
        )


def _next(requests: Iterator[Request], count: int) -> list[Request]:
    return [next(requests) for _ in range(count)]


def ways_to_split(profile: StagedProfile, stage: int, size: int) -> Iterator[Sequence[int]]:
    """Yield the splits to evaluate: into 2 to 8 even parts, and into sizes that stages prefer."""
    for count in range(2, min(size, _MOST_PARTS) + 1):
        smaller, larger = divmod(size, count)
        yield (smaller + 1,) * larger + (smaller,) * (count - larger)
    for preferred in set(profile.preferred[stage:]):
        if preferred < size:
            full, rest = divmod(size, preferred)
            yield (preferred,) * full + ((rest,) if rest else ())
