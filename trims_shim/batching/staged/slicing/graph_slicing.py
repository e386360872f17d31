"""Any torch model in stages: its graph, cut where the stages take equally long.

Or cut where the preferred batch size changes, beyond which larger batches gain nothing. For models
whose code cannot be traced, or whose lengths vary freely, see :mod:`.block_slicing`.
Source: DVABatch (ATC'22), section 6.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.profiles.diversity import preferred_size
from trims_shim.batching.staged.slicing.examples import check_stages, stage_times
from trims_shim.batching.staged.slicing.graph_stages import GraphStage
from trims_shim.batching.staged.slicing.tracing import Compiler, TracedModel
from trims_shim.checks import whole

__all__ = ["slice_model"]

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_GRAINS = 16
"""Pieces of even time whose preferred batch sizes are compared: single operations are too noisy."""
_LEAST_SHARE = 0.03
"""Share of the whole time that a piece needs to count: half of the average piece's."""
_CHANGE = 4
"""A preferred size changes if it is so many times as large or as small. Each measured size is twice
the one before, and two measurements of the same operations differ by one of these steps."""
_MOST_STAGES = 8
"""More gain nothing, and each costs a change of batches (DVABatch found 20 to be too many)."""
_STAGES = 4
"""Where nothing speaks for another number."""


def slice_model(
    model: Any,
    example: Any,
    n_stages: int | None = None,
    *,
    varying: Collection[int] = (),
    compiler: Compiler | None = None,
) -> StagedModel:
    """A ``torch.nn.Module`` as a :class:`StagedModel` that computes the same, bit for bit.

    ``example``: what the model is called with for a batch: a tensor ``[batch, ...]``, a tuple of
    arguments, or a mapping of keyword arguments (the first stage gets one mapping then). It should
    be of a typical size, as times are measured with it. ``n_stages``: how many stages of even time;
    None: cut where the preferred batch size of operations changes much (into eight at most), or
    into four where it does not.
    ``varying``: axes besides the first that may have other sizes than in the example, as ``(1,)``
    for lengths; the stages raise TypeError for sizes with which the model does something else, as
    where it branches on a length. ``compiler``: compiles each stage, for example
    ``functools.partial(torch.compile, dynamic=True)``; with ``n_stages``, the model is then cut
    again by their times. Results are the model's only as far as the compiled stages' are.

    Nothing is copied: the stages have the model's own parameters and buffers. Raises StagingError
    for a model that is in train mode, depends on chance, changes its buffers, branches on data, has
    a batch size built in, or has too few places to be cut at; ValueError for less than one stage.
    Blocks the caller: tracing takes seconds, and the model runs some times.
    """
    if n_stages is not None:
        n_stages = whole("n_stages", n_stages)
    traced = TracedModel(model, example, varying=varying)
    if n_stages is None:
        positions = _where_preferred_changes(traced)
    else:
        positions = traced.even(n_stages, traced.measure())
    stages = traced.stages(positions)
    check_stages(stages, model, traced.example)
    if compiler is not None and n_stages is not None:
        positions = _recut(traced, positions, compiler)
    if compiler is not None:
        stages = _compiled(traced.stages(positions), compiler)
    return StagedModel(stages, name=traced.name)


def _compiled(stages: list[GraphStage], compiler: Compiler) -> list[GraphStage]:
    for stage in stages:
        stage.run = compiler(stage.module)
    return stages


def _recut(traced: TracedModel, positions: Sequence[int], compiler: Compiler) -> list[int]:
    """As many cuts, even by the times of the compiled stages between ``positions``.

    Within a stage, operations keep their shares of its time: a compiled stage does not show them.
    """
    times_ns = traced.measure()
    taken_ns = stage_times(_compiled(traced.stages(positions), compiler), traced.example)
    borders = [0, *positions, len(times_ns)]
    scaled = [
        round(each * taken / max(sum(times_ns[begin:end]), 1))
        for (begin, end), taken in zip(itertools.pairwise(borders), taken_ns, strict=True)
        for each in times_ns[begin:end]
    ]
    return traced.even(len(positions) + 1, scaled)


def _where_preferred_changes(traced: TracedModel) -> list[int]:
    profile = {}
    for size in _SIZES:
        with contextlib.suppress(TypeError):  # with so many rows, the model takes another way
            profile[size] = traced.measure(size, repeats=3)
    times = profile[min(profile, key=lambda size: abs(size - traced.example.rows))]
    grains = traced.even(min(_GRAINS, len(traced.cuts()) + 1), times)
    changes: dict[int, float] = {}
    before: int | None = None
    for begin, end in itertools.pairwise([0, *grains, len(times)]):
        if sum(times[begin:end]) < _LEAST_SHARE * sum(times):
            continue  # too short to be measured well, or to matter
        preferred = preferred_size(_profile_of(profile, begin, end))
        change = max(preferred, before or preferred) / min(preferred, before or preferred)
        if before is None or change >= _CHANGE:
            before = preferred
        if change >= _CHANGE:
            changes[begin] = change
    largest = sorted(changes, key=lambda position: changes[position])[-_MOST_STAGES + 1 :]
    return sorted(largest) or traced.even(min(_STAGES, len(traced.cuts()) + 1), times)


def _profile_of(times: Mapping[int, Sequence[int]], begin: int, end: int) -> LatencyProfile:
    """The profile of some operations."""
    sums = {size: max(1, sum(each[begin:end])) for size, each in times.items()}
    return LatencyProfile.measured(sums, pads=False)
