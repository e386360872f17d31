"""Run one stage with one part of a batch: join its pieces before, take its output apart after.

No threads, no policy, no clock. Inputs are pieces: rows of the values that earlier stages returned.
Outputs are pieces for the next stage, and the results of finished requests. Pieces that cannot be
joined, because they are padded to other lengths, run one after the other and stay apart.

Stages are called without torch's graph and outside of ``inference_mode``, in whatever thread they
run. So the output of a stage in one thread is valid input for the next stage in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.batching.collating.collate import answers
from trims_shim.batching.collating.collates import padded_length, padded_size
from trims_shim.batching.collating.splitting import split
from trims_shim.batching.drivers.functions import BatchFunction, item_of
from trims_shim.batching.drivers.lanes import Lane
from trims_shim.batching.drivers.replies import Entry, is_failure
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.flow import NotJoinable, join, own, rows_of, take
from trims_shim.batching.staged.mechanism.batches import Piece
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.torch_settings import without_graph
from trims_shim.errors import BadBatch

__all__ = ["StageOutput", "StageRunner"]


@dataclass(slots=True)
class StageOutput:
    """What one stage did to the requests of a part."""

    pieces: Sequence[Piece] = ()
    """Of the requests that go on."""
    left: Sequence[Request] = ()
    results: Sequence[Any] = ()
    """Of the requests in ``left``."""
    steps: Sequence[tuple[Request, Any]] = ()
    """The pieces that a step of a loop adds to answers."""
    finished: Sequence[Request] = ()
    """Not in ``left``: the requests that a loop has answered by their pieces."""
    runs: int = 1
    """The number of calls of the stage; 0 if the whole function answered instead."""
    sizes: Sequence[int] = ()
    """The number of requests in each call, if there were several."""
    has_failed: bool = False
    """The stage failed, and the whole function answered instead."""

    @property
    def size(self) -> int:
        """The number of requests."""
        going = sum(len(piece.requests) for piece in self.pieces)
        return len(self.left) + len(self.finished) + going


class StageRunner:
    """Runs stages of ``model``. May be called from several threads.

    ``function`` has the collate, and no ``batch_sizes`` of its own. With ``batch_sizes``, stages
    see batches of these sizes only: the last row is repeated. ``lanes``: one for each device of the
    policy.
    """

    def __init__(
        self,
        model: StagedModel,
        function: BatchFunction,
        *,
        lanes: Sequence[Lane],
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.lanes = tuple(lanes)
        self._function = function
        self._batch_sizes = batch_sizes

    def run(self, stage: int, pieces: Sequence[Piece], *, device: int = 0) -> StageOutput:
        """Run a stage. Raises what it raises, and BadBatch for outputs that are not allowed."""
        groups: list[list[Request]] = []
        outputs: list[Any] = []
        with without_graph():
            lane = self.lanes[device]
            try:
                with lane.enter():
                    for requests, arguments in self._calls(stage, pieces):
                        groups.append(requests)
                        outputs.append(self.model.stages[stage](*arguments))
            finally:
                # Also after a failure: the device may still be reading the inputs.
                lane.finish(outputs)
            # Outside the lane, as nothing waits for it any more.
            return _together(
                [self._sorted(stage, *each) for each in zip(groups, outputs, strict=True)]
            )

    # --- before the stage -------------------------------------------------------------------------

    def _calls(
        self, stage: int, pieces: Sequence[Piece]
    ) -> Sequence[tuple[list[Request], Sequence[Any]]]:
        """Return the requests and the arguments of each call of the stage."""
        join_all, take_rows = self._ways_at(stage)
        new: list[Request] = []
        groups: list[_Group] = []
        for piece in pieces:
            if piece.value is None:
                new += piece.requests
            elif piece.rows is None:
                groups.append((piece.requests, piece.value))
            else:
                groups.append((piece.requests, take_rows(piece.value, piece.rows)))
        if new:
            if not groups:
                return [(new, self._batch(self._filled_up(new)))]
            (state,) = self._batch(new)  # new requests join a loop that is the only stage
            groups.append((new, state))
        joined = _joined(groups, join_all, take_rows)
        if self._batch_sizes is None:
            return [(requests, (value,)) for requests, value in joined]
        return [self._filled(*each, join_all, take_rows) for each in joined]

    def _filled(
        self, requests: list[Request], value: Any, join_all: _Join, take_rows: _Take
    ) -> tuple[list[Request], Sequence[Any]]:
        """Repeat the last row up to one of ``batch_sizes``."""
        missing = self._size_of(len(requests)) - len(requests)
        if missing:
            last = take_rows(value, [len(requests) - 1])
            value = join_all([value, *[last] * missing])
        return requests, (value,)

    def _batch(self, requests: Sequence[Request]) -> Sequence[Any]:
        entries = [request.payload for request in requests]
        collate, items, batch = self._function.joined(entries)
        padded = padded_length(collate, items)
        if padded is not None:
            for entry in entries:
                entry.padded = padded
        return batch

    def _filled_up(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Repeat the last request up to one of ``batch_sizes``."""
        if self._batch_sizes is None:
            return requests
        missing = self._size_of(len(requests)) - len(requests)
        return [*requests, *[requests[-1]] * missing]

    def _ways_at(self, stage: int) -> tuple[_Join, _Take]:
        """Return how to join and take rows before a stage; a loop may have its own ways."""
        loop = self.model.loop
        if loop is None or stage < len(self.model.stages) - 1:
            return join, take
        return loop.join, loop.take

    # --- after the stage --------------------------------------------------------------------------

    def _sorted(self, stage: int, requests: list[Request], output: Any) -> StageOutput:
        """Sort out which requests leave, and which go on with which rows."""
        if isinstance(output, Stepped):
            return self._after_step(requests, output)
        if isinstance(output, EarlyExit):
            return self._after_exit(stage, requests, output)
        if stage == len(self.model.stages) - 1:
            found = self._answers(output, self._filled_up(requests), self._function.name)
            return StageOutput(left=requests, results=found[: len(requests)])
        count, expected = rows_of(output), self._size_of(len(requests))
        if count != expected:
            raise BadBatch(
                f"{self._named(stage)} returned {'no' if count is None else count} rows for a "
                f"batch of {expected}"
            )
        rows = None if expected == len(requests) else list(range(len(requests)))
        return StageOutput([Piece(requests, rows, output)])

    def _after_exit(self, stage: int, requests: list[Request], output: EarlyExit) -> StageOutput:
        flags = self._flags(stage, output.finished, requests)
        filled = zip(self._filled_up(requests), flags, strict=True)
        ended = [each for each, is_finished in filled if is_finished]
        count = sum(flags[: len(requests)])
        results: Sequence[Any] = ()
        if ended:
            results = self._answers(output.results, ended, self._named(stage))[:count]
        rest = [each for each, flag in zip(requests, flags, strict=False) if not flag]
        if not rest:
            return StageOutput(left=ended[:count], results=results)
        if stage == len(self.model.stages) - 1:
            raise BadBatch(f"{self._named(stage)} is the last one, and some rows are not finished")
        found_rows = rows_of(output.rest)
        if found_rows != len(flags) - len(ended):
            raise BadBatch(
                f"{self._named(stage)} returned {found_rows} rows of activations for "
                f"{len(flags) - len(ended)} that are not finished"
            )
        rows = None if found_rows == len(rest) else list(range(len(rest)))
        return StageOutput([Piece(rest, rows, output.rest)], left=ended[:count], results=results)

    def _after_step(self, requests: list[Request], output: Stepped) -> StageOutput:
        last = len(self.model.stages) - 1
        flags = self._flags(last, output.finished, requests)
        pieces = split(own(output.pieces), len(flags))
        rows = range(len(requests))
        failed = [row for row in rows if is_failure(pieces[row])]
        steps = [(requests[row], pieces[row]) for row in rows if row not in failed]
        finished = [requests[row] for row in rows if flags[row] and row not in failed]
        if not failed and not finished and len(flags) == len(requests):
            return StageOutput([Piece(requests, None, output.state)], steps=steps)
        going = [row for row in rows if not flags[row] and row not in failed]
        rest = [Piece([requests[row] for row in going], going, output.state)] if going else []
        left, errors = [requests[row] for row in failed], [pieces[row] for row in failed]
        return StageOutput(rest, left, errors, steps=steps, finished=finished)

    def _answers(self, results: Any, requests: Sequence[Request], function: str) -> list[Any]:
        entries: list[Entry] = [request.payload for request in requests]
        return answers(
            self._function.collate_of(entries[0]),
            results,
            [item_of(entry) for entry in entries],
            function=function,
            padded=entries[0].padded,
        )

    def _flags(
        self, stage: int, finished: Sequence[bool], requests: Sequence[Request]
    ) -> list[bool]:
        flags = [bool(each) for each in finished]
        expected = self._size_of(len(requests))
        if len(flags) != expected:
            raise BadBatch(
                f"{self._named(stage)} said of {len(flags)} rows whether they are finished, and "
                f"has {expected}"
            )
        return flags

    def _size_of(self, count: int) -> int:
        """Return the number of rows of the batch that stages see."""
        return padded_size(count, self._batch_sizes)

    def _named(self, stage: int) -> str:
        return f"stage {stage} of {self._function.name}"


