"""The mechanism of multi-entry multi-exit batching: what may run when, not what should.

Batches go through the stages of a model in the order of their creation. Between two stages there
are buffers (:mod:`trims_shim.batching.staged.mechanism.buffers`). With one buffer pair,
neighbouring stages take turns; with two, they work on two batches at the same time. Three
meta-operations change batches:

``new``      requests enter the first stage as a batch of their own;
``stretch``  requests enter the first stage as a part of a batch that is further on. The part ahead
             waits at a border; the newcomers catch up stage by stage, merge with it, and all go on;
``split``    a batch goes on in several parts, which no longer wait for each other.

One rule holds at every border: *a part goes on when no part of its batch is behind it*, together
with the parts that wait there. Parts of a split batch go on at once. A part that runs when its
batch is stretched waits at the end of its stage, another where it is.

The last stage may be a *loop*: a step that runs again until its requests are finished, each at its
own time. A part in the loop does not wait for the parts behind it; they merge with it between two
steps. Batches that are in the loop at the same time take turns.

The executor of a stage is its queue and the part that it runs; the states that the paper gives it
(section 5.3 and figure 9) follow from these and from the buffers.

Sans I/O, no clock, no decisions. The caller obeys ``may_new``, ``may_stretch`` and ``ready``.
Source: DVABatch (ATC'22), section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.mechanism.batches import Batch, BatchTable, Part, PartState
from trims_shim.batching.staged.mechanism.buffers import Buffer, BufferEvent, BufferState

__all__ = ["Pipeline"]


class Pipeline:
    """See the module docstring. ``pairs``: the number of buffer pairs of each stage."""

    def __init__(self, stages: int, *, pairs: int = 2, has_loop: bool = False) -> None:
        if stages < 1:
            raise ValueError(f"a model of {stages} stages; at least one is needed")
        if pairs < 1:
            raise ValueError(f"{pairs} buffer pairs; at least one is needed")
        self.table = BatchTable(stages=stages)
        self.has_loop = has_loop
        self.last = stages - 1
        """The last stage."""
        self._queues: list[deque[Part]] = [deque() for _ in range(stages)]
        """The batch queue of each stage: only its first part may start."""
        self._running: list[Part | None] = [None] * stages
        """What each stage runs: one part at a time."""
        self._buffers = [[Buffer() for _ in range(pairs)] for _ in range(stages)]
        self._untold: Part | None = None
        """The part of :meth:`new_alone` while buffers and queues do not know of it."""

    @property
    def active(self) -> int:
        """The number of requests under way."""
        return sum(batch.live for batch in self.table)

    # --- meta-operations --------------------------------------------------------------------------

    @property
    def may_new(self) -> bool:
        """Whether a batch could enter now and start at once."""
        return self._free_pair() is not None

    def new(self, now_ns: int, requests: Sequence[Request]) -> Batch:
        """See the module docstring."""
        pair = self._free_pair()
        assert pair is not None
        part = self.table.new(now_ns, requests, pair=pair)
        self._enter(part)
        return part.batch

    def new_alone(self, now_ns: int, requests: Sequence[Request]) -> Part:
        """Do ``new`` and ``start`` if nothing is under way or will run beside it.

        Buffers and queues are told when it has finished its stages, unless all its requests have
        left by then, as is usual. Until then only ``withdraw`` and ``finish`` may be called.
        """
        part = self._untold = self.table.new(now_ns, requests, pair=0)
        self._run(part)
        return part

    def _tell_of(self, part: Part) -> None:
        """Tell buffers and queues of the part of :meth:`new_alone`: it entered and runs."""
        running, part.state = part.running, PartState.WAITING
        self._enter(part)
        self.start(part)
        part.running = running  # not from part.pieces, which are those after its stage

    def may_stretch(self, batch: Batch) -> bool:
        """Whether requests could join the batch now and would still catch up with it."""
        if batch.is_split or not batch.parts or not self._may_enter(batch):
            return False
        if self.has_loop:
            # Newer batches of other keys may overtake it in the loop if they have another buffer
            # pair. With the same pair, newcomers would wait for the newer batch, and it for them.
            return not any(
                each.number > batch.number and (each.key == batch.key or each.pair == batch.pair)
                for each in self.table
            )
        # A part that runs the last stage has left before newcomers catch up.
        is_met = any(
            part.state is not PartState.RUNNING or part.stage < self.last for part in batch.parts
        )
        return is_met and self.table.is_newest(batch)

    def stretch(self, batch: Batch, requests: Sequence[Request]) -> None:
        """See the module docstring."""
        newcomers = self.table.stretch(batch, requests)
        for part in batch.parts:
            if part.state is PartState.QUEUED and not self._goes_on(part):
                self._queues[part.stage].remove(part)
                part.state = PartState.WAITING
        self._enter(newcomers)

    def split(self, part: Part, sizes: Sequence[int]) -> None:
        """See the module docstring. ``part`` is queued and is all of its batch."""
        queue = self._queues[part.stage]
        queue.remove(part)
        for each in self.table.split(part, sizes):
            each.state = PartState.QUEUED
            queue.append(each)

    def _enter(self, part: Part) -> None:
        self._input(part).handle(BufferEvent.ENTER, part.batch)
        self._gather(part.batch)

    def _free_pair(self) -> int | None:
        """Return a buffer pair with which a new batch would start at once, or None.

        Of several pairs, one that no batch has, else the one whose newest batch is the oldest.
        """
        if not len(self.table):
            return 0
        # If the only stage is a loop, a new batch takes turns with the batches that are in it.
        if self._running[0] is not None or (self._queues[0] and not self._is_loop(0)):
            return None
        pairs = [pair for pair in range(len(self._buffers[0])) if self._is_clear(pair)]
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        last = {batch.pair: batch.number for batch in self.table}
        return min(pairs, key=lambda pair: last.get(pair, -1))

    def _is_clear(self, pair: int) -> bool:
        """Whether both buffers that a new batch would read and write are empty."""
        if self._buffers[0][pair].state is not BufferState.INVALID:
            return False
        return not self.last or self._buffers[1][pair].state is BufferState.INVALID

    def _may_enter(self, batch: Batch) -> bool:
        """Whether newcomers would run the first stage before any other batch does."""
        part = self._running[0] or next(iter(self._queues[0]), None)
        is_next = part is None or part.batch is batch
        return is_next and self._buffers[0][batch.pair].may_write(batch)

    # --- stages -----------------------------------------------------------------------------------

    def ready(self) -> list[Part]:
        """Return the parts that could start now, in order of precedence.

        Steps of a loop last; earlier batches first; of a batch, the parts of a split in order, and
        parts that catch up before those they catch up with.
        """
        parts = [
            queue[0]
            for queue, running in zip(self._queues, self._running, strict=True)
            if queue and running is None and self._is_legal(queue[0])
        ]
        if len(parts) > 1:
            parts.sort(key=self._precedence)
        return parts

    def is_step(self, part: Part) -> bool:
        """Whether the part's next stage is the loop."""
        return self._is_loop(part.stage)

    def _precedence(self, part: Part) -> tuple[bool, int, int, int]:
        return self.is_step(part), part.batch.number, part.order, part.stage

    def start(self, part: Part) -> None:
        """Start the stage of a part from :meth:`ready`."""
        first = self._queues[part.stage].popleft()
        assert first is part
        assert self._running[part.stage] is None
        self._running[part.stage] = part
        self._run(part)
        self._input(part).handle(BufferEvent.READ, part.batch)
        output = self._output(part)
        if output is not None:
            output.handle(BufferEvent.WRITE, part.batch)

    def _run(self, part: Part) -> None:
        part.running = part.requests
        part.state = PartState.RUNNING

    def finish(
        self, part: Part, left: Collection[Request], *, through: int | None = None
    ) -> list[Part]:
        """Note that the part's stage has ended, and finished the requests in ``left``.

        ``through``: the stage up to which it has run on. Nothing was ahead when it started or has
        overtaken it since, so no other batch needed the buffers in between. Returns the parts that
        this queues for a stage.
        """
        batch, stage = part.batch, part.stage
        through = stage if through is None else through
        for each in range(stage, through + 1):
            batch.passed[each] += len(part.running)
        if through == self.last and not self.has_loop:
            part.pieces = []
        else:
            part.leave_out({*part.gone, *left})
        if part is self._untold:
            self._untold = None
            if not part.pieces:
                batch.parts.clear()
                self.table.end(batch)
                return []
            self._tell_of(part)
        output = self._output(part)
        if not part.pieces:
            batch.parts.remove(part)
        elif output is not None:
            part.stage = through + 1
        part.running, part.gone = (), []
        part.state = PartState.WAITING
        is_left = batch.has_part_at(stage)
        self._buffers[stage][batch.pair].handle(
            BufferEvent.REMAINDER if is_left else BufferEvent.CLEARED, batch
        )
        if output is not None:
            is_written = batch.has_part_at(stage + 1)
            output.handle(BufferEvent.WRITTEN if is_written else BufferEvent.NOTHING_WRITTEN, batch)
        if part.pieces and through > stage:
            self._input(part).handle(BufferEvent.ENTER, batch)
        self._running[stage] = None
        return self._gather(batch)

    def withdraw(self, request: Request) -> bool:
        """Take a cancelled request out; False if it is not under way."""
        for batch in self.table:
            for part in batch.parts:
                if request in part.requests:
                    self._withdraw(part, request)
                    return True
        return False

    def _withdraw(self, part: Part, request: Request) -> None:
        if part.state is PartState.RUNNING:
            part.gone.append(request)
            return
        part.leave_out((request,))
        if part.pieces:
            return
        batch = part.batch
        batch.parts.remove(part)
        if part.state is PartState.QUEUED:
            self._queues[part.stage].remove(part)
        if not batch.has_part_at(part.stage):
            buffer = self._input(part)
            # If the stage before is writing to it, its end will set the state.
            if buffer.may_read(batch):
                buffer.handle(BufferEvent.CLEARED, batch)
        self._gather(batch)

    # --- inside -----------------------------------------------------------------------------------

    def _gather(self, batch: Batch) -> list[Part]:
        """Queue parts that need not wait any more; forget a batch without parts."""
        queued: list[Part] = []
        if not batch.parts:
            self.table.end(batch)
            return queued
        for part in [each for each in batch.parts if each.state is PartState.WAITING]:
            if not self._goes_on(part):
                continue
            first = self._queued_before(part)
            if first is None:
                part.state = PartState.QUEUED
                self._queues[part.stage].append(part)
                first = part
            else:
                first.absorb(part)
                batch.parts.remove(part)
            if first not in queued:
                queued.append(first)
        return queued

    def _goes_on(self, part: Part) -> bool:
        if part.batch.is_split or self._is_loop(part.stage):
            return True
        return all(each.stage >= part.stage for each in part.batch.parts)

    def _queued_before(self, part: Part) -> Part | None:
        """Return a part that is queued for the same stage and can absorb this one."""
        if part.batch.is_split:
            return None
        return next(
            (
                each
                for each in part.batch.parts
                if each.stage == part.stage and each.state is PartState.QUEUED
            ),
            None,
        )

    def _is_legal(self, part: Part) -> bool:
        output = self._output(part)
        return self._input(part).may_read(part.batch) and (
            output is None or output.may_write(part.batch)
        )

    def _is_loop(self, stage: int) -> bool:
        return self.has_loop and stage == self.last

    def _input(self, part: Part) -> Buffer:
        return self._buffers[part.stage][part.batch.pair]

    def _output(self, part: Part) -> Buffer | None:
        if part.stage == self.last:
            return None
        return self._buffers[part.stage + 1][part.batch.pair]
