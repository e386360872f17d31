"""What the daemon's lines look like, where systemd's journal takes them and elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

_PROGRAM = """
import logging, os
from trims_shim.daemon.logs import log_to

status = os.fstat(2)
os.environ["JOURNAL_STREAM"] = os.environ["STREAM"].format(status.st_dev, status.st_ino)
log_to(logging.StreamHandler())
logger = logging.getLogger("trims_shim.daemon")
logger.debug("not of interest")
logger.info("serves")
logger.warning("is full")
try:
    raise ValueError("a bug")
except ValueError:
    logger.exception("failed")
"""


def _lines(stream: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"STREAM": stream},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr.splitlines()


def test_each_line_in_the_journal_has_its_priority() -> None:
    lines = _lines("{}:{}")
    assert lines[:3] == ["<6>serves", "<4>is full", "<3>failed"]
    assert lines[-1] == "<3>ValueError: a bug"
    assert all(line.startswith("<3>") for line in lines[2:])


@pytest.mark.parametrize("stream", ["", "1{}:{}", "{}:1{}"], ids=["none", "device", "inode"])
def test_elsewhere_lines_have_time_process_and_level(stream: str) -> None:
    lines = _lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ \d+ INFO serves", lines[0])
    assert lines[1].endswith(" WARNING is full")
    assert lines[-1] == "ValueError: a bug"
