"""Never wait: whatever is queued runs as soon as a device is free (a greedy server)."""

from __future__ import annotations

from trims_shim.batching.rules import Rule

__all__ = ["Immediate"]


class Immediate(Rule):
    """All queued requests, late ones too. The baseline that every other policy has to beat."""

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        return self.room()
