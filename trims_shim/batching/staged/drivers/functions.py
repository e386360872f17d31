"""A staged model as a batch function: the whole model, and each of its stages.

The *whole* is the user's function if there is one besides the model, otherwise all stages with one
batch. It answers nested calls, and requests with which a stage has failed.

The user's function may do more than the stages of its model. So the first batch of each key runs
both ways and is answered by the function. If the results differ once, the function answers all
requests from then on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from trims_shim.batching.collating.collate import CollateSpec, collate_of
from trims_shim.batching.collating.collates import Concatenate, cuts
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.lanes import Lane
from trims_shim.batching.drivers.learning import plain_key
from trims_shim.batching.drivers.replies import Entry, Failure
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.comparing import is_close
from trims_shim.batching.staged.drivers.jobs import Pieces
from trims_shim.batching.staged.drivers.running import StageOutput, StageRunner
from trims_shim.batching.staged.mechanism.batches import Piece
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.whole import answers_of, run_steps, run_whole
from trims_shim.batching.torch_settings import without_graph
from trims_shim.diagnostics import pass_on
from trims_shim.errors import BatchingError

__all__ = ["StagedFunction"]

_logger = logging.getLogger(__name__)

_MOST_CHECKED = 64
"""Keys whose first batch runs both ways. Without buckets, each length is a key of its own."""


class StagedFunction(BatchFunction):
    """A batch function that also runs single stages. May be called from several threads.

    ``has_function``: there is one besides the model. ``lanes``: one for each device of the policy.
    Raises TypeError for a function that is asynchronous or a generator, ValueError for items that
    are batches of several rows, and for a loop whose pieces would have to be cut.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        model: StagedModel,
        has_function: bool,
        lanes: Sequence[Lane],
        collate: CollateSpec,
        batch_sizes: Sequence[int] | None,
        isolate_failures: bool,
        takes_owner: bool,
        name: str,
        by_length: bool,
    ) -> None:
        checked = collate_of(collate)
        if model.loop is not None and cuts(checked):
            raise ValueError(
                f"{name}: `unpad` cuts the results of a model, and not the pieces of a Loop; leave "
                "it out, and have the step return a list of what each row gets"
            )
        if isinstance(checked, Concatenate):
            raise ValueError(
                f"{name}: with collate='concatenate' an item is a batch itself, and its rows "
                "cannot take different ways through the stages"
            )

        super().__init__(
            function if has_function else functools.partial(_without_graph, model),
            collate=collate,
            batch_sizes=batch_sizes,
            isolate_failures=isolate_failures,
            takes_owner=takes_owner,
            name=name,
            by_length=by_length,
        )
        if self.is_async or self.is_generator:
            raise TypeError(
                f"{name} is asynchronous or a generator; a function with model= is the whole in "
                "one plain call (answers in pieces come from a model whose last stage is a Loop)"
            )
        self.model = model
        self.lanes = tuple(lanes)
        # Without owner: the model already belongs to it.
        made = functools.partial(
            BatchFunction, collate=collate, isolate_failures=isolate_failures, name=name
        )
        self._runner = StageRunner(model, made(model), lanes=lanes, batch_sizes=batch_sizes)
        self._in_pieces = made(functools.partial(_in_pieces, model), batch_sizes=batch_sizes)
        self._has_function = has_function
        self._checked: set[Hashable] = set()
        self.is_distrusted = False
        """The stages gave other results than the function."""
        self._has_warned = False

    def run_stage(self, stage: int, pieces: Sequence[Piece], *, device: int = 0) -> StageOutput:
        """Run a stage; failures are results, except those of the thread, like a time limit."""
        if self._has_function:
            if self.is_distrusted:
                return self.instead(_requests_of(pieces))
            if not stage and self._is_to_be_checked(plain_key(pieces[0].requests[0].key)):
                return self._checked_against(_requests_of(pieces))
        try:
            return self._runner.run(stage, pieces, device=device)
        except Exception as error:
            pass_on(error)  # a time limit of the thread is no fault of the stage
            output = self.instead(_requests_of(pieces), error)
            output.has_failed = True
            self._warn_of(stage, error, output)
            return output

    def instead(self, requests: Sequence[Request], error: Exception | None = None) -> StageOutput:
        """Answer all requests by the whole; ``error``: why the stages do not."""
        results = self._whole([request.payload for request in requests], error)
        return StageOutput(left=list(requests), results=results, runs=0)

    def arguments_of(self, entries: Sequence[Entry]) -> Sequence[Any]:
        """Return the arguments of the first stage."""
        return self._in_pieces.joined(entries)[2]

    # --- the whole --------------------------------------------------------------------------------

    def _whole(self, entries: Sequence[Entry], error: Exception | None) -> list[Any]:
        if self.model.loop is None:
            return self.run(entries)
        results: dict[int, Any] = {}
        groups: dict[bool, list[int]] = {True: [], False: []}
        for index, entry in enumerate(entries):
            if entry.is_streamed and entry.pieces is not None:
                results[index] = Failure(error or _too_late(self.name))
            else:
                entry.pieces = None
                groups[entry.is_streamed].append(index)
        for is_streamed, indices in groups.items():
            if indices:
                function = self._in_pieces if is_streamed else self
                found = function.run([entries[index] for index in indices])
                results.update(zip(indices, found, strict=True))
        return [results[index] for index in range(len(entries))]

    def _warn_of(self, stage: int, error: Exception, output: StageOutput) -> None:
        """Warn once of a stage that fails where the whole answers every item."""
        if self._has_warned or any(type(each) is Failure for each in output.results):
            return
        self._has_warned = True
        _logger.warning(
            "stage %d of %s failed with what the whole model could do, which answers instead; "
            "later failures of this kind are not reported: %s: %s",
            stage,
            self.name,
            type(error).__name__,
            error,
        )

    # --- whether the stages are the function ------------------------------------------------------

    def _is_to_be_checked(self, key: Hashable) -> bool:
        if key in self._checked or len(self._checked) >= _MOST_CHECKED:
            return False
        self._checked.add(key)
        return True

    def _checked_against(self, requests: Sequence[Request]) -> StageOutput:
        entries = [request.payload for request in requests]
        results = self.run(entries)
        found = self._in_pieces.run(entries)
        if self._is_same(results, [self._result_of(each) for each in found]):
            results = [
                piece if entry.is_streamed and type(piece) is Pieces else result
                for result, piece, entry in zip(results, found, entries, strict=True)
            ]
        return StageOutput(left=list(requests), results=results, runs=0)

    def _result_of(self, found: Any) -> Any:
        loop = self.model.loop
        if loop is None or type(found) is not Pieces:
            return found
        try:
            return loop.result(list(found.pieces))
        except Exception as error:
            pass_on(error)
            return Failure(error)

    def _is_same(self, expected: Sequence[Any], found: Sequence[Any]) -> bool:
        pairs = [
            (one, other)
            for one, other in zip(expected, found, strict=True)
            if type(one) is not Failure
        ]
        if is_close([one for one, _ in pairs], [other for _, other in pairs]):
            return True
        self.is_distrusted = True
        _logger.warning(
            "%s and the stages of its model come to different results, or to some that cannot be "
            "compared; from now on the function alone answers, without stages. If the function "
            "does more than the model, make that a part of the last stage",
            self.name,
        )
        return False


def _requests_of(pieces: Sequence[Piece]) -> list[Request]:
    return [request for piece in pieces for request in piece.requests]


def _without_graph(model: StagedModel, *batch: Any) -> Any:
    with without_graph():
        return model(*batch)


def _in_pieces(model: StagedModel, *batch: Any) -> Any:
    """Run the model; of a loop, return each row's pieces instead of its answer."""
    loop = model.loop
    if loop is None:
        return _without_graph(model, *batch)

    def last(state: Any) -> list[Any]:
        found = run_steps(loop.step, state, take_rows=loop.take)
        return answers_of(found, Pieces)

    with without_graph():
        return run_whole((*model.stages[:-1], last), batch)


def _too_late(name: str) -> BatchingError:
    return BatchingError(f"{name}: interrupted after the first pieces of this answer; ask again")
