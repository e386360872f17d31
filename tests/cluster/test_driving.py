"""The driver with devices of its own process: plans that fail, warm devices, faults. No Ray."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from harness import PATIENCE_S, wait_until

from tests.cluster.making import LARGE, SMALL, placed
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.cluster import driving
from trims_shim.cluster.actor import Loaded
from trims_shim.cluster.driving import Driver
from trims_shim.cluster.fleet import Fleet, Phase, Rest
from trims_shim.cluster.routing import Router, Ticket
from trims_shim.cluster.service import Service
from trims_shim.errors import BatcherClosed, ClusterError, PlanningError, RequestDropped
from trims_shim.planner import Option, Placement, Problem, replanning
from trims_shim.planner.replanning import Replanner

PROBLEM = Problem({"gpu": 3}, [SMALL, LARGE], {"cats": 10})
ONE = placed((SMALL, 1, 10.0))
TWO = placed((SMALL, 1, 1.0), (LARGE, 1, 9.0))
HELD = {0: frozenset({"other"}), 1: frozenset[str](), 2: frozenset({"of large"})}
"""Digests in the memory of the devices' nodes."""


class _Actor:
    """Answers at once, with its number; loads have an image of the variant's name.

    An item that is a function says what the answer is: of the time left, None for one that never
    comes, an error, a tuple as of a real actor, or a future of these.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattr__(self, method: str) -> _Method:
        return _Method(self.number, method)


class _Method:
    load_error: Exception | None = None

    def __init__(self, number: int, name: str) -> None:
        self._number = number
        self._name = name

    def remote(self, *arguments: Any) -> _Reference:
        if self._name == "answer" and isinstance(arguments[1], BaseException):
            raise arguments[1]
        if self._name == "answer" and callable(arguments[1]):
            return _Reference(arguments[1](arguments[2]))
        if self._name == "load" and self.load_error is not None:
            return _Reference(self.load_error)
        if self._name == "load":
            return _Reference(Loaded("here", frozenset({f"of {arguments[1].variant}"})))
        return _Reference((self._number,))


class _Reference:
    def __init__(self, value: Any) -> None:
        self._value = value

    def future(self) -> Future[Any]:
        if isinstance(self._value, Future):
            return self._value
        future: Future[Any] = Future()
        if isinstance(self._value, Exception):
            future.set_exception(self._value)
        elif self._value is not None:
            future.set_result(self._value)
        return future


class _World:
    """A driver, and what it asks of the planner."""

    def __init__(
        self,
        plans: list[Placement | Exception],
        first: Placement = ONE,
        period_s: float | None = 0.05,
    ) -> None:
        """``period_s``: None to plan no more."""
        self.plans = plans
        self.is_up = True
        self.problems: list[Problem] = []
        self.seen: list[list[Option | None]] = []
        """What devices ran when it was planned."""
        self.fleet = Fleet(["gpu"] * 3)
        self.fleet.place(first)
        self.router = Router(self.fleet, ["cats"], queue_size=9, resends=True)
        self.numbers = 0
        self.made: list[int] = []
        """Devices that got another actor."""
        self.driver = Driver(
            [_Actor(number) for number in range(3)],
            self.fleet,
            self.router,
            start=self.start,
            placement=first,
            problem=PROBLEM,
            plan=self.plan,
            replanner=None
            if period_s is None
            else Replanner(first, period_s=period_s, burst=1.1, since_ns=time.monotonic_ns()),
            is_up=lambda: self.is_up,
        )

    def start(self, number: int) -> _Actor:
        self.made.append(number)
        return _Actor(number)

    def plan(self, problem: Problem, *, before: Placement) -> Placement:
        self.problems.append(problem)
        self.seen.append([device.option for device in self.fleet.devices])
        planned = self.plans.pop(0) if self.plans else before
        if isinstance(planned, Exception):
            raise planned
        return planned

    def ask(self, item: object = "item", deadline_ns: int = NEVER_NS) -> Future[Any]:
        future: Future[Any] = Future()
        self.numbers += 1
        self.driver.take(Ticket(self.numbers, "cats", deadline_ns, (item, future)))
        return future

    def service(self, ended: list[str], slo_ns: int = NEVER_NS) -> Service:
        """A service that notes when it ends its actors."""
        families = {"cats": slo_ns}
        return Service(
            self.driver, self.fleet, self.router, families, on_shutdown=lambda: ended.append("all")
        )

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


def never(limit_ms: float) -> None:
    """An item that is not answered."""


Maker: TypeAlias = Callable[..., _World]
"""As the class."""


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes worlds whose devices have loaded."""
    made: list[_World] = []

    def make(*arguments: Any) -> _World:
        made.append(_World(*arguments))
        made[-1].driver.started.result(PATIENCE_S)
        return made[-1]

    yield make
    for world in made:
        world.driver.stop(0)


