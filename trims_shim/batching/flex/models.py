"""Models in stages: several batch functions behind one batcher, with exit points between stages.

Implements what a dispatch uses of :class:`~trims_shim.batching.drivers.functions.BatchFunction`,
for models by name. Items are joined before the first stage and results split after the last. What
one stage hands to the next is their own business.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from trims_shim.batching.collating.collate import Collate, CollateSpec, answers
from trims_shim.batching.drivers.functions import BatchFunction
from trims_shim.batching.drivers.lanes import Lane
from trims_shim.batching.drivers.replies import Entry, Failure
from trims_shim.batching.flex.exit_points import ExitPoints, GivenUp
from trims_shim.batching.staged.model import Stage, StagedModel
from trims_shim.batching.staged.whole import run_whole
from trims_shim.diagnostics import pass_on
from trims_shim.errors import BadBatch

__all__ = ["FlexFunctions", "Stages", "staged_on"]

Stages = Sequence[Stage] | Stage | Mapping[str, Sequence[Stage] | Stage]
"""Callables in their order: the first gets the batch, each other one the previous one's result. An
``nn.Sequential`` stands for its children; one callable is one stage. If each device has a copy of
its own: a mapping of device names to stages."""


def staged_on(device: str, model: Stages) -> StagedModel:
    """The stages of a model on a device. Raises ValueError for none, TypeError for a bad one."""
    if isinstance(model, Mapping):
        if device not in model:
            raise ValueError(f"a model has no stages for {device}; it has {', '.join(model)}")
        return staged_on(device, model[device])
    if isinstance(model, str):
        raise TypeError(f"{model!r} is no stage: it is not callable")  # nor are its letters stages
    # nn.Sequential is no Sequence, but iterates over its children; other modules do not.
    staged = StagedModel(model if isinstance(model, Iterable) else [model])
    if staged.loop is not None:
        raise TypeError("a model that ends in a Loop cannot start anew; serve it with a Batcher")
    return staged


def _staged_everywhere(
    name: str, model: Stages, devices: Sequence[str]
) -> Mapping[str, StagedModel]:
    """The stages of a model on each device; errors name the model."""
    try:
        return {device: staged_on(device, model) for device in devices}
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"model {name!r}: {error}") from error


class _Model:
    """One model: its stages on each device, and how its items become batches."""

    def __init__(
        self, name: str, staged: Mapping[str, StagedModel], collate: CollateSpec, isolates: bool
    ) -> None:
        self.name = name
        self.staged = staged
        self.isolates = isolates
        self.functions = {
            device: BatchFunction(
                model,
                collate=collate,
                isolate_failures=isolates,
                name=name,
            )
            for device, model in staged.items()
        }

    @property
    def any_function(self) -> BatchFunction:
        return next(iter(self.functions.values()))


class FlexFunctions:
    """Models by name; the ``owner`` of an entry is the name of its model.

    ``devices`` are the names of the devices, ``lanes`` the ways to them, both indexed by the
    policy's number of the device.
    """

    is_async = is_generator = False

    def __init__(
        self,
        models: Mapping[str, Stages],
        *,
        devices: Sequence[str],
        lanes: Sequence[Lane],
        collate: CollateSpec,
        isolate_failures: bool,
        name: str,
    ) -> None:
        if not isinstance(models, Mapping):
            raise TypeError(f"models is {models!r}; it has to be a mapping of models by name")
        if not models:
            raise ValueError("a batcher needs at least one model")
        self.name = name
        self.devices = tuple(devices)
        self.lanes = tuple(lanes)
        self._models = {
            each: _Model(
                each,
                _staged_everywhere(each, model, self.devices),
                collate,
                isolate_failures,
            )
            for each, model in models.items()
        }

    @property
    def collate(self) -> Collate:
        """The collate of all models."""
        return next(iter(self._models.values())).any_function.collate

    def number_of_stages(self, model: str) -> int:
        """How many stages a model has on the first device."""
        return len(self._models[model].staged[self.devices[0]])

    def key(self, model: Any, arguments: tuple[Any, ...]) -> Hashable:
        """Which requests may share a batch. Raises ValueError for an unknown model."""
        try:
            found = self._models[model]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._models))
            raise ValueError(f"{self.name} has no model {model!r}; it has {known}") from None
        return model, found.any_function.key(arguments)

    def run(self, entries: Sequence[Entry]) -> list[Any]:
        """One result or failure for each entry, run on the first device without exit points."""
        function = self._model_of(entries).functions[self.devices[0]]
        lane = self.lanes[0]
        with lane.enter():
            results = function.run(entries)
            lane.finish(results)
        return results

    def run_staged(
        self, entries: Sequence[Entry], device: int, points: ExitPoints
    ) -> list[Any] | None:
        """One result or failure for each entry; None if the batch was given up."""
        model, name = self._model_of(entries), self.devices[device]
        function, lane = model.functions[name], self.lanes[device]
        try:
            with lane.enter(), points:
                collate, items, batch = function.joined(entries)
                value = run_whole(model.staged[name].stages, batch, between=points.check)
                lane.finish(value)
            return answers(collate, value, items, function=model.name)
        except GivenUp:
            lane.finish()
            return None
        except Exception as error:
            pass_on(error)  # a time limit of the thread is no fault of an item
            if len(entries) == 1 or not model.isolates or isinstance(error, BadBatch):
                return [Failure(error)] * len(entries)
        # Halves are not given up: when they end, their callers have waited for two batches.
        middle = len(entries) // 2
        with lane.enter():
            results = function.run(entries[:middle]) + function.run(entries[middle:])
            lane.finish(results)
        return results

    def _model_of(self, entries: Sequence[Entry]) -> _Model:
        name: Any = entries[0].owner
        return self._models[name]
