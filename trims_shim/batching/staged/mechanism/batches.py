"""The batch table: the batches that are under way in the stages of a model, and their parts.

A batch has the requests it was created with (``new``) and those that joined later (``stretch``). It
has one part until it is stretched or split. Each part is at one stage, where it waits or runs. Its
pieces list its requests and hold their activations, which only the driver looks at.
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
    """At the border before the stage, until the parts of its batch that are behind catch up."""
    QUEUED = "queued"
    """In the stage's batch queue."""
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of one value that a stage returned, or requests that have not started."""

    requests: list[Request]
    rows: list[int] | None = None
    """The row of the value for each request; None if they are all its rows, in order."""
    value: Any = field(default=None, repr=False)
    """Belongs to the driver. None before the first stage has run."""

    def cut(self, count: int) -> Piece:
        """Remove the first ``count`` requests; return them as a piece of the same value."""
        rows = self._numbered()
        first = Piece(self.requests[:count], rows[:count], self.value)
        self.requests, self.rows = self.requests[count:], rows[count:]
        return first

    def leave_out(self, gone: Collection[Request]) -> None:
        """Remove these requests. Their rows stay in the value until the next stage takes it."""
        kept = [index for index, each in enumerate(self.requests) if each not in gone]
        if len(kept) < len(self.requests):
            rows = self._numbered()
            self.requests = [self.requests[index] for index in kept]
            self.rows = [rows[index] for index in kept]

    def _numbered(self) -> list[int]:
        return list(range(len(self.requests))) if self.rows is None else self.rows


@dataclass(slots=True, eq=False)
class Part:
    """Requests of one batch that are at the same stage and run it together."""

    batch: Batch
    stage: int
    pieces: list[Piece]
    order: int = 0
    """Position among the parts of a split batch; the first is to finish first."""
    state: PartState = PartState.WAITING
    started_ns: int = 0
    """When its current stage started; valid while it runs."""
    running: Sequence[Request] = ()
    """The requests that its stage runs with. Meanwhile ``pieces`` belongs to the driver."""
    gone: list[Request] = field(default_factory=list)
    """The running requests that were cancelled meanwhile."""

    @property
    def size(self) -> int:
        """The number of requests."""
        if self.state is PartState.RUNNING:
            return len(self.running)
        return sum(len(piece.requests) for piece in self.pieces)

    @property
    def requests(self) -> list[Request]:
        """All requests, in batch order."""
        if self.state is PartState.RUNNING:
            return list(self.running)
        return [request for piece in self.pieces for request in piece.requests]

    def at(self, stage: int) -> Part:
        """Return a copy at another stage, for rules to evaluate."""
        return replace(self, stage=stage)

    def absorb(self, other: Part) -> None:
        """Take over the pieces of a part that has caught up."""
        self.pieces.extend(other.pieces)
        other.pieces = []

    def cut(self, count: int) -> Part:
        """Remove the first ``count`` requests and return them as a new part."""
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
        """Remove requests that are finished or cancelled."""
        if not gone:
            return
        for piece in self.pieces:
            piece.leave_out(gone)
        self.pieces = [piece for piece in self.pieces if piece.requests]


@dataclass(slots=True, eq=False)
class Batch:
    """A row of the batch table."""

    number: int
    """Ascends in the order of creation."""
    key: Hashable
    created_ns: int
    pair: int
    """The index of its buffer before each stage."""
    size: int
    """The number of requests that have entered."""
    passed: list[int]
    """The status map: how many requests have finished each stage; of a loop, once for each step."""
    is_split: bool = False
    """No request can join it any more, and its parts do not wait for each other."""
    is_typical: bool = True
    """Its duration is that of a batch that no request joined on the way."""
    is_apart: bool = False
    """Its rows could not all be joined: each stage runs once for each group of joinable rows."""
    parts: list[Part] = field(default_factory=list)

    def has_part_at(self, stage: int) -> bool:
        """Whether one of its parts is at ``stage``."""
        return stage in [part.stage for part in self.parts]

    @property
    def live(self) -> int:
        """The number of its requests that are still under way."""
        return sum(part.size for part in self.parts)

    @property
    def weight(self) -> int:
        """The total weight of the requests that are still under way."""
        return sum(request.weight for part in self.parts for request in part.requests)


class BatchTable:
    """The batches under way, and the operations on whole batches: new, stretch, split."""

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
        """Whether no batch created after it is under way."""
        return next(reversed(self._batches.values()), None) is batch

    def new(self, now_ns: int, requests: Sequence[Request], *, pair: int) -> Part:
        """Create a batch of requests of one key, at the first stage; return its part."""
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
        """Add requests to a batch, as a part at the first stage."""
        part = Part(batch, 0, [Piece(list(requests))])
        batch.parts.append(part)
        batch.size += len(requests)
        return part

    def split(self, part: Part, sizes: Sequence[int]) -> list[Part]:
        """Split the part into parts of these sizes, in order; the last one is ``part`` itself."""
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
        """Remove a batch of which nothing is under way any more."""
        del self._batches[batch.number]
