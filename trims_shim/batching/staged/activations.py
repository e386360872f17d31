"""What a stage may return besides arrays and structures of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.errors import BadBatch

__all__ = ["EarlyExit", "Shared", "Stepped"]


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of an activation without a batch axis; equal for every batch of equal shapes."""

    value: Any


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Returned by a stage before the last when some rows are finished.

    ``finished``: a flag for each row of the stage's batch. ``results``: one result for each
    finished row, as the last stage would return them. ``rest``: the activations of the other rows.
    """

    finished: Sequence[bool]
    results: Any
    rest: Any

    def __post_init__(self) -> None:
        _check_flags("EarlyExit", self.finished)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Returned by each step of a loop, for all rows of its batch.

    ``state``: the input of the next step, once finished rows have been removed from it.
    ``pieces``: for each row, what this step adds to its answer; arrays are copied, as the next step
    may write into the state, but not the elements of lists. ``finished``: a flag for each row.
    An exception in a list of pieces finishes its row, and is raised for that row alone.
    """

    state: Any
    pieces: Any
    finished: Sequence[bool]

    def __post_init__(self) -> None:
        _check_flags("Stepped", self.finished)
        if self.state is None and not all(self.finished):
            raise BadBatch(
                "Stepped: rows are not finished and state is None, with which a loop begins anew; "
                "give what the next step continues with"
            )


def _check_flags(name: str, flags: Any) -> None:
    """Raises BadBatch for something else in their place: most of it is true, too."""
    for each in flags if isinstance(flags, Sequence) else [flags]:
        if not (isinstance(each, bool) or "bool" in str(getattr(each, "dtype", ""))):
            raise BadBatch(
                f"{name}: finished has to be a boolean for each row, and has {each!r:.100}"
            )
