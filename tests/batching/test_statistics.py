"""Counters and percentiles."""

from __future__ import annotations

from typing import Any

from trims_shim.batching.protocol import Drop, DropReason, Request
from trims_shim.batching.statistics import Percentiles, Record

MS = 1_000_000


def test_a_record_of_nothing() -> None:
    stats = Record(devices=1).snapshot(queued=0, running=0, now_ns=5)
    assert stats.submitted == stats.batches == stats.violations == 0
    assert stats.answered == stats.failed == stats.cancelled == stats.rejected == 0
    assert stats.wait_total_s == stats.latency_total_s == stats.busy_total_s == 0
    assert stats.mean_batch_size == stats.busy_share == 0
    assert stats.latency == Percentiles(0, 0, 0, 0, 0)


def test_what_is_counted() -> None:
    record = Record(devices=2)
    for arrival_ns in (0, 0, 4 * MS):
        record.add_request(arrival_ns)
    record.add_rejection(0)
    record.add_drop(Drop([Request(1, 0)], DropReason.SHED))
    record.add_wake(3 * MS)
    record.add_batch([0, 4 * MS], 6 * MS, 10 * MS)
    record.add_answer(0, 10 * MS, 10 * MS)
    record.add_answer(4 * MS, 9 * MS, 10 * MS)
    stats = record.snapshot(queued=1, running=2, now_ns=20 * MS)
    assert (stats.submitted, stats.answered, stats.late, stats.rejected) == (3, 2, 1, 1)
    assert stats.dropped == {"shed": 1}
    assert stats.violations == 2
    assert stats.batch_sizes == {2: 1}
    assert stats.mean_batch_size == 2
    assert (stats.queued, stats.running) == (1, 2)
    assert stats.wait == Percentiles(6, 6, 6, 6, 2)
    assert stats.latency == Percentiles(10, 10, 10, 10, 2)
    assert stats.wake_lateness.max_ms == 3
    assert stats.busy_share == 4 / 20 / 2
    assert stats.busy_total_s == 0.004
    assert stats.latency_total_s == 0.016
    assert stats.wait_total_s == 0.008


def test_several_batches() -> None:
    record = Record(devices=1)
    record.add_batch([0], MS, 2 * MS)
    record.add_batch([0, MS, 2 * MS], 9 * MS, 10 * MS)
    stats = record.snapshot(queued=0, running=0, now_ns=10 * MS)
    assert stats.mean_batch_size == 2
    assert (stats.wait.p50_ms, stats.wait.max_ms) == (8, 9)


def test_percentiles_of_the_last() -> None:
    record = Record(devices=1)
    for latency_ms in range(5000):
        record.add_answer(0, 0, latency_ms * MS)
    latency = record.snapshot(queued=0, running=0, now_ns=1).latency
    assert latency.count < 5000
    first_ms = 5000 - latency.count
    assert latency.max_ms == 4999
    assert abs(latency.p50_ms - (first_ms + latency.count / 2)) <= 1
    assert abs(latency.p99_ms - (first_ms + latency.count * 0.99)) <= 1


def test_records_add_up() -> None:
    total = Record(devices=1)
    total.merge(Record(devices=1))
    for arrival_ns in (5, 0, 4):
        record = Record(devices=1)
        record.add_request(arrival_ns)
        record.add_batch([arrival_ns], 6, 7)
        record.add_answer(arrival_ns, 0, 7)
        record.add_drop(Drop([Request(1, 0)], DropReason.HOPELESS))
        total.merge(record)
    stats = total.snapshot(queued=0, running=0, now_ns=9)
    assert (stats.submitted, stats.answered, stats.late) == (3, 3, 3)
    assert stats.batch_sizes == {1: 3}
    assert stats.dropped == {"hopeless": 3}
    assert stats.latency.count == 3
    assert stats.busy_share == 3 / 9  # since the first request of all


def test_a_device_is_busy_since_the_first_request_not_since_the_clock_began() -> None:
    record = Record(devices=1)
    record.add_request(6)
    record.add_batch([6], 7, 8)
    assert record.snapshot(queued=0, running=0, now_ns=10).busy_share == 1 / 4


class Meanwhile(Record):
    """Another thread counts a late answer whenever this one has read a counter."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("answered", "in_time", "late"):
            self.__dict__["late"] += 1
        return found


def test_answers_that_come_late_meanwhile_do_not_change_how_many_were_in_time() -> None:
    record = Meanwhile(devices=1)
    for deadline_ns in (0, 9, 9):
        record.add_answer(0, deadline_ns, 5)
    stats = record.snapshot(queued=0, running=0, now_ns=9)
    assert stats.answered - stats.late == 2
