"""Arguments of ``trims stage profile`` and ``plot``; imports nothing heavy."""

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
from trims_shim.cli.values import count, counts, positive

__all__ = ["add_stage"]

_LENGTH = "N"
_EXAMPLE = """trims stage profile app:unet --shape 3,256,256 -o unet.json
  trims stage profile app:bert --shape N --dtype int64 --lengths 16,64,256 \\
      -o bert.json
  trims stage plot bert.json -o bert.png"""


def add_stage(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``trims stage`` and its own commands."""
    stage = add_command(
        commands,
        "stage",
        "stage",
        "cut a model into stages; measure what batches gain from that",
        _EXAMPLE,
        has_json=False,
    )
    inner = stage.add_subparsers(metavar="COMMAND", required=True)
    _add_profile(inner)
    _add_plot(inner)


def _add_profile(commands: Commands[argparse.ArgumentParser]) -> None:
    profile = add_command(
        commands,
        "profile",
        "stage:profile",
        "measure every stage of a model at batch sizes from 1 on",
        "trims stage profile app:unet --shape 3,256,256 --stages 6 -o unet.json",
    )
    profile.add_argument(
        "model",
        metavar="MODEL",
        help="MODULE:NAME of a StagedModel, of a torch module, of a batcher with stages, or of a "
        "function without arguments that makes one; or an .onnx file",
    )
    _add_items(profile)
    add_sizes(profile, largest=64, repeats=5)
    profile.add_argument(
        "--limit-s",
        type=positive,
        default=600.0,
        metavar="SECONDS",
        help="begin no new batch after that; default 600",
    )
    profile.add_argument(
        "--stages",
        type=count,
        metavar="N",
        help="into how many to cut a module or an .onnx file; default: tried out",
    )
    profile.add_argument(
        "--lanes",
        action="store_true",
        help="measure also two batches at once, for `Batcher(..., devices=2)`: the second is used "
        "where that gains",
    )
    add_output(profile, use="Batcher(model, profile=FILE)")


def _add_items(profile: argparse.ArgumentParser) -> None:
    add_item(
        profile,
        item="that makes one; once for each argument. With --lengths it is called with each length",
        shape=f". {_LENGTH} stands for each of --lengths",
        read_shape=_shape,
        device=", and whose work to wait for",
    )
    profile.add_argument(
        "--lengths",
        type=counts,
        metavar="16,64,256",
        help="of items: measures each, and says whether it pays to batch them apart",
    )
    profile.add_argument(
        "--collate",
        choices=("auto", "list", "stack", "concatenate"),
        help="how items become a batch; default: the batcher's own, or auto",
    )


def _add_plot(commands: Commands[argparse.ArgumentParser]) -> None:
    plot = add_command(
        commands,
        "plot",
        "stage_plot:plot",
        "draw the latency and the throughput of each stage by batch size (needs matplotlib)",
        "trims stage plot unet.json -o unet.png",
    )
    plot.add_argument("profile", metavar="FILE", help="made by `trims stage profile`")
    add_picture(plot)
    plot.add_argument(
        "--length", type=count, metavar="N", help="of the items; default: the longest measured"
    )


def _shape(text: str) -> tuple[int | None, ...]:
    """``3,224,224``, or ``N,8``: None is where the length goes."""
    return tuple(None if part == _LENGTH else count(part) for part in text.split(","))
