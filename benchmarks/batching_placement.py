"""Which variant runs on how many devices: a placement for the traces, by our planner.

Placements are kept in ``docs/results/batching_placements.json``, so that a benchmark that is run
again uses the same ones and needs no solver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.batching_data import DEVICE_COUNTS, Dataset, Option
from benchmarks.harness import ROOT, write_json
from trims_shim import planner
from trims_shim.errors import PlanningError
from trims_shim.planner import Problem, plan_proteus

__all__ = [
    "CACHE",
    "Group",
    "Placement",
    "SolverMissing",
    "find_placement",
    "planned_options",
    "solve",
]

CACHE = ROOT / "docs" / "results" / "batching_placements.json"
_HEADROOM = 1.5
_GAP = 1e-4
_LIMIT_S = 60.0


class SolverMissing(Exception):
    """There is neither a solver nor a stored placement."""


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind with the same variant."""

    option: Option
    devices: int
    planned_qps: float
    """Queries per second planned for all of them together."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The groups of devices for one trace and objective."""

    trace: str
    slo_ms: float
    share: float
    """Share of the demand (headroom included) that the devices can take; at most 1."""
    groups: tuple[Group, ...]


def find_placement(dataset: Dataset, trace: str, slo_ms: float) -> Placement:
    """Return the stored placement, or solve and store it. Raises SolverMissing without highspy."""
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    options = {(each.variant, each.device): each for each in dataset.options(slo_ms)}
    name = f"{trace}, {slo_ms:g} ms"
    if name not in known:
        made = solve(dataset, trace, slo_ms)
        groups = [
            {"variant": each.option.variant, "device": each.option.device}
            | {"devices": each.devices, "planned_qps": round(each.planned_qps, 3)}
            for each in made.groups
        ]
        known[name] = {"headroom": _HEADROOM, "share": round(made.share, 4), "groups": groups}
        write_json(CACHE, known)
    found = known[name]
    groups = tuple(
        Group(options[each["variant"], each["device"]], each["devices"], each["planned_qps"])
        for each in found["groups"]
    )
    return Placement(trace, slo_ms, found["share"], groups)


def planned_options(options: Sequence[Option]) -> list[planner.Option]:
    """The same, as the planner has them."""
    return [
        planner.Option(each.family, each.variant, each.device, each.accuracy, each.profile())
        for each in options
    ]


def solve(dataset: Dataset, trace: str, slo_ms: float) -> Placement:
    """Solve with HiGHS. Raises SolverMissing without highspy."""
    options = dataset.options(slo_ms)
    problem = Problem(
        DEVICE_COUNTS, planned_options(options), dataset.demand_qps(trace, headroom=1.0)
    )
    try:
        found = plan_proteus(problem, headroom=_HEADROOM, gap=_GAP, time_limit_s=_LIMIT_S)
    except PlanningError as error:
        raise SolverMissing(str(error)) from error
    known = {(each.variant, each.device): each for each in options}
    groups = tuple(
        Group(
            known[each.option.variant, each.option.device],
            each.devices,
            each.planned_qps * min(found.headroom, _HEADROOM),
        )
        for each in found.groups
    )
    return Placement(trace, slo_ms, min(1.0, found.headroom / _HEADROOM), groups)
