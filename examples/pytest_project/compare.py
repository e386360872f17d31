"""Measure how much faster this test suite gets with the cache: ``python compare.py [--rounds N]``.

Runs the suite without and with ``--trims``, alternating, after an uncounted run, which writes the
checkpoint. Every run with ``--trims`` starts a daemon of its own and stops it, so
its first load is a cold one; that is in the numbers. Prints medians of the time of whole pytest
processes, and of the tests alone as pytest reports them.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
SUMMARY = re.compile(r"(\d+) passed in ([\d.]+)s")
LIMIT_S = 300


def run_suite(*options: str) -> tuple[float, float, int]:
    """(seconds of the process, seconds of the session, tests passed)."""
    command = [sys.executable, "-m", "pytest", "-q", *options]
    environment = os.environ | {"TRIMS_ENABLED": "1" if options else "0"}
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    elapsed = time.perf_counter() - start
    found = SUMMARY.search(done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return elapsed, float(found[2]), int(found[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds has to be 1 or more")
    without, with_trims = [], []
    run_suite("--trims")
    for _ in range(rounds):
        without.append(run_suite())
        with_trims.append(run_suite("--trims"))

    tests = {run[2] for run in without + with_trims}
    print(f"{'/'.join(map(str, sorted(tests)))} tests passed in every run; medians of {rounds}")
    for title, index in (("whole process", 0), ("the tests", 1)):
        slow = statistics.median(run[index] for run in without)
        fast = statistics.median(run[index] for run in with_trims)
        print(f"{title:14} {slow:6.2f} s without, {fast:6.2f} s with trims: {slow / fast:.1f} x")


if __name__ == "__main__":
    main()
