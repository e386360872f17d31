"""The onnx package's backend tests through onnxruntime.backend, without the shim and with it.

Node and model tests whose data ship with the package; each must pass, fail or be skipped alike,
with the same bits, while the model is new to the daemon and when it is prepared.

python -m tests.transparency.onnx_backend                      all of them: hours of one processor's
                                                               idle time, mostly preparations
python -m tests.transparency.onnx_backend --match '^test_lstm' some
python -m tests.transparency.onnx_backend --every 40           each fortieth
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import child, shim
from .registry import begin_in_child

__all__ = ["Results", "main", "problems", "run_both"]

Results = dict[str, dict[str, Any]]
"""pass -> test -> what was seen: ``outcome``, ``detail``, ``outputs``; of the shim ``served`` and
``reasons``."""

_CHUNK = 25
"""The daemon refuses to prepare more than some models at a time."""
_NOT_COMPARED = {"served", "reasons"}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--match", default="", help="regular expression of test names")
    parser.add_argument("--every", type=int, default=1, help="only each n-th of them")
    parser.add_argument("--start", type=int, default=0, help="from this one on")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for each side")
    parser.add_argument("--report", help="write what was seen to this file (JSON)")
    options = parser.parse_args(arguments)
    selection = {"match": options.match, "every": options.every, "start": options.start}
    with shim.SocketDirectory() as sockets:
        original, shimmed = run_both(selection, sockets, options.timeout)
    if options.report:
        Path(options.report).write_text(json.dumps([original, shimmed], indent=1))
    lines = problems(original, shimmed)
    for line in lines:
        print(line)
    for label, seen in {"without": original["first"], **shimmed}.items():
        print(f"{label}: {_count(seen)}")
    print(f"{len(lines)} differ")
    return int(bool(lines))


def _count(seen: dict[str, Any]) -> dict[str, int]:
    counts = {"tests": len(seen)}
    for each in seen.values():
        counts[each["outcome"]] = counts.get(each["outcome"], 0) + 1
        for event in ["served"] * each.get("served", False) + each.get("reasons", []):
            counts[event] = counts.get(event, 0) + 1
    return counts


def problems(original: Results, shimmed: Results) -> list[str]:
    """What differs, as lines. What differs between two runs without the shim is no proof."""
    lines = []
    for label, tests in shimmed.items():
        for name, seen in tests.items():
            expected, again = original["first"].get(name), original["second"].get(name)
            if expected is None or again is None:
                lines.append(f"{name} ({label}): not run without the shim")
                continue
            for key in sorted(set(seen) | set(expected)):
                is_stable = expected.get(key) == again.get(key)
                if key not in _NOT_COMPARED and is_stable and expected.get(key) != seen.get(key):
                    lines.append(f"{name} ({label}): {expected.get(key)} -> {seen.get(key)}")
    missing = set(original["first"]) - set(shimmed["second"])
    return [*lines, *(f"{name}: not run with the shim" for name in sorted(missing))]


def run_both(selection: dict[str, Any], sockets: Path, timeout_s: float) -> tuple[Results, Results]:
    """(without the shim, with it), at the same time. Raises RuntimeError when a side fails."""
    with tempfile.TemporaryDirectory(prefix="backend-") as directory:
        sides = {str(Path(directory, "without")): "", str(Path(directory, "with")): str(sockets)}
        command = [sys.executable, "-m", "tests.transparency.onnx_backend"]
        with (Path(directory) / "output.txt").open("w+b") as output:
            status = subprocess.run(
                [*command, json.dumps({**selection, "sides": sides})],
                cwd=shim.ROOT,
                env=shim.environment(None),
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status != 0:
            raise RuntimeError(f"the backend tests ended with {status}: {text[-3000:]}")
        original, shimmed = (json.loads(Path(side, "result.json").read_text()) for side in sides)
        return original, shimmed


# --- the process that runs the tests --------------------------------------------------------------


def _child(request: dict[str, Any]) -> None:
    """Both sides, each in a process forked before anything imports onnxruntime or the shim."""
    from onnx.backend.test.loader import load_model_tests

    warnings.simplefilter("ignore")
    load_model_tests(kind="node")  # computes the data of all, which take most of the time, once
    gc.freeze()
    pids = [_fork_side(request, Path(each), where) for each, where in request["sides"].items()]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(int(any(statuses)))


def _fork_side(request: dict[str, Any], directory: Path, sockets: str) -> int:
    def run() -> None:
        child.die_with_parent()
        directory.mkdir()
        variables = shim.environment(Path(sockets) if sockets else None, min_bytes="1")
        os.environ.clear()
        os.environ.update(variables, ONNX_HOME=str(directory))
        (directory / "result.json").write_text(json.dumps(_run_side(request, sockets)))

    return begin_in_child(run)


def _run_side(request: dict[str, Any], sockets: str) -> Results:
    if sockets:
        shim.activate()
    tests = _tests(request["match"], slice(request["start"], None, request["every"]))
    names = sorted(tests)
    results: Results = {"first": {}, "second": {}}
    for start in range(0, len(names), _CHUNK):
        chunk = names[start : start + _CHUNK]
        for label in results:
            results[label] |= _run_forked(tests, chunk)
            if sockets:
                shim.settle(Path(sockets), timeout_s=1800)
    return results


def _tests(match: str, part: slice) -> dict[str, unittest.TestCase]:
    """The CPU's tests; those of other devices are skipped by every backend here."""
    from onnx.backend.test import BackendTest

    runner = BackendTest(_recording_backend(), __name__)
    found = {}
    for name, case in runner.test_cases.items():
        for method in unittest.defaultTestLoader.getTestCaseNames(case):
            if method.endswith("_cpu") and re.search(match, method):
                found[f"{name}.{method}"] = case(method)
    return {name: found[name] for name in sorted(found)[part]}


