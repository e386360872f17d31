"""The default policy of staged models: load and operator diversity together.

Nothing has to be tuned for a model. Each decision compares the costs of both ways by the profile:
a batch is not stretched if catching up costs more than it saves, and not split if all operators
prefer large batches. Input diversity has no part in it, beyond a batch for each length: requests
that arrive within its window can also join later.
"""

from __future__ import annotations

from trims_shim.batching.staged.policies.load import LoadDiversity
from trims_shim.batching.staged.policies.operators import OperatorDiversity

__all__ = ["DVABatch"]


class DVABatch(LoadDiversity, OperatorDiversity):
    """Stretches and splits where that pays; ``wait_ms`` as in :class:`LoadDiversity`."""
