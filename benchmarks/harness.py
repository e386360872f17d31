"""Measure variants fairly: fresh processes, alternating order, medians and their spread.

Owns child processes with a deadline and a result pipe, the order of measurements, the statistics,
a private daemon, and the description of the machine. :mod:`benchmarks.workers` has the measured
tasks; the calling benchmark decides what is compared.

Invariants: every wait has a deadline; no child and no daemon outlives the block that started it; a
ratio is taken inside one round, between processes that ran right after one another, so that a slow
drift of the machine cancels out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.process_memory import processes_with_environment

__all__ = [
    "ROOT",
    "Daemon",
    "Summary",
    "Worker",
    "WorkerFailed",
    "alternate",
    "argument_parser",
    "daemon",
    "describe_machine",
    "pair_ratios",
    "results_directory",
    "rounded",
    "run_once",
    "write_json",
]

ROOT = Path(__file__).resolve().parent.parent
Result = dict[str, Any]
"""One JSON object that a worker sent."""
DEADLINE_S = 180.0
_STOP_DEADLINE_S = 15.0
_HARMLESS = ("output", "jobs", "check", "json")


def argument_parser(
    name: str, description: str | None, *, harmless: Collection[str] = ()
) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``; ``--output`` is the directory of its results.

    With other options than ``harmless`` ones a run measures something else than the whole
    benchmark. Its results then go to a temporary directory unless another is given.
    """
    parser = _Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.harmless = {*_HARMLESS, *harmless}
    parser.add_argument(
        "--output",
        type=results_directory,
        metavar="DIR",
        help="of results; default: docs/results, or a temporary one if options make it another "
        "benchmark than the whole",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Keeps the committed results from being replaced by those of a part, or of a smoke run."""

    harmless: Collection[str] = ()

    def parse_args(self, *arguments: Any) -> Any:
        options = super().parse_args(*arguments)
        for action in self._actions:
            if action.type is int:
                self._check_positive(action, getattr(options, action.dest))
        if options.output is None:
            options.output = self._directory(options)
        return options

    def _check_positive(self, action: argparse.Action, value: Any) -> None:
        """All whole numbers are counts or sizes, and nothing is measured with none of it."""
        if value is not None and min([value] if isinstance(value, int) else value) < 1:
            self.error(f"argument {action.option_strings[-1]}: at least 1 is needed")

    def _directory(self, options: argparse.Namespace) -> Path:
        other = [
            action.option_strings[-1]
            for action in self._actions
            if action.dest not in self.harmless
            and getattr(options, action.dest, action.default) != action.default
        ]
        if not other:
            return ROOT / "docs" / "results"
        directory = Path(tempfile.mkdtemp(prefix="trims-results-"))
        text = f"not the whole benchmark ({', '.join(other)}): results go to {directory}"
        print(text, file=sys.stderr, flush=True)
        return directory


def results_directory(name: str) -> Path:
    """The type of an option that names a directory of results.

    It is made at once: a run of half an hour shall not end with results that it cannot write.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is not writable")
    return path


class WorkerFailed(Exception):
    """A measuring process ended without a result, or did not answer in time."""


class Worker:
    """A fresh interpreter that runs one task of :mod:`benchmarks.workers` and sends results.

    A context manager; leaving the block ends the process. ``proceed`` releases a task that waits
    for the others. ``send`` gives the next order to a task that serves orders. ``module`` may name
    another module of tasks with the same command line.
    """

    def __init__(
        self,
        task: str,
        *,
        module: str = "benchmarks.workers",
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.task = task
        self._results, write_end = os.pipe()
        self._pending = b""
        variables = {k: v for k, v in os.environ.items() if not _is_setting(k)}
        variables["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", module, task, json.dumps(arguments)]
        self.process = subprocess.Popen(
            [*command, str(write_end)],
            env=variables | dict(environment or {"TRIMS_ENABLED": "0"}),
            stdin=subprocess.PIPE,
            pass_fds=[write_end],
            cwd=ROOT,
        )
        os.close(write_end)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.proceed()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        os.close(self._results)
        try:
            self.process.wait(_STOP_DEADLINE_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def result(self, deadline_s: float = DEADLINE_S) -> Result:
        """Return the next result. Raises WorkerFailed if none comes."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._results], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise WorkerFailed(f"{self.task}: no result within {deadline_s:.0f} s")
            chunk = os.read(self._results, 1 << 16)
            if not chunk:
                code = self.process.wait(_STOP_DEADLINE_S)
                raise WorkerFailed(f"{self.task}: ended with status {code} before its result")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: Result = json.loads(line)
        return answer

    def proceed(self) -> None:
        """Release a task that waits."""
        self._write(b"\n")

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order to a task that serves orders; the answer is a :meth:`result`."""
        self._write(json.dumps(order).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended; result() says so
            if self.process.stdin is not None and not self.process.stdin.closed:
                self.process.stdin.write(line)
                self.process.stdin.flush()


def _is_setting(name: str) -> bool:
    """Whether a variable is a setting of the package, rather than a description of the machine."""
    return name.startswith("TRIMS_") and not name.startswith("TRIMS_TEST_")


def run_once(
    task: str, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Result:
    """Run one task in a fresh process and return its result."""
    with Worker(task, environment=environment, **arguments) as worker:
        return worker.result()


@dataclass(frozen=True, slots=True)
class Daemon:
    """A private daemon; clients with ``environment`` use it."""

    environment: dict[str, str]
    socket_directory: Path

    def warm(self, path: os.PathLike[str] | str) -> None:
        """Make a file resident, through a process that then ends."""
        run_once("warm", environment=self.environment, path=os.fspath(path))

    def pid(self) -> int:
        """The daemon's process: it has our directory in its environment and is no worker."""
        running = processes_with_environment("TRIMS_SOCKET_DIR", str(self.socket_directory))
        serving = [pid for pid, line in running.items() if "benchmarks" not in line]
        if not serving:
            raise WorkerFailed(f"no daemon is running for {self.socket_directory}")
        return min(serving)


@contextlib.contextmanager
def daemon(**settings: str) -> Iterator[Daemon]:
    """A private daemon, started by its first client and stopped at the end of the block."""
    directory = Path(tempfile.mkdtemp(prefix="trims-bench-"))
    environment = {
        "TRIMS_ENABLED": "1",
        "TRIMS_SOCKET_DIR": str(directory),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "XDG_STATE_HOME": str(directory / "state"),
        **settings,
    }
    try:
        yield Daemon(environment, directory)
    finally:
        _stop_daemon(environment)
        shutil.rmtree(directory, ignore_errors=True)


def _stop_daemon(environment: Mapping[str, str]) -> None:
    directory = environment["TRIMS_SOCKET_DIR"]
    if not processes_with_environment("TRIMS_SOCKET_DIR", directory):
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "trims_shim", "stop"],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment),
            cwd=ROOT,
            timeout=_STOP_DEADLINE_S,
            check=False,
            stdout=subprocess.DEVNULL,
        )
    end = time.monotonic() + _STOP_DEADLINE_S
    while remaining := processes_with_environment("TRIMS_SOCKET_DIR", directory):
        if time.monotonic() > end:
            for pid in remaining:  # ours: they were started with our own directory
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            print(f"warning: killed {remaining}, which did not stop", file=sys.stderr)
            return
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of some samples, and their range."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarise at least one sample."""
        return cls(statistics.median(samples), min(samples), max(samples), tuple(samples))


def alternate(
    sides: Mapping[str, Callable[[], Result]], rounds: int, *, warmups: int = 0
) -> dict[str, list[Result]]:
    """Run each side once a round, every second round in reversed order; results by side.

    ``warmups`` rounds go first and are not counted: on a virtual machine, the first use of a page
    of memory by any process also waits for the host.
    """
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for number in range(-warmups, rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            result = sides[name]()
            if number >= 0:
                results[name].append(result)
    return results


def pair_ratios(slow: Sequence[float], fast: Sequence[float]) -> Summary:
    """Ratios of ``slow`` to ``fast``, round by round."""
    return Summary.of([s / f for s, f in zip(slow, fast, strict=True)])


def describe_machine() -> Result:
    """Describe the machine as far as the figures depend on it."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _field("/proc/cpuinfo", "model name"),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": _kilobytes("MemTotal"),
        "available_bytes": _kilobytes("MemAvailable"),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "page_bytes": os.sysconf("SC_PAGESIZE"),
        "huge_pages_anonymous": _huge("enabled"),
        "huge_pages_shmem": _huge("shmem_enabled"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("trims-shim", *_LIBRARIES)},
    }


_LIBRARIES = ("torch", "safetensors", "numpy", "msgpack", "pyzmq", "blake3")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results for people and programs; dataclasses become objects.

    The file is replaced as a whole: some runs go on with what an earlier one has measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, default=_encode)
    partial = path.with_name(f".{path.name}")
    partial.write_text(text + "\n")
    partial.replace(path)


def rounded(value: Any, digits: int) -> Any:
    """Round all floats to ``digits`` significant ones, because results files are kept for good."""
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return asdict(value)  # type: ignore[call-overload]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
        )
    except FileNotFoundError:  # a copy of the tree on a machine without git
        return ""
    return answer.stdout.strip()


def _field(path: str, name: str) -> str:
    with open(path) as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return platform.machine()


def _kilobytes(name: str) -> int:
    return int(_field("/proc/meminfo", name).split()[0]) * 1024


def _huge(name: str) -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage") / name
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "absent"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
