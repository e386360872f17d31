"""What is to be planned: devices, the variants of models that run on them, and the demand.

A *family* is what users ask for (an image classifier); its *variants* (ResNet-18 to ResNet-152)
answer with different accuracy and take different times. An :class:`Option` is a variant on a kind
of device.

Source: Proteus (ASPLOS'24), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.checks import check_amount, check_limit

__all__ = ["Option", "Problem"]

_NS_PER_S = 1e9
_NS_PER_MS = 1e6
_SHARE_OF_SLO = 0.5
"""A request that has just missed a batch waits for that one, then for its own."""


@dataclass(frozen=True, slots=True)
class Option:
    """A variant of a family's model on one kind of device."""

    family: str
    variant: str
    device: str
    """The kind of device."""
    accuracy: float
    """Of one answer; any scale, equal for all variants of a family."""
    profile: LatencyProfile = field(hash=False)
    """Of the batch sizes that may run."""

    @property
    def name(self) -> str:
        """``resnet50 on gpu``."""
        return f"{self.variant} on {self.device}"

    @property
    def peak_qps(self) -> float:
        """Requests that a device answers in a second, with its best batch size."""
        return self.profile.best_rate() * _NS_PER_S

    def within(self, slo_ms: float) -> Option | None:
        """The same with the batch sizes that take less than half of ``slo_ms``; None for none.

        Raises TypeError for a ``slo_ms`` that is no number, ValueError for one below 0.
        """
        check_amount("slo_ms", slo_ms, may_be_infinite=True)
        budget_ns = _SHARE_OF_SLO * slo_ms * _NS_PER_MS
        limit = self.profile.max_batch_size
        largest = self.profile.largest_within(math.nextafter(budget_ns, 0), limit)
        return replace(self, profile=self.profile.limited(largest)) if largest else None


@dataclass(frozen=True, slots=True)
class Problem:
    """Raises ValueError for negative numbers, unknown kinds of devices, and two equal options."""

    devices: Mapping[str, int]
    """How many there are of each kind."""
    options: Sequence[Option]
    demand_qps: Mapping[str, float]
    """Requests of each family in a second."""

    def __post_init__(self) -> None:
        for kind, count in self.devices.items():
            check_limit(f"devices[{kind!r}]", count, least=0)
        for family, qps in self.demand_qps.items():
            check_amount(f"demand_qps[{family!r}]", qps)
        seen = set()
        for option in self.options:
            if option.device not in self.devices:
                raise ValueError(f"{option.name}: there is no such kind of device")
            check_amount(f"the accuracy of {option.name}", option.accuracy)
            if (option.family, option.variant, option.device) in seen:
                raise ValueError(f"{option.name} ({option.family}) is given twice")
            seen.add((option.family, option.variant, option.device))

    @property
    def families(self) -> list[str]:
        """Those that are asked for."""
        return [family for family, qps in self.demand_qps.items() if qps]

    def of_family(self, family: str) -> Iterator[tuple[int, Option]]:
        """Its options, each with its index."""
        return ((i, each) for i, each in enumerate(self.options) if each.family == family)

    def asked(self, demand_qps: Mapping[str, float]) -> Problem:
        """The same with a demand that was seen, but for families without an option.

        Nobody can answer them; they must not keep a new plan from the others.
        """
        possible = {option.family for option in self.options}
        return replace(
            self,
            demand_qps={
                family: qps if family in possible else 0.0 for family, qps in demand_qps.items()
            },
        )

    def times(self, factor: float) -> Problem:
        """The same with ``factor`` times the demand."""
        demand_qps = {family: factor * qps for family, qps in self.demand_qps.items()}
        return replace(self, demand_qps=demand_qps)
