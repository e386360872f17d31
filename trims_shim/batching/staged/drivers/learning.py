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
from trims_shim.batching.staged.scheduler import StagedBatching

__all__ = ["StagedLearning"]

_UNREACHED: Mapping[int, float] = {1: 1.0}
"""Of a stage that was not measured because all rows had left before it."""


class StagedLearning(Learning):
    """Makes policies for a model of ``stages`` stages, and keeps their profiles fresh.

    ``pairs``, ``has_loop``, ``max_active`` and ``may_run_whole`` are those of
    :class:`StagedBatching`. ``width`` is assumed for the device where it was not measured. With
    ``is_whole`` the only stage runs like any function, under a plain :class:`Batching`.
    """

    def __init__(
        self,
        maker: RuleMaker,
        *,
        stages: int,
        is_whole: bool,
        has_loop: bool,
        pairs: int,
        max_active: int | None,
        may_run_whole: bool,
        width: float | None = None,
        **others: Any,
    ) -> None:
        """``others`` are those of :class:`Learning`."""
        # Set these first: the base class makes a policy to check that it can.
        self._parts = stages
        self._is_whole = is_whole
        self._has_loop = has_loop
        self._pairs = pairs
        self._max_active = max_active
        self._may_run_whole = may_run_whole
        self._width = width
        super().__init__(maker, **others)
        self.mixes_lengths = self.mixes_lengths and not has_loop

    def make_policy(self) -> Policy:
        """See :class:`Learning`."""
        if self._is_whole:
            return super().make_policy()
        return StagedBatching(
            self._make_rule,
            stages=self._parts,
            devices=self._devices,
            pairs=self._pairs,
            has_loop=self._has_loop,
            max_active=self._max_active,
            max_weight=self._max_batch_weight,
            may_run_whole=self._may_run_whole,
        )

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
