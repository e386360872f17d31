"""Runs many cases with few interpreters, with and without the shim, both sides at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import shim
from .registry import Case

__all__ = ["PASSES", "Results", "run", "run_both"]

PASSES = ("first", "second")
"""Of a case over the same directory: a first load, then one of what is resident already."""

Results = dict[str, dict[str, Any]]
"""case name -> pass -> observation"""

_SECONDS_PER_BATCH = 1800
"""Each case has a limit of its own; some machines take four times as long as others."""


def run(
    selected: Iterable[Case], socket_directory: Path | None, passes: tuple[str, ...]
) -> Results:
    """Observations of these cases, without the shim where ``socket_directory`` is None."""
    batches: dict[tuple[str, bool], list[Case]] = {}
    for case in selected:
        batches.setdefault((case.batch, case.early), []).append(case)
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="transparency-") as directory:
        for (_, early), cases in batches.items():
            request = {
                "cases": [case.name for case in cases],
                "early": early,
                "passes": passes,
                "shim": socket_directory is not None,
                "directory": f"{directory}/work",
                "is_prepared": cases[0].is_prepared,  # one batch, one answer
            }
            environment = shim.environment(socket_directory, min_bytes=cases[0].min_bytes)
            results |= _run_batch(request, Path(directory), environment)
    return results


def _run_batch(request: dict[str, Any], directory: Path, environment: dict[str, str]) -> Results:
    request_path, result_path = directory / "request.json", directory / "result.json"
    request_path.write_text(json.dumps(request))
    result_path.unlink(missing_ok=True)
    # By its full name, whatever pytest calls this package: spawned grandchildren import it, too.
    module = "tests.transparency.child"
    command = [sys.executable, "-m", module, str(request_path), str(result_path)]
    # Without a terminal or pipe of ours: a daemon that a case starts must not keep us waiting.
    with (directory / "output.txt").open("w+b") as output:
        try:
            status: object = subprocess.run(
                command,
                cwd=shim.ROOT,
                env=environment,
                timeout=_SECONDS_PER_BATCH,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as error:
            status = error
        output.seek(0)
        text = output.read().decode(errors="replace")
    if result_path.exists():
        results: Results = json.loads(result_path.read_text())
        return results
    failed = {"failed": f"the batch ended with {status}: {text}"}
    return {name: dict.fromkeys(request["passes"], failed) for name in request["cases"]}


def run_both(selected: list[Case], sockets: Path | None) -> tuple[Results, Results | None]:
    """(first pass without the shim, both with it or None where there is none), side by side."""
    with ThreadPoolExecutor(2) as pool:
        original = pool.submit(run, selected, None, PASSES[:1])
        shimmed = pool.submit(run, selected, sockets, PASSES) if sockets is not None else None
        return original.result(), shimmed.result() if shimmed is not None else None
