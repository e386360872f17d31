"""Profiles of a model's stages, learned while stages run.

Like :class:`~trims_shim.batching.drivers.learning.Learning`, with a profile for each stage of each
key. The rules of the policy get them as one :class:`StagedProfile`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import Learning, plain_key
from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.lengths import LengthCurve
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_store import ProfileStore
from trims_shim.batching.protocol import Policy
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.drivers.jobs import StageJob
from trims_shim.batching.staged.profiles.learning import LearnedStages
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = ["StagedLearning"]

_UNREACHED: Mapping[int, float] = {1: 1.0}
"""Of a stage that was not measured because all rows had left before it."""


class StagedLearning(Learning):
    """Keeps the profiles of a model of ``stages`` stages fresh.

    ``width`` is assumed for the device where it was not measured.
    """

    def __init__(
        self,
        maker: RuleMaker,
        *,
        stages: int,
        has_loop: bool,
        width: float | None = None,
        **others: Any,
    ) -> None:
        """``others`` are those of :class:`Learning`."""
        # Set these first: the base class makes a rule to check that it can.
        self._parts = stages
        self._width = width
        super().__init__(maker, **others)
        self.mixes_lengths = self.mixes_lengths and not has_loop

    def _learn(self, policy: Policy, job: Job) -> bool:
        if isinstance(job, StageJob) and job.is_beside:
            learned = self._learned_of(plain_key(job.key))
            assert isinstance(learned, LearnedStages)
            if learned.has_width and not learned.is_doubted:
                # Rules start from the duration alone, and that was measured with the width.
                return True
        return super()._learn(policy, job)

    def _durations_ns(self, job: Job, learned: LearnedProfile, size: int) -> Sequence[int]:
        """See :class:`Learning`; a batch that ran whole is divided among stages as they are known.

        Those that go through the stages keep that up to date.
        """
        if isinstance(job, StageJob) or self._parts == 1:
            return job.durations_ns
        profile = learned.profile(self.max_batch_size)
        assert isinstance(profile, StagedProfile)
        taken_ns, known_ns = job.ended_ns - job.started_ns, profile.latency_ns(size)
        stages = range(self._parts)
        return [taken_ns * profile.stage_ns(stage, size) // known_ns for stage in stages]

    def measured_stages(
        self,
        key: Hashable,
        durations_ns: Sequence[Mapping[int, float]],
        *,
        width: float | None = None,
    ) -> LatencyProfile:
        """Like :meth:`measured`, with the durations of each stage and the width of the device."""
        pads = self._batch_sizes is not None
        largest = max(max(each) for each in durations_ns if each)
        prior = StagedProfile(
            [
                LatencyProfile.measured(each or _UNREACHED, max_batch_size=largest, pads=pads)
                for each in durations_ns
            ],
            width=width,
        )
        return self._start_anew(key, prior, durations_ns)

    def _make_learned(
        self, prior: LatencyProfile | None, curves: Sequence[LengthCurve], length: int
    ) -> LearnedProfile:
        return LearnedStages(
            self._parts,
            prior,
            batch_sizes=self._batch_sizes,
            width=self._width,
            curves=curves,
            length=length,
        )

    def _trial_profile(self) -> LatencyProfile:
        return StagedProfile([super()._trial_profile()] * self._parts)

    # --- kept for the next process ----------------------------------------------------------------

    def _kept(
        self, key: Hashable, learned: LearnedProfile
    ) -> list[tuple[Hashable, Mapping[int, float]]]:
        assert isinstance(learned, LearnedStages)
        return [
            (self._kept_as(key, stage), each.known_latencies_ns(self.max_batch_size))
            for stage, each in enumerate(learned.stages)
        ]

    def _load(self, name: str, key: Hashable, store: ProfileStore) -> LatencyProfile | None:
        saved = [store.load(name, self._kept_as(key, stage)) for stage in range(self._parts)]
        parts = [each.profile for each in saved if each is not None]
        return StagedProfile(parts) if len(parts) == self._parts else None

    def _kept_as(self, key: Hashable, stage: int) -> Hashable:
        # The number of stages is in the key: slicing the model differently gives other stages.
        return key, f"stage {stage} of {self._parts}"
