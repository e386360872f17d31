"""The estimate of the demand is the weighted mean of complete seconds."""

from __future__ import annotations

import pytest

from trims_shim.planner import Demand

SECOND = 1_000_000_000


def test_nothing_is_known_before_a_second_is_over() -> None:
    demand = Demand(["cats"])
    demand.came(5 * SECOND, "cats")
    assert demand.estimate_qps(5 * SECOND + 1) == {"cats": 0.0}
    assert demand.estimate_qps(6 * SECOND) == {"cats": 1.0}


def test_later_seconds_weigh_more() -> None:
    demand = Demand(["cats", "dogs"])
    for _ in range(10):
        demand.came(1, "cats")
    for _ in range(30):
        demand.came(SECOND + 2, "cats")
    found = demand.estimate_qps(2 * SECOND + 2)
    # Weights 1 and 1.6 / 2.6, as pandas' ewm(com=1.6).mean() has it.
    assert found["cats"] == pytest.approx((30 + 10 * 1.6 / 2.6) / (1 + 1.6 / 2.6))
    assert found["dogs"] == 0
    assert demand.last_qps(2 * SECOND + 2) == 30


def test_silence_counts() -> None:
    demand = Demand(["cats"])
    demand.came(1, "cats")
    assert demand.estimate_qps(100 * SECOND) == {"cats": 0.0}
    demand.came(100 * SECOND, "cats")
    assert demand.last_qps(102 * SECOND) in (0, 1)
    assert demand.estimate_qps(101 * SECOND + 2)["cats"] > 0


def test_seconds_begin_with_the_first_request() -> None:
    demand = Demand(["cats"])
    for moment_ns in (1, 3 * SECOND // 2, 9 * SECOND // 4):
        demand.came(moment_ns, "cats")
    assert demand.last_qps(3 * SECOND + 1) == 1


def test_twenty_seconds_count() -> None:
    demand = Demand(["cats"])
    demand.came(1, "cats")
    assert demand.estimate_qps(20 * SECOND + 1)["cats"] > 0
    assert demand.estimate_qps(21 * SECOND + 1)["cats"] == 0
