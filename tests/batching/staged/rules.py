"""Rules for tests: what they decide is said when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["joining", "splitting"]


class _Joining(StagedRule):
    def choose(self, now_ns: int) -> int:
        return self.room()

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        return room


def joining(profile: LatencyProfile, *, max_batch_size: int) -> StagedRule:
    """Everybody joins whatever is on its way, or starts at once."""
    return _Joining(profile, max_batch_size=max_batch_size)


def splitting(sizes: Callable[[int], Sequence[int]]) -> Callable[..., StagedRule]:
    """Parts before the second stage are split into ``sizes(their size)``; nobody joins."""

    class Splitting(_Joining):
        def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
            return 0

        def split(self, now_ns: int, part: Part) -> Sequence[int]:
            return sizes(part.size) if part.stage == 1 else ()

    return Splitting
