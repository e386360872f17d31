"""What a stage may return besides arrays and structures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EarlyExit", "Shared", "Stepped"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of an activation that has no batch axis, the same for every batch of equal shapes."""

    value: Any


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Returned by a stage before the last: some rows are finished.

    ``finished``: for each row of the stage's batch, whether it is. ``results``: one result for each
    finished row, as the last stage would return them. ``rest``: the activations of the others.
    """

    finished: Sequence[bool]
    results: Any
    rest: Any


@dataclass(frozen=True, slots=True)
class Stepped:
    """Returned by each step of a loop, for all rows of its batch.

    ``state`` is what the next step gets, after rows that are finished were taken out of it.
    ``pieces``: one for each row, what this step adds to its answer. ``finished``: one for each. An
    exception in a list of pieces is raised for that row alone, which is finished.
    """

    state: Any
    pieces: Any
    finished: Sequence[bool]
