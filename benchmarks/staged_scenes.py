"""Staged models, devices and loads of :mod:`benchmarks.staged_policies`: stated, not measured.

Five models after those of DVABatch (ATC'22), whose figures are not public. The models share with
them which stages gain from larger batches. Latencies are such that a batch of 64 takes about 90 ms,
somewhat less than half of the objective of 200 ms. Arrivals are Poisson.

The gain of two stages from running side by side depends on the device, and lies between extremes:

=======  ==========================================================================================
wide     what a small batch leaves of the device is free, as much as its throughput is below that
         of the best batch size; two stages at once
half     only half of that is free; two stages at once
narrow   each stage keeps all of it busy, as on a processor whose cores all work at each stage; one
         at a time
=======  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from random import Random

from benchmarks.staged_device import (
    DeviceTime,
    StageDevice,
    demand_of_best_size,
    full_demand,
)
from benchmarks.staged_simulation import StagedOutcome, simulate_staged
from trims_shim.batching.buckets import OpenBucket
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS, Policy, Request
from trims_shim.batching.rules import Rule, RuleMaker
from trims_shim.batching.simulator.arrivals import poisson
from trims_shim.batching.single import Batching
from trims_shim.batching.staged.profiles.profile_files import load_saved_stages
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.profiles.width import width_of
from trims_shim.batching.staged.scheduler import StagedBatching

__all__ = ["DEVICES", "LOADS", "SCENES", "Scene", "Way", "line_stages", "measured_scene", "run"]

LOADS = {"low": (0.2,), "medium": (0.5,), "high": (0.85,), "step": (0.2, 1.0, 0.2)}
"""Shares of the largest batch's throughput; several follow each other for equal times."""
_MAX_BATCH_SIZE = 64
_QOS_MS = 200.0
_OVERHEAD_NS = 100_000
"""Of each stage: launch, joining and splitting batches. A model in one stage has it once."""
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_LENGTHS = (32, 64, 96, 128)
_MEDIAN_SHARE, _SIGMA = 28 / 128, 0.6
"""Median and sigma of the log-normal lengths, cut at the longest. If that is 128, 59 % have up to
32 tokens, and 92 % up to 64."""


def _longest_in(batch: Sequence[Request]) -> int:
    return max(request.payload for request in batch)


def _half_demand(profile: LatencyProfile, size: int) -> float:
    return (1 + demand_of_best_size(profile, size)) / 2


DEVICES = {"wide": (demand_of_best_size, 2), "half": (_half_demand, 2), "narrow": (full_demand, 1)}
"""The demand of a stage, and the number of stages at once."""


@dataclass(frozen=True)
class Scene:
    """A model on a device."""

    model: str
    device: str
    diversity: str
    """The diversity it stands for (input, operator, load), or that it was measured."""
    profiles: dict[int, StagedProfile]
    """By the length to which inputs are padded; a single one for models without lengths."""
    qos_ms: float = _QOS_MS

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"{self.model}, {self.device}"

    @property
    def max_batch_size(self) -> int:
        """The largest batch size of all its profiles."""
        return min(each.max_batch_size for each in self.profiles.values())

    @cached_property
    def staged(self) -> StageDevice:
        """Runs stages; a batch is padded to its longest item."""
        demand, _ = DEVICES[self.device]
        return StageDevice(
            self.profiles,
            demand=demand,
            overhead_ns=_OVERHEAD_NS,
            profile_of=_longest_in,
        )

    @cached_property
    def unstaged(self) -> StageDevice:
        """Runs the model in one piece."""
        return self.staged.unstaged()

    @cached_property
    def width(self) -> float:
        """The width that `trims stage profile --lanes` would measure, with the longest inputs."""
        longest = max(self.profiles)
        sizes = [1 << power for power in range(self.max_batch_size.bit_length())]
        alone_ns, both_ns = {}, {}
        for size in sizes:
            batch = [Request(number, 0, payload=longest) for number in range(size)]
            phases = self.unstaged.cost(0, batch)
            alone_ns[size] = sum(own_ns for own_ns, _ in phases)
            time = DeviceTime[int]()
            for number in range(2):
                time.start(0, number, phases)
            while (end_ns := time.next_end_ns()) != NEVER_NS:
                both_ns[size] = end_ns
                time.end_next()
        return width_of(alone_ns, both_ns)

    @cached_property
    def capacity_qps(self) -> float:
        """The throughput of the largest batches, padded to the longest possible input."""
        size = self.max_batch_size
        return _NS_PER_S * size / self.unstaged.profile(max(self.profiles)).latency_ns(size)

    def requests(
        self, loads: Sequence[float], *, count: int, seed: int, is_bucketed: bool
    ) -> list[Request]:
        """About ``count`` requests, the same for all systems; keys are lengths if bucketed."""
        random = Random(seed)
        span_ns = count * _NS_PER_S / self.capacity_qps / sum(loads)
        times_ns = chain.from_iterable(
            _within(poisson(load * self.capacity_qps, random), round(index * span_ns), span_ns)
            for index, load in enumerate(loads)
        )
        slo_ns = round(self.qos_ms * _NS_PER_MS)
        lengths = self._lengths(Random(seed + 1))
        return [
            Request(
                number,
                time_ns,
                time_ns + slo_ns,
                key=OpenBucket(length) if is_bucketed else None,
                payload=length,
            )
            for number, (time_ns, length) in enumerate(zip(times_ns, lengths, strict=False))
        ]

    def _lengths(self, random: Random) -> Iterator[int]:
        longest = max(self.profiles)
        while True:
            length = random.lognormvariate(0, _SIGMA) * _MEDIAN_SHARE * longest
            if length <= longest:
                yield min(each for each in self.profiles if length <= each)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve a model."""

    maker: RuleMaker
    setting: str = ""
    """The tuned setting."""
    is_staged: bool = True
    is_bucketed: bool = True
    """True: each batch has one length. False: all lengths, padded to the longest."""
    lanes: int | None = None
    """Stages that run at once; by default the device's number."""
    pairs: int = 2
    knows_width: bool = False
    """The device's width was measured before."""


