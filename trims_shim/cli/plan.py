"""``trims plan``: placements, groups, and what a placement is worth in virtual time."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.simulator import Outcome, Report, gamma, merged, requests
from trims_shim.cli.arguments import refuse
from trims_shim.cli.batch import report_fields
from trims_shim.cli.batch_setup import policies, read_requests
from trims_shim.cli.exits import Exit
from trims_shim.cli.text import counted, print_json, printable, table
from trims_shim.errors import ConfigError, FormatError, PlanningError
from trims_shim.plan_files import Cluster, read_cluster, read_herd
from trims_shim.planner import (
    Placement,
    Problem,
    Replanning,
    Serving,
    plan_herd,
    plan_proteus,
    serve,
)

__all__ = ["herd", "proteus", "simulate"]

_NS_PER_S = 1_000_000_000
_MOST_REQUESTS = 10_000_000
"""A few gigabytes, and some minutes."""


def proteus(arguments: argparse.Namespace) -> Exit:
    """Print the groups of devices of the best placement."""
    cluster = read_cluster(arguments.problem)
    placement = _planned(cluster.problem, arguments)
    if arguments.json:
        print_json(_placement_fields(placement))
    else:
        print(_placement_text(cluster, placement))
    return Exit.OK


def simulate(arguments: argparse.Namespace) -> Exit:
    """Print a row for each family: violations and accuracy."""
    if arguments.trace:
        refuse(arguments, ("--seconds", "--cv"), "with --trace")
    if not arguments.replan:
        refuse(arguments, ("--period-s", "--load-s"), "without --replan")
    cluster = read_cluster(arguments.problem)
    placement = _planned(cluster.problem, arguments)
    stream = _stream(cluster, arguments)
    serving = _serving(cluster, placement, arguments)
    outcome, report = serve(serving, stream)
    families = _by_family(placement.demand_qps, stream, outcome)
    if arguments.json:
        own = {"families": families, "plans": serving.plans, "loads": serving.loads}
        print_json(report_fields(report) | own)
    else:
        print(_simulated_text(serving, report, families))
    return Exit.OK


def herd(arguments: argparse.Namespace) -> Exit:
    """Print the groups of devices, and which streams they serve."""
    problem = read_herd(arguments.problem)
    try:
        plan = plan_herd(
            problem.streams,
            problem.models,
            devices=problem.devices,
            memory_bytes=problem.memory_bytes,
            groups=problem.groups,
            largest=problem.largest,
            of_paper=arguments.of_paper,
            gap=arguments.gap,
            time_limit_s=arguments.time_limit_s,
        )
    except ValueError as error:
        raise FormatError(f"{arguments.problem}: {error}") from None
    if arguments.json:
        print_json(dataclasses.asdict(plan) | {"slack": plan.slack})
        return Exit.OK
    titles = ("GROUP", "DEVICES", "NEEDED", "MODELS", "STREAMS")
    rows = [
        (
            str(number),
            str(group.devices),
            f"{group.needed:.2f}",
            ", ".join(group.models),
            ", ".join(group.streams),
        )
        for number, group in enumerate(plan.groups, start=1)
    ]
    print(table(titles, rows, right=("DEVICES", "NEEDED")) + "\n")
    for number, group in enumerate(plan.groups, start=1):
        if group.needed > group.devices:
            print(f"Group {number} has too few devices for its average demand")
    print(
        f"A burst may be {plan.burst_tolerance:.4g} times a stream's average; least slack of a "
        f"group: {plan.slack:.3g}"
    )
    return Exit.OK


# --- placements -----------------------------------------------------------------------------------


def _planned(
    problem: Problem, arguments: argparse.Namespace, before: Placement | None = None
) -> Placement:
    return plan_proteus(
        problem,
        headroom=arguments.headroom,
        before=before,
        gap=arguments.gap,
        time_limit_s=arguments.time_limit_s,
    )


def _placement_text(cluster: Cluster, placement: Placement) -> str:
    titles = ("FAMILY", "VARIANT", "DEVICE", "COUNT", "ACCURACY", "REQUESTS/S", "BUSY")
    groups = sorted(placement.groups, key=lambda each: (each.option.family, -each.option.accuracy))
    rows = [
        (
            group.option.family,
            group.option.variant,
            group.option.device,
            str(group.devices),
            f"{group.option.accuracy:g}",
            f"{group.planned_qps:.1f}",
            f"{group.utilisation:.0%}",
        )
        for group in groups
    ]
    used, devices = placement.devices, cluster.problem.devices
    left = {kind: count - used.get(kind, 0) for kind, count in devices.items()}
    idle = ", ".join(f"{count} x {kind}" for kind, count in left.items() if count)
    lines = [
        table(titles, rows, right=titles[3:]),
        "",
        f"accuracy {placement.accuracy:.4g} (none is above {placement.accuracy_bound:.4g}), "
        f"room for {placement.headroom:.3g} times the demand",
        *([f"not used: {printable(idle)}"] if idle else ()),
    ]
    lines += [
        f"{printable(family)}: only {share:.0%} of the demand can be answered"
        for family, share in placement.served.items()
        if share < 0.999
    ]
    return "\n".join(lines)


def _placement_fields(placement: Placement) -> dict[str, Any]:
    return {
        "accuracy": placement.accuracy,
        "accuracy_bound": placement.accuracy_bound,
        "headroom": placement.headroom,
        "served": placement.served,
        "groups": [
            {
                "family": group.option.family,
                "variant": group.option.variant,
                "device": group.option.device,
                "devices": group.devices,
                "accuracy": group.option.accuracy,
                "planned_qps": group.planned_qps,
                "utilisation": group.utilisation,
                "max_batch_size": group.option.profile.max_batch_size,
            }
            for group in placement.groups
        ],
    }


# --- simulation -----------------------------------------------------------------------------------


def _serving(cluster: Cluster, placement: Placement, arguments: argparse.Namespace) -> Serving:
    problem = cluster.problem

    def plan(demand_qps: Mapping[str, float], before: Placement) -> Placement:
        return _planned(problem.asked(demand_qps), arguments, before)

    if not problem.options:
        raise PlanningError(f"{arguments.problem}: no device runs any variant within its objective")
    load_ns = round(arguments.load_s * _NS_PER_S)
    (make_rule,) = policies([arguments.policy], problem.options[0].profile).values()
    return Serving(
        [kind for kind, count in problem.devices.items() for _ in range(count)],
        placement,
        make_rule=make_rule,
        random=Random(arguments.seed),
        load_ns=lambda option: load_ns,
        replanning=Replanning(plan, arguments.period_s) if arguments.replan else None,
    )


def _stream(cluster: Cluster, arguments: argparse.Namespace) -> list[Request]:
    make: Callable[[Cluster, argparse.Namespace], Sequence[Sequence[Request]]]
    make = _traces if arguments.trace else _made_up
    found = list(merged(*make(cluster, arguments)))
    if not found:
        raise FormatError(f"{arguments.problem}: no request comes")
    return found


def _made_up(cluster: Cluster, arguments: argparse.Namespace) -> list[list[Request]]:
    expected = arguments.seconds * sum(cluster.problem.demand_qps.values())
    if expected > _MOST_REQUESTS:
        raise ConfigError(
            f"{expected:.3g} requests in {arguments.seconds:g} s are too many to simulate; give "
            "less --seconds"
        )
    streams = [
        list(
            requests(
                gamma(qps, arguments.cv, Random(f"{arguments.seed} {family}")),
                slo_ms=cluster.slo_ms[family],
                duration_s=arguments.seconds,
                count=_MOST_REQUESTS,
                key=family,
            )
        )
        for family, qps in cluster.problem.demand_qps.items()
        if qps
    ]
    if any(len(stream) == _MOST_REQUESTS for stream in streams):  # as bursts have no bound
        raise ConfigError(
            f"{_MOST_REQUESTS:.3g} requests or more in {arguments.seconds:g} s are too many to "
            "simulate; give a lower --cv, or less --seconds"
        )
    return streams


def _traces(cluster: Cluster, arguments: argparse.Namespace) -> list[list[Request]]:
    streams = []
    for word in arguments.trace:
        family, equals, path = word.partition("=")
        if not equals or family not in cluster.slo_ms:
            families = ", ".join(cluster.slo_ms)
            raise ConfigError(f"--trace {word}: it is FAMILY=FILE, and there are {families}")
        found = read_requests(path, key=family)
        for request in found:
            if request.deadline_ns == NEVER_NS:
                request.deadline_ns = request.arrival_ns + round(cluster.slo_ms[family] * 1e6)
        streams.append(found)
    return streams


def _by_family(
    families: Iterable[str], stream: Sequence[Request], outcome: Outcome
) -> dict[str, dict[str, float]]:
    came = Counter(request.key for request in stream)
    on_time = Counter(
        request.key for request, end_ns in outcome.answered if end_ns <= request.deadline_ns
    )
    found: dict[str, dict[str, float]] = {}
    for family in families:
        count, missed = came[family], came[family] - on_time[family]
        ratio = missed / count if count else 0.0
        found[family] = {"requests": count, "violations": missed, "violation_ratio": ratio}
    return found


def _simulated_text(
    serving: Serving, report: Report, families: Mapping[str, Mapping[str, float]]
) -> str:
    titles = ("FAMILY", "REQUESTS", "VIOLATIONS", "SHARE")
    whole = {
        "requests": report.requests,
        "violations": report.violations,
        "violation_ratio": report.violation_ratio,
    }
    rows = [
        (
            family,
            str(each["requests"]),
            str(each["violations"]),
            f"{each['violation_ratio']:.2%}",
        )
        for family, each in ({**families, "all": whole}).items()
    ]
    accuracy = "none in time" if report.accuracy is None else f"{report.accuracy:.4g}"
    return (
        f"{table(titles, rows, right=titles[1:])}\n\n"
        f"accuracy {accuracy}, p50 {report.p50_ms:.1f} ms, p99 {report.p99_ms:.1f} ms, "
        f"devices busy {report.busy_share:.0%}\n"
        f"planned again {counted(serving.plans, 'time')}, "
        f"{counted(serving.loads, 'load')} of another variant"
    )