def test_a_variant_goes_to_a_device_whose_node_has_its_weights(make: Maker) -> None:
    # The first time nobody knows what the large variant needs, so the next device gets it.
    world = make([TWO, placed((SMALL, 2, 10.0)), TWO])
    wait_until(lambda: world.asked() and len(world.seen) > 3, "the plan after these")
    assert world.seen[:4] == [
        [SMALL, None, None],
        [SMALL, LARGE, None],
        [SMALL, SMALL, None],
        [SMALL, SMALL, LARGE],
    ]


def test_a_service_may_keep_its_first_plan(make: Maker) -> None:
    world = make([TWO], ONE, None)
    assert world.asked()
    assert world.asked()
    world.driver.stop(PATIENCE_S)
    assert not world.problems


def test_a_service_may_begin_without_demand(make: Maker) -> None:
    world = make([TWO], placed())
    with pytest.raises(RequestDropped, match="no device runs a variant of 'cats' now"):
        world.ask().result(PATIENCE_S)
    wait_until(lambda: len(world.fleet.ready("cats")) == 2, "what is asked for is planned")
    assert world.ask().result(PATIENCE_S) is not None


def test_without_a_new_plan_the_old_one_stays(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    world = make([PlanningError("no plan was found"), TWO])
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: world.asked() and world.driver.plans, "a plan")
    assert "no new plan, the old one stays: no plan was found" in caplog.text
    assert world.driver.placement is TWO
    assert world.problems[0].devices == {"gpu": 3}
    assert world.problems[0].demand_qps.keys() == {"cats", "dogs"}


def test_requests_that_cannot_be_sent_make_room_for_others(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "_LOOK_NS", 1 << 60)
    world = make([], ONE, 600.0)
    (device, *_) = world.fleet.devices
    device.open = 4
    bad = [world.ask(OSError("not pickled")) for _ in range(4)]
    good = world.ask()
    wait_until(lambda: world.router.waiting("cats") == 5, "all wait")
    device.open = 0
    world.driver._events.put(driving._look)
    assert good.result(PATIENCE_S) == 0
    assert all(isinstance(future.exception(PATIENCE_S), OSError) for future in bad)


def test_an_item_that_wants_to_exit_as_it_is_pickled_fails_alone(make: Maker) -> None:
    world = make([])
    bad = world.ask(SystemExit("not pickled"))
    assert isinstance(bad.exception(PATIENCE_S), SystemExit)
    assert world.ask().result(PATIENCE_S) is not None


def test_a_callback_that_wants_to_exit_is_no_other_requests_end(make: Maker) -> None:
    def leave(future: Future[Any]) -> None:
        raise SystemExit

    world = make([])
    answer: Future[Any] = Future()
    first, second = world.ask(lambda limit_ms: answer), world.ask(never)
    for future in (first, second):
        future.add_done_callback(leave)
    answer.set_result((7,))
    assert first.result(PATIENCE_S) == 7
    assert world.ask().result(PATIENCE_S) is not None
    third = world.ask(never)
    world.driver.stop(0)
    for future in (second, third):
        assert isinstance(future.exception(PATIENCE_S), BatcherClosed)


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), CancelledError()])
@pytest.mark.parametrize("is_sent", [True, False])
def test_who_awaits_is_told_of_errors_that_event_loops_take_for_their_own(
    make: Maker, error: BaseException, is_sent: bool
) -> None:
    pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    failed: Future[Any] = Future()
    failed.set_exception(error)
    service = make([]).service([])
    item = (lambda limit_ms: failed) if is_sent else error

    async def ask() -> Any:
        return await asyncio.wait_for(service.aio("cats", item), PATIENCE_S)

    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        asyncio.run(ask())
    assert caught.value.__cause__ is error


