"""Nothing is lost and nothing left behind when everything happens at once, for a few seconds.

The long form: ``python -m benchmarks.batching_soak``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOAK_S, DEADLINE_S = 5, 150


def test_short_soak() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.batching_soak", "--seconds", str(SOAK_S)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)["counts"]
    for kind in ("answered", "cancelled", "forks", "given up", "poisoned", "RequestDropped"):
        assert counts[kind] > 0, counts
