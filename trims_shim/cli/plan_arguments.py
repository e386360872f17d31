"""Arguments of ``trims plan`` and its commands; imports nothing heavy."""

from __future__ import annotations

import argparse

from trims_shim.cli.arguments import Commands, add_command, add_item, add_output
from trims_shim.cli.values import count, counts, not_negative, positive

__all__ = ["add_plan"]

_EXAMPLE = """trims plan proteus cluster.toml
  trims plan simulate cluster.toml --cv 3 --replan
  trims plan herd herd.toml --json
  trims plan ensemble app:members --shape 3,224,224 --devices cpu:0,cpu:1

The files: docs/planning.md and docs/ensembles.md."""


def add_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``trims plan`` and its own commands."""
    plan = add_command(
        commands,
        "plan",
        "plan",
        "plan which models run on which devices; try plans",
        _EXAMPLE,
        has_json=False,
    )
    inner = plan.add_subparsers(metavar="COMMAND", required=True)
    _add_proteus(inner)
    _add_simulate(inner)
    _add_herd(inner)
    _add_ensemble(inner)


def _add_proteus(commands: Commands[argparse.ArgumentParser]) -> None:
    proteus = add_command(
        commands,
        "proteus",
        "plan:proteus",
        "choose the variants of models that are as accurate as the demand allows",
        "trims plan proteus cluster.toml --headroom 2",
    )
    _add_problem(proteus)
    _add_headroom(proteus)
    _add_solver(proteus)


def _add_simulate(commands: Commands[argparse.ArgumentParser]) -> None:
    simulate = add_command(
        commands,
        "simulate",
        "plan:simulate",
        "plan, and answer made-up arrivals or a trace with that plan",
        "trims plan simulate cluster.toml --trace resnet=resnet.txt --replan --load-s 5",
    )
    _add_problem(simulate)
    _add_headroom(simulate)
    _add_solver(simulate)
    simulate.add_argument(
        "--policy",
        default="auto",
        metavar="NAME[:OPTION=VALUE,...]",
        help="how each device batches, as in `trims batch simulate`; default auto",
    )
    simulate.add_argument(
        "--trace",
        action="append",
        metavar="FAMILY=FILE",
        help="lines of `arrival_ms`; give it once for each family; default: made-up arrivals at "
        "the demand",
    )
    simulate.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="length of made-up arrivals; default 60",
    )
    simulate.add_argument(
        "--cv",
        type=positive,
        default=1.0,
        metavar="CV",
        help="coefficient of variation of the times between made-up requests of a family; default "
        "1 (Poisson)",
    )
    simulate.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of all that is random; default 1"
    )
    simulate.add_argument(
        "--replan",
        action="store_true",
        help="plan again every --period-s, and when demand jumps, for the demand seen by then",
    )
    simulate.add_argument("--period-s", type=positive, default=10.0, metavar="S", help="default 10")
    simulate.add_argument(
        "--load-s",
        type=not_negative,
        default=0.05,
        metavar="S",
        help="time in which a device loads another variant; default 0.05, for weights that are in "
        "memory already",
    )


def _add_herd(commands: Commands[argparse.ArgumentParser]) -> None:
    herd = add_command(
        commands,
        "herd",
        "plan:herd",
        "divide streams of requests and devices into groups, so that bursts do least harm",
        "trims plan herd herd.toml",
    )
    _add_problem(herd)
    herd.add_argument(
        "--of-paper",
        action="store_true",
        help="groups of the highest burst tolerance, however busy others become",
    )
    _add_solver(herd)


def _add_ensemble(commands: Commands[argparse.ArgumentParser]) -> None:
    ensemble = add_command(
        commands,
        "ensemble",
        "plan_ensemble:ensemble",
        "measure the members of an ensemble, and choose their devices and batch sizes",
        "trims plan ensemble app:members --shape 3,224,224 -o ensemble.json\n"
        "  trims plan ensemble ensemble.json",
    )
    ensemble.add_argument(
        "members",
        metavar="MODULE:NAME|FILE",
        help="a list of trims_shim.ensemble.Member, to be measured with --item or --shape; or what "
        "was measured, a .json file",
    )
    add_item(
        ensemble,
        item="without arguments that makes one; once for each part of a sample",
        shape="",
        is_required=False,
    )
    ensemble.add_argument(
        "--devices",
        metavar="cpu:0-3,cuda:0",
        help="where members may run: cpu, cpu:CORES, cuda:INDEX; default: GPUs and the processor",
    )
    ensemble.add_argument(
        "--batch-sizes",
        type=counts,
        metavar="8,16,32",
        help="those to choose from; default 8,16,32,64,128",
    )
    ensemble.add_argument("--repeats", type=count, metavar="N", help="runs of each size; default 3")
    ensemble.add_argument(
        "--tries",
        type=count,
        default=10_000,
        metavar="N",
        help="allocations that are estimated; default 10000",
    )
    add_output(ensemble, use="trims plan ensemble FILE")


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="FILE", help="TOML, or JSON if its name ends in .json")


def _add_headroom(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--headroom",
        type=positive,
        default=1.5,
        metavar="FACTOR",
        help="how many times the demand can be answered; default 1.5",
    )


def _add_solver(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gap",
        type=not_negative,
        default=1e-3,
        metavar="SHARE",
        help="of the best plan's worth that may be lost to find one sooner; default 0.001",
    )
    parser.add_argument(
        "--time-limit-s",
        type=positive,
        default=10.0,
        metavar="S",
        help="for each of a few programmes; default 10",
    )
