"""The batch table: batches on their way through the stages of a model, and the parts they are in.

A batch is what was put together at one time (``new``) and what joined it later (``stretch``). It is
in one part, until it is stretched or split; each part is at one stage, where it waits or runs. Who
is in which part is known by request; what a part has become so far is in its pieces, whose values
belong to the driver and are never looked at here.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trims_shim.batching.protocol import Request

__all__ = ["Batch", "BatchTable", "Part", "PartState", "Piece"]


class PartState(enum.Enum):
    """Where a part is, at its stage."""

    WAITING = "waiting"
    """At the border before it, for those of its batch that are behind."""
    QUEUED = "queued"
    """In the stage's batch queue."""
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of one value: of what a stage has returned, or items that have not begun."""

    requests: list[Request]
    rows: list[int] | None = None
    """Which row of the value belongs to each request; None where it has no others."""
    value: Any = field(default=None, repr=False)
    """The driver's."""

    def cut(self, count: int) -> Piece:
        """The first ``count`` leave, as a piece of the same value."""
        rows = self._numbered()
        first = Piece(self.requests[:count], rows[:count], self.value)
        self.requests, self.rows = self.requests[count:], rows[count:]
        return first

    def leave_out(self, gone: Collection[Request]) -> None:
        """Without those; their rows stay in the value until the next stage takes it."""
        kept = [index for index, each in enumerate(self.requests) if each not in gone]
        if len(kept) < len(self.requests):
            rows = self._numbered()
            self.requests = [self.requests[index] for index in kept]
            self.rows = [rows[index] for index in kept]

    def _numbered(self) -> list[int]:
        return list(range(len(self.requests))) if self.rows is None else self.rows


@dataclass(slots=True, eq=False)
class Part:
    """Requests of one batch that are at the same stage, and run it together."""

    batch: Batch
    stage: int
    pieces: list[Piece]
    order: int = 0
    """Among the parts of a split batch: earlier ones are to be done earlier."""
    state: PartState = PartState.WAITING
    started_ns: int = 0
    """When its stage began, while it runs."""
    running: Sequence[Request] = ()
    """Whom its stage runs with. Its pieces are the driver's meanwhile, and not looked at."""
    gone: list[Request] = field(default_factory=list)
    """Those of them for whom nobody waits any more."""

    @property
    def size(self) -> int:
        """How many requests."""
        if self.state is PartState.RUNNING:
            return len(self.running)
        return sum(len(piece.requests) for piece in self.pieces)

    @property
    def requests(self) -> list[Request]:
        """All of them, in the order in which they are in the batch."""
        if self.state is PartState.RUNNING:
            return list(self.running)
        return [request for piece in self.pieces for request in piece.requests]

    def at(self, stage: int) -> Part:
        """The same requests at another stage, for rules to look at."""
        return replace(self, stage=stage)

    def absorb(self, other: Part) -> None:
        """The other has caught up: from now on it is in this one."""
        self.pieces.extend(other.pieces)
        other.pieces = []

    def cut(self, count: int) -> Part:
        """The first ``count`` become a part of their own."""
        pieces: list[Piece] = []
        while count:
            first = self.pieces[0]
            if len(first.requests) <= count:
                pieces.append(self.pieces.pop(0))
            else:
                pieces.append(first.cut(count))
            count -= len(pieces[-1].requests)
        return Part(self.batch, self.stage, pieces, self.order)

    def leave_out(self, gone: Collection[Request]) -> None:
        """Without those that are finished, or that nobody waits for."""
        if not gone:
            return
        for piece in self.pieces:
            piece.leave_out(gone)
        self.pieces = [piece for piece in self.pieces if piece.requests]


@dataclass(slots=True, eq=False)
class Batch:
    """A row of the batch table."""

    number: int
    """Ascending in the order of their creation."""
    key: Hashable
    created_ns: int
    pair: int
    """Which buffer of each stage is its."""
    size: int
    """How many requests have entered."""
    passed: list[int]
    """The status map: how many of its requests have finished each stage; of a loop, the steps."""
    is_split: bool = False
    """It can be stretched no more, and its parts do not wait for each other."""
    is_typical: bool = True
    """It has taken what one that nobody joined on the way would have taken."""
    is_apart: bool = False
    """Some of it could not be joined with the others, and runs after them at each stage."""
    parts: list[Part] = field(default_factory=list)

    def has_part_at(self, stage: int) -> bool:
        """Whether one of its parts is there."""
        return stage in [part.stage for part in self.parts]

    @property
    def live(self) -> int:
        """How many of its requests are still on their way."""
        return sum(part.size for part in self.parts)

    @property
    def weight(self) -> int:
        """What those weigh together."""
        return sum(request.weight for part in self.parts for request in part.requests)


class BatchTable:
    """The batches on their way, and what is done to them as a whole: new, stretch, split."""

    __slots__ = ("_batches", "_number", "_stages")

    def __init__(self, *, stages: int) -> None:
        self._stages = stages
        self._number = 0
        self._batches: dict[int, Batch] = {}

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def __len__(self) -> int:
        return len(self._batches)

    def is_newest(self, batch: Batch) -> bool:
        """Whether none that was made after it is on its way."""
        return next(reversed(self._batches.values()), None) is batch

    def new(self, now_ns: int, requests: Sequence[Request], *, pair: int) -> Part:
        """A batch of requests of one key, at the first stage."""
        batch = Batch(
            number=self._number,
            key=requests[0].key,
            created_ns=now_ns,
            pair=pair,
            size=0,
            passed=[0] * self._stages,
        )
        self._number += 1
        self._batches[batch.number] = batch
        return self.stretch(batch, requests)

    def stretch(self, batch: Batch, requests: Sequence[Request]) -> Part:
        """More requests for a batch on its way, at the first stage."""
        part = Part(batch, 0, [Piece(list(requests))])
        batch.parts.append(part)
        batch.size += len(requests)
        return part

    def split(self, part: Part, sizes: Sequence[int]) -> list[Part]:
        """The part in parts of these sizes, in their order; the last one is ``part`` itself."""
        batch = part.batch
        batch.is_split = True
        parts = []
        for order, size in enumerate(sizes[:-1]):
            first = part.cut(size)
            first.order = order
            parts.append(first)
        part.order = len(sizes) - 1
        batch.parts.extend(parts)
        return [*parts, part]

    def end(self, batch: Batch) -> None:
        """None of it is on its way any more."""
        del self._batches[batch.number]
