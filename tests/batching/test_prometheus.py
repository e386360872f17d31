"""What Prometheus is told is what ``stats()`` says, for every batcher that still exists."""

from __future__ import annotations

import dataclasses
import gc
import sys
from typing import Any

import pytest
from forks import passes_in_child

from tests.batching.waiting import LONG_S
from trims_shim.batching import prometheus as module
from trims_shim.batching.batcher import Batcher, batched
from trims_shim.batching.prometheus import export
from trims_shim.batching.staged import EarlyExit, StagedModel
from trims_shim.batching.statistics import BatcherStats, Percentiles

prometheus = pytest.importorskip("prometheus_client")

STATS = BatcherStats(
    submitted=30,
    answered=20,
    late=3,
    dropped={"hopeless": 2, "shed": 1},
    failed=1,
    cancelled=4,
    rejected=5,
    queued=1,
    running=2,
    batch_sizes={1: 2, 3: 4, 2000: 1},
    wait=Percentiles(p50_ms=1, p90_ms=2, p99_ms=3),
    latency=Percentiles(p50_ms=10, p90_ms=20, p99_ms=30),
    wake_lateness=Percentiles(p99_ms=0.5),
    busy_share=0.5,
    wait_total_s=1.0,
    latency_total_s=2.0,
    busy_total_s=1.5,
)


class Stub:
    """What is used of a batcher."""

    def __init__(self, name: str = "classify", **changes: object) -> None:
        self.name = name
        self._stats = dataclasses.replace(STATS, **changes)  # type: ignore[arg-type]

    def stats(self) -> BatcherStats:
        return self._stats


@pytest.fixture
def registry() -> object:
    return prometheus.CollectorRegistry()


def value(registry: object, name: str, **labels: str) -> float | None:
    found = registry.get_sample_value(  # type: ignore[attr-defined]
        f"trims_batching_{name}", {"batcher": "classify", **labels}
    )
    return None if found is None else float(found)


def test_outcomes_are_counted(registry: object) -> None:
    batcher = Stub()
    export(batcher, registry)
    outcomes = ("in_time", "late", "hopeless", "shed", "failed", "cancelled", "rejected")
    found = [value(registry, "requests_total", outcome=each) for each in outcomes]
    assert found == [17, 3, 2, 1, 1, 4, 5]
    assert value(registry, "queued") == 1
    assert value(registry, "running") == 2
    assert value(registry, "busy_seconds_total") == 1.5


def test_batch_sizes_are_a_histogram(registry: object) -> None:
    batcher = Stub()
    export(batcher, registry)
    bounds = ("1.0", "2.0", "4.0", "1024.0", "+Inf")
    assert [value(registry, "batch_size_bucket", le=each) for each in bounds] == [2, 2, 6, 6, 7]
    assert value(registry, "batch_size_count") == 7
    assert value(registry, "batch_size_sum") == 2014


def test_times_are_in_seconds(registry: object) -> None:
    batcher = Stub()
    export(batcher, registry)
    quantiles = ("0.5", "0.9", "0.99")
    found = [value(registry, "latency_seconds", quantile=each) for each in quantiles]
    assert found == [0.01, 0.02, 0.03]
    assert value(registry, "wait_seconds", quantile="0.5") == 0.001
    assert value(registry, "wake_lateness_seconds", quantile="0.99") == 0.0005


def test_batchers_share_a_registry(registry: object) -> None:
    first, second, other = Stub(), Stub(queued=9), Stub("detect", queued=7)
    for batcher in (first, second, other, first):
        export(batcher, registry)
    assert value(registry, "queued") == 1
    assert value(registry, "queued", batcher="classify-2") == 9
    assert value(registry, "queued", batcher="detect") == 7
    assert value(registry, "queued", batcher="classify-3") is None
    text = prometheus.generate_latest(registry).decode()
    assert text.count("# TYPE trims_batching_queued gauge") == 1


def test_a_batcher_keeps_its_name_though_it_is_the_number_of_another(registry: object) -> None:
    numbered, first, second = Stub("classify-2", queued=7), Stub(), Stub(queued=9)
    for batcher in (numbered, first, second):
        export(batcher, registry)
    assert value(registry, "queued", batcher="classify-2") == 7
    assert value(registry, "queued", batcher="classify-3") == 9


def test_two_that_ask_at_once_after_a_batcher_is_gone(registry: object) -> None:
    class Asking(Stub):
        def stats(self) -> BatcherStats:
            if again:
                again.pop()
                prometheus.generate_latest(registry)
            return super().stats()

    again: list[object] = []
    first, gone = Asking("detect"), Stub()
    export(first, registry)
    export(gone, registry)
    again.append(1)
    del gone
    gc.collect()
    assert value(registry, "queued", batcher="detect") == 1


