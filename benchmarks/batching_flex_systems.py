"""Several models on several devices: workloads, Flex, and the systems it is compared with.

All systems know the same profiles, serve the same requests on the same number of equal devices, and
run in the same loop. A batch takes exactly the simulated time that the profile says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.batching_data import Dataset
from trims_shim.batching.policies.auto import Auto
from trims_shim.batching.policies.clockwork import Clockwork
from trims_shim.batching.policies.early_drop import EarlyDrop
from trims_shim.batching.policies.flex import PREEMPTION_FACTOR, Flex
from trims_shim.batching.policies.generation import by_largest
from trims_shim.batching.policies.preemptible import PreemptibleModel, even_exits
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Policy, Request
from trims_shim.batching.simulator import (
    Cluster,
    Node,
    Report,
    bursty,
    gamma,
    merged,
    requests,
    simulate,
)
from trims_shim.batching.simulator.cluster import least_loaded
from trims_shim.batching.single import Batching

__all__ = [
    "LINES",
    "MAX_BATCH_SIZE",
    "SYSTEMS",
    "Workload",
    "cost_ns",
    "flex",
    "of_trace",
    "run",
    "synthetic",
]

MAX_BATCH_SIZE = 32
STAGES = 10
# (alpha, beta, SLO) in ms of each model, the most popular first.
LINES = ((0.5, 5), (1, 10), (2, 20), (0.8, 15), (1.5, 8), (0.4, 20), (2.5, 12), (1, 25))
_MIXED_MS = (40, 100, 200, 60, 30, 150, 50, 250)
_MODELS = {
    # Cheap and expensive items, small and large fixed costs; the same objective for all.
    "equal": tuple((*line, 100) for line in LINES),
    "mixed": tuple((*line, slo_ms) for line, slo_ms in zip(LINES, _MIXED_MS, strict=True)),
    # Light models with tight objectives, and a heavy one whose batches are longer than these.
    "heavy": ((0.5, 5, 50), (0.4, 8, 60), (1, 6, 50), (4, 250, 2000)),
}
_BURST_S = 0.25
_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for some models, and the devices that all of them share."""

    profiles: Mapping[str, LatencyProfile]
    devices: int
    costs_ns: Mapping[str, float]
    """Device time of one request in a large batch, by model."""
    shares: Mapping[str, float]
    """Share of all requests, by model."""
    requests: Callable[[], Iterator[Request]]

    def staged(self, stages: int) -> dict[str, PreemptibleModel]:
        """Every model, cut into equal stages."""
        exits = even_exits(stages)
        return {
            name: PreemptibleModel(profile, profile.max_batch_size, exits)
            for name, profile in self.profiles.items()
        }


def synthetic(
    *, slos: str, process: str, load: float, devices: int, count: int, seed: int
) -> Workload:
    """Linear models whose popularity follows Zipf's law. ``process``: ``bursty``, or a gamma's CV.

    At a ``load`` of 1, requests come as fast as the devices could answer them if each model ran
    batches that take half its objective.
    """
    kinds = _MODELS[slos]
    names = [f"model-{number}" for number in range(len(kinds))]
    slos_ms = {name: slo_ms for name, (_, _, slo_ms) in zip(names, kinds, strict=True)}
    profiles = {
        name: LatencyProfile.linear(alpha, beta, max_batch_size=MAX_BATCH_SIZE)
        for name, (alpha, beta, _) in zip(names, kinds, strict=True)
    }
    total = sum(1 / rank for rank in range(1, len(names) + 1))
    shares = {name: 1 / rank / total for rank, name in enumerate(names, 1)}
    costs_ns = {name: cost_ns(profiles[name], slos_ms[name]) for name in names}
    mean_ns = sum(shares[name] * costs_ns[name] for name in names)
    rate_qps = load * devices * _NS_PER_S / mean_ns

    def stream() -> Iterator[Request]:
        random = Random(seed)
        streams = []
        for name in names:
            own = Random(random.random())
            rate = rate_qps * shares[name]
            if process == "bursty":
                times = bursty(rate, own, burst_s=_BURST_S)
            else:
                times = gamma(rate, float(process), own)
            streams.append(
                requests(times, slo_ms=slos_ms[name], duration_s=count / rate_qps, key=name)
            )
        return merged(*streams)

    return Workload(profiles, devices, costs_ns, shares, stream)


