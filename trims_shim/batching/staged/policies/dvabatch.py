"""The default policy of staged models: load, operator and, on request, input diversity together.

Nothing has to be tuned for a model. Each decision compares the costs of both ways by the profile:
a batch is not stretched if catching up costs more than it saves, and not split if all operators
prefer large batches. The window of input diversity is the exception, as the profile of one length
says nothing of the others. It is off by default, since requests that arrive within it can also join
later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.policies.inputs import InputDiversity
from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.operators import OperatorDiversity
from trims_shim.batching.staged.policies.staged_auto import StagedAuto
from trims_shim.batching.staged.profiles.diversity import Diversity

__all__ = ["DVABatch"]

_AS_IT_PAYS = Diversity(operators=True, load=True, inputs=False)


class DVABatch(LoadDiversity, OperatorDiversity, InputDiversity):
    """Stretches and splits where that pays.

    ``diversity``: which of the three to use: ``load`` for stretching, ``operators`` for splitting,
    ``inputs`` for a window as long as the first stage takes with a full batch. ``wait_ms`` as in
    :class:`LoadDiversity`.
    """

    def __init__(
        self,
        profile: LatencyProfile,
        *,
        max_batch_size: int,
        margin_ms: float = 0.0,
        wait_ms: float | None = None,
        diversity: Diversity = _AS_IT_PAYS,
    ) -> None:
        super().__init__(
            profile, max_batch_size=max_batch_size, margin_ms=margin_ms, wait_ms=wait_ms
        )
        self._diversity = diversity

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self._diversity.inputs:
            return super().choose(now_ns)
        return StagedAuto.choose(self, now_ns)

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        if self._diversity.inputs:
            return super().companions(now_ns, size, others)
        return StagedAuto.companions(self, now_ns, size, others)

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        return super().stretch(now_ns, batch, room) if self._diversity.load else 0

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        return super().split(now_ns, part) if self._diversity.operators else ()

    def next_split(self, now_ns: int, part: Part) -> int | None:
        """See :class:`~trims_shim.batching.staged.staged_rules.StagedRule`."""
        return super().next_split(now_ns, part) if self._diversity.operators else None
