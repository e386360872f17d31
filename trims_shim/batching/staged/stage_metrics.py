"""Prometheus metrics of stages, in addition to those of every batcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trims_shim.batching.staged.stage_statistics import StagedStats, StageStats

__all__ = ["stage_families"]


def stage_families(prefix: str, stats: Mapping[str, StagedStats]) -> list[Any]:
    """Return counters with samples for each batcher; their names start with ``prefix``."""

    def of_stages(name: str, text: str, value: Callable[[StageStats], float]) -> Any:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(f"{prefix}stage_{name}", text, labels=["batcher", "stage"])
        for label, each in stats.items():
            for number, stage in enumerate(each.stages):
                family.add_metric([label, str(number)], value(stage))
        return family

    return [
        _operations(prefix, stats),
        of_stages("runs", "How many times a stage ran.", lambda stage: stage.runs),
        of_stages("requests", "Requests that a stage ran with.", lambda stage: stage.requests),
        of_stages(
            "exits", "Requests that were finished before the last stage.", lambda stage: stage.exits
        ),
        of_stages("busy_seconds", "Time in which a stage ran.", lambda stage: stage.busy_s),
    ]


def _operations(prefix: str, stats: Mapping[str, StagedStats]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        f"{prefix}stage_operations",
        "What was done to batches: begun, stretched, split, answered by the whole function.",
        labels=["batcher", "operation"],
    )
    for label, each in stats.items():
        operations = {
            "new": each.batches,
            "stretch": each.stretches,
            "split": each.splits,
            "failure": each.failures,
        }
        for operation, count in operations.items():
            family.add_metric([label, operation], count)
    return family
