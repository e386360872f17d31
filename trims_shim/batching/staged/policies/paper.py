"""The rules as published for DVABatch (ATC'22, section 6): fixed times and ratios, no deadlines.

For comparison. When a device is free, all queued requests start as a new batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import duration_ns
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["PaperDVABatch"]


class PaperDVABatch(Immediate, StagedRule):
    """Stretches batches younger than ``wait_ms`` (T_comp_wait); 0 never stretches.

    Splits a batch into halves if two halves take no longer than the whole.
    """

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, wait_ms: float = 0.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size)
        self._wait_ns = duration_ns("wait_ms", wait_ms)

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        return room if now_ns - batch.created_ns < self._wait_ns else 0

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        half, rest = part.size // 2, part.size - part.size // 2
        remaining_ns = self.staged.remaining_ns
        if not half or remaining_ns(part.stage, part.size) < 2 * remaining_ns(part.stage, rest):
            return ()
        return half, rest
