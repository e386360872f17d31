"""Plans for many devices: which models run where. Pure: a problem in, a plan out.

:func:`plan_proteus` chooses the variants of models that a cluster runs, as accurate as the demand
allows; :class:`Serving` tries a plan, or planning again and again, in virtual time.
:func:`plan_herd` divides streams of requests and devices into groups, so that bursts do least harm.
"""

from trims_shim.planner.demand import Demand
from trims_shim.planner.herd import DeviceGroup, HerdPlan, HostedModel, Stream, plan_herd
from trims_shim.planner.placement import Group, Placement, assign
from trims_shim.planner.problem import Option, Problem
from trims_shim.planner.proteus import plan_proteus
from trims_shim.planner.serving import Replanning, Serving, serve

__all__ = [
    "Demand",
    "DeviceGroup",
    "Group",
    "HerdPlan",
    "HostedModel",
    "Option",
    "Placement",
    "Problem",
    "Replanning",
    "Serving",
    "Stream",
    "assign",
    "plan_herd",
    "plan_proteus",
    "serve",
]
