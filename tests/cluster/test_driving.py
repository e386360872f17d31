"""The driver with devices of its own process: plans that fail, warm devices, faults. No Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from harness import PATIENCE_S, wait_until

from tests.cluster.making import LARGE, SMALL, placed
from trims_shim.cluster import driving
from trims_shim.cluster.actor import Loaded
from trims_shim.cluster.driving import Driver
from trims_shim.cluster.fleet import Fleet
from trims_shim.cluster.routing import Router, Ticket
from trims_shim.errors import BatcherClosed, ClusterError, PlanningError
from trims_shim.planner import Option, Placement, Problem, replanning
from trims_shim.planner.replanning import Replanner

PROBLEM = Problem({"gpu": 3}, [SMALL, LARGE], {"cats": 10})
ONE = placed((SMALL, 1, 10.0))
TWO = placed((SMALL, 1, 1.0), (LARGE, 1, 9.0))
HELD = {0: frozenset({"other"}), 1: frozenset[str](), 2: frozenset({"of large"})}
"""Digests in the memory of the devices' nodes."""


class _Actor:
    """Answers at once, with its number; loads have an image of the variant's name."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattr__(self, method: str) -> _Method:
        return _Method(self.number, method)


class _Method:
    def __init__(self, number: int, name: str) -> None:
        self._number = number
        self._name = name

    def remote(self, *arguments: Any) -> _Reference:
        if self._name == "load":
            return _Reference(Loaded("here", frozenset({f"of {arguments[1].variant}"})))
        return _Reference((self._number,))


class _Reference:
    def __init__(self, value: Any) -> None:
        self._value = value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._value)
        return future


class _World:
    """A driver, and what it asks of the planner."""

    def __init__(self, plans: list[Placement | Exception]) -> None:
        self.plans = plans
        self.is_up = True
        self.problems: list[Problem] = []
        self.seen: list[list[Option | None]] = []
        """What devices ran when it was planned."""
        self.fleet = Fleet(["gpu"] * 3)
        self.fleet.place(ONE)
        self.router = Router(self.fleet, ["cats"], queue_size=9, resends=True)
        self.numbers = 0
        self.driver = Driver(
            [_Actor(number) for number in range(3)],
            self.fleet,
            self.router,
            placement=ONE,
            problem=PROBLEM,
            plan=self.plan,
            replanner=Replanner(ONE, period_s=0.05, burst=1.1),
            is_up=lambda: self.is_up,
        )
        self.driver.started.result(PATIENCE_S)

    def plan(self, problem: Problem, *, before: Placement) -> Placement:
        self.problems.append(problem)
        self.seen.append([device.option for device in self.fleet.devices])
        planned = self.plans.pop(0) if self.plans else before
        if isinstance(planned, Exception):
            raise planned
        return planned

    def ask(self) -> Future[Any]:
        future: Future[Any] = Future()
        self.numbers += 1
        self.driver.take(Ticket(self.numbers, "cats", payload=("item", future)))
        return future

    def asked(self) -> bool:
        """Ask, so that a plan becomes due."""
        return self.ask().result(PATIENCE_S) is not None


@pytest.fixture(autouse=True)
def _no_pause_before_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanning, "_LEAST_PERIOD_S", 0.0)


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(asked: Mapping[int, Any]) -> Mapping[int, frozenset[str]]:
        return HELD

    monkeypatch.setattr(driving, "_answers", answers)


@pytest.fixture
def worlds() -> Iterator[list[_World]]:
    made: list[_World] = []
    yield made
    for world in made:
        world.driver.stop(0)


def test_a_variant_goes_to_a_device_whose_node_has_its_weights(worlds: list[_World]) -> None:
    # The first time nobody knows what the large variant needs, so the next device gets it.
    world = _World([TWO, placed((SMALL, 2, 10.0)), TWO])
    worlds.append(world)
    wait_until(lambda: world.asked() and len(world.seen) > 3, "the plan after these")
    assert world.seen[:4] == [
        [SMALL, None, None],
        [SMALL, LARGE, None],
        [SMALL, SMALL, None],
        [SMALL, SMALL, LARGE],
    ]


def test_without_a_new_plan_the_old_one_stays(
    worlds: list[_World], caplog: pytest.LogCaptureFixture
) -> None:
    world = _World([PlanningError("no plan was found"), TWO])
    worlds.append(world)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: world.asked() and world.driver.plans, "a plan")
    assert "no new plan, the old one stays: no plan was found" in caplog.text
    assert world.driver.placement is TWO
    assert world.problems[0].devices == {"gpu": 3}
    assert world.problems[0].demand_qps.keys() == {"cats", "dogs"}


def test_requests_fail_when_ray_is_shut_down(worlds: list[_World]) -> None:
    world = _World([])
    worlds.append(world)
    world.is_up = False
    with pytest.raises(ClusterError, match="Ray was shut down before the service was"):
        world.ask().result(PATIENCE_S)


def test_a_fault_fails_the_requests_instead_of_leaving_them(
    worlds: list[_World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = _World([])
    worlds.append(world)
    monkeypatch.setattr(world.router, "arrived", lambda now_ns, ticket: 1 // 0)
    with pytest.raises(ClusterError, match=r"the service has failed \(ZeroDivisionError"):
        world.ask().result(PATIENCE_S)
    with pytest.raises(BatcherClosed):
        world.ask()
    assert "the service has failed" in caplog.text
