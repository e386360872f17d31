"""Cells of the simulated comparison: a load, a routing, a policy, a seed; and their results.

A cell on a trace is a cluster: the placement's devices, each with a policy of its own, behind a
router. A cell on generated arrivals is one device. Nothing here measures time; a cell has the same
result on every machine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import trims_shim.batching.simulator.cluster as routing
from benchmarks.batching_data import find_dataset
from benchmarks.batching_placement import Placement, find_placement
from trims_shim.batching.policies import POLICIES, Proteus
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import (
    Cluster,
    Node,
    Report,
    arrivals,
    simulate,
)
from trims_shim.batching.single import Batching

__all__ = [
    "ARRIVALS",
    "DEVICE_SLO_MS",
    "MAKERS",
    "PROFILE",
    "ROUTINGS",
    "TRACE_SLO_MS",
    "Cell",
    "Result",
    "fingerprint",
    "run",
]

TRACE_SLO_MS = 300.0
ROUTINGS = ("random", "least loaded")
# A device with a large fixed cost, on which batching matters: a batch of 16 takes 52 ms.
PROFILE = LatencyProfile.linear(2, 20, max_batch_size=16)
DEVICE_SLO_MS = 100.0
_CAPACITY_QPS = 16 / (PROFILE.latency_ns(16) / 1e9)
# The paper leaves open which requests give way when not all can be in time. Both variants are
# here, because each is better somewhere.
MAKERS: dict[str, RuleMaker] = POLICIES | {"proteus_head": partial(Proteus, drop="head")}
ARRIVALS = ("uniform", "Poisson", "gamma CV 2", "gamma CV 3", "gamma CV 4", "bursty")
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation. ``subject`` is a trace, or arrivals on one device at ``load``."""

    subject: str
    policy: str
    seed: int
    routing: str = ""
    """Empty: one device."""
    load: float = 0.0
    """As a share of the device's capacity."""
    requests: int = 0
    """0: the whole trace."""


@dataclass(frozen=True, slots=True)
class Result:
    """A cell, the fingerprint of its code, and its report."""

    cell: Cell
    code: str
    report: Report

    @staticmethod
    def columns() -> list[str]:
        """Names of a row's values."""
        return [each.name for each in (*fields(Cell), *fields(Report))] + ["code"]

    def row(self) -> list[Any]:
        """The result as stored in a file; five digits are enough."""
        values = [*astuple(self.cell), *astuple(self.report), self.code]
        return [float(f"{each:.5g}") if isinstance(each, float) else each for each in values]

    @classmethod
    def of_row(cls, row: list[Any]) -> Result:
        """Make the result from a stored row."""
        count = len(fields(Cell))
        return cls(Cell(*row[:count]), row[-1], Report(*row[count:-1]))


def run(cell: Cell) -> Result:
    """Simulate the cell."""
    report = _on_trace(cell) if cell.routing else _on_device(cell)
    return Result(cell, fingerprint(cell.policy), report)


def _on_trace(cell: Cell) -> Report:
    requests = _trace(cell.subject)
    if cell.requests:
        requests = requests[: cell.requests]
    groups = _placement(cell.subject).groups
    options = [group.option for group in groups for _ in range(group.devices)]
    profiles = [option.profile() for option in options]
    maker = MAKERS[cell.policy]
    nodes = []
    for group in groups:
        profile, size = group.option.profile(), group.option.max_batch_size
        for _ in range(group.devices):
            policy = Batching(lambda _, p=profile, n=size: maker(p, max_batch_size=n))
            cost_ns = profile.latency_ns(size) / size
            weight = group.planned_qps / group.devices
            keys = (group.option.family,)
            nodes.append(Node(policy, keys=keys, cost_ns=cost_ns, weight=weight))
    # As in the artefact, the probabilities are the shares that the placement planned.
    random_route = routing.weighted(Random(cell.seed))
    outcome = simulate(
        Cluster(nodes, random_route if cell.routing == "random" else routing.least_loaded),
        requests,
        service_ns=lambda device, batch: profiles[device].latency_ns(len(batch)),
    )
    return Report.of(
        outcome, devices=len(nodes), accuracy_of=lambda each: options[each.device].accuracy
    )


def _on_device(cell: Cell) -> Report:
    maker = MAKERS[cell.policy]
    policy = Batching(lambda _: maker(PROFILE, max_batch_size=PROFILE.max_batch_size))
    times_ns = _times_ns(cell.subject, cell.load * _CAPACITY_QPS, Random(cell.seed))
    outcome = simulate(
        policy,
        arrivals.requests(times_ns, slo_ms=DEVICE_SLO_MS, count=cell.requests),
        service_ns=lambda _, batch: PROFILE.latency_ns(len(batch)),
    )
    return Report.of(outcome)


def _times_ns(subject: str, rate_qps: float, random: Random) -> Iterator[int]:
    if subject == "uniform":
        # Starts anywhere in the first gap; otherwise seeds would not differ.
        first_ns = round(random.random() / rate_qps * _NS_PER_S)
        return (first_ns + round(number / rate_qps * _NS_PER_S) for number in count())
    if subject == "Poisson":
        return arrivals.poisson(rate_qps, random)
    if subject == "bursty":
        return arrivals.bursty(rate_qps, random)
    return arrivals.gamma(rate_qps, float(subject.removeprefix("gamma CV ")), random)


@cache
def _trace(name: str) -> list[Request]:
    return find_dataset().requests(name)


@cache
def _placement(trace: str) -> Placement:
    return find_placement(find_dataset(), trace, TRACE_SLO_MS)


# --- which results are still those of the code ----------------------------------------------------


@cache
def fingerprint(policy: str) -> str:
    """A digest of our code that the policy, the simulator and this file consist of and import."""
    maker = MAKERS[policy]
    roots = {getattr(maker, "func", maker).__module__, "trims_shim.batching.simulator", __name__}
    digest = hashlib.sha256()
    for name in sorted(_imported(roots)):
        path = sys.modules[name].__file__
        assert path is not None
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:12]


def _imported(roots: set[str]) -> set[str]:
    """Our modules that these import, themselves included, without the table of policies."""
    found: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in found or name.endswith(("batching.policies", "policies.registry")):
            continue
        found.add(name)
        for value in vars(sys.modules[name]).values():
            used = value.__name__ if isinstance(value, ModuleType) else _home(value)
            if used.startswith(("trims_shim.batching", "benchmarks.batching")):
                pending.append(used)
    return found


def _home(value: object) -> str:
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) and module in sys.modules else ""
