"""The batcher: one item in, one answer out, batches behind it.

``Batcher(function, slo_ms=...)`` and the decorator :func:`batched` make the same thing. It may be
used from any thread and any event loop. In a forked child it starts anew.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
import time
import typing
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from types import EllipsisType, GenericAlias, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from trims_shim.batching.arguments import (
    check_name,
    choice,
    devices_of,
    largest_of,
    lasting_name,
    name_of,
    number,
    objective_ns,
    open_store,
    patience_s,
    prior_of,
    span_ns,
    takes_self,
    weight_limit,
)
from trims_shim.batching.collating.collate import Collate, CollateSpec
from trims_shim.batching.drivers.dispatch import Dispatch
from trims_shim.batching.drivers.engine import Engine, EngineKind
from trims_shim.batching.drivers.instances import Beside, Inside
from trims_shim.batching.drivers.learning import Learning
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import BatchFuture, BlockedCall, Entry, Reply
from trims_shim.batching.drivers.streams import END, StreamReply
from trims_shim.batching.policies.registry import POLICIES, rule_maker
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.stage_statistics import StagedStats
from trims_shim.batching.statistics import BatcherStats
from trims_shim.checks import sizes, whole
from trims_shim.diagnostics import pass_on
from trims_shim.errors import BatcherClosed
from trims_shim.late_imports import ensure_imported

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar, Unpack

    from trims_shim.batching.signatures import (
        AllOptions,
        Answers,
        Item,
        ListOptions,
        Piece,
        Pieces,
        Result,
        batched,
    )

    _A = TypeVar("_A", default=Any)
    _B = TypeVar("_B", default=Any)
    _ClassMethod = classmethod[Any, Any, Any]
else:
    Item, Result, Piece = map(typing.TypeVar, ("Item", "Result", "Piece"))
    # For those who evaluate annotations, as FastAPI does. Python 3.10 has neither of these two.
    Self, Unpack = getattr(typing, "Self", Any), getattr(typing, "Unpack", tuple)
    _ClassMethod = classmethod

__all__ = ["Batcher", "batched"]

_NS_PER_MS = 1_000_000


class Batcher(Generic[Item, Result, Piece]):
    """Turns a function of batches into one of items, under a latency objective.

    ``function`` gets one batch for each argument of its callers and returns one result for each
    item. It may be ``async`` or a generator (see :meth:`stream`); a function of a class has one
    batcher for each instance.

    ``model``: the same in stages, a :class:`~trims_shim.batching.staged.StagedModel`, so that
    requests can enter and leave a batch between stages. The stages run instead of ``function``,
    which answers if one fails. The first batch of each key runs both ways; if the results differ by
    more than rounding, only the function answers from then on. A StagedModel may also be given as
    ``function`` itself. For a method, ``model`` is the (dotted) name of the instance's attribute,
    or a function of the instance, called once for each. ``buffer_pairs`` and ``max_active`` are for
    models in stages: the most batches at each border, and the most requests in the stages.

    ``max_batch_size``: 32, or the largest of ``batch_sizes``.
    ``slo_ms``: the time from the call in which an answer is wanted; None for no limit.
    ``policy``: a name in :data:`trims_shim.batching.policies.POLICIES`, or a function that makes a
    rule; for models in stages also a name in
    :data:`trims_shim.batching.staged.policies.STAGED_POLICIES`. By default ``"auto"``, and with
    stages ``"dvabatch"``.
    ``profile``: how long batches take, or a file with it. If not given, it is learned and kept for
    the next process. Each batch refreshes it in both cases.
    ``collate``: how items become batches. ``"auto"`` stacks tensors, arrays and numpy's numbers to
    ``[batch, ...]``, takes tuples, mappings and dataclasses part by part, and makes a list of
    anything else; ``"list"`` always makes a list; ``"stack"`` is as ``"auto"``, but also makes
    arrays of numbers, text and sequences of them, and refuses the rest; for ``"concatenate"`` items
    have a batch axis of their own. Or a :class:`~trims_shim.batching.collating.padding.Pad`, or any
    other :class:`~trims_shim.batching.collating.collate.Collate`. A sequence of these is one for
    each argument, a mapping one for each field of items that are mappings.
    ``batch_sizes``: the only sizes the function sees; smaller batches are filled up.
    ``queue_size``: how many requests may wait. Beyond that callers wait for room, or with
    ``when_full="reject"`` get :class:`~trims_shim.errors.QueueFull`.
    ``when_late``: what becomes of requests that the policy gives up: dropped with
    :class:`~trims_shim.errors.RequestDropped`, or served when nothing else is left.
    ``isolate_failures``: halve a failing batch until each failing item is alone.
    ``weight``: a function that returns an item's weight, of all its arguments;
    ``max_batch_weight``: the most that the items of a batch may weigh together. One that weighs
    more runs alone.
    ``devices``: how many batches run at once, 1 by default. For a model in stages: how many of its
    stages run at once, each with one batch, or names of devices (``["cuda:0", "cuda:0"]`` are two
    streams). The default is then 1 on a CPU, and 2 if its parameters are on a GPU; policies of
    models in stages use the second one only where it was measured to gain.
    ``caller_runs``: a thread that waits for its answer may run the batch itself, which saves a
    thread switch. False for functions that depend on the thread that runs them (thread-local state;
    OpenMP, which keeps a pool of threads for each thread that computes).
    ``name``: used in messages and metrics, and to find the profile in the next process; by default
    the function's name.
    ``clock_ns``: as ``time.monotonic_ns``; for tests.
    """

    _model: StagedModel | None = None
    _model_of: Callable[[Any], StagedModel] | None = None
    """For a method: finds the model of an instance."""
    __wrapped__: Callable[..., Any]
    _is_of_class = False
    """Whether it is a class method."""
    _classes: tuple[type, ...] = ()
    """The classes whose method it is."""

    if not TYPE_CHECKING:
        # Not Generic's: type variables have defaults from Python 3.13 on only.
        __class_getitem__ = classmethod(GenericAlias)

    @overload
    def __init__(self, function: StagedModel, **options: Unpack[AllOptions]) -> None: ...
    @overload
    def __init__(
        self: Batcher[_A, _B],
        function: Callable[[list[_A]], Answers[_B]],
        **options: Unpack[ListOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Batcher[_A, list[_B], _B],
        function: Callable[[list[_A]], Pieces[_B]],
        **options: Unpack[ListOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: Batcher[Any, _B],
        function: Callable[..., Answers[_B]],
        **options: Unpack[ListOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        function: Callable[..., Any] | classmethod[Any, ..., Any],
        **options: Unpack[AllOptions],
    ) -> None: ...
    def __init__(
        self,
        function: Callable[..., Any] | _ClassMethod,
        *,
        model: StagedModel | str | Callable[[Any], StagedModel] | None = None,
        slo_ms: float | None = None,
        max_batch_size: int | None = None,
        policy: str | RuleMaker | None = None,
        profile: LatencyProfile | str | os.PathLike[str] | None = None,
        collate: CollateSpec = "auto",
        batch_sizes: Sequence[int] | None = None,
        queue_size: int = 1024,
        when_full: Literal["wait", "reject"] = "wait",
        when_late: Literal["drop", "serve"] = "drop",
        isolate_failures: bool = True,
        weight: Callable[..., int] | None = None,
        max_batch_weight: int | None = None,
        devices: int | Sequence[str] | None = None,
        buffer_pairs: int = 2,
        max_active: int | None = None,
        caller_runs: bool = True,
        name: str | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if isinstance(function, classmethod):
            function, self._is_of_class = function.__func__, True
        if not callable(function):
            raise TypeError(f"{function!r} is not callable")
        check_name(name)
        if batch_sizes is not None:
            batch_sizes = sizes("batch_sizes", batch_sizes)
        max_batch_size = largest_of(max_batch_size, batch_sizes)
        queue_size = whole("queue_size", queue_size)
        max_batch_weight = weight_limit(weight, max_batch_weight)
        given_name, has_function = name, True
        if isinstance(function, StagedModel):
            if model is not None:
                raise TypeError("give a function and its model, or a model alone, not two models")
            model, has_function = function, False
            given_name = name or function.name or None
        functools.update_wrapper(self, function, updated=())
        self.__isabstractmethod__ = getattr(function, "__isabstractmethod__", False)
        self.name = given_name or name_of(function)
        self._function = function
        slo_ns = objective_ns(slo_ms)
        self._weight = weight
        self._clock_ns = clock_ns
        self._owner: object = None
        kept_as, shown_name = given_name or lasting_name(function), self.name
        if model is None:
            kind = _plain_kind(policy, profile, devices, max_active)
        else:
            of_model = functools.partial(
                _staged().staged_kind,
                has_function=has_function,
                policy=policy,
                profile=profile,
                devices=devices,
                pairs=buffer_pairs,
                max_active=max_active,
            )
            if isinstance(model, str) or inspect.isroutine(model):
                kind = _staged().unbound_kind(of_model)
                self._model_of = operator.attrgetter(model) if isinstance(model, str) else model
                self._kind_of = of_model
            else:
                kind = of_model(model)
                assert isinstance(model, StagedModel)
                self._model = model
        self._kind = kind
        self._engines = Beside() if model is None else Inside(shown_name)

        # Without self: in a cycle a batcher would outlive its last reference.
        def make_engine(kind: EngineKind, takes_owner: bool) -> Engine:
            learning = kind.learning(
                name=kept_as,
                max_batch_size=max_batch_size,
                max_batch_weight=max_batch_weight,
                devices=kind.devices,
                batch_sizes=batch_sizes,
                store=open_store,
            )
            batch_function = kind.function(
                function,
                collate=collate,
                batch_sizes=batch_sizes,
                isolate_failures=isolate_failures,
                takes_owner=takes_owner,
                name=shown_name,
                by_length=learning.mixes_lengths,
            )
            options = Options(
                learning,
                devices=kind.devices,
                queue_size=queue_size,
                rejects_when_full=choice("when_full", when_full, "reject", "wait"),
                serves_late=choice("when_late", when_late, "serve", "drop"),
                caller_runs=caller_runs,
                clock_ns=clock_ns,
            )
            return kind.engine(batch_function, options, slo_ns=slo_ns)

        self._make_engine = make_engine
        self._engine = make_engine(kind, False)

    # --- one item ---------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
    ) -> Result:
        """The answer for one item; blocks. Raises what the function raised for it, RequestDropped,
        QueueFull or BatcherClosed; RuntimeError where blocking would stop the loop that has to run.

        ``deadline_ms``, from now, replaces ``slo_ms``; higher ``priority`` goes first.
        """
        self, args = self._bound(args)
        engine = self._engine
        if engine.function.is_async:
            return self._call_async(args, deadline_ms, priority)
        dispatch = engine.threads()
        reply = BlockedCall()
        request = self._request(args, reply, deadline_ms, priority)
        answer: Result
        if dispatch.is_running_here():
            answer = dispatch.call_nested(request.payload)
        else:
            answer = dispatch.call(request, reply)
        return answer

    def submit(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
    ) -> BatchFuture[Result]:
        """The answer as a :class:`concurrent.futures.Future`, which may be cancelled.

        Blocks only while the queue is full. Raises QueueFull and BatcherClosed; the future has all
        other errors.
        """
        self, args = self._bound(args)
        engine = self._engine
        dispatch = engine.own_loop() if engine.function.is_async else engine.threads()
        future = BatchFuture()
        request = self._request(args, future, deadline_ms, priority)
        future.attach(dispatch, request)
        dispatch.submit_and_wait_for_room(request)
        return future

    async def aio(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
    ) -> Result:
        """The answer for one item, awaited: as calling the batcher, but for event loops."""
        self, args = self._bound(args)
        answer: Result = await _aio().call(self._engine, self._maker(args, deadline_ms, priority))
        return answer

    # --- answers in pieces ------------------------------------------------------------------------

    def stream(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
    ) -> Generator[Piece, None, None]:
        """The pieces of the answer for one item as they come; blocks between them.

        For batch functions that are generators (each list that they yield has a piece for every
        item), and for models whose last stage is a Loop. With others the whole answer is the only
        piece. Closing the iterator gives the rest up.
        """
        self, args = self._bound(args)
        engine = self._engine
        dispatch = engine.own_loop() if engine.function.is_async else engine.threads()
        reply = StreamReply()
        request = self._request(args, reply, deadline_ms, priority)
        dispatch.check_may_wait()
        pieces = _pieces(reply, dispatch, request)
        next(pieces)  # so that closing or dropping it ends it, also before the first piece
        dispatch.submit_and_wait_for_room(request)
        return pieces

    def astream(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Piece, None]:
        """As :meth:`stream`, for event loops."""
        self, args = self._bound(args)
        pieces: AsyncGenerator[Piece, None] = _aio().stream(
            self._engine, self._maker(args, deadline_ms, priority)
        )
        return pieces

    # --- many items -------------------------------------------------------------------------------

    @overload
    def map(
        self,
        *iterables: Unpack[tuple[Iterable[Item], Unpack[tuple[Iterable[Any], ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
        return_exceptions: Literal[False] = False,
    ) -> Iterator[Result]: ...
    @overload
    def map(
        self,
        *iterables: Unpack[tuple[Iterable[Item], Unpack[tuple[Iterable[Any], ...]]]],
        deadline_ms: float | None = None,
        priority: int = 0,
        return_exceptions: bool,
    ) -> Iterator[Result | BaseException]: ...
    def map(
        self,
        *iterables: Iterable[Any],
        deadline_ms: float | None = None,
        priority: int = 0,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        """The answers for all items, in their order; like ``map``, but batched.

        Takes up to ``queue_size`` items ahead. An item's error is raised at its place and ends the
        iteration; with ``return_exceptions`` the error is yielded instead of an answer.
        """
        futures: deque[BatchFuture] = deque()
        ahead = self._engine.options.queue_size
        get = _outcome if return_exceptions else BatchFuture.result
        try:
            for args in zip(*iterables, strict=False):
                if len(futures) >= ahead:
                    yield get(futures.popleft())
                futures.append(self._placed(args, deadline_ms, priority))
            while futures:
                yield get(futures.popleft())
        finally:
            for future in futures:
                future.cancel()

    def _placed(
        self, args: tuple[Any, ...], deadline_ms: float | None, priority: int
    ) -> BatchFuture:
        """As :meth:`submit`, but an item that is refused gets a future with its error."""
        try:
            return self.submit(*args, deadline_ms=deadline_ms, priority=priority)
        except BatcherClosed:
            raise
        except Exception as error:
            pass_on(error)
            refused = BatchFuture()
            refused.set_exception(error)
        try:
            return refused
        finally:
            del refused  # it has the error, whose traceback has this frame

    # --- the batcher itself -----------------------------------------------------------------------

    @property
    def function(self) -> Callable[..., Any]:
        """The batch function."""
        return self._function

    @property
    def model(self) -> StagedModel | None:
        """The model in stages; None for a function without one, and for a method of no instance."""
        return self._model

    @property
    def collate(self) -> Collate:
        """How items become batches."""
        return self._engine.function.collate

    @property
    def max_batch_size(self) -> int:
        """The largest batch it makes."""
        return self._engine.options.learning.max_batch_size

    @property
    def slo_ms(self) -> float | None:
        """The time in which an answer is wanted; None for no limit."""
        slo_ns = self._engine.slo_ns
        return None if slo_ns == NEVER_NS else slo_ns / _NS_PER_MS

    @property
    def profile(self) -> LatencyProfile:
        """How long batches of the first key take, as far as it is known."""
        return self._engine.options.learning.first_profile()

    def stats(self) -> BatcherStats:
        """What it did until now."""
        return self._engine.stats()

    def stage_stats(self) -> StagedStats:
        """What it did to batches between stages. Raises TypeError if it has no stages."""
        engine: Any = self._engine
        if self._model is None:
            raise TypeError(
                f"{self.name} has no stages; give them with model="
                if self._model_of is None
                else f"{self.name} has other stages for each instance; ask that of one"
            )
        stats: StagedStats = engine.stage_stats()
        return stats

    def update(
        self, *, slo_ms: float | EllipsisType | None = ..., max_batch_size: int | None = None
    ) -> None:
        """Change the objective of later requests (None for no limit), or the size of later batches.

        What is left out stays as it is.
        """
        slo_ns = None if isinstance(slo_ms, EllipsisType) else objective_ns(slo_ms)
        if max_batch_size is not None:
            self._engine.resize(whole("max_batch_size", max_batch_size))
        if slo_ns is not None:
            self._engine.slo_ns = slo_ns

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all requests made until now are answered. Raises TimeoutError.

        Meanwhile the policy does not wait for further requests, but they may be made. What was
        learned is saved then, as by :meth:`close`.

        Event loops that do not run when this begins are not waited for. One that is stopped
        meanwhile may run again: until it is closed, this waits for it, or for ``timeout_s``.
        """
        self._engine.wait(None if timeout_s is None else patience_s("timeout_s", timeout_s))
        self._engine.keep()

    def close(self, *, cancel: bool = False, timeout_s: float | None = None) -> None:
        """Take no more requests, and wait until all open ones are answered.

        With ``cancel``, requests whose batch has not begun fail with BatcherClosed. Raises
        TimeoutError; it is closed nevertheless. Afterwards no thread of the batcher holds the
        function, or memory of its batches.
        """
        limit_s = None if timeout_s is None else patience_s("timeout_s", timeout_s)
        self._engine.shut_down(cancel=cancel, timeout_s=limit_s)
        self._engine.join()

    async def adrain(self) -> None:
        """As :meth:`drain`; awaits."""
        await _aio().settled(self._engine)
        self._engine.keep()

    async def aclose(self, *, cancel: bool = False) -> None:
        """As :meth:`close`; awaits."""
        _aio().running_loop(self._engine)  # without one it stays open
        self._engine.close(cancel=cancel)
        await _aio().settled(self._engine)
        self._engine.rest()
        await _aio().joined(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close(cancel=exc_info[0] is not None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose(cancel=exc_info[0] is not None)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # As of methods: another process has its own of the same instance, or of the same name.
        if self._owner is not None:
            return getattr, (self._owner, self._function.__name__)
        return str(self.__dict__.get("__qualname__", self.name))

    def __eq__(self, other: object) -> bool:
        # As methods are compared: each access makes a new one.
        return isinstance(other, Batcher) and self._engine is other._engine

    def __hash__(self) -> int:
        return hash(id(self._engine))

    def __repr__(self) -> str:
        return f"<Batcher of {self.name}, at most {self.max_batch_size} at once>"

    def warm(
        self,
        *args: Unpack[tuple[Item, Unpack[tuple[Any, ...]]]],
        repeats: int = 3,
        limit_s: float = 2.0,
    ) -> LatencyProfile:
        """Measure how long batches of copies of one item take, and start from that profile.

        Runs the function in this thread (an asynchronous one on the batcher's own loop), for about
        ``limit_s`` at most, beside batches that may be running: call it before the first request.
        Kept for the next process unless a profile was given. Raises what the function raises.
        """
        self, args = self._bound(args)
        return self._engine.warm(
            self._request(args, BlockedCall(), None, 0),
            repeats=whole("repeats", repeats),
            limit_s=patience_s("limit_s", limit_s),
        )

    # --- methods ----------------------------------------------------------------------------------

    def __set_name__(self, owner: type, name: str) -> None:
        if inspect.isfunction(self._function):
            self._classes += (owner,)

    @property
    def _is_unbound(self) -> bool:
        """Whether it is a method of no instance, which answers no requests."""
        return self._owner is None and bool(self._classes)

    def _bound(self, args: Any) -> tuple[Self, Any]:
        """The batcher and its arguments. If the instance comes first, as in
        ``Class.method(instance, item)`` and from wrappers of methods, it is the instance's own."""
        if self._owner is not None or len(args) < 2:
            return self, args
        # A method that is wrapped, or assigned to its class later, is known by its first parameter.
        if isinstance(args[0], self._classes) or takes_self(self._function, args[0]):
            return self.__get__(args[0]), args[1:]
        return self, args

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """The batcher of this instance, which is gone when the instance is."""
        if self._is_of_class:
            instance = type(instance) if owner is None else owner
        if instance is None or not inspect.isfunction(self._function):
            return self
        if self._model is not None:
            raise TypeError(
                f"{self.name} is a method, and its model= is of no instance; give the name of the "
                "attribute that has it, or a function of the instance"
            )
        engine = self._engines.find(instance)
        if engine is None:
            engine = self._engines.keep(instance, self._engine_of(instance))
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._owner, view._engine = instance, engine
        view.__wrapped__ = MethodType(self._function, instance)  # for inspect.signature
        if self._model_of is not None:
            of_model: Any = engine
            view._model = of_model.model
        return view

    def _engine_of(self, instance: object) -> Engine:
        """Make the engine of an instance."""
        kind = self._kind
        if self._model_of is not None:
            try:
                model = self._model_of(instance)
            # Python would think that this method is missing, and ask __getattr__.
            except AttributeError as error:
                raise TypeError(
                    f"{self.name}: model= finds none in this {type(instance).__name__}: {error}"
                ) from error
            kind = self._kind_of(model)
        engine = self._make_engine(kind, True)
        # The current values: update() may have changed those of the class.
        engine.slo_ns = self._engine.slo_ns
        engine.resize(self.max_batch_size)
        return engine

    # --- requests ---------------------------------------------------------------------------------

    def _maker(
        self, args: tuple[Any, ...], deadline_ms: float | None, priority: int
    ) -> Callable[[Reply], Request]:
        return lambda reply: self._request(args, reply, deadline_ms, priority)

    def _request(
        self, args: tuple[Any, ...], reply: Reply, deadline_ms: float | None, priority: int
    ) -> Request:
        now_ns = self._clock_ns()
        engine = self._engine
        limit_ns = engine.slo_ns if deadline_ms is None else span_ns("deadline_ms", deadline_ms)
        deadline_ns = NEVER_NS if limit_ns == NEVER_NS else now_ns + limit_ns
        if not args:
            raise TypeError(f"{self.name}() needs an item")
        priority = number("priority", priority)
        key = engine.function.key(args)
        hash(key)  # raises here, not in the policy, where all requests would fail
        weight = 1 if self._weight is None else number("weight", self._weight(*args))
        entry = Entry(args, reply, deadline_ns, self._owner)
        return Request(0, now_ns, deadline_ns, priority, key, weight, entry)

    def _call_async(self, args: Any, deadline_ms: float | None, priority: int) -> Result:
        asyncio = sys.modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None:
            raise RuntimeError(
                f"{self.name} is asynchronous and was called on a running event loop, which it "
                f"would stop: `await {self.name}.aio(...)`"
            )
        own = self._engine.own_loop()
        if own.is_running_here():
            answer: Result = own.wait_nested(
                self._request(args, BlockedCall(), deadline_ms, priority).payload
            )
            return answer
        future = self.submit(*args, deadline_ms=deadline_ms, priority=priority)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # it may have an error, whose traceback has this frame


if not TYPE_CHECKING:

    def batched(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Decorate a function of batches, or a method; options as for :class:`Batcher`."""
        if function is None:
            return functools.partial(Batcher, **options)
        if isinstance(function, int | float | str):
            raise TypeError(
                f"{function!r} is no function; options have names: @batched(slo_ms=100)"
            )
        return Batcher(function, **options)


def _plain_kind(
    policy: str | RuleMaker | None,
    profile: LatencyProfile | str | os.PathLike[str] | None,
    devices: int | Sequence[str] | None,
    max_active: int | None,
) -> EngineKind:
    """The kind of engine for a function without stages."""
    count = 1 if devices is None else devices_of(devices)
    if isinstance(count, list) or max_active is not None:
        raise TypeError(
            "names of devices and max_active are for models in stages: give one with model="
        )
    if isinstance(policy, str) and policy not in POLICIES and policy in _staged().STAGED_POLICIES:
        raise ValueError(f"policy {policy!r} is for models in stages: give one with model=")
    maker = rule_maker("auto" if policy is None else policy)
    return EngineKind(count, functools.partial(Learning, maker, prior=prior_of(profile)))


@functools.cache
def _staged() -> ModuleType:
    """The module that only models in stages need."""
    ensure_imported("trims_shim.batching.staged.drivers.front")
    from trims_shim.batching.staged.drivers import front

    return front


@functools.cache
def _aio() -> ModuleType:
    """The module that needs asyncio, which takes 50 ms to import."""
    ensure_imported("trims_shim.batching.drivers.aio")
    from trims_shim.batching.drivers import aio

    return aio


def _outcome(future: BatchFuture) -> Any:
    error = future.exception()
    return future.result() if error is None else error


def _pieces(reply: StreamReply, dispatch: Dispatch, request: Request) -> Generator[Any, None, None]:
    try:
        yield
        while (piece := _next_piece(reply, dispatch)) is not END:
            yield piece
    finally:
        reply.is_abandoned = True
        dispatch.cancel(request)


def _next_piece(reply: StreamReply, dispatch: Dispatch) -> Any:
    if not reply.has_pieces:
        dispatch.check_may_wait()  # it may be another thread, or another batch, than at first
    return reply.get()
