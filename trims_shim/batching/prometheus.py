"""Batchers' statistics for Prometheus, where prometheus_client is installed (extra ``metrics``).

Numbers are read from :meth:`Batcher.stats` when the registry is scraped, so serving pays nothing.
A batcher that is gone is no longer reported; reporting keeps none alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from trims_shim.batching.staged.stage_metrics import stage_families

if TYPE_CHECKING:
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
        registry.register(collector)


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
        if any(reference() is source for reference in self._sources.values()):
            return
        label = self._next_label(batcher.name)
        while label in self._sources:  # of a batcher that has this very name
            label = self._next_label(batcher.name)
        self._sources[label] = weakref.ref(source)

    def _next_label(self, name: str) -> str:
        self._names[name] += 1
        number = self._names[name]
        return name if number == 1 else f"{name}-{number}"

    def describe(self) -> Iterator[Any]:
        """The metrics without samples: registering must not read any batcher."""
        return iter(_families({}) + stage_families(_PREFIX, {}))

    def collect(self) -> Iterator[Any]:
        """The samples; called by the registry."""
        stats = {}
        stages = {}
        for label, reference in list(self._sources.items()):
            source = reference()
            if source is None:
                self._sources.pop(label, None)  # None: two threads may collect at once
            else:
                stats[label] = source.stats()
                if hasattr(source, "stage_stats"):
                    stages[label] = source.stage_stats()
        return iter(_families(stats) + (stage_families(_PREFIX, stages) if stages else []))


def _families(stats: Mapping[str, BatcherStats]) -> list[Any]:
    return [
        _outcomes(stats),
        _gauge("queued", "Requests that wait.", {k: s.queued for k, s in stats.items()}),
        _gauge(
            "running", "Requests in batches that run.", {k: s.running for k, s in stats.items()}
        ),
        _batch_sizes(stats),
        _busy(stats),
        _quantiles("wait", "from arrival to the start of the batch", stats),
        _quantiles("latency", "from arrival to the answer", stats),
        _quantiles("wake_lateness", "by which timers came too late", stats),
    ]


def _outcomes(stats: Mapping[str, BatcherStats]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        _PREFIX + "requests", "Requests by what became of them.", labels=["batcher", "outcome"]
    )
    for label, each in stats.items():
        outcomes = {
            "in_time": each.answered - each.late,
            "late": each.late,
            "hopeless": each.dropped.get("hopeless", 0),
            "shed": each.dropped.get("shed", 0),
            "failed": each.failed,
            "cancelled": each.cancelled,
            "rejected": each.rejected,
        }
        for outcome, count in outcomes.items():
            family.add_metric([label, outcome], count)
    return family


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(_PREFIX + name, text, labels=["batcher"])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


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


def _busy(stats: Mapping[str, BatcherStats]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        _PREFIX + "busy_seconds", "Time in which batches ran.", labels=["batcher"]
    )
    for label, each in stats.items():
        family.add_metric([label], each.busy_total_s)
    return family


def _quantiles(quantity: str, text: str, stats: Mapping[str, BatcherStats]) -> Any:
    """Gauges: quantiles of the last requests cannot be added up over time or batchers."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(
        f"{_PREFIX}{quantity}_seconds",
        f"Time {text}; quantiles of the last requests.",
        labels=["batcher", "quantile"],
    )
    for label, each in stats.items():
        found: Percentiles = getattr(each, quantity)
        for name in _QUANTILES:
            quantile = f"0.{name[1:3].rstrip('0')}"
            family.add_metric([label, quantile], getattr(found, name) / 1e3)
    return family
