"""What of a model a multi-entry multi-exit batch can gain from, read from its profile.

Input diversity
    Short items cost less than long ones, so a batch of both pays for padding.
Operator diversity
    What comes late in the model gains less from large batches than what comes early, so a batch
    that is split on its way loses nothing, and its first part is answered sooner.
Load diversity
    What is still to come of a batch takes newcomers along for less than they cost alone, so it pays
    to let them catch up.

Where none of them holds, batches gain nothing from having stages. The names are those of DVABatch
(ATC'22), section 3; the paper tells them by hand, and the bounds here are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trims_shim.batching.profile import LatencyProfile
from trims_shim.batching.staged.stage_profile import StagedProfile

__all__ = [
    "Diversity",
    "has_input_diversity",
    "has_load_diversity",
    "has_operator_diversity",
    "preferred_size",
    "stretch_gain",
]

_GAIN = 0.1
"""Of the throughput: what larger batches have to bring to be preferred. Two measurements of the
same batch on a shared machine differ by a few per cent."""
_SHARE = 0.1
"""Of the time: a side of a border that has less of it decides nothing."""
_ADVANTAGE = 1.25
"""Times as many items a second: less could be the error of two measurements."""
_PADDING = 1.5
"""Times as long: where long items cost less than that, the batches that padding makes larger bring
as much as the padding costs."""
_STRETCH_GAIN = 0.05
"""Of the device's time: catching up delays those who wait, so it has to save something."""


@dataclass(frozen=True, slots=True)
class Diversity:
    """Which of them a model has; ``inputs`` is None where items of one length were measured."""

    operators: bool
    load: bool
    inputs: bool | None = None

    @classmethod
    def of(cls, profiles: Iterable[StagedProfile]) -> Diversity:
        """Of a model whose profiles are given for each length of items, the longest last."""
        found = list(profiles)
        return cls(
            operators=has_operator_diversity(found[-1]),
            load=has_load_diversity(found[-1]),
            inputs=has_input_diversity(found) if len(found) > 1 else None,
        )


def preferred_size(profile: LatencyProfile) -> int:
    """The smallest batch size beyond which larger batches bring no more than a tenth more a second.

    For a line ``alpha * b + beta`` whose sizes go on and on it is ``10 * beta / alpha``.
    """
    best = 0.0
    preferred = profile.max_batch_size
    for size in range(preferred, 0, -1):
        rate = _rate(profile, size)
        best = max(best, rate)
        if best <= (1 + _GAIN) * rate:
            preferred = size
    return preferred


def has_operator_diversity(profile: StagedProfile) -> bool:
    """Whether at some border what is done gains from larger batches than what is left prefers.

    A quarter more items a second at least, than in batches of the size that the rest prefers. Both
    sides have to take a tenth of the time.
    """
    largest = profile.max_batch_size
    whole_ns = profile.latency_ns(largest)
    for stage in range(1, len(profile.stages)):
        rest_ns = profile.remaining_ns(stage, largest)
        if not _SHARE * whole_ns <= rest_ns <= (1 - _SHARE) * whole_ns:
            continue
        before = LatencyProfile(profile.passed_ns(stage, size) for size in range(1, largest + 1))
        after = LatencyProfile(profile.remaining_ns(stage, size) for size in range(1, largest + 1))
        large, small = preferred_size(before), preferred_size(after)
        if small < large and _rate(before, large) >= _ADVANTAGE * _rate(before, small):
            return True
    return False


def _rate(profile: LatencyProfile, size: int) -> float:
    return size / profile.latency_ns(size)


def stretch_gain(profile: StagedProfile) -> float:
    """What two equal batches save by going on as one, as a share of what both take.

    The second has caught up with the first after the first stage. The mean over batches of 1, 2, 4,
    ... each, as single measurements err; 0 for a model of one stage.
    """
    if len(profile.stages) < 2 or profile.max_batch_size < 2:
        return 0.0
    gains = []
    size = 1
    while 2 * size <= profile.max_batch_size:
        both_ns = 2 * profile.latency_ns(size)
        saved_ns = 2 * profile.remaining_ns(1, size) - profile.remaining_ns(1, 2 * size)
        gains.append(saved_ns / both_ns)
        size *= 2
    return sum(gains) / len(gains)


def has_load_diversity(profile: StagedProfile) -> bool:
    """Whether stretching a batch saves a twentieth of the time at least."""
    return stretch_gain(profile) >= _STRETCH_GAIN


def has_input_diversity(profiles: Iterable[StagedProfile]) -> bool:
    """Whether the items of one length cost half as much again as those of another."""
    rates = [_rate(profile, preferred_size(profile)) for profile in profiles]
    return max(rates) >= _PADDING * min(rates)
