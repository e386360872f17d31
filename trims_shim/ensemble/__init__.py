"""Ensembles: several models that answer together, allocated to devices and run in parallel."""

from __future__ import annotations

from trims_shim.ensemble.allocation import (
    Allocation,
    Device,
    Footprint,
    MemberProfile,
    Problem,
    worst_fit_decreasing,
)
from trims_shim.ensemble.devices import find_devices
from trims_shim.ensemble.ensemble import Ensemble, EnsembleStats, Member, Worker
from trims_shim.ensemble.estimate import throughput
from trims_shim.ensemble.measuring import measure
from trims_shim.ensemble.problem_file import load_problem, save_problem
from trims_shim.ensemble.search import bounded_greedy, optimise

__all__ = [
    "Allocation",
    "Device",
    "Ensemble",
    "EnsembleStats",
    "Footprint",
    "Member",
    "MemberProfile",
    "Problem",
    "Worker",
    "bounded_greedy",
    "find_devices",
    "load_problem",
    "measure",
    "optimise",
    "save_problem",
    "throughput",
    "worst_fit_decreasing",
]
