"""The default policy of staged models: load and operator diversity together.

Nothing has to be tuned for a model. Each decision compares the costs of both ways by the profile:
a batch is not stretched if catching up costs more than it saves, and not split if all operators
prefer large batches. Input diversity has no part in it, beyond a batch for each length: requests
that arrive within its window can also join later.

Where one batch runs at a time, stages cost time at every border. A batch that will probably gain
less than that from being stretched or split runs the whole model in one call, like a batch of a
plain function.
"""

from __future__ import annotations

from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.operators import OperatorDiversity
from trims_shim.batching.staged.policies.prospect import Prospect
from trims_shim.batching.staged.policies.staged_auto import RUN_NS

__all__ = ["DVABatch"]


_OPEN = 16
"""One batch in this many goes through the stages in any case: their latencies may change."""


class DVABatch(LoadDiversity, OperatorDiversity):
    """Stretches and splits where that pays; ``wait_ms`` as in :class:`LoadDiversity`."""

    _batches = 0
    _judged_by: Prospect | None = None
    _pays: dict[int, bool]
    """Whether stages pay, by batch size."""

    def runs_whole(self, now_ns: int, size: int) -> bool:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        self._batches += 1
        if self._batches % _OPEN == 1 or self.wait_ns is not None:
            return False
        prospect = self.looked_at(now_ns)
        if self._judged_by is not prospect:
            self._judged_by, self._pays = prospect, {}
        pays = self._pays.get(size)
        if pays is None:
            pays = self._pays[size] = self._do_stages_pay(now_ns, size)
        return not pays

    def on_met(self, is_joined: bool) -> None:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        super().on_met(is_joined)
        self._judged_by = None

    def _do_stages_pay(self, now_ns: int, size: int) -> bool:
        if min(self.staged.sure) < size:  # they have to be learned
            return True
        whole_ns = self.staged.remaining_ns(0, size)
        staged_ns = whole_ns + RUN_NS * (len(self.staged.stages) - 1)
        whole, staged = (
            self.cost_ns(now_ns, [(each, size)], next_ns=each, queued=0)
            for each in (whole_ns, staged_ns)
        )
        saves = self.joining_saves_ns(now_ns, size) + self.splitting_saves_ns(now_ns, size)
        return saves >= staged - whole
