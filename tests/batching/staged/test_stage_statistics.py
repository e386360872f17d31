"""Counters of stages."""

from __future__ import annotations

from trims_shim.batching.staged.stage_statistics import StageRecord


def test_a_snapshot_is_of_its_time() -> None:
    record = StageRecord(2)
    before = record.snapshot()
    record.add_runs(0, [3], 2_000_000_000)
    record.add_runs(0, [1], 1_000_000_000)
    record.add_runs(1, [], 5)  # nobody was left
    record.add_exits(0, 2)
    record.batches, record.stretches, record.splits, record.failures = 4, 3, 2, 1
    after = record.snapshot()
    assert [each.runs for each in before.stages] == [0, 0]
    assert before.stages[0].mean_batch_size == 0
    assert after.stages[0].batch_sizes == {1: 1, 3: 1}
    assert after.stages[0].mean_batch_size == 2
    assert after.stages[0].requests == 4
    assert after.stages[0].busy_s == 3
    assert (before.exits, after.exits) == (0, 2)
    assert [each.exits for each in after.stages] == [2, 0]
    assert after.stages[1].runs == after.stages[1].busy_s == 0
    assert (after.batches, after.stretches, after.splits, after.failures) == (4, 3, 2, 1)
