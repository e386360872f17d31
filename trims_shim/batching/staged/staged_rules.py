"""The decisions of a policy for staged models, and nothing else.

Every :class:`~trims_shim.batching.rules.Rule` decides how many requests start as a new batch when a
device is free. A StagedRule also decides how many join a batch under way, and into which parts a
batch is split between two stages. A plain Rule never does either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

__all__ = ["StagedRule"]


class StagedRule(Rule):
    """Decides for the requests of one key. Its profile is always a :class:`StagedProfile`."""

    has_loop = False
    """Whether the last stage is a loop; set by the state machine."""
    others = 0
    """How many requests of other keys wait; kept up to date by the state machine."""
    ahead: Iterable[Batch] = ()
    """The batches under way, of all keys, oldest first; set by the state machine."""

    @property
    def staged(self) -> StagedProfile:
        """The current profile."""
        profile = self.profile
        assert isinstance(profile, StagedProfile)
        return profile

    def runs_whole(self, now_ns: int, size: int) -> bool:
        """Whether a new batch of ``size`` runs all stages in one call, which nobody can enter.

        Called if the device is the only one and nothing else is under way.
        """
        return False

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        """Return how many of the queue's first requests join ``batch`` now; at most ``room``.

        Called when a device is free, the queue is not empty and the batch, of the same key, can be
        stretched: it was not split, and newcomers would meet it
        (:meth:`~trims_shim.batching.staged.mechanism.pipeline.Pipeline.may_stretch`). ``room`` is
        at least 1. Newcomers meet the part ahead before ``part.stage`` if it is not running, and
        else before the next stage. Until then that part waits; bounding the wait is up to the rule.
        May give requests up, as ``choose`` does.
        """
        return 0

    def on_met(self, is_joined: bool) -> None:
        """Note that newcomers have caught up with a batch and that they have run a stage.

        ``is_joined``: all ran as one batch. If not, their rows could not be joined, for example
        because they are padded to other lengths, and each stage runs once for each group.
        """

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """Return the sizes into which the part is split before its next stage, ``part.stage``.

        Empty to leave it whole. Called at the end of each stage but the last, for a part that is
        all that is left of a batch that was not split before; not at borders that it ran across
        because of :meth:`next_split`. The sizes are positive and add up to ``part.size``; the
        part's first requests get the first size.
        """
        return ()

    def may_run_beside(self, now_ns: int, part: Part) -> bool:
        """Whether a part that is ready starts while other stages run.

        Called if one device is free and another is busy. If not, the part waits for the next event.
        """
        return True

    def next_split(self, now_ns: int, part: Part) -> int | None:
        """Return the first stage after ``part.stage`` before which :meth:`split` is to be called.

        None for none. Called when a part starts that is alone: it runs on to that border unless an
        event occurs. By default the next stage, for rules that override :meth:`split`.
        """
        return None if type(self).split is StagedRule.split else part.stage + 1