def test_what_only_looks_like_a_lost_device_is_none() -> None:
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    asked = errors.RayTaskError("answer", "", errors.RayActorError()).as_instanceof_cause()
    assert isinstance(asked, errors.RayActorError)  # of an actor that the function has asked
    assert not driving._is_loss(asked)
    assert driving._is_loss(errors.RayActorError())
    assert driving._is_loss(errors.ObjectLostError("00", b"", ""))


@dataclass(frozen=True)
class _Frozen(Exception):
    """Attributes cannot be set as usual."""


def test_an_error_that_is_frozen_fails_its_request_alone(make: Maker) -> None:
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    world = make([])
    raised = errors.RayTaskError("answer", "in the actor", _Frozen()).as_instanceof_cause()
    error = world.ask(lambda limit_ms: raised).exception(PATIENCE_S)
    assert isinstance(error, _Frozen)
    assert "in the actor" in str(error.__cause__)
    assert world.ask().result(PATIENCE_S) is not None


def test_devices_are_told_how_much_time_is_left(make: Maker) -> None:
    world = make([])
    assert world.ask(lambda limit_ms: (limit_ms,)).result(PATIENCE_S) == math.inf
    deadline_ns = time.monotonic_ns() + 10**12
    assert 900_000 < world.ask(lambda limit_ms: (limit_ms,), deadline_ns).result(PATIENCE_S) < 1e6


def test_requests_have_the_objective_of_their_family_or_a_deadline_of_their_own(
    make: Maker,
) -> None:
    service = make([]).service([], slo_ns=10**12)

    def limit_ms(limit_ms: float) -> tuple[float]:
        return (limit_ms,)

    assert 900_000 < service.call("cats", limit_ms) <= 1e6
    assert 400_000 < service.call("cats", limit_ms, deadline_ms=500_000) <= 500_000
    assert service.call("cats", limit_ms, deadline_ms=math.inf) == math.inf
    assert service.stats().families["cats"].answered == 3


def test_what_became_of_requests_is_counted(make: Maker) -> None:
    pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    world = make([])
    for error in (ValueError("a fault"), RequestDropped("hopeless", "too late")):
        with pytest.raises(type(error), match=str(error)):
            world.ask(lambda limit_ms, error=error: error).result(PATIENCE_S)
    assert world.router.counters["cats"] == {"requests": 2, "failed": 1, "dropped": 1}
    assert world.ask().result(PATIENCE_S) == 0, "the device is there"


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_device_does_not_answer_goes_to_another(make: Maker, is_lost: bool) -> None:
    """Its process is a new one, or gone."""
    first: Any = ()
    if is_lost:
        first = pytest.importorskip("ray.exceptions", reason="no Ray").RayActorError()
    answers = iter([first, ("from the other",)])
    world = make([], placed((SMALL, 2, 10.0)))
    assert world.ask(lambda limit_ms: next(answers)).result(PATIENCE_S) == "from the other"
    resent = {"resent": 1} if is_lost else {}
    assert world.router.counters["cats"] == {"requests": 1, "answered": 1} | resent
    wait_until(lambda: world.fleet.loads == 3, "the first device loads again")


