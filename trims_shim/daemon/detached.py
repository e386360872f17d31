"""Entry of a daemon that a client started: standard streams go to the log, nobody is our parent."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["main"]


def main(report_descriptor: int) -> None:
    """Run the daemon and exit with its status."""
    os.set_inheritable(report_descriptor, False)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    from trims_shim.daemon.main import run

    sys.exit(run(report_descriptor=report_descriptor))