_outputs: list[str] = []


def _recording_backend() -> Any:
    """onnxruntime's backend; what a test's model computes is noted."""
    from onnxruntime.backend.backend import OnnxRuntimeBackend

    class Recording(OnnxRuntimeBackend):  # type: ignore[misc]
        @classmethod
        def prepare(cls, model: Any, device: Any = None, **keywords: Any) -> Any:
            return _Recorded(OnnxRuntimeBackend.prepare(model, device, **keywords))

    return Recording


class _Recorded:
    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def run(self, inputs: Any, **keywords: Any) -> Any:
        outputs = self._prepared.run(inputs, **keywords)
        _outputs.append(_digest(outputs))
        return outputs


def _digest(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(" ".join(map(_digest, value)).encode()).hexdigest()[:16]
    if getattr(value, "dtype", None) is not None and not value.dtype.hasobject:
        described = f"{value.dtype} {value.shape} ".encode() + value.tobytes()
        return hashlib.sha256(described).hexdigest()[:16]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _run_forked(tests: dict[str, unittest.TestCase], names: Sequence[str]) -> dict[str, Any]:
    """Run them in a forked process; alone each, when they end it together."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            seen = {name: _run_test(tests[name]) for name in names}
            with open(writing, "wb") as pipe:
                pipe.write(json.dumps(seen).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if data and status == 0:
        seen_there: dict[str, Any] = json.loads(data)
        return seen_there
    if len(names) == 1:
        return {names[0]: {"outcome": "ended", "detail": str(status)}}
    return {key: seen for name in names for key, seen in _run_forked(tests, [name]).items()}


def _run_test(test: unittest.TestCase) -> dict[str, Any]:
    _outputs.clear()
    before = shim.counters()
    result = unittest.TestResult()
    with _silence():
        test.run(result)
    seen: dict[str, Any] = {"outcome": "passed", "detail": "", "outputs": list(_outputs)}
    for outcome, found in (("failed", result.failures), ("error", result.errors)):
        if found:
            seen |= {"outcome": outcome, "detail": _last_line(found[0][1])}
    if result.skipped:
        seen |= {"outcome": "skipped", "detail": result.skipped[0][1]}
    after = shim.counters()
    changed = [key for key in after if after[key] != before.get(key, 0)]
    reasons = [key.partition(":")[2] for key in changed if key.startswith("fallbacks:")]
    return {**seen, "served": "served" in changed, "reasons": reasons}


def _last_line(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+", "<>", text.strip().splitlines()[-1])[:500]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing the library writes to standard error is of interest here."""
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _child(json.loads(sys.argv[1]))
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
