"""Every request goes to a device that is ready for it, waits, or is refused: none is lost."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.making import LARGE, OTHER, SECOND, SMALL, placed, ready, start
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.cluster.fleet import Fleet, Phase
from trims_shim.cluster.routing import Action, Refuse, Router, Send, Ticket
from trims_shim.errors import DeviceLost, QueueFull, RequestDropped


def router_of(fleet: Fleet, *, queue_size: int = 100, resends: bool = True) -> Router:
    return Router(fleet, ("cats", "dogs"), queue_size=queue_size, resends=resends)


def tickets(count: int, family: str = "cats", deadline_ns: int = NEVER_NS) -> list[Ticket]:
    return [Ticket(number, family, deadline_ns) for number in range(count)]


def sent(actions: list[Action]) -> list[Ticket]:
    assert all(isinstance(action, Send) for action in actions)
    return [action.ticket for action in actions]


def refusal(actions: list[Action] | list[Refuse]) -> BaseException:
    (action,) = actions
    assert isinstance(action, Refuse)
    return action.error


def test_requests_are_shared_as_planned() -> None:
    fleet = ready((SMALL, 2, 30.0), (LARGE, 1, 10.0), (OTHER, 1, 5.0))
    router = router_of(fleet)
    counts: Counter[int] = Counter()
    for ticket in tickets(400):
        assert sent(router.arrived(0, ticket)) == [ticket]
        assert ticket.device is not None
        counts[ticket.device.number] += 1
        router.answered(0, ticket, "answered")
    assert counts[0] + counts[1] == 300
    assert counts[2] == 100
    assert counts[3] == 0


def test_within_a_group_the_least_loaded_device_is_chosen() -> None:
    fleet = ready((SMALL, 3, 30.0))
    router = router_of(fleet)
    for ticket in tickets(6):
        router.arrived(0, ticket)
    assert [device.open for device in fleet.devices] == [2, 2, 2]


def test_what_no_device_has_room_for_waits_in_the_order_of_deadlines() -> None:
    fleet = ready((SMALL, 1, 30.0))
    router = router_of(fleet)
    first = tickets(4, deadline_ns=9 * SECOND)  # two batches of two
    for ticket in first:
        assert sent(router.arrived(0, ticket)) == [ticket]
    late, early = Ticket(4, "cats", 8 * SECOND), Ticket(5, "cats", 7 * SECOND)
    assert router.arrived(0, late) == router.arrived(0, early) == []
    assert router.waiting("cats") == 2
    assert router.next_deadline_ns() == 7 * SECOND + 1
    router.answered(0, first[0], "answered")
    assert sent(router.settle(0)) == [early]
    assert router.settle(8 * SECOND) == [], "its deadline has not passed"
    assert isinstance(refusal(router.settle(8 * SECOND + 1)), RequestDropped)
    assert router.next_deadline_ns() is None
    assert router.counters["cats"]["dropped"] == 1


@pytest.mark.parametrize("first", ["cats", "dogs"])
def test_the_next_deadline_is_the_first_of_all_families(first: str) -> None:
    """A request must not hear of its end only when one of another family is over."""
    fleet = Fleet(["gpu", "gpu"])
    fleet.place(placed((SMALL, 1, 1.0), (OTHER, 1, 1.0)))
    assert len(start(fleet)) == 2
    router = router_of(fleet)
    for number, family in enumerate(("cats", "dogs")):
        deadline_ns = SECOND if family == first else 9 * SECOND
        assert router.arrived(0, Ticket(number, family, deadline_ns)) == []
    assert router.next_deadline_ns() == SECOND + 1


def test_others_take_over_where_the_planned_device_has_no_room() -> None:
    fleet = ready((SMALL, 1, 30.0), (LARGE, 1, 0.0))
    router = router_of(fleet)
    for ticket in tickets(6):
        router.arrived(0, ticket)
    assert [device.open for device in fleet.devices] == [4, 2]


def test_shares_are_those_of_the_last_plan_at_once() -> None:
    fleet = ready((SMALL, 1, 3000.0), (LARGE, 1, 3000.0))
    router = router_of(fleet)
    counts: Counter[int] = Counter()
    for ticket in tickets(21):
        router.arrived(0, ticket)
        if ticket.number:
            assert ticket.device is not None
            counts[ticket.device.number] += 1
        else:
            fleet.place(placed((SMALL, 1, 5.0), (LARGE, 1, 5.0)))
        router.answered(0, ticket, "answered")
    assert abs(counts[0] - counts[1]) <= 2


def test_devices_that_nothing_is_planned_for_share_what_comes() -> None:
    fleet = ready((SMALL, 1, 0.0), (LARGE, 1, 0.0))
    router = router_of(fleet)
    for ticket in tickets(4):
        router.arrived(0, ticket)
    assert [device.open for device in fleet.devices] == [2, 2]


def test_requests_of_a_family_that_is_given_up_do_not_wait_for_ever() -> None:
    fleet = ready((SMALL, 1, 1.0), (OTHER, 1, 1.0))
    router = router_of(fleet)
    *taken, last = tickets(5)
    for ticket in [*taken, last]:
        router.arrived(0, ticket)
    fleet.place(placed((OTHER, 2, 1.0)))
    assert start(fleet) == [fleet.devices[0]]
    with pytest.raises(RequestDropped, match="no device runs a variant of 'cats'"):
        raise refusal(router.settle(0))
    assert router.counters["cats"] == {"requests": 5, "dropped": 1}


def test_a_family_that_is_not_planned_for_is_answered_as_long_as_a_device_has_it() -> None:
    fleet = ready((SMALL, 1, 1.0), (OTHER, 1, 1.0))
    fleet.place(placed((OTHER, 1, 1.0)))
    assert start(fleet) == []
    router = router_of(fleet)
    (ticket,) = tickets(1)
    assert sent(router.arrived(0, ticket)) == [ticket]


def test_too_many_are_refused() -> None:
    router = router_of(ready((SMALL, 1, 30.0)), queue_size=3)
    *taken, last = tickets(8)
    for ticket in taken:
        router.arrived(0, ticket)
    with pytest.raises(QueueFull, match="3 requests of 'cats' wait already"):
        raise refusal(router.arrived(0, last))
    assert router.counters["cats"] == {"requests": 8, "rejected": 1}


def test_a_family_without_a_device_is_refused_at_once() -> None:
    router = router_of(ready((SMALL, 1, 30.0)))
    with pytest.raises(RequestDropped, match="no device runs a variant of 'dogs'") as caught:
        raise refusal(router.arrived(0, Ticket(0, "dogs")))
    assert caught.value.reason == "hopeless"


def test_a_device_that_loads_gets_nothing_and_others_take_its_requests() -> None:
    fleet = ready((SMALL, 2, 30.0))
    router = router_of(fleet)
    fleet.place(placed((SMALL, 1, 15.0), (LARGE, 1, 15.0)))
    (loading,) = start(fleet)
    for ticket in tickets(3):
        router.arrived(0, ticket)
    assert loading.open == 0
    fleet.loaded(loading, loading.load)
    for ticket in tickets(3):
        router.arrived(0, ticket)
    assert loading.open == 2  # the other one had room for one more


def test_what_a_changing_device_does_not_take_goes_to_another() -> None:
    fleet = ready((SMALL, 2, 30.0))
    router = router_of(fleet)
    (ticket,) = tickets(1)
    router.arrived(0, ticket)
    device = ticket.device
    assert device is not None
    fleet.place(placed((SMALL, 1, 15.0), (OTHER, 1, 15.0)))
    device.wanted, fleet.devices[1 - device.number].wanted = OTHER, SMALL
    assert start(fleet) == [device]
    router.returned(ticket)
    assert sent(router.settle(0)) == [ticket]
    assert ticket.device is fleet.devices[1 - device.number]
    assert router.counters["cats"] == {"requests": 1}


def test_a_request_is_sent_once_more_when_its_device_is_lost() -> None:
    fleet = ready((SMALL, 3, 30.0))
    router = router_of(fleet)
    (ticket,) = tickets(1)
    router.arrived(0, ticket)
    for _ in range(2):
        device = ticket.device
        assert device is not None
        fleet.lost(device, ticket.load, 0)
        actions = router.lost(ticket)
        assert device.open == 0
        if actions:
            break
        assert sent(router.settle(0)) == [ticket]
        assert ticket.device is not device
    with pytest.raises(DeviceLost, match="2 in all"):
        raise refusal(actions)
    assert router.counters["cats"] == {"requests": 1, "resent": 1, "failed": 1}


def test_a_request_that_must_not_run_twice_is_not_sent_again() -> None:
    fleet = ready((SMALL, 2, 30.0))
    router = router_of(fleet, resends=False)
    (ticket,) = tickets(1)
    router.arrived(0, ticket)
    assert isinstance(refusal(router.lost(ticket)), DeviceLost)


def test_late_answers_are_counted() -> None:
    router = router_of(ready((SMALL, 1, 30.0)))
    for ticket, outcome in zip(
        tickets(3, deadline_ns=SECOND), ("answered", "failed", "dropped"), strict=True
    ):
        router.arrived(0, ticket)
        router.answered(2 * SECOND, ticket, outcome)
    in_time = Ticket(3, "cats", SECOND)
    router.arrived(0, in_time)
    router.answered(SECOND, in_time, "answered")
    assert router.counters["cats"] == {
        "requests": 4, "answered": 2, "late": 1, "failed": 1, "dropped": 1
    }  # fmt: skip


@given(st.integers(0, 10_000))
def test_none_is_lost_whatever_happens_to_devices(seed: int) -> None:
    """Events at random; at the end devices are well and answer all that was not refused."""
    world = _World(Random(seed))
    for _ in range(80):
        world.step()
    world.finish()
    assert not world.open
    assert world.ended == Counter(world.tickets)
    assert all(device.open == 0 for device in world.fleet.devices)
    for counters in world.router.counters.values():
        ended = ("answered", "dropped", "failed", "rejected")
        assert counters["requests"] == sum(counters[outcome] for outcome in ended)


class _World:
    """A driver in virtual time, whose devices do anything."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ns = 0
        self.fleet = Fleet(["gpu"] * 3)
        self.fleet.place(self.plan(3))
        self.router = router_of(self.fleet, queue_size=5)
        self.tickets: list[Ticket] = []
        self.ended: Counter[Ticket] = Counter()
        self.open: list[Ticket] = []
        """At devices."""

    def plan(self, devices: int) -> object:
        options = self.fleet.to_plan((SMALL, LARGE, OTHER), self.now_ns)
        chosen = Counter(self.random.choices(range(len(options)), k=devices))
        return placed(*((options[which], count, 1.0 * which) for which, count in chosen.items()))

    def step(self) -> None:
        self.now_ns += self.random.choice((0, 1, SECOND))
        self.random.choice(
            (self.arrive, self.arrive, self.arrive, self.answer, self.answer, self.load,
             self.lose, self.place)
        )()  # fmt: skip
        self.settle()

    def arrive(self) -> None:
        deadline_ns = self.random.choice((NEVER_NS, self.now_ns + 2 * SECOND))
        family = self.random.choice(("cats", "dogs"))
        ticket = Ticket(len(self.tickets), family, deadline_ns)
        self.tickets.append(ticket)
        self.obey(self.router.arrived(self.now_ns, ticket))

    def answer(self) -> None:
        if not self.open:
            return
        ticket = self.open.pop(self.random.randrange(len(self.open)))
        device = ticket.device
        assert device is not None
        is_there = device.phase is Phase.READY and device.load == ticket.load
        if is_there or self.random.random() < 0.5:
            self.router.answered(self.now_ns, ticket, "answered")
            self.ended[ticket] += 1
        else:
            self.router.returned(ticket)

    def load(self) -> None:
        for device in self.fleet.devices:
            if device.phase is Phase.LOADING:
                if self.random.random() < 0.7:
                    self.fleet.loaded(device, device.load)
                else:
                    self.fleet.failed(device, device.load, self.now_ns)

    def lose(self) -> None:
        device = self.random.choice(self.fleet.devices)
        self.fleet.lost(device, device.load, self.now_ns)
        for ticket in [ticket for ticket in self.open if ticket.device is device]:
            self.open.remove(ticket)
            self.obey(self.router.lost(ticket))

    def place(self) -> None:
        self.fleet.place(self.plan(len(self.fleet.present)))

    def settle(self) -> None:
        start(self.fleet, self.now_ns)
        self.obey(self.router.settle(self.now_ns))
        for family in ("cats", "dogs"):
            has_room = any(device.has_room for device in self.fleet.ready(family))
            assert not (has_room and self.router.waiting(family))

    def obey(self, actions: list[Action] | list[Refuse]) -> None:
        for action in actions:
            ticket = action.ticket
            if isinstance(action, Refuse):
                self.ended[ticket] += 1
                continue
            device = ticket.device
            assert device is not None
            assert device.phase is Phase.READY
            assert device.option is not None
            assert device.option.family == ticket.family
            assert device.open <= 4
            self.open.append(ticket)

    def finish(self) -> None:
        """Both families get a device, and all devices load and answer."""
        for _ in range(100):
            self.now_ns += 60 * SECOND
            if len(self.fleet.present) >= 2:
                self.fleet.place(placed((SMALL, 1, 1.0), (OTHER, 1, 1.0)))
            self.settle()
            for device in self.fleet.devices:
                self.fleet.loaded(device, device.load)
            while self.open:
                self.answer()
            self.settle()
            if not self.open and not any(map(self.router.waiting, ("cats", "dogs"))):
                break
