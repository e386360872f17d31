"""What a preemptive policy knows of a model: its latencies, and where its batches can stop."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS

__all__ = ["PreemptibleModel", "even_exits"]


def even_exits(stages: int) -> tuple[float, ...]:
    """Return the exit points of a model of ``stages`` equally long stages."""
    if stages < 1:
        raise ValueError(f"a model of {stages} stages; at least one is needed")
    return tuple(number / stages for number in range(1, stages))


@dataclass(frozen=True, slots=True)
class PreemptibleModel:
    """A model whose batches can be given up between its stages.

    ``exits``: the shares of a batch's latency after which it can be given up, ascending, above 0
    and below 1; none for a model in one piece, which is never preempted. Raises ValueError for
    other values, and for a ``max_batch_size`` that the profile does not know.
    """

    profile: LatencyProfile
    max_batch_size: int
    exits: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.profile.check_knows(self.max_batch_size)
        edges = (0.0, *self.exits, 1.0)
        if any(later <= earlier for earlier, later in pairwise(edges)):
            raise ValueError(f"exits {self.exits} do not ascend between 0 and 1")

    def next_exit_ns(self, batch_size: int, passed_ns: int) -> int:
        """Return the next time, since its start, at which a batch can be given up.

        It has run for ``passed_ns``. NEVER_NS if no exit point is left.
        """
        latency_ns = self.profile.latency_ns(batch_size)
        index = bisect_left(self.exits, passed_ns / latency_ns)
        if index == len(self.exits):
            return NEVER_NS
        return max(passed_ns, round(self.exits[index] * latency_ns))
