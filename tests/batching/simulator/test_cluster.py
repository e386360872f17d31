"""A cluster routes each request to one node, and is nothing more than its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.policies import EarlyDrop, Immediate, Proteus, Window
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    TIMER,
    Action,
    Cancelled,
    Event,
    Finished,
    Policy,
    Preempt,
    Preempted,
    Request,
    Run,
)
from trims_shim.batching.simulator import (
    Cluster,
    Node,
    Outcome,
    Report,
    poisson,
    requests,
    simulate,
)
from trims_shim.batching.simulator.cluster import Route, least_loaded, weighted
from trims_shim.batching.single import Batching

PROFILE = LatencyProfile.linear(2, 20, max_batch_size=8)
RULES = (Immediate, EarlyDrop, Window, Proteus)


def device(rule: type = EarlyDrop) -> Policy:
    return Batching(lambda _: rule(PROFILE, max_batch_size=8))


def service_ns(device: int, batch: Sequence[Request]) -> int:
    return PROFILE.latency_ns(len(batch))


def routed(route: Route, nodes: list[Node], count: int = 4000, rate_qps: float = 100) -> Outcome:
    stream = requests(poisson(rate_qps, Random(1)), slo_ms=100, count=count)
    return simulate(Cluster(nodes, route), stream, service_ns=service_ns)


def counts(outcome: Outcome) -> Counter[int]:
    return Counter(each.device for each in outcome.executions for _ in each.batch)


@given(
    times_ns=st.lists(st.integers(0, 400_000_000), max_size=30).map(sorted),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 3),
)
def test_one_node_is_its_policy(times_ns: list[int], rule: type, seed: int) -> None:
    def outcome(policy: Policy) -> object:
        random = Random(seed)
        found = simulate(
            policy,
            requests(times_ns, slo_ms=70),
            service_ns=service_ns,
            lateness_ns=lambda: random.randrange(5_000_000),
        )
        dropped = [(request.number, time_ns) for request, time_ns in found.dropped]
        return [(r.number, t) for r, t in found.answered], dropped, found.end_ns

    assert outcome(Cluster([Node(device(rule))], least_loaded)) == outcome(device(rule))


@given(
    times_ns=st.lists(st.integers(0, 200_000_000), max_size=40).map(sorted),
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_nodes_behave_as_if_they_were_alone(
    times_ns: list[int], rules: list[type], seed: int
) -> None:
    """A node in a cluster answers its requests as the same policy alone on those requests."""
    random = Random(seed)
    places = [random.randrange(len(rules)) for _ in times_ns]
    nodes = [Node(device(rule)) for rule in rules]
    stream = list(requests(times_ns, slo_ms=70))
    together = simulate(
        Cluster(nodes, lambda request, nodes: places[request.number]), stream, service_ns=service_ns
    )
    for index, rule in enumerate(rules):
        own = [request for request in stream if places[request.number] == index]
        alone = simulate(device(rule), own, service_ns=service_ns)
        expected = [(each.started_ns, list(each.batch)) for each in alone.executions]
        found = [
            (each.started_ns, list(each.batch))
            for each in together.executions
            if each.device == index
        ]
        # Only at the end a node hears of it earlier alone than where others are still at work.
        last = len(expected) - 1
        assert found[:last] == expected[:last]
        assert len(found) >= last
    assert Report.of(together, devices=len(nodes)).requests == len(times_ns)
    assert all(node.open == 0 for node in nodes)


def test_least_loaded_spreads_by_speed() -> None:
    nodes = [Node(device(), cost_ns=1), Node(device(), cost_ns=1), Node(device(), cost_ns=4)]
    request = Request(0, 0)
    assert least_loaded(request, nodes) == 0
    nodes[0].open = 1
    assert least_loaded(request, nodes) == 1
    nodes[1].open = 3
    nodes[0].open = 4
    assert least_loaded(request, nodes) == 1  # 4 x 1 against 5 x 1 and 1 x 4: the first of equals


def test_least_loaded_has_fewer_violations_than_random() -> None:
    def violations(route: Route) -> int:
        nodes = [Node(device()) for _ in range(4)]
        return Report.of(routed(route, nodes, rate_qps=600), devices=4).violations

    assert violations(least_loaded) < 0.7 * violations(weighted(Random(1)))


def test_random_routing_keeps_its_shares() -> None:
    nodes = [Node(device(Immediate), weight=3), Node(device(Immediate), weight=1)]
    found = counts(routed(weighted(Random(2)), nodes))
    assert found[0] / 4000 == pytest.approx(0.75, abs=0.03)
    found = counts(routed(weighted(Random(2)), [Node(device(Immediate)) for _ in range(4)]))
    assert all(each / 4000 == pytest.approx(0.25, abs=0.03) for each in found.values())


def test_a_request_goes_where_its_key_is_answered() -> None:
    nodes = [Node(device(), keys=("a",)), Node(device(), keys=("b", "a")), Node(device(), keys="b")]
    cluster = Cluster(nodes, least_loaded)
    seen = []
    for number, key in enumerate("abbba"):
        actions = cluster.on_event(0, Request(number, 0, key=key))
        seen += [each.device for each in actions if isinstance(each, Run)]
    assert seen == [0, 1, 2]
    assert [node.open for node in nodes] == [2, 2, 1]
    with pytest.raises(ValueError, match="no node answers requests of 'c'"):
        cluster.on_event(0, Request(9, 0, key="c"))


class Recorder:
    """A policy that preempts on every second request, and remembers its events."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        self.seen.append(event)
        if isinstance(event, Request):
            return [Run(0, [event])] if len(self.seen) == 1 else [Preempt(0)]
        return ()

    def next_deadline_ns(self) -> int | None:
        return None


