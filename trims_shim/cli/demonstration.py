"""``trims demo``: arguments of :mod:`trims_shim.cli.demo`."""

from __future__ import annotations

import argparse

from trims_shim.cli.demo import run_demo
from trims_shim.cli.exits import Exit

__all__ = ["demo"]


def demo(arguments: argparse.Namespace) -> Exit:
    """Run the demonstration."""
    return Exit(
        run_demo(
            size_mb=arguments.size_mb, processes=arguments.processes, json=bool(arguments.json)
        )
    )
