"""Runs an ONNX model on made-up inputs, and compares what another session computes.

Owns which inputs are tried, for how long, and what a difference means: an output whose bits differ
between runs of the original itself proves nothing. Knows nothing of how a session was made;
sessions are those of onnxruntime's binding.

Called by the process that prepares models (:mod:`trims_shim.daemon.preparer.main`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trims_shim.daemon.preparer import probe_inputs
from trims_shim.daemon.preparer.fingerprints import fingerprint
from trims_shim.daemon.preparer.probe_inputs import FILLINGS, Argument, NoInputs

__all__ = ["EQUAL", "Probe", "Probes", "collect"]

EQUAL = "equal"
_PROBES = 2
"""One row uses other kernels than several rows do."""
_RUNS = 2
"""The second shows whether a model gives the same twice, and runs in memory that was planned."""
_RUN_LIMIT_S = 30.0
_COLLECT_LIMIT_S = 60.0
"""Of processor time: at low priority much time may pass in which nothing is computed."""
_PATIENCE = 4
"""A model that has run within the limit gets this many times as long when it is compared."""
_CLOCK_FACTOR = 20
"""The clock's limit is this much longer, for a model that waits and computes nothing."""
_POLL_S = 0.1
_QUIET = 4
_LACKING = "No corresponding Numpy type"


@dataclass(frozen=True, slots=True)
class Probe:
    """Inputs, and the fingerprints of all outputs in each run from a fresh session on."""

    feeds: dict[str, Any]
    runs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Probes:
    """What the original computed from some inputs; ``note`` says why there are none."""

    outputs: tuple[str, ...]
    probes: tuple[Probe, ...]
    note: str = ""

    def differences(self, session: Any) -> tuple[tuple[str, ...], str]:
        """Outputs of another session whose bits differ from the original's, and a note.

        Outputs that the original itself does not repeat from run to run are not among them.
        Raises what a run raises.
        """
        if not self.probes:
            return (), self.note
        different: set[str] = set()
        unstable: set[str] = set()
        with _Runner(session, self.outputs, _PATIENCE * _RUN_LIMIT_S) as runner:
            for probe in self.probes:
                found = runner.runs(probe.feeds)
                for index, name in enumerate(self.outputs):
                    expected = [run[index] for run in probe.runs]
                    if [run[index] for run in found] != expected:
                        (different if len(set(expected)) == 1 else unstable).add(name)
        note = f"runs of the original differ: {sorted(unstable)}" if unstable else EQUAL
        return tuple(sorted(different)), note


def collect(session: Any, arguments: Sequence[Argument], outputs: Sequence[str]) -> Probes:
    """Run a fresh session of the original model on whatever inputs it accepts."""
    names = tuple(outputs)
    probes: list[Probe] = []
    deadline_s = time.process_time() + _COLLECT_LIMIT_S
    note = "no inputs could be made"
    with _Runner(session, names, _RUN_LIMIT_S) as runner:
        for size in probe_inputs.sizes(arguments):
            try:
                probes.append(_first_accepted(runner, arguments, size, deadline_s))
            except NoInputs as error:
                note = f"no inputs could be made: {error}"
            if len(probes) == _PROBES or time.process_time() > deadline_s:
                break
    return Probes(names, tuple(probes), "" if probes else note)


def _first_accepted(
    runner: _Runner, arguments: Sequence[Argument], size: int, deadline_s: float
) -> Probe:
    """Run the first filling that the model takes. Raises NoInputs with the last reason."""
    reason = ""
    for filling in FILLINGS:
        feeds = probe_inputs.inputs(arguments, size=size, filling=filling)
        try:
            return Probe(feeds, runner.runs(feeds))
        # onnxruntime raises a RuntimeError or ValueError of its own for each kind of failure.
        except Exception as error:
            reason = str(error) or type(error).__name__
        if time.process_time() > deadline_s:
            break
    raise NoInputs(reason)


class _Runner:
    """Runs a session, no run longer than a limit. Used in a ``with`` block."""

    def __init__(self, session: Any, outputs: tuple[str, ...], limit_s: float) -> None:
        self._session = session
        self._outputs = outputs
        self._watch = _Watch(limit_s)

    def __enter__(self) -> _Runner:
        self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._watch.stop()

    def runs(self, feeds: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
        """Fingerprints of all outputs, run after run. Raises what onnxruntime raises, TypeError."""
        return tuple(tuple(map(fingerprint, self._run(feeds))) for _ in range(_RUNS))

    def _run(self, feeds: dict[str, Any]) -> list[Any]:
        from onnxruntime import RunOptions

        options = RunOptions()
        options.log_severity_level = _QUIET
        with self._watch.over(lambda: setattr(options, "terminate", True)):
            try:
                return list(self._session.run(list(self._outputs), feeds, options))
            except RuntimeError as error:
                if _LACKING not in str(error):
                    raise
                return self._run_with_values(feeds, options)

    def _run_with_values(self, feeds: dict[str, Any], options: Any) -> list[Any]:
        """The same without numpy, for outputs of types that it lacks."""
        from onnxruntime import OrtValue

        values = {
            name: value if isinstance(value, OrtValue) else OrtValue.ortvalue_from_numpy(value)
            for name, value in feeds.items()
        }
        bare = {name: value._ortvalue for name, value in values.items()}
        return list(self._session.run_with_ort_values(bare, list(self._outputs), options))


class _Watch:
    """A thread that stops runs that take too long; one for many runs, which may be short."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._current: tuple[Callable[[], None], float, float] | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    @contextlib.contextmanager
    def over(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop``, from the thread, when the block takes longer than the limit."""
        processor_s = time.process_time() + self._limit_s
        clock_s = time.monotonic() + _CLOCK_FACTOR * self._limit_s
        with self._lock:
            self._current = stop, processor_s, clock_s
        try:
            yield
        finally:
            with self._lock:
                self._current = None

    def _loop(self) -> None:
        while not self._is_over.wait(_POLL_S):
            with self._lock:
                if self._current is None:
                    continue
                stop, processor_s, clock_s = self._current
                if time.process_time() > processor_s or time.monotonic() > clock_s:
                    self._current = None
                    stop()
