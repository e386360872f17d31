"""A plan for a cluster: which variant runs on how many devices, and what share of requests it gets.

Devices of one kind are interchangeable, so a plan counts them. :func:`assign` gives each device its
variant, and changes as few devices as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trims_shim.planner.problem import Option

__all__ = ["Group", "Placement", "assign"]


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind that run the same variant."""

    option: Option
    devices: int
    planned_qps: float
    """The part of the demand that is planned for all of them together, in requests a second."""

    @property
    def device_qps(self) -> float:
        """The planned requests a second of each device."""
        return self.planned_qps / self.devices

    @property
    def utilisation(self) -> float:
        """The planned requests over those that the devices can answer."""
        return self.planned_qps / (self.devices * self.option.peak_qps)


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of planning."""

    groups: tuple[Group, ...]
    demand_qps: Mapping[str, float]
    """The demand that it was made for, by family."""
    headroom: float
    """How many times the demand of every family could be answered, as far as was asked for. Below
    1, not all of it can be."""
    accuracy_bound: float = 0.0
    """No placement that answers as much has a higher accuracy."""

    @property
    def accuracy(self) -> float:
        """Mean over the planned requests; 0 if none are ("effective accuracy" in the paper)."""
        planned = sum(group.planned_qps for group in self.groups)
        total = sum(group.planned_qps * group.option.accuracy for group in self.groups)
        return total / planned if planned else 0.0

    @property
    def served(self) -> dict[str, float]:
        """The planned share of each family's demand."""
        planned = dict.fromkeys(self.demand_qps, 0.0)
        for group in self.groups:
            planned[group.option.family] += group.planned_qps
        return {
            family: min(1.0, planned[family] / qps) if qps else 1.0
            for family, qps in self.demand_qps.items()
        }

    @property
    def devices(self) -> dict[str, int]:
        """How many devices of each kind run a variant."""
        used: dict[str, int] = {}
        for group in self.groups:
            used[group.option.device] = used.get(group.option.device, 0) + group.devices
        return used


def assign(
    placement: Placement,
    kinds: Sequence[str],
    before: Sequence[Option | None] = (),
    *,
    is_warm: Callable[[int, Option], bool] = lambda device, option: False,
) -> list[Option | None]:
    """Return the option of each device; None for a device that is not needed.

    ``kinds`` names the kind of each device, ``before`` what each runs now. As many devices as
    possible keep their variant; one that is not needed keeps it, too, as it may be needed again.
    Others preferably get one for which they are warm: its weights are near. Raises ValueError if
    there are fewer devices than the placement uses.
    """
    missing = {group.option: group.devices for group in placement.groups}
    chosen: list[Option | None] = [None] * len(kinds)

    def take(suits: Callable[[int, Option], bool]) -> None:
        for option in missing:
            for device, kind in enumerate(kinds):
                if not missing[option]:
                    break
                if kind == option.device and chosen[device] is None and suits(device, option):
                    chosen[device] = option
                    missing[option] -= 1

    take(lambda device, option: device < len(before) and before[device] == option)
    take(is_warm)
    take(lambda device, option: True)
    for option, count in missing.items():
        if count:
            raise ValueError(f"there are too few devices of the kind {option.device!r}")
    return chosen