def test_devices_are_numbered_by_node_outside_and_0_inside() -> None:
    quiet, busy = Recorder(), Recorder()
    cluster = Cluster([Node(quiet), Node(busy)], lambda request, nodes: 1)
    first, second = Request(0, 0), Request(1, 1)
    assert cluster.on_event(0, first) == [Run(1, [first])]
    assert cluster.on_event(1, second) == [Preempt(1)]
    assert cluster.on_event(2, Preempted(1, [first], 0)) == ()
    assert cluster.on_event(3, Finished(1, [second], 2, is_typical=False)) == ()
    assert quiet.seen == []
    assert busy.seen[2:] == [
        Preempted(0, [first], 0),
        Finished(0, [second], 2, is_typical=False),
    ]
    assert cluster.nodes[1].open == 1


def test_what_is_dropped_is_no_load_any_more() -> None:
    nodes = [Node(device()), Node(device())]
    stream = [Request(number, 0, 30_000_000) for number in range(40)]
    outcome = simulate(Cluster(nodes, least_loaded), stream, service_ns=service_ns)
    assert outcome.dropped
    assert [node.open for node in nodes] == [0, 0]


class Insistent:
    """A policy that wants to be asked at one time, whatever happens."""

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        return ()

    def next_deadline_ns(self) -> int | None:
        return 7


def test_a_time_for_which_a_node_asks_again_is_not_forgotten() -> None:
    cluster = Cluster([Node(Insistent())], least_loaded)
    cluster.on_event(0, Request(0, 0))
    assert cluster.next_deadline_ns() == 7
    cluster.on_event(6, TIMER)  # too early: nobody is asked
    cluster.on_event(7, TIMER)
    assert cluster.next_deadline_ns() == 7


def test_the_end_of_arrivals_ends_the_waiting_of_every_node() -> None:
    class Patient(Immediate):
        def choose(self, now_ns: int) -> int:
            return 0

    found = routed(least_loaded, [Node(device(Patient)), Node(device(Patient))], count=4)
    assert counts(found) == {0: 2, 1: 2}


def test_nothing_can_be_cancelled() -> None:
    with pytest.raises(ValueError, match="cancels nothing"):
        Cluster([Node(device())], least_loaded).on_event(0, Cancelled(Request(0, 0)))
