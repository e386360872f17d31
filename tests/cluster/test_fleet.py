"""Devices load what they have to, come back when they were lost, and leave no family alone."""

from __future__ import annotations

from tests.cluster.making import LARGE, OTHER, SECOND, SMALL, placed, ready, start
from trims_shim.cluster.fleet import Fleet, Phase, Rest


def phases(fleet: Fleet) -> list[Phase]:
    return [device.phase for device in fleet.devices]


def test_devices_load_what_is_placed_and_then_are_ready() -> None:
    fleet = Fleet(["gpu", "gpu", "gpu"])
    fleet.place(placed((SMALL, 1, 8.0), (OTHER, 1, 5.0)))
    assert not fleet.is_settled
    assert not fleet.ready("cats")
    assert [fleet.is_coming(family) for family in ("cats", "dogs", "birds")] == [True, True, False]
    loading = start(fleet)
    assert [device.option for device in loading] == [SMALL, OTHER]
    assert start(fleet) == []
    assert not fleet.is_settled
    for device in loading:
        fleet.loaded(device, device.load)
    assert fleet.is_settled
    assert fleet.ready("cats") == [fleet.devices[0]]
    assert fleet.devices[0].planned_qps == 8.0
    assert phases(fleet) == [Phase.READY, Phase.READY, Phase.EMPTY]
    assert fleet.next_retry_ns() is None
    assert fleet.loads == 2


def test_only_devices_change_that_have_to_and_warm_ones_are_preferred() -> None:
    fleet = ready((SMALL, 3, 9.0), (OTHER, 1, 1.0))
    fleet.place(
        placed((SMALL, 2, 6.0), (LARGE, 1, 3.0), (OTHER, 1, 1.0)),
        is_warm=lambda device, option: device.number == 1,
    )
    # The two that keep their variant are the first ones; so the third changes, warm or not.
    assert [device.number for device in start(fleet)] == [2]
    assert len(fleet.ready("cats")) == 2
    fleet = Fleet(["gpu", "gpu"])
    fleet.place(placed((SMALL, 1, 1.0)), is_warm=lambda device, option: device.number == 1)
    assert [device.number for device in start(fleet)] == [1]


def test_a_device_that_is_not_needed_keeps_its_variant() -> None:
    fleet = ready((SMALL, 1, 1.0), (OTHER, 1, 1.0))
    fleet.place(placed((OTHER, 1, 1.0)))
    assert start(fleet) == []
    assert [device.planned_qps for device in fleet.ready("cats")] == [0.0]


def test_what_a_device_loads_that_is_not_needed_any_more_is_coming() -> None:
    """Found: its requests were dropped until it had loaded."""
    fleet = Fleet(["gpu", "gpu"])
    fleet.place(placed((SMALL, 1, 1.0), (OTHER, 1, 1.0)))
    device, _ = start(fleet)
    fleet.place(placed((OTHER, 1, 1.0)))
    assert fleet.is_coming("cats")
    fleet.loaded(device, device.load)
    assert fleet.ready("cats") == [device]
    fleet.lost(device, device.load, 0)
    assert start(fleet, SECOND) == [device]
    fleet.place(placed((OTHER, 1, 1.0)))
    fleet.failed(device, device.load, SECOND)
    assert fleet.is_coming("cats"), "it tries to come back as it was"


def test_the_last_ready_device_waits_until_another_has_loaded() -> None:
    fleet = ready((SMALL, 3, 9.0))
    fleet.place(placed((LARGE, 3, 9.0)))
    assert not fleet.is_settled
    first, second = start(fleet)
    (last,) = fleet.ready("cats")
    fleet.loaded(second, second.load)
    assert start(fleet) == [last]
    fleet.loaded(first, first.load)
    fleet.loaded(last, last.load)
    assert fleet.is_settled


def test_the_last_ready_device_changes_after_all_others() -> None:
    fleet = ready((SMALL, 2, 1.0), (OTHER, 2, 1.0))
    for device, wanted in zip(fleet.devices, (OTHER, OTHER, SMALL, OTHER), strict=True):
        device.wanted = wanted
    assert [device.number for device in start(fleet)] == [0, 2]
    assert [device.number for device in fleet.ready("cats")] == [1]


def test_what_runs_is_not_given_up_for_a_variant_that_cannot_be_loaded() -> None:
    fleet = ready((SMALL, 3, 9.0))
    fleet.place(placed((LARGE, 3, 9.0)))
    first, second = start(fleet)
    (last,) = fleet.ready("cats")
    fleet.failed(first, first.load, 0)
    fleet.failed(second, second.load, 0)
    assert start(fleet, SECOND) == [first, second]
    fleet.loaded(first, first.load)
    assert not fleet.unloadable
    assert start(fleet, SECOND) == [last]


