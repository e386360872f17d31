"""The mechanism of multi-entry multi-exit batching: what may run when, not what should.

Batches go through the stages of a model in the order of their creation. Between two stages there
are buffers, :mod:`trims_shim.batching.staged.buffers`; with one pair of them neighbouring stages
take turns, with two they work at the same time on two batches. Three meta-operations change
batches:

``new``      requests enter at the first stage as a batch of their own;
``stretch``  they enter there as part of the newest batch, which is already beyond. At the next
             border the first part waits; the later ones catch up, stage by stage, merge with it
             there, and go on as one;
``split``    a batch goes on in several parts, which do not wait for each other any more.

So at every border one rule holds: *a part goes on when no part of its batch is behind it*, and it
takes those with it that wait there; parts of a split batch go on at once.

The last stage may be a *loop*: a step that is run again until its requests are finished, one after
the other. It does not wait for those behind; they merge with it between two steps.

Sans I/O, no clock, no decisions. Who calls it keeps to ``may_new``, ``may_stretch`` and ``ready``.
Source: DVABatch (ATC'22), section 5.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.batches import Batch, BatchTable, Part, PartState
from trims_shim.batching.staged.buffers import Buffer, BufferEvent
from trims_shim.batching.staged.stage_executors import ExecutorEvent, ExecutorState, StageExecutor

__all__ = ["Pipeline"]


class Pipeline:
    """See the module docstring. ``pairs`` are the buffer pairs of each stage."""

    def __init__(self, stages: int, *, pairs: int = 2, has_loop: bool = False) -> None:
        if stages < 1:
            raise ValueError(f"a model of {stages} stages; at least one is needed")
        if pairs < 1:
            raise ValueError(f"{pairs} buffer pairs; at least one is needed")
        self.table = BatchTable(stages=stages, pairs=pairs)
        self.has_loop = has_loop
        self._executors = [StageExecutor() for _ in range(stages)]
        self._buffers = [[Buffer() for _ in range(pairs)] for _ in range(stages)]
        self._gone: set[Request] = set()
        """Nobody waits for them, but their part runs."""

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self._executors) - 1

    @property
    def active(self) -> int:
        """How many requests are on their way."""
        return sum(batch.live for batch in self.table)

    # --- meta-operations --------------------------------------------------------------------------

    @property
    def may_new(self) -> bool:
        """Whether a batch could enter now and would be the next to run the first stage."""
        return self._executors[0].is_idle and self._entrance(self.table.next_pair).owner is None

    def new(self, now_ns: int, requests: Sequence[Request]) -> Batch:
        """See the module docstring."""
        part = self.table.new(now_ns, requests)
        self._enter(part)
        return part.batch

    def may_stretch(self, batch: Batch) -> bool:
        """Whether requests could join it now and would still meet it."""
        if batch.is_split or not batch.parts:
            return False
        is_last = self.table.is_newest(batch)
        if self.has_loop:
            is_last = not any(
                each.number > batch.number and each.key == batch.key for each in self.table
            )
            is_ahead = True
        else:
            # What runs the last stage is gone when they come.
            is_ahead = any(self._has_border_before(part) for part in batch.parts)
        return is_last and is_ahead and self._entrance(batch.pair).may_write(batch)

    def _has_border_before(self, part: Part) -> bool:
        return part.state is not PartState.RUNNING or part.stage < self.last

    def stretch(self, batch: Batch, requests: Sequence[Request]) -> None:
        """See the module docstring."""
        self._enter(self.table.stretch(batch, requests))

    def split(self, part: Part, sizes: Sequence[int]) -> None:
        """See the module docstring; of a queued part that is all of its batch."""
        executor = self._executors[part.stage]
        executor.discard(part)
        for each in self.table.split(part, sizes):
            each.state = PartState.QUEUED
            executor.queue.append(each)
        self._look()

    def _enter(self, part: Part) -> None:
        entrance = self._entrance(part.batch.pair)
        entrance.handle(BufferEvent.WRITE, part.batch)
        entrance.handle(BufferEvent.WRITTEN, part.batch)
        self._gather(part.batch)
        self._look()

    def _entrance(self, pair: int) -> Buffer:
        return self._buffers[0][pair]

    # --- stages -----------------------------------------------------------------------------------

    def ready(self) -> list[Part]:
        """What could start now, the best first.

        Earlier batches first; of a batch, the first part of a split, and those that catch up before
        those they catch up with.
        """
        return sorted(
            (
                part
                for executor in self._executors
                if executor.state is ExecutorState.CHECKING
                and (part := executor.part) is not None
                and self._is_legal(part)
            ),
            key=lambda part: (part.batch.number, part.order, part.stage),
        )

    def start(self, part: Part) -> None:
        """Its stage begins; it is one of :meth:`ready`."""
        self._executors[part.stage].handle(ExecutorEvent.START)
        part.state = PartState.RUNNING
        self._input(part).handle(BufferEvent.READ, part.batch)
        output = self._output(part)
        if output is not None:
            output.handle(BufferEvent.WRITE, part.batch)

    def finish(self, part: Part, left: Collection[Request]) -> list[Part]:
        """Its stage has ended, and those in ``left`` are finished.

        Returns what was queued for the next stage by that.
        """
        batch, stage, output = part.batch, part.stage, self._output(part)
        executor = self._executors[stage]
        batch.passed[stage] += part.size
        gone = self._gone.intersection(part.requests)
        self._gone -= gone
        part.leave_out(gone.union(left))
        is_loop = self.has_loop and stage == self.last
        if output is None and not is_loop:
            part.pieces = []
        if not part.pieces:
            batch.parts.remove(part)
        elif not is_loop:
            part.stage += 1
        part.state = PartState.WAITING
        is_left = any(each.stage == stage for each in batch.parts)
        self._buffers[stage][batch.pair].handle(
            BufferEvent.REMAINDER if is_left else BufferEvent.CLEARED, batch
        )
        if output is not None:
            is_written = any(each.stage == stage + 1 for each in batch.parts)
            output.handle(BufferEvent.WRITTEN if is_written else BufferEvent.NOTHING_WRITTEN, batch)
        executor.part = None
        executor.handle(ExecutorEvent.DONE)
        queued = self._gather(batch)
        self._look()
        return queued

    def withdraw(self, request: Request) -> bool:
        """Nobody waits for it any more; False if it is not on its way."""
        for batch in self.table:
            for part in batch.parts:
                if request in part.requests:
                    self._withdraw(part, request)
                    return True
        return False

    def _withdraw(self, part: Part, request: Request) -> None:
        if part.state is PartState.RUNNING:
            self._gone.add(request)
            return
        part.leave_out((request,))
        if part.pieces:
            return
        batch = part.batch
        batch.parts.remove(part)
        self._executors[part.stage].discard(part)
        if not any(each.stage == part.stage for each in batch.parts):
            buffer = self._input(part)
            # Not where the stage before is writing to it: that will say what is in it.
            if buffer.may_read(batch):
                buffer.handle(BufferEvent.CLEARED, batch)
        self._gather(batch)
        self._look()

    # --- inside -----------------------------------------------------------------------------------

    def _gather(self, batch: Batch) -> list[Part]:
        """Queue what waits for nobody any more, and forget the batch if nothing is left of it."""
        queued: list[Part] = []
        for part in [each for each in batch.parts if each.state is PartState.WAITING]:
            if not self._goes_on(part):
                continue
            first = self._queued_before(part)
            if first is None:
                part.state = PartState.QUEUED
                self._executors[part.stage].queue.append(part)
                first = part
            else:
                first.absorb(part)
                batch.parts.remove(part)
            if first not in queued:
                queued.append(first)
        if not batch.parts:
            self.table.end(batch)
        return queued

    def _goes_on(self, part: Part) -> bool:
        if part.batch.is_split or (self.has_loop and part.stage == self.last):
            return True
        return all(each.stage >= part.stage for each in part.batch.parts)

    def _queued_before(self, part: Part) -> Part | None:
        """What waits for the same stage already, and can take it along."""
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

    def _look(self) -> None:
        """Let executors take parts, after anything has changed."""
        for stage, executor in enumerate(self._executors):
            if executor.part is not None:
                continue
            is_legal = self._has_legal_pair(stage)
            if executor.state is ExecutorState.INACTIVE and is_legal:
                executor.handle(ExecutorEvent.PAIR_LEGAL)
            elif executor.state is ExecutorState.ACTIVE and not is_legal:
                executor.handle(ExecutorEvent.NO_PAIR_LEGAL)
            if executor.state is ExecutorState.ACTIVE and executor.queue:
                executor.part = executor.queue.popleft()
                executor.handle(ExecutorEvent.TAKE)

    def _has_legal_pair(self, stage: int) -> bool:
        if stage == self.last:
            return True
        outputs = self._buffers[stage + 1]
        return any(
            buffer.owner is not None
            and buffer.may_read(buffer.owner)
            and outputs[pair].may_write(buffer.owner)
            for pair, buffer in enumerate(self._buffers[stage])
        )

    def _is_legal(self, part: Part) -> bool:
        output = self._output(part)
        return self._input(part).may_read(part.batch) and (
            output is None or output.may_write(part.batch)
        )

    def _input(self, part: Part) -> Buffer:
        return self._buffers[part.stage][part.batch.pair]

    def _output(self, part: Part) -> Buffer | None:
        if part.stage == self.last:
            return None
        return self._buffers[part.stage + 1][part.batch.pair]
