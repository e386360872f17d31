"""The figures of a simulation, on one small enough to reckon by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.protocol import Request
from trims_shim.batching.simulator import Execution, Outcome, Report, percentile

MS = 1_000_000


def request(number: int, arrival_ms: int, deadline_ms: int) -> Request:
    return Request(number, arrival_ms * MS, deadline_ms * MS)


def outcome() -> Outcome:
    on_time, late = request(0, 0, 50), request(1, 10, 39)
    exactly = request(2, 20, 100)
    return Outcome(
        executions=[
            Execution(0, [on_time, late], 20 * MS, 40 * MS),
            Execution(1, [exactly], 30 * MS, 50 * MS, is_preempted=True),
            Execution(1, [exactly], 60 * MS, 100 * MS),
        ],
        dropped=[(request(3, 30, 60), 35 * MS)],
        unanswered=[request(4, 40, 80)],
        requests=5,
        start_ns=0,
        end_ns=100 * MS,
    )


def test_the_figures() -> None:
    report = Report.of(outcome(), devices=2, accuracy_of=lambda each: (80.0, 90.0)[each.device])
    assert (report.on_time, report.late, report.dropped, report.unanswered) == (2, 1, 1, 1)
    assert report.violations == 3
    assert report.violation_ratio == 0.6
    assert report.goodput_qps == pytest.approx(20)
    assert report.mean_batch == 1.5
    assert report.busy_share == pytest.approx(0.4)
    assert (report.preemptions, report.wasted_share) == (1, pytest.approx(0.1))
    assert (report.p50_ms, report.p99_ms) == (40, 80)
    assert report.accuracy == 85  # of the two that were in time; the late one is not counted


def test_an_answer_at_its_deadline_is_in_time() -> None:
    found = Report.of(
        Outcome(executions=[Execution(0, [request(0, 0, 5)], 0, 5 * MS)], requests=1, end_ns=5 * MS)
    )
    assert found.violations == 0


def test_accuracy_is_unknown_where_nobody_says_or_nothing_was_in_time() -> None:
    assert Report.of(outcome()).accuracy is None
    none = Outcome(dropped=[(request(0, 0, 5), 1)], requests=1, end_ns=1)
    report = Report.of(none, accuracy_of=lambda _: 90.0)
    assert (report.accuracy, report.mean_batch) == (None, 0)


def test_a_missing_request_is_refused() -> None:
    lossy = outcome()
    lossy.unanswered.clear()
    with pytest.raises(ValueError, match="of 5 requests 3 were answered, 1 dropped and 0 not"):
        Report.of(lossy)


@given(
    st.lists(st.integers(0, 100), min_size=1).map(sorted),
    st.sampled_from((0.01, 0.5, 0.9, 0.99, 1)),
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[int], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(each <= found for each in values) >= share * len(values)
    assert sum(each < found for each in values) < share * len(values)


def test_a_percentile_of_nothing_is_0() -> None:
    assert percentile([], 0.5) == 0