def test_what_could_not_be_loaded_is_planned_after_pauses_that_grow() -> None:
    """Found: never again."""
    options = [SMALL, LARGE, OTHER]
    fleet = ready((SMALL, 3, 9.0))
    fleet.place(placed((LARGE, 3, 9.0)))
    first, second = start(fleet)
    now_ns, pauses = 0, []
    for _ in range(1100):
        fleet.failed(first, first.load, now_ns)
        fleet.failed(second, second.load, now_ns)
        until_ns = fleet.unloadable[LARGE].until_ns
        assert fleet.to_plan(options, until_ns - 1) == [SMALL, OTHER]
        assert fleet.to_plan([LARGE, OTHER], until_ns - 1) == [LARGE, OTHER], "it has no other"
        assert fleet.to_plan(options, until_ns) == options
        pauses.append(until_ns - now_ns)
        now_ns = max(until_ns, first.retry_ns, second.retry_ns)
        assert start(fleet, now_ns) == [first, second]
    assert pauses[1] == 2 * pauses[0]
    assert pauses[-1] == pauses[-2] == 600 * SECOND
    fleet.loaded(first, first.load)
    assert fleet.to_plan(options, now_ns) == options


def test_one_device_at_a_time_tries_what_could_not_be_loaded() -> None:
    fleet = ready((SMALL, 3, 9.0), (OTHER, 1, 1.0))
    fleet.place(placed((SMALL, 2, 9.0), (LARGE, 1, 9.0), (OTHER, 1, 1.0)))
    (device,) = start(fleet)
    fleet.failed(device, device.load, 0)
    fleet.place(placed((SMALL, 3, 9.0), (OTHER, 1, 1.0)))
    assert start(fleet, SECOND) == [device]
    fleet.loaded(device, device.load)
    fleet.place(placed((LARGE, 4, 9.0)))
    fleet.unloadable[LARGE] = Rest(60.0, 60 * SECOND)
    assert start(fleet, 60 * SECOND - 1) == []
    (one,) = start(fleet, 60 * SECOND)
    before = one.before
    fleet.failed(one, one.load, 60 * SECOND)
    assert start(fleet, 60 * SECOND) == [one], "it goes back at once"
    assert one.option == before
    fleet.loaded(one, one.load)
    assert start(fleet, 180 * SECOND - 1) == []
    (other,) = start(fleet, 180 * SECOND)
    fleet.loaded(other, other.load)
    assert len(start(fleet, 180 * SECOND)) == 2


def test_what_another_family_loads_does_not_keep_a_device_from_trying() -> None:
    fleet = Fleet(["gpu", "gpu", "gpu"])
    fleet.place(placed((SMALL, 2, 9.0)))
    for device in start(fleet):
        fleet.loaded(device, device.load)
    fleet.unloadable[LARGE] = Rest(60.0, 60 * SECOND)
    fleet.place(placed((LARGE, 2, 9.0), (OTHER, 1, 1.0)))
    assert start(fleet) == [fleet.devices[2]]
    assert len(start(fleet, 60 * SECOND)) == 1


def test_the_only_device_of_a_family_tries_too_and_goes_back() -> None:
    fleet = ready((SMALL, 1, 1.0))
    (device,) = fleet.devices
    fleet.unloadable[LARGE] = Rest(60.0, 60 * SECOND)
    fleet.place(placed((LARGE, 1, 1.0)))
    assert start(fleet, 60 * SECOND) == [device]
    fleet.failed(device, device.load, 60 * SECOND)
    assert fleet.is_coming("cats")
    assert start(fleet, 60 * SECOND) == [device]
    assert device.option == SMALL


def test_a_device_that_is_not_needed_comes_back_too() -> None:
    fleet = ready((SMALL, 1, 1.0), (OTHER, 1, 1.0))
    fleet.place(placed((OTHER, 1, 1.0)))
    device = fleet.devices[0]
    fleet.lost(device, device.load, 0)
    assert start(fleet, SECOND) == [device]
    fleet.loaded(device, device.load)
    assert len(fleet.present) == 2


def test_nobody_waits_for_a_device_that_may_never_come_back() -> None:
    fleet = ready((SMALL, 2, 9.0))
    away, last = fleet.devices
    fleet.lost(away, away.load, 0)
    assert start(fleet, SECOND) == [away]
    fleet.place(placed((LARGE, 1, 9.0)))
    assert start(fleet, SECOND) == [last]


