"""A model as an ordered list of stages, and what a stage may return.

A stage is a callable. The first gets the batch, one argument for each argument of the callers; each
other one gets what the stage before returned. In what goes from stage to stage, the *activations*,
every tensor or array has the batch as its first axis; what has none is wrapped in :class:`Shared`.
Rows are independent: what a stage returns for one must not depend on which others are in its batch,
as it could not in any batcher. So rows of several batches can be joined between stages, and taken
apart again, and no one can tell.

The last stage may be a :class:`Loop`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trims_shim.batching.staged import flow
from trims_shim.batching.staged.activations import EarlyExit, Shared, Stepped
from trims_shim.batching.staged.stage_profile import StagedProfile
from trims_shim.batching.staged.whole import answers_of, run_steps, run_whole

__all__ = ["EarlyExit", "Loop", "Shared", "Stage", "StagedModel", "Stepped", "check_stage"]

Stage = Callable[..., Any]


class Loop:
    """A last stage that is run again until its rows are finished, one row sooner than another.

    Between two steps rows leave that are finished, and others join. ``step(state)`` returns a
    :class:`Stepped`; the first state of a row is what the stage before returned. The answer of a
    row is ``result(pieces)``, by default the list of its pieces; callers that stream get the
    pieces. ``join`` and ``take`` (a state, the numbers of the rows to keep) are for states that
    have to be padded to be joined; by default they are those of all activations.
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
        """One step."""
        return self.step(state)

    def run(self, state: Any) -> list[Any]:
        """All steps. Returns the answer of each row, or its exception."""
        pieces = run_steps(self.step, state, take_rows=self.take)
        return answers_of(pieces, self.result)


class StagedModel:
    """Stages in their order: an ``nn.Sequential``'s children, or callables.

    Iterating gives the stages; calling it runs the whole, as if it had none. So one model does for
    :class:`~trims_shim.batching.Batcher` and for :class:`~trims_shim.batching.FlexBatcher`.
    ``profile``: how long they take; learned if not given. Raises ValueError for no stages,
    TypeError for what is not callable, or asynchronous, and for a Loop that is not the last.
    """

    def __init__(
        self, stages: Iterable[Stage], *, profile: StagedProfile | None = None, name: str = ""
    ) -> None:
        if not isinstance(stages, Iterable):
            raise TypeError(
                f"stages is a {type(stages).__name__}; it has to be a list of callables or an "
                "nn.Sequential (slice_model and slice_blocks cut other modules)"
            )
        self.stages = tuple(stages)
        self.profile = profile
        self.name = name
        if not self.stages:
            raise ValueError("a model needs at least one stage")
        last = self.stages[-1]
        self.loop = last if isinstance(last, Loop) else None
        """The last stage, if it is one."""
        for stage in self.stages:
            check_stage(stage)
        if any(isinstance(stage, Loop) for stage in self.stages[:-1]):
            raise TypeError("a Loop has to be the last stage")
        if profile is not None and not isinstance(profile, StagedProfile):
            raise TypeError(
                f"profile is {profile!r}; it has to be a StagedProfile (StagedProfile.even makes "
                "one of the whole's)"
            )
        if profile is not None and len(profile.stages) != len(self.stages):
            raise ValueError(
                f"a profile of {len(profile.stages)} stages for a model of {len(self.stages)}"
            )

    def __call__(self, *batch: Any) -> Any:
        """The whole with one batch, one argument for each of the first stage.

        Returns what the last stage does; a list of one result for each row where rows left earlier
        or the last is a Loop. Raises what the stages raise.
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
    """Raises TypeError for what is not callable, or asynchronous."""
    if not callable(stage):
        raise TypeError(f"{stage!r} is no stage: it is not callable")
    if inspect.iscoroutinefunction(stage) or inspect.isasyncgenfunction(stage):
        raise TypeError(f"{stage!r} is asynchronous; stages run in threads")
