"""Arguments of ``trims batch profile``, ``simulate`` and ``plot``; imports nothing heavy."""

from __future__ import annotations

import argparse

from trims_shim.cli.arguments import (
    Commands,
    add_command,
    add_item,
    add_output,
    add_picture,
    add_sizes,
)
from trims_shim.cli.values import count, line, not_negative, positive, shares

__all__ = ["add_batch"]

_ARRIVALS = ("poisson", "uniform", "gamma", "bursty")
_PLOTS = {
    "profile": "latency and throughput over the batch size",
    "latency": "how many requests are answered within which time, for each policy",
    "load": "the share of violations over the load, for each policy",
}
_EXAMPLE = """trims batch profile app:classify --shape 3,224,224 -o classify.json
  trims batch simulate --profile classify.json --slo-ms 100 --load 0.8
  trims batch plot load --profile classify.json --slo-ms 100 -o load.png"""


def add_batch(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``trims batch`` and its own commands."""
    batch = add_command(
        commands,
        "batch",
        "batch",
        "measure batches of a function; try batching policies on them",
        _EXAMPLE,
        has_json=False,
    )
    inner = batch.add_subparsers(metavar="COMMAND", required=True)
    _add_profile(inner)
    _add_simulate(inner)
    _add_plot(inner)


def _add_profile(commands: Commands[argparse.ArgumentParser]) -> None:
    profile = add_command(
        commands,
        "profile",
        "batch_profile:profile",
        "measure how long batches of a function take",
        "trims batch profile app:classify --shape 3,224,224 -o classify.json",
    )
    profile.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="a function of a batch, or one that is decorated with `batched`",
    )
    add_item(
        profile,
        item="without arguments that makes one; once for each argument",
        shape="",
    )
    add_sizes(profile, largest=32, repeats=20)
    add_output(profile, use="batched(profile=FILE)")


def _add_simulate(commands: Commands[argparse.ArgumentParser]) -> None:
    simulate = add_command(
        commands,
        "simulate",
        "batch:simulate",
        "compare batching policies on made-up arrivals or on a trace",
        "trims batch simulate --line 2,20 --slo-ms 100 --rate 200 --cv 3",
    )
    _add_experiment(simulate)
    _add_load(simulate)


def _add_plot(commands: Commands[argparse.ArgumentParser]) -> None:
    plot = add_command(
        commands,
        "plot",
        "batch_plot:plot",
        "draw a profile or a comparison of policies (needs matplotlib)",
        "trims batch plot load --line 2,20 --slo-ms 100 -o load.png",
    )
    what = "; ".join(f"{name}: {text}" for name, text in _PLOTS.items())
    plot.add_argument("what", choices=tuple(_PLOTS), metavar="WHAT", help=what)
    add_picture(plot)
    _add_experiment(plot)
    _add_load(plot)
    plot.add_argument(
        "--loads",
        type=shares,
        default=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3),
        metavar="0.2,0.4",
        help="what `plot load` draws, as shares of the capacity; default 0.2 to 1.3",
    )


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    device = parser.add_mutually_exclusive_group(required=True)
    device.add_argument("--profile", metavar="FILE", help="made by `trims batch profile`")
    device.add_argument(
        "--line",
        type=line,
        metavar="ALPHA,BETA",
        help="a batch of b takes ALPHA * b + BETA milliseconds",
    )
    parser.add_argument(
        "--slo-ms",
        type=positive,
        metavar="MS",
        help="the time in which a request is to be answered; default: the trace's, or 100",
    )
    parser.add_argument(
        "--max-batch-size",
        type=count,
        metavar="N",
        help="default: the profile's; 32 with --line",
    )
    parser.add_argument(
        "--devices", type=count, default=1, metavar="N", help="batches that run at once; default 1"
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help="one to try, with its options; give it several times for several; default: all",
    )
    parser.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="how many are simulated; default: all of a trace, or 20000",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of all that is random; default 1"
    )
    parser.add_argument(
        "--jitter-ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="timers are late and batches take longer by so much in the mean; default 0",
    )
    parser.add_argument(
        "--spread",
        type=not_negative,
        default=0.0,
        metavar="SIGMA",
        help="how much the time of a batch varies: standard deviation of its logarithm; default 0",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    arrivals = parser.add_argument_group("arrivals")
    load = arrivals.add_mutually_exclusive_group()
    load.add_argument("--rate", type=positive, metavar="QPS", help="requests per second")
    load.add_argument(
        "--load",
        type=positive,
        default=0.6,
        metavar="SHARE",
        help="share of the most that the devices answer within the SLO; default 0.6",
    )
    load.add_argument(
        "--trace",
        action="append",
        metavar="FILE",
        help="lines of `arrival_ms` or `arrival_ms,level,slo_ms` (a level is ignored); several "
        "files are merged",
    )
    arrivals.add_argument(
        "--arrivals", choices=_ARRIVALS, help="how irregular they are; default poisson"
    )
    arrivals.add_argument(
        "--cv",
        type=positive,
        metavar="CV",
        help="coefficient of variation of the times between requests; implies gamma arrivals",
    )
