"""Write the results of a run of scripts/gpu_check.sh as one JSON file. Standard library only.

``gpu_report.py WORK OUTPUT`` collects steps, tests and verdicts of experiments from the files in
the working directory; it is called again after every step. ``gpu_report.py --missing WHEELS``
prints the wheels whose package is not installed, and ``gpu_report.py --imports`` fails if a needed
module cannot be imported.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NEEDED = (
    *("zmq", "msgpack", "blake3", "torch", "safetensors"),
    # Without it nothing is shared, and every comparison would compare torch with itself.
    "pynvml",
    *("pytest", "pytest_timeout", "hypothesis"),
)
LIBRARIES = (
    "torch",
    "triton",
    "safetensors",
    "fastsafetensors",
    "transformers",
    "nvidia-ml-py",
    "pyzmq",
    "msgpack",
    "blake3",
    "numpy",
    "onnxruntime-gpu",
)
LOG_LINES = 60
"""Lines at the end of a failed step's output, which say why it failed."""


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def lines_of(path: Path) -> list[Result]:
    """The objects of a file with one JSON object per line; leaves out a torn last line."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def steps_of(work: Path) -> list[Result]:
    """The steps so far, a failed one with the end of its output."""
    steps = lines_of(work / "steps.jsonl")
    for step in steps:
        log = work / f"{step['step']}.log"
        if step["status"] and log.exists():
            step["output"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return steps


def collect(work: Path) -> Result:
    """All results so far."""
    tests = lines_of(work / "tests.jsonl")
    outcomes = [test["outcome"] for test in tests]
    smi = work / "nvidia-smi.log"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "is_dry_run": not smi.exists(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "nvidia_smi": smi.read_text(errors="replace").splitlines() if smi.exists() else [],
        "steps": steps_of(work),
        "test_outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "experiments": lines_of(work / "experiments.jsonl"),
        "tests": tests,
    }


def missing(wheels: Path) -> list[str]:
    """Paths of wheels for this Python whose distribution is not installed."""
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        if not is_for_this_python(wheel.name):
            print(f"{wheel.name} is for another Python", file=sys.stderr)
            continue
        try:
            metadata.version(wheel.name.split("-")[0])
        except metadata.PackageNotFoundError:
            found.append(str(wheel.absolute()))
    return found


def is_for_this_python(wheel: str) -> bool:
    """Whether the tags in a wheel's name fit (PEP 425); pip checks the platform."""
    *_, python, abi, _ = wheel.removesuffix(".whl").split("-")
    major, minor = sys.version_info[:2]
    for tag in python.split("."):
        if tag in (f"py{major}", f"py{major}{minor}", f"cp{major}{minor}"):
            return True
        if abi == "abi3" and tag.startswith(f"cp{major}") and int(tag[3:]) <= minor:
            return True
    return False


def unimportable() -> list[str]:
    """Needed modules that cannot be imported, each with the reason."""
    problems = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name} cannot be imported: {error}")
    return problems


def main(arguments: list[str]) -> int:
    """See the module."""
    if arguments[:1] == ["--missing"]:
        print("\n".join(missing(Path(arguments[1]))), end="")
        return 0
    if arguments[:1] == ["--imports"]:
        problems = unimportable()
        print("\n".join(problems))
        return 1 if problems else 0
    work, output = map(Path, arguments)
    partial = output.with_name(f".{output.name}")
    partial.write_text(json.dumps(collect(work), indent=1) + "\n")
    partial.replace(output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
