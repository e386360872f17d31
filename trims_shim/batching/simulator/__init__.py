"""Policies in virtual time: arrivals, traces, one device or a cluster, and a report.

::

    from random import Random
    from trims_shim.batching.simulator import Report, poisson, requests, simulate

    stream = requests(poisson(200, Random(1)), slo_ms=100, count=100_000)
    outcome = simulate(policy, stream, service_ns=lambda _, batch: profile.latency_ns(len(batch)))
    print(Report.of(outcome).violation_ratio)
"""

from trims_shim.batching.simulator.arrivals import (
    bursty,
    gamma,
    merged,
    poisson,
    requests,
    uniform,
)
from trims_shim.batching.simulator.cluster import Cluster, Node
from trims_shim.batching.simulator.loop import Execution, Outcome, simulate
from trims_shim.batching.simulator.report import Report, percentile
from trims_shim.batching.simulator.traces import read_trace

__all__ = [
    "Cluster",
    "Execution",
    "Node",
    "Outcome",
    "Report",
    "bursty",
    "gamma",
    "merged",
    "percentile",
    "poisson",
    "read_trace",
    "requests",
    "simulate",
    "uniform",
]
