"""How every command of ``trims`` is described to argparse, and options that several share.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trims_shim.cli.values import count, counts, output
from trims_shim.errors import ConfigError
from trims_shim.suggestions import did_you_mean

__all__ = [
    "Commands",
    "Parser",
    "add_command",
    "add_item",
    "add_output",
    "add_picture",
    "add_sizes",
    "refuse",
]

Commands = argparse._SubParsersAction
_WIDTH = 79


class Parser(argparse.ArgumentParser):
    """Guesses what a mistyped word was meant to be, and names the help to read.

    argparse guesses, too, but of choices only, and only from Python 3.14 on.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: a command's own parser knows best what was meant."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if self._subparsers is None:  # else a command's own parser has said it
            # As argparse tells what excludes each other: a value that is not the default itself.
            found.given = {
                name
                for action in self._actions
                if getattr(found, action.dest, action.default) is not action.default
                for name in action.option_strings
            }
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End with the usage and the message."""
        super().error(f"{message}\nMore: `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise where help and version cannot be written, as argparse does not in each Python.

        What is wrong with the arguments is still told by the status if stderr is full.
        """
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            with contextlib.suppress(OSError):
                super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices or ())
            raise


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    command: str,
    help: str,
    example: str,
    *,
    has_json: bool = True,
) -> argparse.ArgumentParser:
    """Add ``trims NAME``, which ``command`` (``module:function`` below ``trims_shim.cli``) runs."""
    parser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(help[0].upper() + help[1:] + ".", _WIDTH),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_item(
    profile: argparse.ArgumentParser,
    *,
    item: str,
    shape: str,
    read_shape: Callable[[str], Any] = counts,
    device: str = "",
    is_required: bool = True,
) -> None:
    """Options for the items of a batch; the keyword arguments are additions to the help."""
    source = profile.add_mutually_exclusive_group(required=is_required)
    source.add_argument(
        "--item",
        action="append",
        metavar="MODULE:NAME",
        help=f"one item, or a function {item}",
    )
    source.add_argument(
        "--shape",
        action="append",
        type=read_shape,
        metavar="3,224,224",
        help=f"random torch tensors of this shape as items; once for each argument{shape}",
    )
    profile.add_argument(
        "--dtype", default="float32", help="data type for --shape; default float32"
    )
    profile.add_argument("--device", default="cpu", help=f"device for --shape{device}; default cpu")


def add_sizes(profile: argparse.ArgumentParser, *, largest: int, repeats: int) -> None:
    """Options for the batch sizes to measure, and how often; with these defaults."""
    sizes = profile.add_mutually_exclusive_group()
    sizes.add_argument(
        "--sizes",
        type=counts,
        metavar="1,2,4,8",
        help="batch sizes to measure; default: powers of two, up to the largest",
    )
    sizes.add_argument(
        "--max-batch-size",
        type=count,
        metavar="N",
        help=f"the largest; default: the batcher's own, or {largest}",
    )
    profile.add_argument(
        "--repeats",
        type=count,
        default=repeats,
        metavar="N",
        help=f"runs of each size; default {repeats}",
    )


def add_output(profile: argparse.ArgumentParser, *, use: str) -> None:
    """An option for the file of measurements, and its use."""
    profile.add_argument(
        "-o", "--output", type=output, metavar="FILE", help=f"save there, for `{use}`"
    )


def add_picture(plot: argparse.ArgumentParser) -> None:
    """An option for the picture's file."""
    plot.add_argument(
        "-o", "--output", type=output, metavar="FILE", help="a .png, .svg or .pdf file"
    )


def refuse(arguments: argparse.Namespace, options: Sequence[str], where: str) -> None:
    """Raise ConfigError if one of ``options`` was given, which have no effect ``where``."""
    if given := [each for each in options if each in arguments.given]:
        verb = "has" if len(given) == 1 else "have"
        raise ConfigError(f"{', '.join(given)} {verb} no effect {where}")
