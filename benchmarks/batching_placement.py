"""Which variant runs on how many devices: a placement for the traces, by mixed-integer programming.

Proteus' problem (ASPLOS'24, section 4) in its linear form over kinds of devices. Let ``n`` be the
number of devices of kind t that run variant m, ``f`` the queries per second that go to them, ``P``
the throughput of one, ``A`` the accuracy, and ``s`` a family's demand. Maximise sum A f, where sum
f = s for each family, f <= P n, and the n of a kind sum up to at most its devices. If the devices
cannot take all of the demand, every family gets the same largest share of its own.

Placements are kept in ``docs/results/batching_placements.json``, so that a benchmark that is run
again uses the same ones and needs no solver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.batching_data import DEVICE_COUNTS, Dataset, Option
from benchmarks.harness import ROOT, write_json

__all__ = ["CACHE", "Group", "Placement", "SolverMissing", "find_placement", "solve"]

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
    """Return the stored placement, or solve and store it. Raises SolverMissing without scipy."""
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


def solve(dataset: Dataset, trace: str, slo_ms: float) -> Placement:
    """Solve with HiGHS. Raises SolverMissing without scipy."""
    options = dataset.options(slo_ms)
    demand = dataset.demand_qps(trace, headroom=_HEADROOM)
    share, _, _ = _optimum(options, demand, None)
    # A hair less than the largest share, so that rounding leaves the second problem feasible.
    share = min(1.0, share * (1 - 1e-4))
    scaled = {family: share * value for family, value in demand.items()}
    _, flows, counts = _optimum(options, scaled, [each.accuracy for each in options])
    groups = tuple(
        Group(option, round(count), flow)
        for option, count, flow in zip(options, counts, flows, strict=True)
        if round(count) and flow > 0
    )
    return Placement(trace, slo_ms, share, groups)


def _optimum(
    options: list[Option], demand: dict[str, float], worth: list[float] | None
) -> tuple[float, list[float], list[float]]:
    """(share of the demand, flows, devices) that maximise ``worth``, or without it the share.

    Variables are the flows, the numbers of devices, and the share.
    """
    try:
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise SolverMissing("a new placement needs scipy: pip install scipy") from error
    count = len(options)
    width = 2 * count + 1
    goal = numpy.zeros(width)
    if worth is None:
        goal[-1] = -1
    else:
        goal[:count] = [-each for each in worth]
    met = numpy.zeros((len(demand), width))
    for row, (family, qps) in enumerate(demand.items()):
        met[row, :count] = [option.family == family for option in options]
        met[row, -1] = -qps
    fits = numpy.hstack(
        [
            numpy.eye(count),
            -numpy.diag([each.peak_qps for each in options]),
            numpy.zeros((count, 1)),
        ]
    )
    kinds = numpy.zeros((len(DEVICE_COUNTS), width))
    for row, kind in enumerate(DEVICE_COUNTS):
        kinds[row, count:-1] = [option.device == kind for option in options]
    result = milp(
        goal,
        integrality=[0] * count + [1] * count + [0],
        bounds=Bounds(
            [0] * (2 * count) + [0 if worth is None else 1],
            [numpy.inf] * (2 * count) + [10 if worth is None else 1],
        ),
        constraints=[
            LinearConstraint(met, 0, 0),
            LinearConstraint(fits, -numpy.inf, 0),
            LinearConstraint(kinds, 0, list(DEVICE_COUNTS.values())),
        ],
        options={"mip_rel_gap": _GAP, "time_limit": _LIMIT_S},
    )
    if result.x is None:
        raise RuntimeError(f"HiGHS found no placement: {result.message}")
    return float(result.x[-1]), list(result.x[:count]), list(result.x[count:-1])
