"""Groups of devices in virtual time: Herd's against a pool, models alone, and groups at random.

Eight linear models, each with four users of different rates (Zipf's law), on sixteen devices that
hold three models each. Arrivals come in bursts. Within its group any request may run on any device,
by our Flex. A pool in which every device holds every model needs more memory than there is; it is
the ideal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.batching_flex_systems import (
    LINES,
    MAX_BATCH_SIZE,
    SYSTEMS,
    Workload,
    cost_ns,
    run,
)
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import gamma, merged, requests
from trims_shim.planner import HostedModel, Stream, plan_herd

__all__ = ["HerdCell", "herd_cells", "run_herd"]

_SLO_MS = 100.0
_USERS = 4
_DEVICES = 16
_FITTING = 3
"""Models that fit in a device's memory."""
_GROUPS = 4
_DURATION_S = 30.0
_SYSTEMS = ("pool", "Herd, ours", "Herd, paper", "random groups", "models alone")
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HerdCell:
    """One simulation; ``load`` is that of the devices, ``cv`` that of each stream's gaps."""

    system: str
    load: float
    cv: float
    seed: int


def herd_cells() -> Iterator[HerdCell]:
    """All simulations."""
    for load in (0.6, 0.8):
        for cv in (1.0, 4.0):
            for system in _SYSTEMS:
                for seed in (1, 2, 3):
                    yield HerdCell(system, load, cv, seed)


def run_herd(cell: HerdCell) -> dict[str, float]:
    """Return the share of requests that were not answered in time."""
    models = {
        f"model-{i}": LatencyProfile.linear(*line, max_batch_size=MAX_BATCH_SIZE)
        for i, line in enumerate(LINES)
    }
    hosted = {
        name: HostedModel(_NS_PER_S / cost_ns(each, _SLO_MS), 1) for name, each in models.items()
    }
    streams = _streams(hosted, cell.load)
    violations = count = 0
    for devices, names in _divided(cell, streams, hosted):
        missed, came = _simulated(cell, devices, {name: streams[name] for name in names}, models)
        violations += missed
        count += came
    return {"requests": count, "violation_ratio": violations / count}


def _streams(hosted: Mapping[str, HostedModel], load: float) -> dict[str, Stream]:
    """All streams of all models together need ``load`` times the devices."""
    random = Random(7)  # which user of which model is popular
    ranks = list(range(1, len(hosted) * _USERS + 1))
    random.shuffle(ranks)
    needs = [1 / rank for rank in ranks]
    scale = load * _DEVICES / sum(needs)
    streams = {}
    for i, need in enumerate(needs):
        model = f"model-{i % len(hosted)}"
        rate_qps = scale * need * hosted[model].throughput_qps
        streams[f"user-{i}"] = Stream(model, rate_qps)
    return streams


def _divided(
    cell: HerdCell, streams: Mapping[str, Stream], hosted: Mapping[str, HostedModel]
) -> list[tuple[int, list[str]]]:
    """Return the size of each group, and its streams."""
    if cell.system == "pool":
        return [(_DEVICES, list(streams))]
    if cell.system.startswith("Herd"):
        plan = plan_herd(
            streams,
            hosted,
            devices=_DEVICES,
            memory_bytes=_FITTING,
            groups=_GROUPS,
            of_paper=cell.system == "Herd, paper",
        )
        return [(group.devices, list(group.streams)) for group in plan.groups]
    names = list(hosted)
    if cell.system == "models alone":
        sets = [{name} for name in names]
    else:
        Random(cell.seed).shuffle(names)
        sets = [set(names[i : i + _FITTING]) for i in range(0, len(names), _FITTING)]
    return _sized(sets, streams, hosted)


def _sized(
    sets: list[set[str]], streams: Mapping[str, Stream], hosted: Mapping[str, HostedModel]
) -> list[tuple[int, list[str]]]:
    """Give each set of models devices by what its streams need (largest remainder)."""
    members = [[name for name, each in streams.items() if each.model in held] for held in sets]
    needs = [
        sum(streams[name].rate_qps / hosted[streams[name].model].throughput_qps for name in each)
        for each in members
    ]
    whole = sum(needs)
    sizes = [max(1, int(_DEVICES * need / whole)) for need in needs]
    while sum(sizes) < _DEVICES:
        poorest = max(range(len(sizes)), key=lambda i: needs[i] / sizes[i])
        sizes[poorest] += 1
    while sum(sizes) > _DEVICES:
        richest = max(
            (i for i in range(len(sizes)) if sizes[i] > 1), key=lambda i: sizes[i] / needs[i]
        )
        sizes[richest] -= 1
    return list(zip(sizes, members, strict=True))


def _simulated(
    cell: HerdCell,
    devices: int,
    streams: Mapping[str, Stream],
    models: Mapping[str, LatencyProfile],
) -> tuple[int, int]:
    """Return (violations, requests) of one group."""
    arrivals: list[Request] = list(
        merged(
            *(
                requests(
                    gamma(each.rate_qps, cell.cv, Random(f"{cell.seed} {name}")),
                    slo_ms=_SLO_MS,
                    duration_s=_DURATION_S,
                    key=each.model,
                )
                for name, each in streams.items()
            )
        )
    )
    used = {each.model: models[each.model] for each in streams.values()}
    workload = Workload(used, devices, costs_ns={}, shares={}, requests=lambda: iter(arrivals))
    report = run(SYSTEMS["Flex, ours"], workload)
    return report.violations, report.requests
