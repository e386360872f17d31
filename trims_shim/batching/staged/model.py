"""A model as an ordered list of stages, and what a stage may return.

A stage is a callable. The first one gets the batch, one argument for each argument of the callers.
Each other one gets the *activations* that the stage before returned. Every tensor or array in them
has the batch as its first axis; a value without that axis is wrapped in :class:`.Shared`. Rows are
independent, as for any batcher: the output of a stage for one row must not depend on the other rows
of the batch. So rows of several batches can be joined between stages and taken apart again without
changing results.

The last stage may be a :class:`Loop`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trims_shim.batching.staged import flow
from trims_shim.batching.staged.activations import Stepped
from trims_shim.batching.staged.whole import answers_of, run_steps, run_whole

__all__ = ["Loop", "Stage", "StagedModel", "check_stage"]

Stage = Callable[..., Any]


class Loop:
    """A last stage that runs again and again until its rows are finished, each at its own time.

    Between two steps, finished rows leave and new ones join. ``step(state)`` returns a
    :class:`.Stepped`; the first state of a row is the output of the stage before. The answer of a
    row is ``result(pieces)``, by default the list of its pieces; callers that stream get the
    pieces. ``join(states)`` and ``take(state, rows to keep)`` are for states that have to be padded
    to be joined; by default they work as for all activations.
    """

    def __init__(
        self,
        step: Callable[[Any], Stepped],
        *,
        join: Callable[[Sequence[Any]], Any] | None = None,
        take: Callable[[Any, Sequence[int]], Any] | None = None,
        result: Callable[[list[Any]], Any] = list,
    ) -> None:
        check_stage(step)
        self.step = step
        self.join = join or flow.join
        self.take = take or flow.take
        self.result = result

    def __call__(self, state: Any) -> Stepped:
        """Run one step."""
        return self.step(state)

    def run(self, state: Any) -> list[Any]:
        """Run all steps. Returns the answer of each row, or its exception."""
        pieces = run_steps(self.step, state, take_rows=self.take)
        return answers_of(pieces, self.result)


class StagedModel:
    """Stages in order: the children of an ``nn.Sequential``, or callables.

    Iterating gives the stages. Calling runs the whole model, as if it had no stages, so the same
    model works with :class:`~trims_shim.batching.Batcher` and
    :class:`~trims_shim.batching.FlexBatcher`. Raises ValueError for no stages, TypeError for a
    stage that is asynchronous or not callable, or a Loop that is not last.
    """

    def __init__(self, stages: Iterable[Stage], *, name: str = "") -> None:
        if not isinstance(stages, Iterable):
            raise TypeError(
                f"stages is a {type(stages).__name__}; it has to be a list of callables or an "
                "nn.Sequential (slice_model and slice_blocks cut other modules)"
            )
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}; it has to be text")
        self.stages = tuple(stages)
        self.name = name
        if not self.stages:
            raise ValueError("a model needs at least one stage")
        last = self.stages[-1]
        self.loop = last if isinstance(last, Loop) else None
        """The last stage if it is a Loop, else None."""
        for stage in self.stages:
            check_stage(stage)
        if any(isinstance(stage, Loop) for stage in self.stages[:-1]):
            raise TypeError("a Loop has to be the last stage")

    def __call__(self, *batch: Any) -> Any:
        """Run all stages with one batch, given as the arguments of the first stage.

        Returns the output of the last stage; if rows left earlier or the last stage is a Loop, a
        list of one result for each row. Raises what the stages raise.
        """
        loop = self.loop
        stages = self.stages if loop is None else (*self.stages[:-1], loop.run)
        return run_whole(stages, batch)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __repr__(self) -> str:
        return f"<StagedModel {self.name or 'of'} {len(self)} stages>"


def check_stage(stage: Stage) -> None:
    """Raise TypeError for a stage that is not callable or is asynchronous."""
    if not callable(stage):
        raise TypeError(f"{stage!r} is no stage: it is not callable")
    if inspect.iscoroutinefunction(stage) or inspect.isasyncgenfunction(stage):
        raise TypeError(f"{stage!r} is asynchronous; stages run in threads")
