"""A driver of staged batching in one thread: real stages, and an order of events drawn at random.

Between any two events any other may come: another stage's end, an arrival, a cancellation, a timer
that nobody asked for. So orders are tried that threads would hardly ever bring about, and each can
be tried again. Independent of the package's own driver, so that each can be checked against the
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.batching.staged.models import Subject
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Cancelled,
    Drop,
    Event,
    Finished,
    Request,
    Run,
)
from trims_shim.batching.staged.activations import EarlyExit, Stepped
from trims_shim.batching.staged.flow import NotJoinable, join, take
from trims_shim.batching.staged.mechanism.batches import Part, Piece
from trims_shim.batching.staged.model import Loop
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded
from trims_shim.batching.staged.staged_rules import StagedRule

__all__ = ["StagedDriver", "Wild"]

_MOST_EVENTS = 5_000
_STEP_NS = 1_000_000


class StagedDriver:
    """Answers the items of a subject under a policy; ``answers`` by their numbers."""

    def __init__(self, subject: Subject, policy: StagedBatching, randoms: Random) -> None:
        self.answers: dict[int, Any] = {}
        self.dropped: set[int] = set()
        self.cancelled: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._subject = subject
        self._policy = policy
        self._collate = collate_of(subject.collate)
        self._randoms = randoms
        self._running: list[tuple[Run, int]] = []
        """With the time at which each began."""
        self._pieces: dict[int, list[Any]] = {}
        """Of requests in the loop, what its steps have added."""
        self._now_ns = 0

    def run(self, numbers: Sequence[int], *, cancels: float = 0.0, slo_ns: int = 1 << 60) -> None:
        """Ask for the items of these numbers, in this order; returns when all are settled.

        ``cancels``: how likely a cancellation is between two events.
        """
        coming = [self._request(number, slo_ns) for number in numbers]
        here: list[Request] = []
        for _ in range(_MOST_EVENTS):
            here = [request for request in here if not self._is_settled(request.number)]
            if not coming and not here and not self._running:
                return
            self._now_ns += self._randoms.randrange(_STEP_NS)
            if here and self._randoms.random() < cancels:
                self._cancel(here.pop(self._randoms.randrange(len(here))))
            elif coming and self._randoms.random() < 0.5:
                here.append(coming.pop(0))
                here[-1].arrival_ns = self._now_ns
                here[-1].deadline_ns += self._now_ns
                self._tell(here[-1])
            elif self._running:
                self._end(*self._running.pop(self._randoms.randrange(len(self._running))))
            else:
                self._wait(is_last=not coming)
        raise AssertionError(f"not settled: {[request.number for request in here]}")

    def _request(self, number: int, slo_ns: int) -> Request:
        item = self._subject.item(number)
        return Request(number, 0, slo_ns, key=self._collate.key(item), payload=item)

    def _is_settled(self, number: int) -> bool:
        return number in self.answers or number in self.dropped

    def _wait(self, *, is_last: bool) -> None:
        due_ns = self._policy.next_deadline_ns()
        if due_ns is not None:
            self._now_ns = max(self._now_ns, due_ns)
            self._tell(TIMER)
        elif is_last:
            self._tell(FLUSH)

    def _cancel(self, request: Request) -> None:
        self.cancelled.add(request.number)
        self._tell(Cancelled(request))

    def _tell(self, event: Event) -> None:
        for action in self._policy.on_event(self._now_ns, event):
            if isinstance(action, RunStage):
                self._running.append((action, self._now_ns))
                self.counts["batch"] += (
                    not action.stage and action.part.batch.size == action.part.size
                )
                self.counts["stretched"] += action.part.batch.size > len(action.batch)
                self.counts["split"] += action.part.batch.is_split
                self.counts["joined"] += len(action.part.pieces) > 1
            elif isinstance(action, Run):
                self._running.append((action, self._now_ns))
                self.counts["whole"] += 1
            else:
                assert isinstance(action, Drop), action
                self.dropped.update(request.number for request in action.requests)

    # --- stages -----------------------------------------------------------------------------------

    def _end(self, action: Run, started_ns: int) -> None:
        if not isinstance(action, RunStage):
            self._end_whole(action, started_ns)
            return
        part = action.part
        assert part.requests == list(action.batch)
        left: list[Request] = []
        part.pieces = [
            piece for each in self._inputs(part) for piece in self._run(part.stage, *each, left)
        ]
        for request in left:
            self._pieces.pop(request.number, None)
        live = [each for each in left if each.number not in self.cancelled]
        assert all(each.number in self.answers for each in live)
        self._tell(StageEnded(action.device, action.batch, started_ns, part=part, left=left))

    def _end_whole(self, action: Run, started_ns: int) -> None:
        requests = list(action.batch)
        value = self._collate.join([request.payload for request in requests])
        left: list[Request] = []
        for stage in range(len(self._subject.model)):
            pieces = self._run(stage, requests, value, left)
            if not pieces:
                break
            requests, value = pieces[0].requests, take(pieces[0].value, pieces[0].rows)
        assert set(left) == set(action.batch)
        self._tell(Finished(action.device, action.batch, started_ns))

    def _inputs(self, part: Part) -> list[tuple[list[Request], Any]]:
        """What the stage is to be called with; more than one where values cannot be joined."""
        if not part.stage:
            requests = part.requests
            return [(requests, self._collate.join([request.payload for request in requests]))]
        values = [take(piece.value, piece.rows) for piece in part.pieces]
        try:
            return [(part.requests, join(values))]
        except NotJoinable:
            self.counts["not joinable"] += 1
            return [
                (piece.requests, value) for piece, value in zip(part.pieces, values, strict=True)
            ]

    def _run(
        self, stage: int, requests: list[Request], value: Any, left: list[Request]
    ) -> list[Piece]:
        model = self._subject.model
        result = model.stages[stage](value)
        if isinstance(result, Stepped):
            return self._stepped(requests, result, left)
        if isinstance(result, EarlyExit):
            finished = [
                each
                for each, is_finished in zip(requests, result.finished, strict=True)
                if is_finished
            ]
            self._answer(finished, result.results, left)
            requests = [each for each in requests if each not in finished]
            return [Piece(requests, list(range(len(requests))), result.rest)] if requests else []
        if stage == len(model) - 1:
            self._answer(requests, result, left)
        return [Piece(requests, list(range(len(requests))), result)]

    def _stepped(
        self, requests: list[Request], stepped: Stepped, left: list[Request]
    ) -> list[Piece]:
        loop = self._subject.model.loop
        assert isinstance(loop, Loop)
        for row, request in enumerate(requests):
            pieces = self._pieces.setdefault(request.number, [])
            pieces.append(stepped.pieces[row])
            if stepped.finished[row]:
                left.append(request)
                self._settle(request, loop.result(pieces))
        return [Piece(requests, list(range(len(requests))), stepped.state)]

    def _answer(self, requests: list[Request], results: Any, left: list[Request]) -> None:
        left += requests
        items = [request.payload for request in requests]
        for request, result in zip(requests, self._collate.split(results, items), strict=True):
            self._settle(request, result)

    def _settle(self, request: Request, result: Any) -> None:
        number = request.number
        assert number not in self.answers, f"{number} is answered twice"
        assert number not in self.dropped
        if number not in self.cancelled:
            self.answers[number] = result


class Wild(StagedRule):
    """Starts, stretches, splits or does none of it at random: whatever a policy might do."""

    randoms = Random(0)

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        self.wake_ns = now_ns + _STEP_NS
        return self.randoms.randint(0, self.room())

    def runs_whole(self, now_ns: int, size: int) -> bool:
        """See :class:`StagedRule`."""
        return self.randoms.random() < 0.3

    def stretch(self, now_ns: int, batch: Any, room: int) -> int:
        """See :class:`StagedRule`."""
        return self.randoms.randint(0, room)

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        """See :class:`StagedRule`."""
        if part.size < 2 or self.randoms.random() < 0.5:
            return ()
        first = self.randoms.randint(1, part.size - 1)
        return first, part.size - first