def test_a_device_that_is_lost_while_it_loads_loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    monkeypatch.setattr(_Method, "load_error", errors.RayActorError())
    world = _World([])
    try:
        wait_until(lambda: world.fleet.devices[0].phase is Phase.LOST, "the loss")
        monkeypatch.setattr(_Method, "load_error", None)
        world.driver.started.result(PATIENCE_S)
    finally:
        world.driver.stop(0)


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_actor_that_ray_does_not_start_anew_is_made_anew(make: Maker, has_ended: bool) -> None:
    """It lost a request twice: the second is late news, which means no further actor."""
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    error = errors.ActorDiedError() if has_ended else errors.ActorUnavailableError("", None)
    late: Future[Any] = Future()
    answers = iter([late, error])
    world = make([], placed((SMALL, 1, 10.0)))
    requests = [world.ask(lambda limit_ms: next(answers, ("again",))) for _ in range(2)]
    assert requests[1].result(PATIENCE_S) == "again"
    late.set_exception(error)
    assert requests[0].result(PATIENCE_S) == "again"
    assert world.fleet.loads == 2
    assert world.made == ([0] if has_ended else [])


@pytest.mark.parametrize(
    "error", ["ActorDiedError", "ActorPlacementGroupRemoved", "ActorUnschedulableError"]
)
def test_an_actor_that_cannot_be_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Found: with the last, as where a node is gone, its variant was taken for unloadable."""
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    monkeypatch.setattr(_Method, "load_error", getattr(errors, error)(None))
    world = _World([])
    try:
        wait_until(lambda: len(world.made) >= 2, "the second try")
        assert not world.fleet.unloadable
        monkeypatch.setattr(_Method, "load_error", None)
        world.driver.started.result(PATIENCE_S)
    finally:
        world.driver.stop(0)


def test_an_actor_that_ray_refuses_to_make_is_made_later(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: that ended the service, whose other devices were well."""
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    world = make([], placed((SMALL, 1, 10.0)))
    refusals = iter([ConnectionError("Ray does not answer")])

    def start(number: int) -> _Actor:
        for error in refusals:
            raise error
        return world.start(number)

    monkeypatch.setattr(world.driver, "_start", start)
    answers = iter([errors.ActorDiedError()])
    request = world.ask(lambda limit_ms: next(answers, ("again",)))
    assert request.result(PATIENCE_S) == "again"
    assert world.made == [0]
    assert "no other actor for device 0 (gpu), it is tried again: ConnectionError" in caplog.text


def test_a_load_whose_error_cannot_be_unpickled_has_failed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    monkeypatch.setattr(_Method, "load_error", errors.UnserializableException("two arguments"))
    with pytest.raises(ClusterError, match=r"small on gpu .* could not be loaded.*two arguments"):
        make([])


def test_one_may_wait_for_ever_for_the_end(make: Maker) -> None:
    world = make([], ONE, 600.0)
    assert world.ask().result(PATIENCE_S) == 0
    world.driver.stop(threading.TIMEOUT_MAX)
    assert not world.driver._thread.is_alive()


