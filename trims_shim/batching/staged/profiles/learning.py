"""Learn how long each stage of a model takes while stages run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.lengths import LengthCurve
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = ["LearnedStages"]


class LearnedStages(LearnedProfile):
    """A learned profile for each stage, and the profile of the whole that they make."""

    def __init__(
        self,
        stages: int,
        prior: LatencyProfile | None = None,
        *,
        batch_sizes: Sequence[int] | None = None,
        width: float | None = None,
        curves: Sequence[LengthCurve] = (),
        length: int = 0,
    ) -> None:
        """``width``: used if ``prior`` has none. ``curves``: one for each stage, or none at all."""
        super().__init__(prior, batch_sizes=batch_sizes)
        if prior is not None and not isinstance(prior, StagedProfile):
            prior = StagedProfile.even(prior, stages)
        priors = prior.stages if prior is not None else (None,) * stages
        self.stages = tuple(
            LearnedProfile(each, batch_sizes=batch_sizes, curve=curve, length=length)
            for each, curve in zip(priors, curves or (None,) * stages, strict=True)
        )
        self._has_curves = bool(curves)
        self._preferred: Sequence[float] | None = None
        if prior is not None:
            # Preferring the largest known size sets no limit: larger ones may gain more.
            known = prior.max_batch_size
            self._preferred = [math.inf if each >= known else each for each in prior.preferred]
        self.has_width = prior is not None and prior.width is not None
        """The width was measured, not assumed."""
        self._width = prior.width if prior is not None and self.has_width else width
        self._whole: StagedProfile | None = None
        self._news = set(range(stages))
        """Stages with observations that the whole does not include yet."""

    @property
    def is_doubted(self) -> bool:
        """See :class:`LearnedProfile`: whether any stage is."""
        return any(each.is_doubted for each in self.stages)

    @property
    def count(self) -> int:
        """See :class:`LearnedProfile`: that of the stage with the fewest."""
        return min(each.count for each in self.stages)

    def observe(self, size: int, duration_ns: int, part: int = 0) -> bool:
        """See :class:`LearnedProfile`."""
        self._news.add(part)
        return self.stages[part].observe(size, duration_ns)

    def doubt(self) -> bool:
        """See :class:`LearnedProfile`."""
        found = [each.doubt() for each in self.stages]  # a list: any() would stop at the first
        self._news.update(range(len(found)))
        return any(found)

    def is_due(self, max_batch_size: int) -> bool:
        """True: :meth:`profile` looks for news. Asking every stage of many lengths costs more."""
        return True

    def profile(self, max_batch_size: int) -> StagedProfile:
        """See :class:`LearnedProfile`."""
        whole, stages, news = self._whole, self.stages, self._news
        if whole is None or whole.max_batch_size != max_batch_size:
            return self._made_of([each.profile(max_batch_size) for each in stages])
        if self._has_curves:  # other lengths may have brought news for any stage
            news.update(n for n, each in enumerate(stages) if each.is_due(max_batch_size))
        for stage in news:
            if stages[stage].is_due(max_batch_size):
                break
        else:
            return whole
        # Renew all at once: rules spend more on a new profile than it takes to make.
        parts = [
            each.renewed(max_batch_size) if stage in news else part
            for stage, (each, part) in enumerate(zip(stages, whole.stages, strict=True))
        ]
        news.clear()
        return self._made_of(parts)

    def _made_of(self, parts: Sequence[LatencyProfile]) -> StagedProfile:
        largest = min(each.max_batch_size for each in parts)
        sure = [int(min(each.largest_sure, largest)) for each in self.stages]
        preferred = None
        if self._preferred is not None:
            preferred = [int(min(each, largest)) for each in self._preferred]
        self._whole = StagedProfile(parts, preferred=preferred, width=self._width, sure=sure)
        return self._whole