def of_trace(data: Dataset, trace: str, *, load: float, slo_ms: float = 300) -> Workload:
    """A trace in which the most accurate variant that a GPU runs in time serves each family.

    The number of GPUs makes the mean load at most ``load``. Families that no variant can serve in
    time are left out.
    """
    options = [each for each in data.options(slo_ms) if each.device == "gpu_ampere"]
    best = {each.family: each for each in sorted(options, key=lambda each: each.accuracy)}
    every = [each for each in data.requests(trace) if each.key in best]
    profiles = {family: option.profile() for family, option in best.items()}
    counts = {family: sum(each.key == family for each in every) for family in best}
    shares = {family: count / len(every) for family, count in counts.items()}
    costs_ns = {family: cost_ns(profiles[family], slo_ms) for family in best}
    work_ns = sum(counts[family] * costs_ns[family] for family in best)
    devices = max(1, math.ceil(work_ns / every[-1].arrival_ns / load))
    return Workload(profiles, devices, costs_ns, shares, lambda: iter(every))


def cost_ns(profile: LatencyProfile, slo_ms: float) -> float:
    """Device time of one request, in the largest batch that takes at most half the objective."""
    size = profile.largest_within(slo_ms / 2 * _NS_PER_MS, profile.max_batch_size)
    return profile.latency_ns(size) / size


# --- systems --------------------------------------------------------------------------------------

System = Callable[[Workload, Mapping[str, PreemptibleModel]], Policy]


def flex(factor: float | None, *, of_paper: bool = False) -> System:
    """Flex with this lambda, ours or as published."""

    def make(workload: Workload, models: Mapping[str, PreemptibleModel]) -> Policy:
        maker = Flex.of_paper if of_paper else Flex
        return maker(models, devices=workload.devices, preemption_factor=factor)

    return make


def _flex_of_author(workload: Workload, models: Mapping[str, PreemptibleModel]) -> Policy:
    return Flex.of_paper(models, devices=workload.devices, generation=by_largest)


def _pooled(make_rule: Callable[..., Auto | Clockwork | EarlyDrop]) -> System:
    """One queue per model; the most urgent batch runs on any free device."""

    def make(workload: Workload, models: Mapping[str, PreemptibleModel]) -> Policy:
        def rule(key: object) -> Auto | Clockwork | EarlyDrop:
            profile = workload.profiles[str(key)]
            return make_rule(profile, max_batch_size=profile.max_batch_size)

        return Batching(rule, devices=workload.devices)

    return make


def _dedicated(workload: Workload, models: Mapping[str, PreemptibleModel]) -> Policy:
    """As in Nexus: models are packed onto devices by their mean load, and stay there."""
    nodes = []
    for keys in _packed(workload):
        rules = {key: workload.profiles[key] for key in keys}
        policy = Batching(
            lambda key, rules=rules: EarlyDrop(  # type: ignore[misc]
                rules[key], max_batch_size=rules[key].max_batch_size
            )
        )
        nodes.append(Node(policy, keys))
    return Cluster(nodes, least_loaded)


def _packed(workload: Workload) -> list[list[str]]:
    """The models of each device: the heaviest model first, onto the device with most room.

    A model that needs more than one device is cut into equal pieces first.
    """
    work = {name: workload.shares[name] * workload.costs_ns[name] for name in workload.profiles}
    unit = sum(work.values()) / workload.devices
    pieces = []
    for name, amount in work.items():
        parts = max(1, round(amount / unit))
        pieces += [(amount / parts, name)] * parts
    loads = [0.0] * workload.devices
    models: list[list[str]] = [[] for _ in loads]
    for amount, name in sorted(pieces, reverse=True):
        room = sorted(range(len(loads)), key=lambda each: (name in models[each], loads[each]))
        loads[room[0]] += amount
        if name not in models[room[0]]:
            models[room[0]].append(name)
    # A device without a model gets the heaviest one too.
    heaviest = max(work, key=lambda each: work[each])
    return [keys or [heaviest] for keys in models]


SYSTEMS: dict[str, System] = {
    "Flex, ours": flex(PREEMPTION_FACTOR),
    "Flex, ours, no preemption": flex(None),
    "Flex, paper": flex(PREEMPTION_FACTOR, of_paper=True),
    "Flex, paper, no preemption": flex(None, of_paper=True),
    "Flex, paper, two-pass batches": _flex_of_author,
    "Clockwork-like, pooled": _pooled(Clockwork),
    "Nexus-like, dedicated": _dedicated,
    "Nexus-like, pooled": _pooled(EarlyDrop),
    "our default policy, pooled": _pooled(Auto),
}


def run(system: System, workload: Workload, *, stages: int = STAGES) -> Report:
    """Run one simulation."""
    models = workload.staged(stages)
    profiles = workload.profiles

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        return profiles[str(batch[0].key)].latency_ns(len(batch))

    def next_exit_ns(device: int, batch: Sequence[Request], passed_ns: int) -> int:
        return models[str(batch[0].key)].next_exit_ns(len(batch), passed_ns)

    outcome = simulate(
        system(workload, models),
        workload.requests(),
        service_ns=service_ns,
        next_exit_ns=next_exit_ns,
    )
    return Report.of(outcome, devices=workload.devices)
