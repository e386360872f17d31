"""Fleets, placements and requests that tests of clusters share. No Ray."""

from __future__ import annotations

from tests.planner.making import option
from trims_shim.cluster.fleet import Device, Fleet, Phase
from trims_shim.planner import Group, Option, Placement

__all__ = ["LARGE", "OTHER", "SECOND", "SMALL", "placed", "ready", "start"]

SECOND = 1_000_000_000
SMALL = option("cats", "small", "gpu", 60, 200, size=2)
LARGE = option("cats", "large", "gpu", 90, 40, size=2)
OTHER = option("dogs", "other", "gpu", 90, 40, size=2)


def placed(*groups: tuple[Option, int, float]) -> Placement:
    """Groups of (option, devices, planned requests a second)."""
    made = tuple(Group(*each) for each in groups)
    return Placement(made, {"cats": 10, "dogs": 10}, 1.0)


def start(fleet: Fleet, now_ns: int = 0) -> list[Device]:
    """Begin the loads that are due."""
    return list(fleet.begin_loads(now_ns))


def ready(*groups: tuple[Option, int, float]) -> Fleet:
    """A fleet of as many devices as the placement needs, all loaded."""
    fleet = Fleet(["gpu"] * sum(count for _, count, _ in groups))
    fleet.place(placed(*groups))
    for device in start(fleet):
        fleet.loaded(device, device.load)
    assert all(device.phase is Phase.READY for device in fleet.devices)
    return fleet
