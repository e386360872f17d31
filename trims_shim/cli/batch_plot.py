"""``trims batch plot``: a profile, latencies, or violations over the load, as a picture.

Drawn with matplotlib, which is no dependency of this package. ``--json`` prints what would be
drawn, and does not need it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Report, percentile
from trims_shim.cli.arguments import refuse
from trims_shim.cli.batch import device_text, stream_of, stream_text
from trims_shim.cli.batch_setup import Setup, made_up, policies, slo_ns_of
from trims_shim.cli.drawing import Drawing, Line, Panel, show
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.errors import ConfigError

__all__ = ["plot"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_QUANTILES = 200
_WITHOUT_EFFECT = {
    "profile": (
        *("--slo-ms", "--devices", "--policy", "--requests", "--seed", "--jitter-ms", "--spread"),
        *("--rate", "--load", "--trace", "--arrivals", "--cv", "--loads"),
    ),
    "latency": ("--loads",),
    "load": ("--load",),
}


def plot(arguments: argparse.Namespace) -> Exit:
    """Draw ``arguments.what`` into a file, or print its data."""
    what = arguments.what
    refuse(arguments, _WITHOUT_EFFECT[what], f"on `plot {what}`")
    return show(lambda: _DRAWINGS[what](arguments), arguments)


# --- what is drawn --------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> Drawing:
    profile = Setup.of(arguments).profile
    sizes = list(range(1, profile.max_batch_size + 1))
    alpha_ns, beta_ns = profile.line_ns()
    latencies = [
        Line("profile", sizes, [profile.latency_ns(size) / _NS_PER_MS for size in sizes]),
        Line("line", sizes, [(alpha_ns * size + beta_ns) / _NS_PER_MS for size in sizes]),
    ]
    rates = [size * _NS_PER_S / profile.latency_ns(size) for size in sizes]
    return Drawing(
        f"{beta_ns / _NS_PER_MS:.3g} + {alpha_ns / _NS_PER_MS:.3g} b ms",
        [
            Panel("batch size", "latency, ms", latencies),
            Panel("batch size", "items per second", [Line("profile", sizes, rates)]),
        ],
    )


def _latency(arguments: argparse.Namespace) -> Drawing:
    """Over all requests: a line ends below 1 if some were not answered."""
    setup = Setup.of(arguments)
    makers = policies(arguments.policy, setup.profile)
    stream = stream_of(arguments, setup)
    lines = [_distribution(name, maker, setup, stream) for name, maker in makers.items()]
    panel = Panel("latency, ms", "requests answered within it", lines, is_share=True)
    return Drawing(f"{device_text(setup)}; {stream_text(stream)}", [panel])


def _distribution(name: str, maker: RuleMaker, setup: Setup, stream: Sequence[Request]) -> Line:
    outcome = setup.run(maker, stream)
    latencies_ns = sorted(end_ns - request.arrival_ns for request, end_ns in outcome.answered)
    shares = [number / _QUANTILES for number in range(_QUANTILES + 1)]
    answered = len(latencies_ns) / len(stream)
    return Line(
        name,
        [percentile(latencies_ns, share) / _NS_PER_MS for share in shares],
        [share * answered for share in shares],
    )


def _load(arguments: argparse.Namespace) -> Drawing:
    if arguments.trace or arguments.rate:
        raise ConfigError("`plot load` makes its own arrivals: use --loads, not --trace or --rate")
    setup = Setup.of(arguments)
    makers = policies(arguments.policy, setup.profile)
    slo_ns = slo_ns_of(arguments)
    capacity_qps = setup.capacity_qps(slo_ns)
    loads = sorted(arguments.loads)
    streams = [made_up(arguments, load * capacity_qps) for load in loads]
    lines = []
    for number, (name, maker) in enumerate(makers.items(), start=1):
        if not arguments.json:
            say(f"[{number}/{len(makers)}] {name}")
        violations = [_violations(setup, maker, stream) for stream in streams]
        lines.append(Line(name, loads, violations))
    panel = Panel(f"load, of {capacity_qps:.4g}/s", "violations", lines, is_share=True)
    return Drawing(f"{device_text(setup)}; SLO {slo_ns / _NS_PER_MS:g} ms", [panel])


def _violations(setup: Setup, maker: RuleMaker, stream: Sequence[Request]) -> float:
    return Report.of(setup.run(maker, stream), devices=setup.devices).violation_ratio


_DRAWINGS: dict[str, Callable[[argparse.Namespace], Drawing]] = {
    "profile": _profile,
    "latency": _latency,
    "load": _load,
}
