"""The job of running a stage with a part: begin it, run it, deliver its answers, report it.

Unlike a plain :class:`~trims_shim.batching.drivers.jobs.Job` it answers only the requests that
leave at its end. Once it has run, ``live`` and ``results`` are these requests and their results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.replies import BatchFuture, Entry, Failure
from trims_shim.batching.drivers.streams import END
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.drivers.running import StageOutput
from trims_shim.batching.staged.mechanism.batches import Piece
from trims_shim.batching.staged.scheduler import RunStage

__all__ = ["Pieces", "StageJob"]


class Pieces:
    """A result: the pieces of an answer, none of which has been handed out yet."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[Any]) -> None:
        self.pieces = pieces


class StageJob(Job):
    """One :class:`~trims_shim.batching.staged.scheduler.RunStage`.

    ``is_end``: the stage is the last one and no loop; its requests can no longer be cancelled.
    ``result`` makes the answer of a row of a loop from its pieces.
    """

    __slots__ = (
        "_has_met",
        "_is_handed_out",
        "_output",
        "_result",
        "_since_ns",
        "_told",
        "began",
        "durations_ns",
        "has_started",
        "is_alone",
        "is_beside",
        "is_end",
        "news",
        "part",
        "size",
        "stage",
        "through",
        "until",
    )

    def __init__(
        self, action: RunStage, era: int, *, is_end: bool, result: Callable[[list[Any]], Any]
    ) -> None:
        super().__init__(action.device, action.batch, era)
        self.stage = action.stage
        self.until = action.until
        """The last stage that it may run on to, as long as no event occurs."""
        self.through = action.stage
        """The stage that it is running or has run last."""
        self.durations_ns: list[int] = []
        """The durations of its stages that have ended."""
        self._since_ns = 0
        self.news = 0
        """The number of events when it was made."""
        self.part = action.part
        self.is_end = is_end
        self.size: int = 0
        """The number of rows it runs with."""
        self.began: Sequence[Request] = ()
        """The requests of these rows."""
        self.has_started = False
        """The stage was called, and may have modified its input."""
        self.is_alone = True
        """Its duration is that of one call with all rows."""
        self.is_beside = False
        """Another stage ran during part of it."""
        self._result = result
        self._has_met = False
        self._output: StageOutput | None = None
        self._told = 0
        self._is_handed_out = False

    @property
    def key(self) -> Hashable:
        """See :class:`Job`; also valid when its requests have left."""
        return self.part.batch.key

    @property
    def is_typical(self) -> bool:
        """See :class:`Job`."""
        return self.size > 0 and self.is_alone

    def may_run_on(self, output: StageOutput) -> bool:
        """Whether all its requests go on, and ``until`` allows another stage."""
        return (
            self.through < self.until
            and len(output.pieces) == 1
            and len(output.pieces[0].requests) == len(self.requests)
        )

    def run_on(self, now_ns: int, *, is_end: bool) -> bool:
        """Go on to the next stage; False if that is the end and a request was cancelled."""
        if is_end and not all(each.payload.reply.begin() for each in self.requests):
            return False
        self.is_end = is_end
        self._add_duration(now_ns)
        self.through += 1
        return True

    def _add_duration(self, now_ns: int) -> None:
        self.durations_ns.append(now_ns - self._since_ns)
        self._since_ns = now_ns

    @property
    def has_failed(self) -> bool:
        """The stage failed, and the whole function answered instead."""
        return self._output is not None and self._output.has_failed

    @property
    def is_by_stage(self) -> bool:
        """Its answers are the stage's, not those of the whole function."""
        return self._output is not None and self._output.runs > 0

    @property
    def has_exits(self) -> bool:
        """The stage has answered some of its requests itself; others may have been cancelled."""
        output = self._output
        return output is not None and output.runs > 0 and bool(output.left)

    @property
    def is_joined(self) -> bool | None:
        """Whether the stage ran several pieces as one batch; None if there were not several."""
        output = self._output
        if output is None or not self._has_met or not output.runs:
            return None
        return output.runs == 1

    def sizes(self, stage: int) -> Sequence[int]:
        """Return the rows of each call of this stage: one call unless rows stay apart."""
        output = self._output
        if output is None or stage < self.through or not output.sizes:
            return [self.size] if self.size else []
        return output.sizes

    def begin(self, now_ns: int) -> list[Entry]:
        """See :class:`Job`."""
        if self.live is None:
            self.started_ns = now_ns
            self.live = [each for each in self.requests if self._is_wanted(each)]
        return [request.payload for request in self.live]

    def _is_wanted(self, request: Request) -> bool:
        reply = request.payload.reply
        if self.is_end or not isinstance(reply, BatchFuture):
            return bool(reply.begin())
        return not reply.cancelled()  # without begin(), so that it can still be cancelled

    def pieces(self) -> list[Piece]:
        """Return the pieces to run at its first stage, without cancelled requests."""
        self.through, self._since_ns = self.stage, self.started_ns
        self.durations_ns.clear()
        live = self.began = self.live or []
        self.size = len(live)
        if self.size == len(self.requests):
            self._has_met = _are_several(self.part.pieces)
            return self.part.pieces
        pieces = [Piece(each.requests, each.rows, each.value) for each in self.part.pieces]
        for piece in pieces:
            piece.leave_out([each for each in piece.requests if each not in live])
        pieces = [piece for piece in pieces if piece.requests]
        self._has_met = _are_several(pieces)
        return pieces

    def end_stage(self, now_ns: int, output: StageOutput) -> None:
        """Record what its last call of a stage returned."""
        self._output = output
        self._add_duration(now_ns)
        self.is_alone = self.is_alone and output.runs == 1
        live = [*output.left, *output.finished]
        results = [*output.results, *[None] * len(output.finished)]
        self.ended_ns = now_ns
        # No interrupt can come between these two, and whoever continues finds both or neither.
        self.live = live
        self.results = results

    def end_with(self, now_ns: int, error: BaseException) -> None:
        """See :class:`Job`."""
        self.is_alone = False
        super().end_with(now_ns, error)

    def deliver(self) -> None:
        """See :class:`Job`; hands out the pieces of a loop first."""
        output = self._output
        if output is not None and not self._is_handed_out:
            while self._told < len(output.steps):
                request, piece = output.steps[self._told]
                _hand_out(request.payload, piece)
                self._told += 1
            self._complete(output)
            self._is_handed_out = True
        super().deliver()

    def _complete(self, output: StageOutput) -> None:
        assert self.results is not None
        for index, request in enumerate([*output.left, *output.finished]):
            result = self.results[index]
            if type(result) is Pieces:
                for piece in result.pieces:
                    _hand_out(request.payload, piece)
            elif index < len(output.left):
                continue
            self.results[index] = self._answer(request.payload)

    def _answer(self, entry: Entry) -> Any:
        if entry.is_streamed:
            return END
        try:
            return self._result(entry.pieces or [])
        # Whatever it is: it would come again each time that the answers are handed out.
        except BaseException as error:
            return Failure(error)

    def lets_go(self, request: Request) -> bool:
        """Whether the request is in this job and leaves with it."""
        leaving = self.live or () if self.results is not None else ()
        return request in (self.requests if self.is_end else leaving)

    def settle_part(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Give the part its new pieces, under the lock.

        Returns the requests that leave it, and those of them without a result: the cancelled ones.
        """
        going = [] if self._output is None else list(self._output.pieces)
        self.part.pieces = going
        left, live = self.requests, self.live or ()
        if going:
            staying = {each for piece in going for each in piece.requests}
            left = [each for each in left if each not in staying]
        if len(left) == len(live):
            return left, ()
        answered = set(live)
        return left, [each for each in left if each not in answered]


def _are_several(pieces: Sequence[Piece]) -> bool:
    return len(pieces) > 1 and any(piece.value is not None for piece in pieces)


def _hand_out(entry: Entry, piece: Any) -> None:
    if entry.pieces is None:
        entry.pieces = []
    step = getattr(entry.reply, "step", None)
    if step is None:
        entry.pieces.append(piece)
    else:
        step(piece)