def test_single_devices_of_two_families_can_swap() -> None:
    """Each is the last one of its family; they must not wait for each other."""
    fleet = ready((SMALL, 1, 1.0), (OTHER, 1, 1.0))
    fleet.devices[0].kind = "gpu"
    fleet.devices[0].wanted, fleet.devices[1].wanted = OTHER, SMALL
    (first,) = start(fleet)
    fleet.loaded(first, first.load)
    (second,) = start(fleet)
    fleet.loaded(second, second.load)
    assert fleet.is_settled


def test_a_lost_device_loads_again_after_pauses_that_grow() -> None:
    fleet = ready((SMALL, 2, 9.0))
    device = fleet.devices[0]
    pauses = []
    now_ns = 5 * SECOND
    for _ in range(1100):  # nine hours
        fleet.lost(device, device.load, now_ns)
        assert fleet.ready("cats") == [fleet.devices[1]]
        retry_ns = fleet.next_retry_ns()
        assert retry_ns is not None
        assert start(fleet, retry_ns - 1) == []
        assert start(fleet, retry_ns) == [device]
        pauses.append(retry_ns - now_ns)
        now_ns = retry_ns
    assert pauses[0] < SECOND < pauses[4]
    assert pauses[-1] == pauses[-2] == 30 * SECOND
    fleet.loaded(device, device.load)
    fleet.lost(device, device.load, now_ns)
    retry_ns = fleet.next_retry_ns()
    assert retry_ns == now_ns + pauses[0]
    fleet.lost(device, device.load, now_ns)
    assert fleet.next_retry_ns() == retry_ns, "each batch that ran there tells it"


def test_late_news_of_loads_before_are_void() -> None:
    fleet = ready((SMALL, 1, 1.0))
    device = fleet.devices[0]
    before = device.load
    fleet.place(placed((LARGE, 1, 1.0)))
    start(fleet)
    fleet.lost(device, before, 0)
    fleet.loaded(device, before)
    fleet.failed(device, before, 0)
    assert device.phase is Phase.LOADING
    assert not fleet.unloadable
    fleet.loaded(device, device.load)
    assert device.phase is Phase.READY


def test_a_loader_that_fails_is_tried_again_and_its_variant_is_known() -> None:
    fleet = ready((SMALL, 2, 1.0))
    fleet.place(placed((SMALL, 1, 1.0), (LARGE, 1, 1.0)))
    (device,) = start(fleet)
    fleet.failed(device, device.load, 0)
    assert set(fleet.unloadable) == {LARGE}
    assert device.phase is Phase.EMPTY
    assert start(fleet) == [], "not at once"
    assert start(fleet, 60 * SECOND) == [device]
    fleet.failed(device, device.load, 60 * SECOND)
    fleet.place(placed((SMALL, 2, 1.0)))
    start(fleet, 120 * SECOND)
    assert device.option == SMALL


def test_a_device_that_comes_back_and_cannot_load_is_there_for_plans() -> None:
    fleet = ready((SMALL, 1, 1.0))
    (device,) = fleet.devices
    fleet.lost(device, device.load, 0)
    assert start(fleet, SECOND) == [device]
    fleet.failed(device, device.load, SECOND)
    assert fleet.present == [device]
    fleet.place(placed((LARGE, 1, 1.0)))
    assert start(fleet, 60 * SECOND) == [device]
    assert device.option == LARGE


def test_a_device_that_is_lost_before_it_could_change_comes_back_as_it_was_to_be() -> None:
    fleet = ready((SMALL, 2, 9.0))
    fleet.place(placed((LARGE, 2, 9.0)))
    assert len(start(fleet)) == 1
    (last,) = fleet.ready("cats")
    fleet.lost(last, last.load, 0)
    assert start(fleet, SECOND) == [last]
    assert last.option == LARGE


def test_plans_are_for_the_devices_that_are_there() -> None:
    fleet = ready((SMALL, 2, 2.0), (OTHER, 1, 1.0))
    fleet.lost(fleet.devices[2], fleet.devices[2].load, 0)
    assert len(fleet.present) == 2
    fleet.place(placed((SMALL, 1, 1.0), (OTHER, 1, 1.0)))
    assert [device.wanted for device in fleet.devices] == [SMALL, OTHER, OTHER]
    assert [device.planned_qps for device in fleet.devices] == [1.0, 1.0, 0.0]
    # It tries to come back as it was, but is not there for plans before it has.
    assert fleet.devices[2] in start(fleet, SECOND)
    assert len(fleet.present) == 2
    fleet.loaded(fleet.devices[2], fleet.devices[2].load)
    assert len(fleet.present) == 3
