"""``trims batch plot``: a profile, latencies, or violations over the load, as a picture.

Drawn with matplotlib, which is no dependency of this package. ``--json`` prints what would be
drawn, and needs none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from trims_shim.batching.protocol import Request
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Report, percentile
from trims_shim.cli.batch import device_text, stream_of, stream_text
from trims_shim.cli.batch_setup import Setup, made_up, policies, slo_ns_of
from trims_shim.cli.exits import Exit
from trims_shim.cli.text import print_json
from trims_shim.errors import ConfigError

__all__ = ["plot"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_QUANTILES = 200
_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class _Panel:
    x_label: str
    y_label: str
    lines: Sequence[_Line]
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Panels side by side."""

    title: str
    panels: Sequence[_Panel]


def plot(arguments: argparse.Namespace) -> Exit:
    """Draw ``arguments.what`` into a file, or print its data."""
    if not arguments.json:
        _check(arguments.output)
    drawing = _DRAWINGS[arguments.what](arguments)
    if arguments.json:
        print_json(asdict(drawing))
        return Exit.OK
    _draw(drawing, arguments.output)
    print(f"drawn: {arguments.output}")
    return Exit.OK


def _check(path: str | None) -> None:
    """Before the work, not after it."""
    if not path or os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"--output has to name a file that ends in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib draws the picture, and is not installed: run `pip install matplotlib`, "
            "or print the data with --json"
        )


# --- what is drawn --------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> _Drawing:
    profile = Setup.of(arguments).profile
    sizes = list(range(1, profile.max_batch_size + 1))
    alpha_ns, beta_ns = profile.line_ns()
    latencies = [
        _Line("profile", sizes, [profile.latency_ns(size) / _NS_PER_MS for size in sizes]),
        _Line("line", sizes, [(alpha_ns * size + beta_ns) / _NS_PER_MS for size in sizes]),
    ]
    rates = [size * _NS_PER_S / profile.latency_ns(size) for size in sizes]
    return _Drawing(
        f"{beta_ns / _NS_PER_MS:.3g} + {alpha_ns / _NS_PER_MS:.3g} b ms",
        [
            _Panel("batch size", "latency, ms", latencies),
            _Panel("batch size", "items per second", [_Line("profile", sizes, rates)]),
        ],
    )


def _latency(arguments: argparse.Namespace) -> _Drawing:
    """Over all requests: a line ends below 1 where some were not answered."""
    setup = Setup.of(arguments)
    makers = policies(arguments.policy, setup.profile)
    stream = stream_of(arguments, setup)
    lines = [_distribution(name, maker, setup, stream) for name, maker in makers.items()]
    panel = _Panel("latency, ms", "requests answered within it", lines, is_share=True)
    return _Drawing(f"{device_text(setup)}; {stream_text(stream)}", [panel])


def _distribution(name: str, maker: RuleMaker, setup: Setup, stream: Sequence[Request]) -> _Line:
    outcome = setup.run(maker, stream)
    latencies_ns = sorted(end_ns - request.arrival_ns for request, end_ns in outcome.answered)
    shares = [number / _QUANTILES for number in range(_QUANTILES + 1)]
    answered = len(latencies_ns) / len(stream)
    return _Line(
        name,
        [percentile(latencies_ns, share) / _NS_PER_MS for share in shares],
        [share * answered for share in shares],
    )


def _load(arguments: argparse.Namespace) -> _Drawing:
    if arguments.trace or arguments.rate:
        raise ConfigError("`plot load` makes its own arrivals: use --loads, not --trace or --rate")
    setup = Setup.of(arguments)
    makers = policies(arguments.policy, setup.profile)
    slo_ns = slo_ns_of(arguments)
    capacity_qps = setup.capacity_qps(slo_ns)
    loads = sorted(arguments.loads)
    streams = [made_up(arguments, load * capacity_qps) for load in loads]
    lines = [
        _Line(name, loads, [_violations(setup, maker, stream) for stream in streams])
        for name, maker in makers.items()
    ]
    panel = _Panel(f"load, of {capacity_qps:.4g}/s", "violations", lines, is_share=True)
    return _Drawing(f"{device_text(setup)}; SLO {slo_ns / _NS_PER_MS:g} ms", [panel])


def _violations(setup: Setup, maker: RuleMaker, stream: Sequence[Request]) -> float:
    return Report.of(setup.run(maker, stream), devices=setup.devices).violation_ratio


_DRAWINGS: dict[str, Callable[[argparse.Namespace], _Drawing]] = {
    "profile": _profile,
    "latency": _latency,
    "load": _load,
}


# --- drawing --------------------------------------------------------------------------------------


def _draw(drawing: _Drawing, path: str) -> None:
    # Not pyplot, which looks for a display and keeps figures.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(drawing.panels), 4.8), layout="constrained")
    figure.suptitle(drawing.title, fontsize="small")
    all_axes = figure.subplots(1, len(drawing.panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, drawing.panels, strict=True):
        for line in panel.lines:
            axes.plot(line.x, line.y, label=line.name)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_ylim(bottom=0, top=1 if panel.is_share else None)
        axes.grid(alpha=0.3)
        if len(panel.lines) > 1:
            axes.legend()
    figure.savefig(path, dpi=150)
