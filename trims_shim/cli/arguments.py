"""How every command of ``trims`` is described to argparse; imports nothing heavy."""

from __future__ import annotations

import argparse

__all__ = ["Commands", "add_command"]

Commands = argparse._SubParsersAction


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
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
