"""Which variant runs on how many devices: a placement for the traces, by mixed-integer programming.

Proteus' problem (ASPLOS'24, section 4) in its linear form over kinds of devices. With ``n`` devices
of kind t that run variant m, ``f`` the queries per second that go there, ``P`` the throughput of
one, ``A`` the accuracy, ``s`` a family's demand: maximise sum A f, where sum f = s for each family,
f <= P n, and no kind has more devices than there are. Where the demand is more than all devices can
take, all families get the same largest share of theirs.

Placements are kept in ``docs/results/batching_placements.json``, so that a benchmark that is run
again compares the same ones, and needs no solver.
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
    """There is no solver, and no placement from before."""


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind with the same variant."""

    option: Option
    devices: int
    planned_qps: float
    """Of all of them together."""


@dataclass(frozen=True, slots=True)
class Placement:
    """For one trace and objective."""

    trace: str
    slo_ms: float
    share: float
    """Of the demand with its headroom that the devices can take; at most 1."""
    groups: tuple[Group, ...]


def find_placement(dataset: Dataset, trace: str, slo_ms: float) -> Placement:
    """From the file, or solved and written there. Raises SolverMissing without scipy."""
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
    """With HiGHS; raises SolverMissing without scipy."""
    options = dataset.options(slo_ms)
    demand = dataset.demand_qps(trace, headroom=_HEADROOM)
    share, _, _ = _optimum(options, demand, None)
    # A hair less than the largest, which would leave the second problem no slack for rounding.
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
    """(share of the demand, flows, devices) for the most ``worth``; without, for the largest share.

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
