"""The properties of a model that multi-entry multi-exit batching can exploit, read from a profile.

Input diversity
    Short items cost less than long ones, so a batch of both pays for padding.
Operator diversity
    Late stages gain less from large batches than early ones. Splitting a batch between them loses
    nothing, and its first part is answered sooner.
Load diversity
    The remaining stages of a batch cost less for newcomers that join it than for newcomers alone,
    so it pays to let them catch up.

A model with none of these gains nothing from stages. The names are those of DVABatch (ATC'22),
section 3. The paper judges models by hand; the thresholds here are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = [
    "Diversity",
    "has_input_diversity",
    "has_load_diversity",
    "has_operator_diversity",
    "preferred_size",
    "stretch_gain",
]

_GAIN = 0.1
"""The gain in throughput for which larger batches are preferred. Two measurements of the same batch
on a shared machine differ by a few per cent."""
_SHARE = 0.1
"""The least share of the time on each side of a border that counts."""
_ADVANTAGE = 1.25
"""The least ratio of throughputs that counts: a smaller one could be measurement error."""
_PADDING = 1.5
"""The least ratio of the costs of lengths that counts. Below it, padding pays: it makes batches
larger, which gains as much as padding costs."""
_STRETCH_GAIN = 0.05
"""The least share of device time to save, as catching up delays the requests that wait for it."""


@dataclass(frozen=True, slots=True)
class Diversity:
    """Which diversities a model has; ``inputs`` is None if only one length was measured."""

    operators: bool
    load: bool
    inputs: bool | None = None

    @classmethod
    def of(cls, profiles: Iterable[StagedProfile]) -> Diversity:
        """Judge a model by its profiles, one for each length of items, the longest last."""
        found = list(profiles)
        return cls(
            operators=has_operator_diversity(found[-1]),
            load=has_load_diversity(found[-1]),
            inputs=has_input_diversity(found) if len(found) > 1 else None,
        )


def preferred_size(profile: LatencyProfile) -> int:
    """Return the smallest batch size whose throughput no larger size exceeds by over a tenth.

    For a line ``alpha * b + beta`` over unlimited sizes, it is ``10 * beta / alpha``.
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
    """Whether at some border the stages before it prefer larger batches than the stages after it.

    The stages before must have at least 1.25 times the throughput at their own preferred size than
    at that of the stages after. Each side has to take a tenth of the time of the largest batch.
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
    """Return the time that two equal batches save by merging, as a share of the time of both.

    The second catches up with the first after the first stage. The result is the mean over sizes of
    1, 2, 4, ... each, since single measurements err; 0 for a model of one stage.
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
    """Whether stretching a batch saves at least a twentieth of the time."""
    return stretch_gain(profile) >= _STRETCH_GAIN


def has_input_diversity(profiles: Iterable[StagedProfile]) -> bool:
    """Whether items of one length cost at least 1.5 times as much as those of another."""
    rates = [_rate(profile, preferred_size(profile)) for profile in profiles]
    return max(rates) >= _PADDING * min(rates)
