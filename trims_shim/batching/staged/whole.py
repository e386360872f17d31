"""Run all stages of a model one after the other with one batch: the reference for slicing.

Any other way to run the stages has to give the same answers. No threads, no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trims_shim.batching.collating.splitting import split
from trims_shim.batching.drivers.replies import is_failure
from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.flow import own
from trims_shim.errors import BadBatch

__all__ = ["answers_of", "run_steps", "run_whole"]

Take = Callable[[Any, Sequence[int]], Any]


def run_whole(
    stages: Sequence[Callable[..., Any]],
    batch: Sequence[Any],
    *,
    between: Callable[[], None] = lambda: None,
) -> Any:
    """Return the last stage's output; if rows left early, a list of one result for each row.

    ``batch`` has one element for each argument of the first stage. ``between`` is called between
    two stages. For a loop, the caller passes a last stage that runs it to its end. Raises BadBatch
    if the last stage leaves rows unfinished.
    """
    value = stages[0](*batch)
    rows: list[int] | None = None
    results: dict[int, Any] = {}
    later = list(stages[1:])
    while True:
        if isinstance(value, EarlyExit):
            rows = _going_on(value, rows, results)
            value = value.rest
            if rows and not later:
                raise BadBatch("the last stage returned an EarlyExit with rows that go on")
        if not later or rows == []:
            break
        between()
        value = later.pop(0)(value)
    if rows is None:
        return value
    results.update(zip(rows, split(value, len(rows)) if rows else (), strict=True))
    return [results[row] for row in sorted(results)]


def _going_on(output: EarlyExit, rows: list[int] | None, results: dict[int, Any]) -> list[int]:
    """Add the results of finished rows; return the others. ``rows``: None for all, in order."""
    rows = list(range(len(output.finished))) if rows is None else rows
    ended = [row for row, is_finished in zip(rows, output.finished, strict=True) if is_finished]
    results.update(zip(ended, split(output.results, len(ended)), strict=True))
    return [row for row in rows if row not in results]


def answers_of(rows: Sequence[list[Any]], result: Callable[[list[Any]], Any]) -> list[Any]:
    """Return ``result(pieces)`` for each row of :func:`run_steps`, or the row's exception."""
    return [each[-1] if is_failure(each[-1]) else result(each) for each in rows]


def run_steps(step: Callable[[Any], Stepped], state: Any, *, take_rows: Take) -> list[list[Any]]:
    """Run a step until all rows are finished; return the pieces of each row.

    The last piece of a row may be its exception.
    """
    stepped = step(state)
    answers: list[list[Any]] = [[] for _ in stepped.finished]
    rows = list(range(len(answers)))
    while True:
        pieces = split(own(stepped.pieces), len(rows))
        for row, piece in zip(rows, pieces, strict=True):
            answers[row].append(piece)
        ended = zip(pieces, stepped.finished, strict=True)
        kept = [
            index
            for index, (piece, is_finished) in enumerate(ended)
            if not (is_finished or is_failure(piece))
        ]
        if not kept:
            return answers
        rows = [rows[index] for index in kept]
        stepped = step(take_rows(stepped.state, kept))
