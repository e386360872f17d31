"""What a policy for staged models has to decide, and nothing else.

Beyond what every :class:`~trims_shim.batching.rules.Rule` decides (how many start as a new batch
when a device is free), it says how many join a batch that is on its way, and into which parts a
batch is split between two stages. A plain Rule is one that does neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.batches import Batch, Part
from trims_shim.batching.staged.stage_profile import StagedProfile

__all__ = ["StagedRule"]


class StagedRule(Rule):
    """Decides for the requests of one key. Its profile is always a :class:`StagedProfile`."""

    has_loop = False
    """Whether the last stage is run again until its requests are finished; set by the state
    machine."""
    others = 0
    """How many requests of other keys wait; kept up by the state machine."""
    ahead: Iterable[Batch] = ()
    """The batches on their way, of all keys, the first one first; set by the state machine."""

    @property
    def staged(self) -> StagedProfile:
        """How long each stage takes, as of now."""
        profile = self.profile
        assert isinstance(profile, StagedProfile)
        return profile

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        """How many of the queue's first requests join ``batch`` now; at most ``room``.

        Called when a device is free, the queue is not empty and the batch, of the same key, can be
        stretched: it is the newest and was not split. ``room`` is at least 1. They meet where its
        part is now, before ``part.stage``; where that runs, before the next one. Until then the
        part waits; how long is for the rule to bound. May give requests up, as ``choose`` does.
        """
        return 0

    def on_met(self, is_joined: bool) -> None:
        """Those who had joined a batch have met it, and have run a stage.

        ``is_joined``: as one with the others. Else their rows could not be joined, as where both
        are padded to other lengths, and each stage runs once for these and once for those.
        """

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """The sizes into which the part is split before its next stage, ``part.stage``.

        Empty to leave it whole. Called at the end of each stage but the last, for parts that are
        all that is left of a batch that was not split before, and that did not run on because of
        :meth:`next_split`. The sizes are positive and add up to ``part.size``; those first in the
        part come first.
        """
        return ()

    def may_run_beside(self, now_ns: int, part: Part) -> bool:
        """Whether the part, which is ready, starts while stages of others run.

        Asked where a device is free, and another is not. Otherwise it waits for the next event.
        """
        return True

    def next_split(self, now_ns: int, part: Part) -> int | None:
        """The first stage after ``part.stage`` before which :meth:`split` is to be asked.

        None for none of them. Asked when a part starts that nobody else is beside: if nothing
        happens, it runs on until there. By default the next one, for rules that split at all.
        """
        return None if type(self).split is StagedRule.split else part.stage + 1