_Group = tuple[list[Request], Any]
_Join = Callable[[Sequence[Any]], Any]
_Take = Callable[[Any, Sequence[int]], Any]


def _together(outputs: Sequence[StageOutput]) -> StageOutput:
    """Combine the outputs of all calls of a stage."""
    if len(outputs) == 1:
        return outputs[0]
    return StageOutput(
        pieces=[each for output in outputs for each in output.pieces],
        left=[each for output in outputs for each in output.left],
        results=[each for output in outputs for each in output.results],
        steps=[each for output in outputs for each in output.steps],
        finished=[each for output in outputs for each in output.finished],
        runs=len(outputs),
        sizes=[each.size for each in outputs],
    )


def _joined(groups: list[_Group], join_all: _Join, take_rows: _Take) -> list[_Group]:
    if len(groups) < 2:
        return groups
    try:
        return [_merged(groups, join_all)]
    except NotJoinable:
        return [_merged(each, join_all) for each in _alike(groups, join_all, take_rows)]


def _merged(groups: Sequence[_Group], join_all: _Join) -> _Group:
    value = join_all([value for _, value in groups])
    return [each for requests, _ in groups for each in requests], value


def _alike(groups: Sequence[_Group], join_all: _Join, take_rows: _Take) -> list[list[_Group]]:
    """Return sets of groups that can be joined with each other; tried with one row of each."""
    found: list[tuple[Any, list[_Group]]] = []
    for group in groups:
        row = take_rows(group[1], [0])
        for first, others in found:
            try:
                join_all([first, row])
            except NotJoinable:
                continue
            others.append(group)
            break
        else:
            found.append((row, [group]))
    return [others for _, others in found]
