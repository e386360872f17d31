"""Build the engine of a batcher whose function is a model in stages."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from trims_shim.batching.arguments import check_path, devices_of
from trims_shim.batching.buckets import bucket_in
from trims_shim.batching.drivers.engine import EngineKind
from trims_shim.batching.drivers.lanes import CpuLane, Lane, lane_of
from trims_shim.batching.drivers.learning import Prior
from trims_shim.batching.drivers.threads import ThreadDispatch
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.single import Batching
from trims_shim.batching.staged.drivers.dispatch import StagedDispatch
from trims_shim.batching.staged.drivers.engine import StagedEngine, UnboundEngine
from trims_shim.batching.staged.drivers.functions import StagedFunction
from trims_shim.batching.staged.drivers.learning import StagedLearning
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.policies.registry import STAGED_POLICIES, staged_rule_maker
from trims_shim.batching.staged.profiles.profile_files import SavedStages, load_saved_stages
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import StagedBatching
from trims_shim.checks import whole

__all__ = ["STAGED_POLICIES", "staged_kind", "unbound_kind"]

_STREAMS = 2
"""Stages that run at once on a GPU: one for each buffer pair (DVABatch, ATC'22, section 5.3)."""


def staged_kind(
    model: StagedModel,
    *,
    has_function: bool,
    policy: str | RuleMaker | None,
    profile: LatencyProfile | str | os.PathLike[str] | None,
    devices: int | Sequence[str] | None,
    pairs: int,
    max_active: int | None,
) -> EngineKind:
    """Return the EngineKind for the options of :class:`~trims_shim.batching.batcher.Batcher`.

    ``has_function``: there is a function besides the model. Raises TypeError if ``model`` is no
    StagedModel, ValueError for invalid pairs, devices, policy or bound of active requests.
    """
    if not isinstance(model, StagedModel):
        raise TypeError(f"model is {model!r}; give a StagedModel, which takes stages")
    if max_active is not None:
        max_active = whole("max_active", max_active)
    pairs = whole("buffer_pairs", pairs)
    lanes = _lanes(model, devices)
    # A model of one stage has no borders to act at, and its batches may run side by side.
    is_whole = len(model) == 1 and model.loop is None and max_active is None
    # On a GPU, only lanes wait until what they have called is done.
    may_run_whole = all(isinstance(lane, CpuLane) for lane in lanes)
    is_whole = is_whole and may_run_whole
    staged = functools.partial(
        StagedBatching,
        stages=len(model),
        pairs=pairs,
        has_loop=model.loop is not None,
        max_active=max_active,
        may_run_whole=may_run_whole,
    )
    return EngineKind(
        function=functools.partial(
            StagedFunction, model=model, has_function=has_function, lanes=lanes
        ),
        learning=functools.partial(
            StagedLearning,
            staged_rule_maker("dvabatch" if policy is None else policy),
            prior=_prior_of(profile, model),
            stages=len(model),
            has_loop=model.loop is not None,
            batching=Batching if is_whole else staged,
            # A second stream that the user did not ask for is used only if it is known to gain.
            width=0.0 if devices is None and len(lanes) > 1 else None,
        ),
        engine=functools.partial(
            StagedEngine, dispatch=ThreadDispatch if is_whole else StagedDispatch
        ),
        devices=len(lanes),
    )


def unbound_kind(of_model: Callable[..., EngineKind]) -> EngineKind:
    """Return the class's EngineKind of a method whose model belongs to the instance.

    ``of_model`` is :func:`staged_kind` with its options. Raises what it raises for options that are
    invalid for every model.
    """
    nobody = StagedModel([_nobody])
    kind = of_model(nobody, profile=None, devices=None)
    return replace(kind, engine=UnboundEngine)


def _nobody(*batch: Any) -> Any:
    raise AssertionError("a model of no instance has no stages to run")


def _lanes(model: StagedModel, devices: int | Sequence[str] | None) -> list[Lane]:
    """Return a lane for each stage that may run at the same time."""
    names = None if devices is None else devices_of(devices)
    if not isinstance(names, list):
        name = _device_of(model)
        # On a CPU a stage uses all cores.
        count = names or (1 if name == "cpu" else _STREAMS)
        names = [name] * count
    return [lane_of(name) for name in names]


def _device_of(model: StagedModel) -> str:
    """Return the GPU of the first stage whose first parameter is on one, else "cpu"."""
    for stage in model.stages:
        parameters: Any = getattr(stage, "parameters", None)
        first: Any = next(iter(parameters()), None) if callable(parameters) else None
        if getattr(first, "is_cuda", False):
            return str(first.device)
    return "cpu"


def _prior_of(
    profile: LatencyProfile | str | os.PathLike[str] | None, model: StagedModel
) -> Prior | None:
    if profile is None:
        return None
    if isinstance(profile, LatencyProfile):
        _check_stages(profile, model)
        return profile
    check_path(profile, "a StagedProfile")
    saved = load_saved_stages(profile)
    _check_stages(saved.profile, model)
    return functools.partial(_of_bucket, saved) if saved.lengths else saved.profile


def _of_bucket(saved: SavedStages, key: Hashable) -> LatencyProfile:
    """Return the profile of the next measured length; of the longest for items in no bucket."""
    bucket = bucket_in(key)
    return saved.profile if bucket is None else saved.profile_for(bucket)


def _check_stages(profile: LatencyProfile, model: StagedModel) -> None:
    if isinstance(profile, StagedProfile) and len(profile.stages) != len(model):
        raise ValueError(
            f"a profile of {len(profile.stages)} stages for a model of {len(model)}; measure it "
            "with `trims stage profile`"
        )