def test_requests_fail_when_ray_is_shut_down(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    world = make([])
    world.is_up = False
    with pytest.raises(ClusterError, match=r"^Ray was shut down before the service"):
        world.ask().result(PATIENCE_S)
    assert not caplog.text  # it may be the end of a program


def test_requests_on_their_way_fail_too_when_ray_is_shut_down(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray may leave them open, and nothing else happens."""
    monkeypatch.setattr(driving, "_LOOK_NS", 10_000_000)
    world = make([], ONE, 600.0)
    request = world.ask(never)
    wait_until(lambda: world.fleet.devices[0].open, "it is on its way")
    world.is_up = False
    with pytest.raises(ClusterError, match=r"^Ray was shut down before the service"):
        request.result(PATIENCE_S)


def test_the_end_waits_for_answers(make: Maker) -> None:
    world = make([])
    answer: Future[Any] = Future()
    future = world.ask(lambda limit_ms: answer)
    ending = threading.Thread(target=world.driver.stop, args=(PATIENCE_S,))
    ending.start()
    wait_until(lambda: world.driver._end_ns is not None, "it is to end")
    has_looked = threading.Event()
    world.driver._events.put(lambda now_ns: has_looked.set())
    assert has_looked.wait(PATIENCE_S)
    answer.set_result(("late",))
    assert future.result(PATIENCE_S) == "late"
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


def test_the_end_does_not_wait_for_answers_longer_than_it_may(make: Maker) -> None:
    world = make([], ONE, 600.0)
    request = world.ask(never)
    world.driver.stop(0.05)
    with pytest.raises(BatcherClosed, match="shut down before it could answer"):
        request.result(0)


def test_what_waits_is_dropped_at_its_deadline_though_nothing_else_happens(make: Maker) -> None:
    world = make([], ONE, 600.0)
    world.fleet.devices[0].open = 4  # it has no room
    with pytest.raises(RequestDropped, match="its deadline passed while it waited"):
        world.ask(deadline_ns=time.monotonic_ns() + 20_000_000).result(PATIENCE_S)


def test_a_plan_comes_when_it_is_due_though_nobody_asks_any_more(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replanning, "_LEAST_PERIOD_S", 0.05)
    world = make([TWO])
    world.ask().result(PATIENCE_S)
    wait_until(lambda: world.driver.placement is TWO, "the plan")
    time.sleep(0.1)
    assert len(world.problems) == 1, "nor is it planned again"


def test_a_forked_child_is_told_that_the_service_is_not_its_own(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ended = make([]), list[str]()
    service = world.service(ended)
    with monkeypatch.context() as child:
        child.setattr(service, "_pid", -1)
        with pytest.raises(BatcherClosed, match="belongs to the parent process"):
            service.submit("cats", "item")
        service.shutdown()
    assert not ended
    assert world.ask().result(PATIENCE_S) == 0


def test_actors_end_although_the_wait_for_answers_is_interrupted(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(timeout_s: float) -> None:
        raise KeyboardInterrupt

    world, ended = make([]), list[str]()
    service = world.service(ended)
    with monkeypatch.context() as patch:
        patch.setattr(world.driver, "stop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            service.shutdown()
    assert ended == ["all"]


def test_a_request_whose_time_is_over_is_dropped_and_none_is_cancelled(make: Maker) -> None:
    world = make([])
    service = world.service([])
    with pytest.raises(RequestDropped):
        service.call("cats", "item", deadline_ms=0)
    world.fleet.devices[0].open = 4  # it has no room
    request = service.submit("cats", "item")
    assert not request.cancel()
    wait_until(lambda: service.stats().families["cats"].waiting == 1, "it waits")
    assert [device.node for device in service.stats().devices] == ["here", "", ""]


def test_the_end_of_a_block_waits_unless_it_failed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ended = make([]), list[str]()
    service, waits = world.service(ended), list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(world.driver, "stop", waits.append)
        with service:
            pass
        with pytest.raises(ZeroDivisionError), service:
            1 / 0  # noqa: B018
        service.shutdown(timeout_s=math.inf)
    assert waits == [30.0, 0, threading.TIMEOUT_MAX]
    assert ended == ["all"] * 3


def test_a_fault_fails_the_requests_instead_of_leaving_them(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make([])
    monkeypatch.setattr(world.router, "arrived", lambda now_ns, ticket: 1 // 0)
    with pytest.raises(ClusterError, match=r"the service has failed \(ZeroDivisionError"):
        world.ask().result(PATIENCE_S)
    with pytest.raises(BatcherClosed):
        world.ask()
    assert "the service has failed" in caplog.text


def test_where_no_thread_can_start_the_old_plan_stays(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make([TWO])
    refused: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        wait_until(lambda: world.asked() and len(refused) > 1, "it was tried again")
    assert caplog.text.count("the old one stays: can't start new thread") == 1
    wait_until(lambda: world.asked() and world.driver.placement is TWO, "a plan")


def test_once_it_is_to_end_no_request_is_taken_and_the_thread_is_waited_for(make: Maker) -> None:
    world = make([], ONE, 600.0)
    request = world.ask(never)
    stopping = threading.Thread(target=world.driver.stop, args=(PATIENCE_S,))
    stopping.start()
    wait_until(lambda: world.driver._end_ns is not None, "it is told")
    with pytest.raises(BatcherClosed):
        world.ask()
    world.driver.stop(0)
    assert not world.driver._thread.is_alive()
    assert isinstance(request.exception(0), BatcherClosed)
    stopping.join(PATIENCE_S)


def test_a_fault_at_the_start_ends_the_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Fleet, "begin_loads", lambda fleet, now_ns: 1 // 0)
    error = _World([]).driver.started.exception(PATIENCE_S)
    assert isinstance(error, ClusterError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "the service has failed" in caplog.text


def test_a_loader_that_fails_again_and_again_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = pytest.importorskip("ray.exceptions", reason="Ray is not installed")
    fault = errors.UnserializableException("two arguments")
    monkeypatch.setattr(_Method, "load_error", fault)
    world = _World([])
    try:
        assert world.driver.started.exception(PATIENCE_S).__cause__ is fault
        wait_until(lambda: world.fleet.loads == 3, "it is tried again")
        monkeypatch.setattr(_Method, "load_error", None)
        wait_until(lambda: world.fleet.devices[0].phase is Phase.READY, "it loads in the end")
        assert caplog.text.count("could not be loaded") == 1
    finally:
        world.driver.stop(0)


def test_late_news_of_a_load_are_none_and_what_is_known_stays(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    world = make([], ONE, 600.0)
    driver, device = world.driver, world.fleet.devices[0]
    failed: Future[Any] = Future()
    failed.set_exception(OSError("of the load before"))
    driver._loaded(device, device.load - 1, failed, 0)
    assert not caplog.text
    loaded: Future[Loaded] = Future()
    loaded.set_result(Loaded("there", frozenset()))
    driver._loaded(device, device.load, loaded, 0)
    assert driver.nodes == {0: "there"}
    assert driver._digests == {"small": {"of small"}}


def test_it_is_planned_for_what_loads_and_the_devices_that_are_there(make: Maker) -> None:
    world = make([])
    world.fleet.unloadable[LARGE] = Rest(60.0, NEVER_NS)
    world.fleet.devices[2].is_away = True
    wait_until(lambda: world.asked() and bool(world.problems), "a plan")
    assert world.problems[0].options == [SMALL]
    assert world.problems[0].devices == {"gpu": 2}


def test_what_could_not_be_loaded_is_planned_for_again(make: Maker) -> None:
    world = make([])
    world.fleet.unloadable[LARGE] = Rest(60.0, time.monotonic_ns())
    world.fleet.unloadable[SMALL] = Rest(60.0, NEVER_NS)
    wait_until(lambda: world.asked() and bool(world.problems), "a plan")
    assert world.problems[0].options == [LARGE]


def test_a_family_that_no_device_can_answer_keeps_no_plan_from_others(make: Maker) -> None:
    world = make([])
    wait_until(lambda: world.asked() and bool(world.problems), "a plan")
    assert world.problems[0].families == ["cats"]  # no option is of dogs


def test_a_plan_for_more_devices_than_there_are_is_not_carried_out(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    """One may be lost while it is made."""
    world = make([placed((SMALL, 4, 10.0)), TWO])
    wait_until(lambda: world.asked() and world.driver.placement is TWO, "the next plan")
    assert "a plan is not carried out, the next one will be: there are too few" in caplog.text


def test_devices_are_warm_for_no_variant_of_which_nothing_is_known(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make([], ONE, 600.0)
    asked: list[Callable[..., bool]] = []
    monkeypatch.setattr(world.fleet, "place", lambda placement, is_warm: asked.append(is_warm))
    replanner = Replanner(ONE, period_s=600.0, burst=1.1)
    world.driver._planned(replanner, TWO, {0: frozenset({"of small"})}, 0)
    (is_warm,), devices = asked, world.fleet.devices
    assert [is_warm(device, SMALL) for device in devices] == [True, False, False]
    assert not any(is_warm(device, LARGE) for device in devices)