def run(scene: Scene, way: Way, loads: Sequence[float], *, count: int, seed: int) -> StagedOutcome:
    """Serve the scene's requests in this way."""
    device = scene.staged if way.is_staged else scene.unstaged
    longest = max(scene.profiles)
    profiles = {length: device.profile(length) for length in scene.profiles}
    if way.knows_width:
        profiles = {
            length: StagedProfile(each.stages, preferred=each.preferred, width=scene.width)
            for length, each in profiles.items()
        }
    lanes = way.lanes or DEVICES[scene.device][1]

    def make_rule(key: Hashable) -> Rule:
        profile = profiles[longest if key is None else key]
        return way.maker(profile, max_batch_size=scene.max_batch_size)

    policy: Policy = Batching(make_rule, devices=lanes)
    if way.is_staged:
        policy = StagedBatching(make_rule, stages=device.stages, devices=lanes, pairs=way.pairs)
    stream = scene.requests(loads, count=count, seed=seed, is_bucketed=way.is_bucketed)
    return simulate_staged(policy, stream, device=device)


def measured_scene(path: Path, *, device: str) -> Scene:
    """A model that ``trims stage profile`` has measured.

    Its objective is 2.2 times the time of its largest batch, about as for the models here. The file
    does not have the driver's time between stages.
    """
    saved = load_saved_stages(path)
    profiles = {length or 1: saved.profile_for(length or 1) for length in saved.latencies_ns}
    longest = profiles[max(profiles)]
    qos_ms = 2.2 * longest.latency_ns(longest.max_batch_size) / _NS_PER_MS
    return Scene(f"{saved.name or path.stem} (measured)", device, "measured", profiles, qos_ms)


# --- models ---------------------------------------------------------------------------------------


def line_stages(alpha_ms: float, beta_ms: float, stages: int) -> StagedProfile:
    """``alpha * b + beta``, cut into equal stages."""
    stage = LatencyProfile.linear(
        alpha_ms / stages, beta_ms / stages, max_batch_size=_MAX_BATCH_SIZE
    )
    return StagedProfile([stage] * stages)


def _plateaus(whole_ms: float, *stages: tuple[int, float]) -> StagedProfile:
    """Stages of (preferred size, share of a batch of 64); smaller batches take as long."""
    profiles = [
        LatencyProfile(
            whole_ms * _NS_PER_MS * share * max(size, preferred) / _MAX_BATCH_SIZE
            for size in range(1, _MAX_BATCH_SIZE + 1)
        )
        for preferred, share in stages
    ]
    return StagedProfile(profiles, preferred=[preferred for preferred, _ in stages])


def _bert(tokens: int) -> StagedProfile:
    """12 layers in 4 stages. Matrix products grow with the tokens, attention with their square."""
    return line_stages(0.009 * tokens + 0.000_008 * tokens**2, 6, 4)


def _within(times_ns: Iterator[int], start_ns: int, span_ns: float) -> Iterator[int]:
    for time_ns in times_ns:
        if time_ns >= span_ns:
            return
        yield start_ns + time_ns


_MODELS = {
    "BERT-like": ("input", {length: _bert(length) for length in _LENGTHS}),
    "U-Net-like": (
        "operator",
        {1: _plateaus(96, (4, 0.2), (8, 0.15), (32, 0.15), (32, 0.15), (8, 0.15), (4, 0.2))},
    ),
    "LinkNet-like": (
        "operator",
        {1: _plateaus(80, (4, 0.25), (16, 0.2), (64, 0.15), (16, 0.2), (4, 0.2))},
    ),
    "VGG-like": ("load", {1: line_stages(1.3, 4, 4)}),
    "ResNet-like": ("load", {1: line_stages(1.1, 14, 5)}),
}
SCENES = {
    scene.name: scene
    for device in DEVICES
    for model, (diversity, profiles) in _MODELS.items()
    if (scene := Scene(model, device, diversity, profiles))
}
