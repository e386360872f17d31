"""The public traces and latency profiles of Proteus (ASPLOS'24), as its artefact publishes them.

``TRIMS_BATCHING_DATA`` names a directory ``proteus`` with ``aggregate_profiled.csv``,
``model_variants/`` and ``traces/<name>/<family>.txt`` of github.com/UMass-LIDS/Proteus, commit
6967c932 (there: ``profiling/``, ``traces/model_variants/``, ``traces/twitter/asplos/<name>/300/``).
Its licence allows use for comparison only, so this repository holds none of it.

As in the artefact, the latency of a size is the median, from the last of repeated rows. Sizes are
1, 2, 4 and 8. A variant runs on a device if a batch takes less than half the objective. There are
twenty CPUs (the artefact calls ten of them VPU) and ten GPUs of each of two kinds.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import merged, percentile, read_trace

__all__ = ["DEVICE_COUNTS", "DataMissing", "Dataset", "Option", "find_dataset"]

DEVICE_COUNTS = {"cpu": 20, "gpu_ampere": 10, "gpu_pascal": 10}
_SIZES = (1, 2, 4, 8)
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_VARIABLE = "TRIMS_BATCHING_DATA"


class DataMissing(Exception):
    """The traces are not there."""


@dataclass(frozen=True, slots=True)
class Option:
    """A variant of a model family on a kind of device that runs it within the objective."""

    family: str
    variant: str
    device: str
    accuracy: float
    """Percent of the family's best."""
    latencies_ms: tuple[tuple[int, float], ...]
    """(batch size, latency); only sizes that take less than half the objective."""

    @property
    def max_batch_size(self) -> int:
        """The largest size that takes less than half the objective."""
        return self.latencies_ms[-1][0]

    @property
    def peak_qps(self) -> int:
        """Throughput of a device with the largest batches, as the artefact's planner has it."""
        size, latency_ms = self.latencies_ms[-1]
        return int(1000 * size / latency_ms)

    def profile(self) -> LatencyProfile:
        """The profile in which a batch takes the time of the next profiled size."""
        return LatencyProfile.measured(
            {size: latency_ms * _NS_PER_MS for size, latency_ms in self.latencies_ms}, pads=True
        )


@dataclass(frozen=True)
class Dataset:
    """One directory of traces and profiles."""

    directory: Path

    @property
    def traces(self) -> list[str]:
        """Names of the traces that exist."""
        return sorted(each.name for each in (self.directory / "traces").iterdir())

    @cached_property
    def families(self) -> list[str]:
        """In the artefact's order, from which it takes their index."""
        return sorted(each.name for each in (self.directory / "model_variants").iterdir())

    def requests(self, trace: str) -> list[Request]:
        """All requests of a trace; a request's key is its family."""
        streams = []
        for family in self.families:
            lines = (self.directory / "traces" / trace / f"{family}.txt").read_text().splitlines()
            streams.append(read_trace(lines, key=family))
        return list(merged(*streams))

    def demand_qps(self, trace: str, *, headroom: float) -> dict[str, float]:
        """The demand a placement is made for: the mean of flat traces, else the 95th percentile of
        one-second bins; times ``headroom``."""
        requests = self.requests(trace)
        seconds = range(requests[-1].arrival_ns // _NS_PER_S + 1)
        bins = Counter((each.key, each.arrival_ns // _NS_PER_S) for each in requests)
        demand = {}
        for family in self.families:
            counts = sorted(bins[family, second] for second in seconds)
            is_flat = "flat" in trace
            value = sum(counts) / len(counts) if is_flat else percentile(counts, 0.95)
            demand[family] = headroom * value
        return demand

    def options(self, slo_ms: float) -> list[Option]:
        """Every variant on every kind of device where a batch takes less than half of it."""
        latencies = self._latencies()
        found = []
        for family in self.families:
            for variant, accuracy in self._variants(family):
                for device in DEVICE_COUNTS:
                    table = latencies.get((variant, device), {})
                    fitting = [(n, table[n]) for n in _SIZES if table.get(n, slo_ms) < slo_ms / 2]
                    if fitting:
                        found.append(Option(family, variant, device, accuracy, tuple(fitting)))
        return found

    def _variants(self, family: str) -> list[tuple[str, float]]:
        lines = (self.directory / "model_variants" / family).read_text().split()
        return [(name, float(accuracy)) for name, accuracy in (line.split(",") for line in lines)]

    def _latencies(self) -> dict[tuple[str, str], dict[int, float]]:
        tables: dict[tuple[str, str], dict[int, float]] = {}
        with (self.directory / "aggregate_profiled.csv").open() as file:
            for row in csv.DictReader(file):
                device = row["Accel"].removeprefix("onnxruntime_")
                table = tables.setdefault((row["Model"], device), {})
                table[int(row["batchsize"])] = float(row["50th_pct"])
        return tables


def find_dataset() -> Dataset:
    """The data that the environment names. Raises DataMissing, which says how to get it."""
    named = os.environ.get(_VARIABLE)
    if named:
        for directory in (Path(named), Path(named) / "proteus"):
            if (directory / "aggregate_profiled.csv").is_file():
                return Dataset(directory)
    problem = f"{_VARIABLE} is not set" if not named else f"{named} holds none of it"
    raise DataMissing(
        f"the traces of Proteus are needed, and {problem}. Get github.com/UMass-LIDS/Proteus "
        f"(its licence: for comparison only), lay a directory out as the docstring of "
        f"benchmarks/batching_data.py says, and set {_VARIABLE} to it"
    )
