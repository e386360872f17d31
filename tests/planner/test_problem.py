"""Problems refuse what makes no sense; options keep the batch sizes that are quick enough."""

from __future__ import annotations

import pytest

from tests.planner.making import option
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.planner import Option, Problem

CAT = option("cats", "large", "gpu", 90, 40)


def test_a_batch_takes_less_than_half_the_objective() -> None:
    profile = LatencyProfile.linear(10, 0, max_batch_size=8)
    found = Option("cats", "large", "gpu", 90, profile).within(slo_ms=100)
    assert found is not None
    assert found.profile.max_batch_size == 4  # 50 ms are not less than half
    assert found.peak_qps == pytest.approx(100)


def test_an_option_that_is_too_slow_is_none() -> None:
    profile = LatencyProfile.linear(10, 0, max_batch_size=8)
    assert Option("cats", "large", "gpu", 90, profile).within(slo_ms=20) is None


def test_an_objective_is_a_number() -> None:
    with pytest.raises(ValueError, match="slo_ms is nan"):
        CAT.within(slo_ms=float("nan"))


@pytest.mark.parametrize(
    ("devices", "options", "demand_qps", "message"),
    [
        ({"gpu": -1}, [], {}, r"devices\['gpu'\] is -1; it has to be 0 or more"),
        ({"gpu": 1}, [], {"cats": -1}, r"demand_qps\['cats'\] is -1; it has to be 0 or more"),
        ({"gpu": 1}, [], {"cats": float("nan")}, r"demand_qps\['cats'\] is nan"),
        ({"cpu": 1}, [CAT], {}, "large on gpu: there is no such kind"),
        ({"gpu": 1}, [CAT, CAT], {}, "large on gpu .cats. is given twice"),
        ({"gpu": 1}, [option("cats", "x", "gpu", -1, 4)], {}, "the accuracy of x on gpu is -1"),
        (
            {"gpu": 1},
            [option("cats", "x", "gpu", float("inf"), 4)],
            {},
            "the accuracy of x on gpu is inf, which is too much",
        ),
    ],
)
def test_nonsense_is_refused(devices, options, demand_qps, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        Problem(devices, options, demand_qps)


@pytest.mark.parametrize(
    ("devices", "demand_qps", "message"),
    [
        ({"gpu": 2.5}, {}, r"devices\['gpu'\] is 2.5; it has to be a whole number"),
        ({"gpu": None}, {}, r"devices\['gpu'\] is None"),
        ({"gpu": 1}, {"cats": "9"}, r"demand_qps\['cats'\] is '9'; it has to be a number"),
    ],
)
def test_what_is_no_number_is_refused(devices, demand_qps, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match=message):
        Problem(devices, [], demand_qps)


def test_a_demand_that_was_seen_is_that_of_families_with_an_option() -> None:
    problem = Problem({"gpu": 1}, [CAT], {"cats": 10, "dogs": 0})
    seen = problem.asked({"cats": 20, "dogs": 0.1})
    assert seen == Problem({"gpu": 1}, [CAT], {"cats": 20, "dogs": 0.0})
