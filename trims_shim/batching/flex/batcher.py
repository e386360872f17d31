"""Several models on the same devices, with preemption: Shepherd's Flex for real models.

A :class:`FlexBatcher` is a :class:`~trims_shim.batching.batcher.Batcher` of models by name. Each
model is a list of stages. Between two stages its batch can be given up for a batch that answers
many more requests. :class:`trims_shim.batching.policies.flex.Flex`, the object that the simulator
runs, too, decides what runs when.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, NoReturn

from trims_shim.batching.arguments import (
    check_name,
    choice,
    devices_of,
    number,
    objective_ns,
    open_store,
    prior_of,
    span_ns,
)
from trims_shim.batching.batcher import Batcher
from trims_shim.batching.collating.collate import CollateSpec
from trims_shim.batching.drivers.engine import Engine
from trims_shim.batching.drivers.lanes import lane_of
from trims_shim.batching.drivers.options import Options
from trims_shim.batching.drivers.replies import Entry, Reply
from trims_shim.batching.flex.dispatch import FlexDispatch, FlexLearning
from trims_shim.batching.flex.models import FlexFunctions, Stages
from trims_shim.batching.policies.flex import PREEMPTION_FACTOR, Flex
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import duration_ns
from trims_shim.batching.statistics import percentiles
from trims_shim.checks import whole

__all__ = ["FlexBatcher", "PreemptionStats"]

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class PreemptionStats:
    """What giving batches up has cost. ``stop``: from the decision to preempt to a free device."""

    preemptions: int
    wasted_s: float
    """Device time of batches that were given up."""
    stop_p50_ms: float
    stop_p99_ms: float


class FlexBatcher(Batcher[str, Any]):
    """Answers items of several models under a latency objective.

    ::

        batcher = FlexBatcher({"detect": detector, "name": [embed, *blocks, head]}, slo_ms=100)
        box = batcher("detect", image)             # blocks; also submit(...) and await aio(...)
        boxes = batcher.map("detect", images)

    ``models``: by name, an ``nn.Sequential`` or a list of callables. The first is called with the
    batch, ``[batch, ...]``, each other one with the previous one's result; the last returns one
    result for each item. After a batch was given up, its stages are called again from the first, so
    they must change nothing but what they return. Inside of stages
    :func:`~trims_shim.batching.flex.exit_points.exit_point` makes more exit points.

    ``slo_ms``: the time in which an answer is wanted; a number for all, or one for each model by
    name, and then :attr:`slo_ms` is None; ``update(slo_ms=...)`` sets one for all, or ends all with
    None.
    ``devices``: how many batches run at once, or the names of the devices, ``"cuda:0"`` or
    ``"cpu"``. A model that has a copy of its stages on each of several devices is given as a
    mapping of device names to stages.
    ``preemption_factor``: how many times as large a batch has to be to preempt another (lambda in
    the paper); None never preempts. ``margin_ms`` is kept free before each deadline.
    ``profiles``: how long batches take, for some models by name. The others are learned, and kept
    for the next process under the batcher's ``name`` if it has one. All else as for Batcher.

    Raises ValueError for models without stages, TypeError for stages that are not callable.
    """

    def __init__(
        self,
        models: Mapping[str, Stages],
        *,
        slo_ms: float | Mapping[str, float] | None = None,
        max_batch_size: int = 32,
        devices: int | Sequence[str] = 1,
        preemption_factor: float | None = PREEMPTION_FACTOR,
        margin_ms: float = 0.0,
        profiles: Mapping[str, LatencyProfile | str | os.PathLike[str]] | None = None,
        collate: CollateSpec = "auto",
        queue_size: int = 1024,
        when_full: Literal["wait", "reject"] = "wait",
        when_late: Literal["drop", "serve"] = "drop",
        isolate_failures: bool = True,
        caller_runs: bool = True,
        name: str | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        max_batch_size = whole("max_batch_size", max_batch_size)
        queue_size = whole("queue_size", queue_size)
        found = devices_of(devices)
        names = ["cpu"] * found if isinstance(found, int) else found
        if preemption_factor is not None:
            preemption_factor = number("preemption_factor", preemption_factor)
        check_name(name)
        self.name = name or "flex"
        of_models = slo_ms if isinstance(slo_ms, Mapping) else {}
        self._slos_ns = _slos_ns(of_models, models)
        single_ms = None if isinstance(slo_ms, Mapping) else slo_ms
        slo_ns = objective_ns(single_ms)
        self._clock_ns = clock_ns
        self._owner: object = None
        functions = FlexFunctions(
            models,
            devices=names,
            lanes=[lane_of(each) for each in names],
            collate=collate,
            isolate_failures=isolate_failures,
            name=self.name,
        )
        self._functions = functions
        self._function = functions.run
        margin_ns = duration_ns("margin_ms", margin_ms)

        learning = FlexLearning(
            functools.partial(
                Flex,
                {},
                devices=len(names),
                preemption_factor=preemption_factor,
                margin_ns=margin_ns,
            ),
            functions.number_of_stages,
            name=name,
            max_batch_size=max_batch_size,
            devices=len(names),
            priors=_priors(profiles or {}, models),
            store=open_store,
        )
        options = Options(
            learning,
            devices=len(names),
            queue_size=queue_size,
            rejects_when_full=choice("when_full", when_full, "reject", "wait"),
            serves_late=choice("when_late", when_late, "serve", "drop"),
            caller_runs=caller_runs,
            clock_ns=clock_ns,
        )

        # It has what a dispatch uses of a BatchFunction; subclassing would add nothing.
        self._engine = Engine(
            functions,  # type: ignore[arg-type]
            options,
            slo_ns=slo_ns,
            dispatch=FlexDispatch,
        )

    def map(self, *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """As for a Batcher. The first argument is a model's name, or an iterable of names."""
        if iterables and isinstance(iterables[0], str):
            # Text is iterable, too: by its letters.
            iterables = (itertools.repeat(iterables[0]), *iterables[1:])
        return super().map(*iterables, **options)

    def update(
        self, *, slo_ms: float | EllipsisType | None = ..., max_batch_size: int | None = None
    ) -> None:
        """As for a Batcher; the objective is that of all models."""
        super().update(slo_ms=slo_ms, max_batch_size=max_batch_size)
        if not isinstance(slo_ms, EllipsisType):
            self._slos_ns = {}

    def preemption_stats(self) -> PreemptionStats:
        """How often batches were given up, and what it cost; :meth:`stats` has all else."""
        dispatch = next(iter(self._engine.dispatches()), None)
        if not isinstance(dispatch, FlexDispatch):  # before the first request
            return PreemptionStats(0, 0.0, 0.0, 0.0)
        stops = percentiles(dispatch.stops_ns.copy())
        return PreemptionStats(
            preemptions=dispatch.preemptions,
            wasted_s=dispatch.wasted_ns / _NS_PER_S,
            stop_p50_ms=stops.p50_ms,
            stop_p99_ms=stops.p99_ms,
        )

    def stage_stats(self) -> NoReturn:
        """Raises TypeError: see :meth:`stats` and :meth:`preemption_stats`."""
        raise TypeError(
            f"{self.name}: a FlexBatcher has no stage_stats(); stats() says what it answered, "
            "preemption_stats() what it gave up"
        )

    def __repr__(self) -> str:
        return f"<FlexBatcher {self.name}, at most {self.max_batch_size} at once>"

    def _request(
        self, args: tuple[Any, ...], reply: Reply, deadline_ms: float | None, priority: int
    ) -> Request:
        if len(args) < 2:
            raise TypeError(f"{self.name}() needs the name of a model, and an item")
        model, *items = args
        key = self._functions.key(model, tuple(items))
        hash(key)  # see Batcher._request
        now_ns = self._clock_ns()
        limit_ns = self._engine.slo_ns
        if deadline_ms is not None:
            limit_ns = span_ns("deadline_ms", deadline_ms)
        elif limit_ns == NEVER_NS:
            limit_ns = self._slos_ns.get(model, NEVER_NS)
        deadline_ns = NEVER_NS if limit_ns == NEVER_NS else now_ns + limit_ns
        entry = Entry(tuple(items), reply, deadline_ns, model)
        priority = number("priority", priority)
        return Request(0, now_ns, deadline_ns, priority, key, 1, entry)


def _priors(
    profiles: Mapping[str, LatencyProfile | str | os.PathLike[str]], models: Mapping[str, Stages]
) -> dict[str, LatencyProfile | None]:
    if not isinstance(profiles, Mapping):
        raise TypeError(f"profiles is {profiles!r}; it has to be a mapping of profiles by model")
    if not set(profiles) <= set(models):
        raise ValueError(
            f"profiles are given for {', '.join(profiles)}; the models are {', '.join(models)}"
        )
    return {name: prior_of(each) for name, each in profiles.items()}


def _slos_ns(of_models: Mapping[str, float], models: Mapping[str, Stages]) -> dict[str, int]:
    if of_models and set(of_models) != set(models):
        raise ValueError(
            f"slo_ms is given for {', '.join(of_models)}; the models are {', '.join(models)}"
        )
    return {name: objective_ns(each) for name, each in of_models.items()}
