"""Batch functions that answer in pieces: generators of lists, one piece for each item in each list.

In a list, ``StopIteration`` or ``StopAsyncIteration`` (class or instance) ends the stream of the
item at its place; another exception fails it. Callers that do not stream get the list of all their
pieces. The generator is closed when no caller waits for more.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from trims_shim.batching.drivers.replies import OTHER_PROCESS, Entry, Failure
from trims_shim.errors import BatchingError
from trims_shim.outcomes import stands_for

__all__ = ["END", "StreamReply", "Streaming"]

END: Any = object()
"""In place of an answer: the pieces were the answer."""
_ENDS = (StopIteration, StopAsyncIteration)


class StreamReply:
    """The pieces go to a thread that iterates."""

    __slots__ = ("_pieces", "is_abandoned")

    def __init__(self) -> None:
        self.is_abandoned = False
        # A finalizer may call its put in the middle of a get; that of queue.Queue would deadlock.
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self) -> bool:
        """See :class:`~trims_shim.batching.drivers.replies.Reply`."""
        return not self.is_abandoned

    def step(self, piece: Any) -> bool:
        """Hand one piece over; False if nobody listens."""
        self._put(piece)
        return not self.is_abandoned

    def answer(self, result: Any) -> None:
        """The end of the pieces, or the one answer of a function that has no pieces."""
        if result is not END:
            self._put(result)
        self._put(END)

    def fail(self, error: BaseException) -> None:
        """See :class:`~trims_shim.batching.drivers.replies.Reply`."""
        self._put(Failure(error))

    def orphan(self) -> None:
        """In a forked child: no more pieces come."""
        self.fail(BatchingError(OTHER_PROCESS))

    @property
    def has_pieces(self) -> bool:
        """Whether :meth:`get` returns, or raises, without blocking."""
        return not self._pieces.empty()

    def get(self) -> Any:
        """The next piece, or END. Blocks; raises the error."""
        piece = self._pieces.get()
        if type(piece) is not Failure:
            return piece
        try:
            raise piece.to_raise()
        finally:
            del piece  # else the error would keep itself alive, by this frame in its traceback

    def _put(self, piece: Any) -> None:
        self._pieces.put(piece)


class Streaming:
    """Distributes the lists of one batch while it runs."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._pieces: list[list[Any]] = [[] for _ in entries]
        self._results: list[Any] = [None] * len(entries)
        self._open = set(range(len(entries)))
        self.has_begun = False
        """Whether a list was handed out, so that the function must not run again."""

    def take(self, results: Sequence[Any]) -> bool:
        """Hand out one list; False if nobody waits for more."""
        self.has_begun = True
        is_heard = False
        for index in sorted(self._open):
            piece = results[index]
            if stands_for(piece, _ENDS):
                self._close(index)
            elif issubclass(type(piece), BaseException):
                self._fail(index, piece)
            else:
                is_heard |= self._step(index, piece)
        return is_heard

    def end(self, error: BaseException | None) -> list[Any]:
        """The generator has ended; one result for each entry."""
        for index in sorted(self._open):
            if error is None:
                self._close(index)
            else:
                self._results[index] = Failure(error)
        return self._results

    def _step(self, index: int, piece: Any) -> bool:
        step = getattr(self._entries[index].reply, "step", None)
        if step is not None:
            return bool(step(piece))
        self._pieces[index].append(piece)
        return True

    def _close(self, index: int) -> None:
        self._open.discard(index)
        entry = self._entries[index]
        self._results[index] = END if entry.is_streamed else self._pieces[index]
        # It is answered again at the end of the batch, which does no harm.
        entry.reply.answer(self._results[index])

    def _fail(self, index: int, error: BaseException) -> None:
        self._open.discard(index)
        self._results[index] = Failure(error)
        self._entries[index].reply.fail(error)
