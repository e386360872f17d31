"""When to plan again, and for what demand. The same in virtual time and for a real cluster.

The demand is estimated from the requests that come. A plan is due a period after the last one, but
not before somebody asks, and at once when far more requests come than were planned for. When
requests come after a pause, there is no plan before a whole second of them has been counted.
"""

from __future__ import annotations

import math

from trims_shim.planner.demand import Demand
from trims_shim.planner.placement import Placement

__all__ = ["Replanner"]

_NS_PER_S = 1_000_000_000
_LEAST_QPS = 0.1
"""Families that nobody asks for now may be asked for before the next plan."""
_LEAST_PERIOD_S = 2.0
"""Between two plans, however fast the demand grows (the artefact's value), and from a pause to a
plan: a whole second is in it, wherever seconds begin."""


class Replanner:
    """Says when a plan is due. Times never go back; ``placement`` is carried out from ``since_ns``
    on."""

    def __init__(
        self, placement: Placement, *, period_s: float, burst: float, since_ns: int = 0
    ) -> None:
        self.placement = placement
        """The last one."""
        self.plans = 0
        """How often it was planned again."""
        self._period_ns = round(period_s * _NS_PER_S)
        self._burst = burst
        self._demand = Demand(placement.demand_qps)
        self._is_asked = False
        """Whether a request has come since the last plan."""
        self._next_plan_ns = self._last_plan_ns = since_ns

    def came(self, now_ns: int, family: str) -> None:
        """Note a request."""
        if not self._is_asked:
            self._is_asked = True
            wait_ns = 1 if self._demand.last_qps(now_ns) else round(_LEAST_PERIOD_S * _NS_PER_S)
            self._next_plan_ns = max(now_ns + wait_ns, self._last_plan_ns + self._period_ns)
        self._demand.came(now_ns, family)

    def next_plan_ns(self) -> int | None:
        """When a plan is due if there is no burst before; None while nobody asks."""
        return self._next_plan_ns if self._is_asked else None

    def is_due(self, now_ns: int) -> bool:
        """Whether to plan now."""
        if not self._is_asked:
            return False
        if now_ns >= self._next_plan_ns:
            return True
        if now_ns < self._last_plan_ns + _LEAST_PERIOD_S * _NS_PER_S:
            return False
        planned_qps = sum(self.placement.demand_qps.values())
        by_chance_qps = planned_qps + 3 * math.sqrt(planned_qps)
        return self._demand.last_qps(now_ns) > max(self._burst * planned_qps, by_chance_qps)

    def wanted_qps(self, now_ns: int) -> dict[str, float]:
        """The demand to plan for, by family. A sudden rise counts at once."""
        demand_qps = self._demand.estimate_qps(now_ns)
        last_qps, total_qps = self._demand.last_qps(now_ns), sum(demand_qps.values())
        growth = max(1.0, last_qps / total_qps) if total_qps else 1.0
        return {family: max(_LEAST_QPS, growth * qps) for family, qps in demand_qps.items()}

    def planned(self, now_ns: int, placement: Placement) -> None:
        """``placement`` is carried out from now on."""
        self.placement = placement
        self.plans += 1
        self._is_asked = False
        self._last_plan_ns = now_ns
