"""Batchers' statistics for Prometheus, where prometheus_client is installed (extra ``metrics``).

Numbers are read from :meth:`Batcher.stats` when the registry is scraped, so serving pays nothing.
A batcher that is gone is no longer reported; reporting keeps none alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trims_shim.batching.staged.stage_statistics import StagedStats, StageStats
    from trims_shim.batching.statistics import BatcherStats, Percentiles

__all__ = ["export"]

_PREFIX = "trims_batching_"
_QUANTILES = ("p50_ms", "p90_ms", "p99_ms")
_LARGEST_BUCKET = 1024


class _Source(Protocol):
    def stats(self) -> BatcherStats: ...


class _Exported(_Source, Protocol):
    @property
    def name(self) -> str: ...


def export(batcher: _Exported, registry: Any = None) -> None:
    """Report ``batcher`` in ``registry``, prometheus_client's default one if None; once in each.

    The label ``batcher`` is its name; further batchers of that name are ``name-2`` and so on.
    Raises ImportError if prometheus_client is not installed, TypeError if it is no batcher, or a
    method of no instance.
    """
    if not (hasattr(batcher, "stats") and hasattr(batcher, "name")):
        raise TypeError(f"{batcher!r} is no batcher; give what batched() or Batcher() returned")
    if getattr(batcher, "_is_unbound", False):
        raise TypeError(f"{batcher.name} has other numbers for each instance; export that of one")
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ImportError(
            f"export() needs prometheus_client: pip install 'trims-shim[metrics]' ({error})"
        ) from error
    registry = REGISTRY if registry is None else registry
    with _lock:
        collector = _collectors.get(registry)
        is_new = collector is None
        if collector is None:
            collector = _collectors[registry] = _Collector()
        collector.add(batcher)
    # Outside of our lock: a registry calls the collector that it registers.
    if is_new:
        try:
            registry.register(collector)
        except BaseException:  # it has a metric of such a name: the next call is told, too
            with _lock:
                _collectors.pop(registry, None)
            raise


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()


_lock = threading.Lock()
# Another thread may hold it when this process forks, and is not there in the child.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_lock)
_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()


class _Collector:
    """All batchers of one registry: a metric is registered once, and has a sample for each."""

    def __init__(self) -> None:
        self._sources: dict[str, weakref.ref[_Source]] = {}
        self._names: Counter[str] = Counter()

    def add(self, batcher: _Exported) -> None:
        # Each access to a method makes a new batcher; its engine lives as long as the instance.
        source: _Source = getattr(batcher, "_engine", batcher)
        self._forget_gone()
        if any(reference() is source for reference in list(self._sources.values())):
            return
        # As of a file whose name is no UTF-8: no scrape could be written with it.
        name = batcher.name.encode(errors="backslashreplace").decode()
        label = self._next_label(name)
        while label in self._sources:  # of a batcher that has this very name
            label = self._next_label(name)
        self._sources[label] = weakref.ref(source)

    def _next_label(self, name: str) -> str:
        self._names[name] += 1
        number = self._names[name]
        return name if number == 1 else f"{name}-{number}"

    def _forget_gone(self) -> None:
        # Of a copy, and None: other threads may do this, too.
        for label, reference in list(self._sources.items()):
            if reference() is None:
                self._sources.pop(label, None)

    def describe(self) -> Iterator[Any]:
        """The metrics without samples: registering must not read any batcher."""
        return iter(_families({}) + _stage_families({}))

    def collect(self) -> Iterator[Any]:
        """The samples; called by the registry."""
        stats = {}
        stages = {}
        self._forget_gone()
        for label, reference in list(self._sources.items()):
            source = reference()
            if source is not None:
                stats[label] = source.stats()
                if hasattr(source, "stage_stats"):
                    stages[label] = source.stage_stats()
        return iter(_families(stats) + (_stage_families(stages) if stages else []))


def _families(stats: Mapping[str, BatcherStats]) -> list[Any]:
    return [
        _family_by(
            "Counter",
            "requests",
            "Requests by what became of them.",
            "outcome",
            {label: _outcomes(each) for label, each in stats.items()},
        ),
        _family("Gauge", "queued", "Requests that wait.", {k: s.queued for k, s in stats.items()}),
        _family(
            "Gauge",
            "running",
            "Requests in batches that run.",
            {k: s.running for k, s in stats.items()},
        ),
        _batch_sizes(stats),
        _family(
            "Counter",
            "busy_seconds",
            "Time in which batches ran.",
            {k: s.busy_total_s for k, s in stats.items()},
        ),
        _quantiles("wait", "from arrival to the start of the batch", stats),
        _quantiles("latency", "from arrival to the answer", stats),
        _quantiles("wake_lateness", "by which timers came too late", stats),
    ]


def _outcomes(stats: BatcherStats) -> dict[str, int]:
    return {
        "in_time": stats.answered - stats.late,
        "late": stats.late,
        "hopeless": stats.dropped.get("hopeless", 0),
        "shed": stats.dropped.get("shed", 0),
        "failed": stats.failed,
        "cancelled": stats.cancelled,
        "rejected": stats.rejected,
    }


def _batch_sizes(stats: Mapping[str, BatcherStats]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        _PREFIX + "batch_size", "Requests in a batch.", labels=["batcher"]
    )
    for label, each in stats.items():
        sizes = each.batch_sizes
        buckets, bound = [], 1
        while bound <= _LARGEST_BUCKET:
            buckets.append((str(float(bound)), sum(n for s, n in sizes.items() if s <= bound)))
            bound *= 2
        buckets.append(("+Inf", each.batches))
        family.add_metric([label], buckets, sum(size * n for size, n in sizes.items()))
    return family


def _quantiles(quantity: str, text: str, stats: Mapping[str, BatcherStats]) -> Any:
    """Gauges: quantiles of the last requests cannot be added up over time or batchers."""

    def of(found: Percentiles) -> dict[str, float]:
        return {f"0.{name[1:3].rstrip('0')}": getattr(found, name) / 1e3 for name in _QUANTILES}

    return _family_by(
        "Gauge",
        f"{quantity}_seconds",
        f"Time {text}; quantiles of the last requests.",
        "quantile",
        {label: of(getattr(each, quantity)) for label, each in stats.items()},
    )


def _stage_families(stats: Mapping[str, StagedStats]) -> list[Any]:
    def of_stages(name: str, text: str, value: Callable[[StageStats], float]) -> Any:
        values = {
            label: {str(number): value(stage) for number, stage in enumerate(each.stages)}
            for label, each in stats.items()
        }
        return _family_by("Counter", f"stage_{name}", text, "stage", values)

    return [
        _family_by(
            "Counter",
            "stage_operations",
            "What was done to batches: begun (of these, run whole), stretched, split, answered by "
            "the whole function after a failure.",
            "operation",
            {
                label: {
                    "new": each.batches,
                    "whole": each.whole,
                    "stretch": each.stretches,
                    "split": each.splits,
                    "failure": each.failures,
                }
                for label, each in stats.items()
            },
        ),
        of_stages("runs", "How many times a stage ran.", lambda stage: stage.runs),
        of_stages("requests", "Requests that a stage ran with.", lambda stage: stage.requests),
        of_stages(
            "exits", "Requests that were finished before the last stage.", lambda stage: stage.exits
        ),
        of_stages("busy_seconds", "Time in which a stage ran.", lambda stage: stage.busy_s),
    ]


def _family(kind: str, name: str, text: str, values: Mapping[str, float]) -> Any:
    """A ``"Gauge"`` or ``"Counter"`` with a value for each batcher."""
    family = _kind(kind)(_PREFIX + name, text, labels=["batcher"])
    for batcher, value in values.items():
        family.add_metric([batcher], value)
    return family


def _family_by(
    kind: str, name: str, text: str, label: str, values: Mapping[str, Mapping[str, float]]
) -> Any:
    """As :func:`_family`, with several values for each batcher, told apart by ``label``."""
    family = _kind(kind)(_PREFIX + name, text, labels=["batcher", label])
    for batcher, each in values.items():
        for which, value in each.items():
            family.add_metric([batcher, which], value)
    return family


def _kind(kind: str) -> Any:
    from prometheus_client import core

    return getattr(core, f"{kind}MetricFamily")
