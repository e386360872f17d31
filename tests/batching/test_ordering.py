"""The queue against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trims_shim.batching.ordering import DeadlineQueue
from trims_shim.batching.protocol import NEVER_NS, Request

requests = st.lists(
    st.builds(
        lambda deadline_ns, priority, weight: Request(
            0, 0, deadline_ns, priority=priority, weight=weight
        ),
        st.integers(0, 5),
        st.integers(0, 2),
        st.integers(1, 3),
    ),
    max_size=20,
)


def queue_of(added: list[Request]) -> DeadlineQueue:
    queue = DeadlineQueue()
    for number, request in enumerate(added):
        request.number = number
        queue.add(request)
    return queue


def in_order(added: list[Request]) -> list[Request]:
    return sorted(added, key=lambda each: (-each.priority, each.deadline_ns, each.number))


@given(requests)
def test_the_first_is_the_most_urgent(added: list[Request]) -> None:
    queue = queue_of(added)
    assert list(queue) == in_order(added)
    assert len(queue) == len(added)
    assert [queue[index] for index in range(len(added))] == in_order(added)


@given(requests, st.integers(0, 25))
def test_taking_and_adding_again_changes_nothing(added: list[Request], count: int) -> None:
    queue = queue_of(added)
    taken = queue.take(count)
    assert taken == in_order(added)[:count]
    assert list(queue) == in_order(added)[count:]
    for request in reversed(taken):
        queue.add(request)
    assert list(queue) == in_order(added)


@given(requests, st.data())
def test_discarding(added: list[Request], data: st.DataObject) -> None:
    queue = queue_of(added)
    gone = data.draw(st.lists(st.sampled_from(added), unique_by=id)) if added else []
    for request in gone:
        assert queue.discard(request)
        assert not queue.discard(request)
    assert list(queue) == [each for each in in_order(added) if each not in gone]


def test_an_equal_request_is_not_the_same() -> None:
    queue = queue_of([Request(0, 0, 5)])
    assert not queue.discard(Request(0, 0, 5))
    assert len(queue) == 1


@given(requests, st.integers(0, 6))
def test_taking_what_is_due(added: list[Request], before_ns: int) -> None:
    queue = queue_of(added)
    due = queue.take_due(before_ns)
    assert due == [each for each in in_order(added) if each.deadline_ns < before_ns]
    assert list(queue) == [each for each in in_order(added) if each.deadline_ns >= before_ns]


@given(requests, st.integers(0, 20), st.integers(0, 20))
def test_cutting(added: list[Request], start: int, stop: int) -> None:
    queue = queue_of(added)
    expected = in_order(added)
    assert queue.cut(start, stop) == expected[start:stop]
    del expected[start:stop]
    assert list(queue) == expected


@given(requests, st.integers(0, 25))
def test_others_among_them_in_the_same_order(added: list[Request], count: int) -> None:
    queue = queue_of(added)
    for request in added[:count]:
        queue.discard(request)
    before = list(queue)
    others = in_order(added[:count])
    assert queue.merged(others) == in_order(added)
    assert list(queue) == before
    queue.add_all(others)
    assert list(queue) == in_order(added)


@given(requests)
def test_the_earliest_deadline(added: list[Request]) -> None:
    queue = queue_of(added)
    for count in range(-1, len(added) + 2):
        first = in_order(added)[: max(count, 0)]
        expected = min((each.deadline_ns for each in first), default=NEVER_NS)
        assert queue.deadline_ns(count) == expected


@given(requests.filter(bool), st.data())
def test_peers_end_where_the_priority_changes(added: list[Request], data: st.DataObject) -> None:
    queue = queue_of(added)
    index = data.draw(st.integers(0, len(added) - 1))
    end = queue.peers(index)
    assert {queue[each].priority for each in range(index, end)} == {queue[index].priority}
    assert end == len(queue) or queue[end].priority < queue[index].priority


@given(requests.filter(bool), st.integers(1, 20), st.integers(1, 9))
def test_the_heaviest_prefix_that_is_allowed(
    added: list[Request], count: int, max_weight: int
) -> None:
    queue, count = queue_of(added), min(count, len(added))
    found = queue.within_weight(count, max_weight)
    weights = [each.weight for each in queue]
    assert 1 <= found <= count
    assert found == 1 or sum(weights[:found]) <= max_weight
    assert found == count or sum(weights[: found + 1]) > max_weight
