"""Traces are read as they were written, and a broken line is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.protocol import NEVER_NS
from trims_shim.batching.simulator import read_trace

MS = 1_000_000


def test_the_artefacts_format() -> None:
    first, second = read_trace(["61,1,300\n", "67,1,300\n"], key="bert")
    assert (first.number, first.arrival_ns, first.deadline_ns) == (0, 61 * MS, 361 * MS)
    assert (second.number, second.key) == (1, "bert")


def test_columns_may_be_missing_and_comments_are_passed_over() -> None:
    found = list(read_trace(["# bert\n", "\n", "0.5\n", "1,1\n", "2,1,10\n"]))
    assert [each.arrival_ns for each in found] == [MS // 2, MS, 2 * MS]
    assert [each.deadline_ns for each in found] == [NEVER_NS, NEVER_NS, 12 * MS]
    assert [each.number for each in found] == [0, 1, 2]


def test_objective_and_speed_can_be_chosen() -> None:
    (found,) = read_trace(["100,1,300"], slo_ms=20, speed=4)
    assert (found.arrival_ns, found.deadline_ns) == (25 * MS, 45 * MS)


@pytest.mark.parametrize(
    "line", ["later", "1,2,3,4", "-5", "nan", "inf", "1,,300", "1,1,", "0x10", "1;1;300", "1e305"]
)
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 of the trace is not"):
        list(read_trace(["1,1,300", line]))


@pytest.mark.parametrize("slo", ["nan", "-1", "inf", "0", "1e305"])
def test_an_objective_has_to_be_a_positive_number(slo: str) -> None:
    with pytest.raises(ValueError, match="line 1 of the trace is not"):
        list(read_trace([f"1,1,{slo}"]))


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_has_to_be_positive(speed: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        list(read_trace(["1"], speed=speed))


def test_a_line_that_goes_back_is_named() -> None:
    with pytest.raises(ValueError, match="line 3 of the trace is earlier"):
        list(read_trace(["5", "7", "6"]))


@given(
    st.lists(
        st.tuples(st.integers(0, 10**13), st.integers(1, 10**12) | st.none()), max_size=20
    ).map(lambda found: sorted(found, key=lambda each: each[0]))
)
def test_what_is_written_is_read(found: list[tuple[int, int | None]]) -> None:
    lines = [
        f"{arrival_ns / 1e6:.6f}" + ("" if slo_ns is None else f",1,{slo_ns / 1e6:.6f}")
        for arrival_ns, slo_ns in found
    ]
    assert [(r.number, r.arrival_ns, r.deadline_ns) for r in read_trace(lines)] == [
        (number, arrival_ns, NEVER_NS if slo_ns is None else arrival_ns + slo_ns)
        for number, (arrival_ns, slo_ns) in enumerate(found)
    ]


def test_of_a_line_that_is_long_the_beginning_is_shown() -> None:
    for lines in (["x" * 100_000], ["2", "1," + "0" * 100_000]):
        with pytest.raises(ValueError, match="line") as caught:
            list(read_trace(lines))
        assert len(str(caught.value)) < 300