def test_one_is_added_while_another_thread_asks_after_a_batcher_is_gone(registry: object) -> None:
    first, gone, added = Stub("first"), Stub("gone"), Stub()
    export(first, registry)
    export(gone, registry)
    again = [1]

    def asking() -> Any:
        if again:
            again.pop()
            prometheus.generate_latest(registry)
        return first

    module._collectors[registry]._sources["first"] = asking  # type: ignore[assignment]
    del gone
    gc.collect()
    export(added, registry)
    assert value(registry, "queued") == 1


def test_a_batcher_that_is_gone_is_not_reported(registry: object) -> None:
    first, second = Stub(), Stub("detect")
    export(first, registry)
    export(second, registry)
    del second
    gc.collect()
    assert value(registry, "queued", batcher="detect") is None
    assert value(registry, "queued") == 1


def test_batchers_that_are_gone_do_not_add_up_where_nobody_asks(registry: object) -> None:
    for _ in range(3):
        export(Stub(), registry)
        gc.collect()
    last = Stub(queued=2)
    export(last, registry)
    assert len(module._collectors[registry]._sources) == 1
    assert value(registry, "queued", batcher="classify-4") == 2


def test_a_child_can_export_whatever_its_parent_was_doing(registry: object) -> None:
    """As at a fork while another thread exports."""
    with module._lock:
        assert passes_in_child(lambda: export(Stub(), registry))


def test_a_methods_batcher_is_reported_while_its_owner_lives(registry: object) -> None:
    class Model:
        @batched(name="classify")
        def classify(self, items: list[int]) -> list[int]:
            return items

    model = Model()
    assert model.classify(1) == 1
    export(model.classify, registry)
    export(model.classify, registry)
    gc.collect()
    assert value(registry, "requests_total", outcome="in_time") == 1
    assert value(registry, "queued", batcher="classify-2") is None
    del model
    gc.collect()
    assert value(registry, "queued") is None


def test_a_method_of_no_instance_is_refused(registry: object) -> None:
    class Model:
        @batched(name="classify")
        def classify(self, items: list[int]) -> list[int]:
            return items

        @batched
        @classmethod
        def of_class(cls, items: list[int]) -> list[int]:
            return items

    with pytest.raises(TypeError, match="classify has other numbers for each instance"):
        export(Model.classify, registry)
    export(Model.of_class, registry)


def test_stages_are_reported_where_there_are_any(registry: object) -> None:
    def first(items: list[int]) -> EarlyExit:
        flags = [item % 2 == 1 for item in items]
        odd = [item for item in items if item % 2]
        return EarlyExit(flags, odd, [item for item in items if not item % 2])

    plain = Stub("detect")
    export(plain, registry)
    assert "stage" not in prometheus.generate_latest(registry).decode()
    model = StagedModel([first, lambda items: [item + 1 for item in items]])
    with Batcher(model, collate="list", name="classify") as batcher:
        export(batcher, registry)
        assert [batcher(item) for item in (1, 2, 3)] == [1, 3, 3]
        batcher.drain(LONG_S)
        assert value(registry, "requests_total", outcome="in_time") == 3
        operations = [
            value(registry, "stage_operations_total", operation=each)
            for each in ("new", "whole", "stretch", "split", "failure")
        ]
        assert operations == [3, 0, 0, 0, 0]
        for name, found in (("runs", [3, 1]), ("requests", [3, 1]), ("exits", [2, 0])):
            of_stages = [value(registry, f"stage_{name}_total", stage=each) for each in "01"]
            assert of_stages == found
        busy_s = [each.busy_s for each in batcher.stage_stats().stages]
        assert value(registry, "stage_busy_seconds_total", stage="1") == busy_s[1] > 0
        assert value(registry, "stage_runs_total", batcher="detect", stage="0") is None


def test_a_name_that_is_no_utf_8_is_written(registry: Any) -> None:
    batcher = Stub("mod\udce8le")
    export(batcher, registry)
    assert prometheus.generate_latest(registry)
    assert value(registry, "queued", batcher=r"mod\udce8le") == 1


def test_a_registry_that_refuses_is_asked_again(registry: Any) -> None:
    batcher = Stub()
    other = prometheus.Gauge("trims_batching_queued", "Of somebody else.", registry=registry)
    for _ in range(2):
        with pytest.raises(ValueError, match="trims_batching_queued"):
            export(batcher, registry)
    registry.unregister(other)
    export(batcher, registry)
    assert value(registry, "queued") == 1


def test_the_default_registry(monkeypatch: pytest.MonkeyPatch, registry: object) -> None:
    monkeypatch.setattr(prometheus, "REGISTRY", registry)
    batcher = Stub()
    export(batcher)
    assert value(registry, "queued") == 1


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError):
        export(Stub())


def test_what_is_no_batcher_is_named(registry: object) -> None:
    with pytest.raises(TypeError, match="<built-in function len> is no batcher"):
        export(len, registry)  # type: ignore[arg-type]
