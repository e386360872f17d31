"""A batch function and what surrounds each call of it: joining, splitting, isolating failures.

No threads, no event loop, no clock: dispatches call :meth:`BatchFunction.run` or await
:meth:`BatchFunction.arun`. Neither raises an Exception; failures are in the list of results.

A batch of several items that fails is halved until each failing item is alone, so that it does not
fail its neighbours. For ``n`` items the function runs at most ``2 n - 1`` times. A generator that
has yielded is not run again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from trims_shim.batching.collating.collate import Collate, CollateSpec, answers, collate_of, columns
from trims_shim.batching.drivers.replies import Entry, Failure
from trims_shim.batching.drivers.streams import Streaming
from trims_shim.diagnostics import pass_on
from trims_shim.errors import BadBatch

__all__ = ["BatchFunction", "item_of", "without_partial"]


class BatchFunction:
    """``function`` is called with one batch for each argument of its callers.

    ``takes_owner``: it is a function of a class and gets the instance first. ``by_length``: see
    :func:`~trims_shim.batching.collating.collate.collate_of`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        collate: CollateSpec,
        isolate_failures: bool,
        name: str,
        batch_sizes: Sequence[int] | None = None,
        takes_owner: bool = False,
        by_length: bool = False,
    ) -> None:
        self.function = function
        self.name = name
        self.is_generator = inspect.isgeneratorfunction(_plain(function))
        self.is_async_generator = inspect.isasyncgenfunction(_plain(function))
        # An object may also be marked itself (inspect.markcoroutinefunction, mock.AsyncMock).
        self.is_async = self.is_async_generator or any(
            map(inspect.iscoroutinefunction, (function, _plain(function)))
        )
        self._columns_of = functools.partial(
            columns, collate, batch_sizes=batch_sizes, by_length=by_length
        )
        self.collate = collate_of(collate, batch_sizes=batch_sizes, by_length=by_length)
        self._columns: dict[int, Collate] = {1: self.collate}
        self._isolates = isolate_failures
        self._takes_owner = takes_owner

    def key(self, arguments: tuple[Any, ...]) -> Hashable:
        """Requests of equal key may share a batch. Raises what the collate raises for this item."""
        number = len(arguments)
        if number == 1:
            return self.collate.key(arguments[0])
        return number, self.collate_for(number).key(arguments)

    def run(self, entries: Sequence[Entry]) -> list[Any]:
        """A result for each entry, or a :class:`~trims_shim.batching.drivers.replies.Failure`."""
        streaming = Streaming(entries) if self.is_generator else None
        try:
            if streaming is not None:
                return self._stream(entries, streaming)
            collate, items, batch = self.joined(entries)
            return answers(collate, self.function(*batch), items, function=self.name)
        except Exception as error:
            pass_on(error)  # a time limit of the thread is no fault of an item
            if not self._may_halve(entries, error, streaming):
                return _failed(entries, error, streaming)
        middle = len(entries) // 2
        return self.run(entries[:middle]) + self.run(entries[middle:])

    async def arun(self, entries: Sequence[Entry]) -> list[Any]:
        """As :meth:`run`, for asynchronous functions."""
        streaming = Streaming(entries) if self.is_async_generator else None
        try:
            if streaming is not None:
                return await self._astream(entries, streaming)
            collate, items, batch = self.joined(entries)
            return answers(collate, await self.function(*batch), items, function=self.name)
        except Exception as error:
            if not self._may_halve(entries, error, streaming):
                return _failed(entries, error, streaming)
        middle = len(entries) // 2
        return await self.arun(entries[:middle]) + await self.arun(entries[middle:])

    def _stream(self, entries: Sequence[Entry], streaming: Streaming) -> list[Any]:
        collate, items, batch = self.joined(entries)
        with contextlib.closing(self.function(*batch)) as steps:
            for results in steps:
                if not streaming.take(answers(collate, results, items, function=self.name)):
                    break
        return streaming.end(None)

    async def _astream(self, entries: Sequence[Entry], streaming: Streaming) -> list[Any]:
        collate, items, batch = self.joined(entries)
        async with contextlib.aclosing(self.function(*batch)) as steps:
            async for results in steps:
                if not streaming.take(answers(collate, results, items, function=self.name)):
                    break
        return streaming.end(None)

    def joined(self, entries: Sequence[Entry]) -> tuple[Collate, list[Any], list[Any]]:
        """The entries' collate, their items, and the batch for each argument of the function."""
        first = entries[0]
        collate = self.collate_of(first)
        batch = [first.owner] if self._takes_owner else []
        items = [item_of(entry) for entry in entries]
        if len(first.arguments) == 1:
            batch.append(collate.join(items))
        else:
            batch.extend(collate.join(items))
        return collate, items, batch

    def collate_of(self, entry: Entry) -> Collate:
        """The collate of items like this one's."""
        return self.collate_for(len(entry.arguments))

    def collate_for(self, number: int) -> Collate:
        """The collate of items of ``number`` arguments."""
        collate = self._columns.get(number)
        if collate is None:
            collate = self._columns[number] = self._columns_of(number)
        return collate

    def _may_halve(
        self, entries: Sequence[Entry], error: Exception, streaming: Streaming | None
    ) -> bool:
        if streaming is not None and streaming.has_begun:
            return False
        return self._isolates and len(entries) > 1 and not isinstance(error, BadBatch)


def item_of(entry: Entry) -> Any:
    """What a collate sees of a request: its argument, or the tuple of them."""
    arguments = entry.arguments
    return arguments[0] if len(arguments) == 1 else arguments


def _failed(entries: Sequence[Entry], error: Exception, streaming: Streaming | None) -> list[Any]:
    if streaming is not None:
        return streaming.end(error)
    return [Failure(error)] * len(entries)


def without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a ``functools.partial`` calls in the end; any other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What tells whether it is asynchronous: the function itself, or an object's ``__call__``."""
    function = without_partial(function)
    if isinstance(function, staticmethod):
        function = function.__func__
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004  (it is inspected, not called)
