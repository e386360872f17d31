"""``trims demo``: the effect of the cache on a program that knows nothing about it.

Owns a temporary directory with a program, a checkpoint and a daemon of its own, and removes all of
it, also on Ctrl-C. The program is ordinary torch code that times itself; it runs unchanged without
and with trims. Every statement at the end is computed from what was measured. Memory figures and
the proof of sharing come from the kernel (/proc), not from this package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trims_shim import config
from trims_shim.cli import running
from trims_shim.cli.daemon import stop_if_running
from trims_shim.cli.exits import Exit
from trims_shim.cli.saying import say
from trims_shim.cli.text import print_json, table
from trims_shim.errors import TrimsError
from trims_shim.memory.limits import available_bytes
from trims_shim.wire.endpoint import Endpoint
from trims_shim.wire.handover import wait_until_ready

__all__ = ["demo"]

_MEGA = 1e6
_WIDTH = 79
_ANSWER_DEADLINE_S = 180.0
_STOP_DEADLINE_S = 15.0
_SOCKET_DIR_LIMIT_BYTES = 70
"""Longest directory for another one with sockets in it: the kernel allows 107, with names."""
_COPIES = 3
"""Of the model in memory at most: the program's without trims, the cache's, and that of a model
which has not loaded its weights yet."""
_SERVED_FRACTION = 0.9
"""Share of the checkpoint's bytes that must be shared for a process to count as served."""
_WARNING = "the framework's own loader is used "
"""In the shim's warning (:mod:`trims_shim.diagnostics`); why it is used follows."""
_AREA = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) (\d+)\s*(.*)$")

_PROGRAM = '''\
"""A text model behind a server: loads its weights, answers once, stays up. Ordinary torch code."""

import ctypes
import hashlib
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, WORDS = 1024, 16, 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class TextModel(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, tokens):
        return self.blocks(self.words(tokens)) @ self.words.weight.T


def main(path, layers):
    model = TextModel(layers).eval()

    start = time.perf_counter()
    state = torch.load(path)
    loaded = time.perf_counter()
    model.load_state_dict(state)
    ready = time.perf_counter()
    del state
    with torch.no_grad():
        answer = model(torch.arange(16).unsqueeze(0))
    end = time.perf_counter()

    answer_bytes = ctypes.string_at(answer.data_ptr(), answer.nbytes)  # torch may have no numpy
    report = {
        "pid": os.getpid(),
        "load_s": loaded - start,
        "load_state_dict_s": ready - loaded,
        "first_answer_s": end - ready,
        "checksum": hashlib.sha256(answer_bytes).hexdigest()[:16],
    }
    print(json.dumps(report), flush=True)
    sys.stdin.readline()  # a server would wait for requests here


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
'''

_TRAINING = """\
import sys
import torch
from program import TextModel

torch.manual_seed(1)
torch.save(TextModel(int(sys.argv[2])).state_dict(), sys.argv[1])
"""
_WORDS_MB, _BLOCK_MB = 33.6, 50.4
"""Sizes of the program's embedding and of one block, to turn a size into a number of layers."""
_LEAST_MB = 84
"""Of a model with one block."""


class _DemoFailed(Exception):
    """A step of the demonstration could not be done; the message is for the user."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One process of the program, as it and the kernel report it."""

    label: str
    with_shim: bool
    pid: int
    load_s: float
    load_state_dict_s: float
    first_answer_s: float
    checksum: str
    private_bytes: int = 0
    proportional_bytes: int = 0
    shared_fraction: float = 0.0
    segments: tuple[str, ...] = ()
    complaint: str = ""

    @property
    def ready_s(self) -> float:
        """Time until the model has its weights."""
        return self.load_s + self.load_state_dict_s


@dataclass(frozen=True, slots=True)
class _Place:
    """The files of this demonstration and the environment of its processes."""

    directory: Path
    sockets: Path
    layers: int

    @property
    def program(self) -> Path:
        return self.directory / "program.py"

    @property
    def checkpoint(self) -> Path:
        return self.directory / "model.pt"

    def environment(self, *, with_shim: bool) -> dict[str, str]:
        """The caller's environment, with a daemon of the demonstration's own, or without trims."""
        own = {"TRIMS_SOCKET_DIR": str(self.sockets), "TRIMS_AUTOSTART": "1"}
        inherited = os.environ | own | {"TRIMS_ENABLED": "1" if with_shim else "0"}
        # As by `trims run`; but `python -m` would take code from the working directory.
        return running.environment(inherited) if with_shim else inherited


def demo(arguments: argparse.Namespace) -> Exit:
    """Run the demonstration; OK only if all results are equal and later processes were served.

    Prints a table, or one JSON object. Blocks for some ten seconds and starts child processes;
    needs torch, and as much disk as the model has. Raises ConfigError.
    """
    config.current()  # with settings that cannot be used, no process would be served
    if importlib.util.find_spec("torch") is None:
        say(f"trims demo: {sys.executable} has no torch; install it there")
        return Exit.FAILED
    note = _Notes(is_quiet=arguments.json)
    try:
        _check_room(arguments.size_mb)
        with _ending_as_by_ctrl_c(), _place(arguments.size_mb) as place:
            runs = _measure(place, arguments.processes, note)
            size_bytes = place.checkpoint.stat().st_size
    except KeyboardInterrupt:
        note("interrupted; everything was removed")
        return Exit.INTERRUPTED
    except _DemoFailed as error:
        say(f"trims demo: {error}")
        return Exit.FAILED
    is_good, sentences = _conclude(runs)
    if arguments.json:
        described = {"size_bytes": size_bytes, "ok": is_good, "conclusion": " ".join(sentences)}
        print_json(described | {"runs": [asdict(run) for run in runs]})
    else:
        _show(runs, size_bytes, sentences)
    return Exit.OK if is_good else Exit.FAILED


class _Notes:
    """Progress for the person who waits; on stderr, so that the table can be piped."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def __call__(self, text: str) -> None:
        if not self._is_quiet:
            say(f"... {text}")


# --- running ------------------------------------------------------------------------------------


def _check_room(size_mb: int) -> None:
    """Raise _DemoFailed before a model is made for which this machine has no room."""
    size_mb = max(size_mb, _LEAST_MB)
    directory = tempfile.gettempdir()
    rooms = (
        (f"on disk in {directory}", size_mb, shutil.disk_usage(directory).free),
        ("of memory", _COPIES * size_mb, available_bytes()),
    )
    advice = "; try a smaller --size-mb" if size_mb > _LEAST_MB else ""
    for where, needed_mb, free_bytes in rooms:
        if needed_mb * _MEGA > free_bytes:
            raise _DemoFailed(
                f"a model of {size_mb} MB needs {needed_mb} MB {where}, and {_size(free_bytes)} "
                f"are free{advice}"
            )


@contextlib.contextmanager
def _ending_as_by_ctrl_c() -> Iterator[None]:
    """Also by ``kill``, and where the terminal is closed, but under ``nohup``."""
    numbers = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _place(size_mb: int) -> Iterator[_Place]:
    directory = sockets = Path(tempfile.mkdtemp(prefix="trims-demo-"))
    # $TMPDIR has room for the model, but may be longer than the name of a socket.
    if len(os.fsencode(directory)) > _SOCKET_DIR_LIMIT_BYTES:
        sockets = Path(tempfile.mkdtemp(prefix="trims-demo-", dir="/tmp"))
    place = _Place(
        directory, sockets / "s", layers=max(1, round((size_mb - _WORDS_MB) / _BLOCK_MB))
    )
    try:
        place.sockets.mkdir(mode=0o700)
        place.program.write_text(_PROGRAM)
        (directory / "training.py").write_text(_TRAINING)
        yield place
    finally:
        try:
            _stop_daemon(place)
        finally:  # also if Ctrl-C is pressed once more
            for each in (directory, sockets):
                shutil.rmtree(each, ignore_errors=True)


def _stop_daemon(place: _Place) -> None:
    try:
        stop_if_running(Endpoint(str(place.sockets)))
    except TrimsError as error:
        say(f"trims demo: the daemon of the demo was not stopped: {error}")


def _measure(place: _Place, processes: int, note: Callable[[str], None]) -> list[_Run]:
    note("making a model")
    _train(place)
    with contextlib.ExitStack() as stack:
        note("1 process without trims")
        alive = [stack.enter_context(_program(place, "without trims", False))]
        for number in range(1, processes + 1):
            note(f"process {number} of {processes} with trims")
            alive.append(stack.enter_context(_program(place, f"#{number}", True)))
        # All at once: libraries that several processes map are then no private memory.
        return _observe(alive, place)


def _train(place: _Place) -> None:
    """Write the checkpoint with weights that no freshly initialised model has."""
    try:
        done = subprocess.run(
            [sys.executable, "training.py", str(place.checkpoint), str(place.layers)],
            cwd=place.directory,
            env=place.environment(with_shim=False),
            stderr=subprocess.PIPE,
            text=True,
            timeout=_ANSWER_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _DemoFailed(
            f"the model was not made within {_ANSWER_DEADLINE_S:g} s; try a smaller --size-mb"
        ) from None
    if done.returncode:
        raise _DemoFailed(f"the model could not be made:\n{_tail(done.stderr)}")


@contextlib.contextmanager
def _program(place: _Place, label: str, with_shim: bool) -> Iterator[_Run]:
    """The program in a fresh process that has answered, and stays alive inside the block."""
    complaints = place.directory / f"{label}.err"
    with complaints.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(place.program), str(place.checkpoint), str(place.layers)],
            env=place.environment(with_shim=with_shim),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        line = _first_line(process)
        if not line:
            raise _DemoFailed(
                f"process {label} has failed, or not answered within {_ANSWER_DEADLINE_S:g} s:\n"
                + _tail(complaints.read_text())
            )
        complaint = _complaint(complaints.read_text(errors="replace"))
        yield _Run(label=label, with_shim=with_shim, complaint=complaint, **json.loads(line))
    finally:
        _end(process)


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    """The line that the program prints; empty when it ends or stays silent too long."""
    assert process.stdout is not None
    text = b""
    end = time.monotonic() + _ANSWER_DEADLINE_S
    while b"\n" not in text:
        left_s = max(0.0, end - time.monotonic())
        if not wait_until_ready(process.stdout.fileno(), left_s):
            return b""
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return b""
        text += chunk
    return text.partition(b"\n")[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_STOP_DEADLINE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        process.kill()
        process.wait()
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        process.stdout.close()


def _complaint(text: str) -> str:
    """Why a load was not served, with its reason in parentheses, as the shim warned of it."""
    return next((line.partition(_WARNING)[2] for line in text.splitlines() if _WARNING in line), "")


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-8:])


# --- what the kernel says -----------------------------------------------------------------------


def _observe(runs: Sequence[_Run], place: _Place) -> list[_Run]:
    """Add memory figures while all ``runs`` are alive, so that shared memory counts as shared."""
    size = place.checkpoint.stat().st_size
    observed = []
    for run in runs:
        totals = _totals(run.pid)
        # Other deleted files may be mapped too (libraries of an upgraded package).
        shared = {k: v for k, v in _shared_by_segment(run.pid).items() if v > size / 2}
        observed.append(
            replace(
                run,
                private_bytes=totals["Private_Clean"] + totals["Private_Dirty"],
                proportional_bytes=totals["Pss"],
                shared_fraction=min(1.0, sum(shared.values()) / size),
                segments=tuple(sorted(shared)),
            )
        )
    return observed


def _totals(pid: int) -> dict[str, int]:
    totals = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, amount = line.partition(":")
        totals[name] = int(amount.split()[0]) * 1024
    return totals


def _shared_by_segment(pid: int) -> dict[str, int]:
    """Bytes mapped and never written, by memory file (device and inode) without a name on disk."""
    shared: dict[str, int] = {}
    segment = ""
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        if area := _AREA.match(line):
            device, inode, path = area.groups()
            is_memory_file = inode != "0" and path.endswith("(deleted)")
            segment = f"{device}:{inode}" if is_memory_file else ""
        elif segment and line.startswith(("Size:", "Anonymous:")):
            amount = int(line.split()[1]) * 1024
            sign = 1 if line.startswith("Size:") else -1
            shared[segment] = shared.get(segment, 0) + sign * amount
    return shared


# --- saying it ----------------------------------------------------------------------------------


def _is_served(run: _Run, others: Sequence[_Run]) -> bool:
    """Whether a process has its weights in memory that every other process has mapped too."""
    is_common = all(set(run.segments) & set(other.segments) for other in others)
    return run.with_shim and is_common and run.shared_fraction >= _SERVED_FRACTION


def _conclude(runs: Sequence[_Run]) -> tuple[bool, list[str]]:
    """(whether the demonstration succeeded, sentences that follow from the measurements)."""
    plain, first, *later = runs
    are_equal = len({run.checksum for run in runs}) == 1
    served = [run for run in later if _is_served(run, [first, *later])]
    complaint = next((run.complaint for run in later if run not in served and run.complaint), "")
    sentences = []
    if not are_equal:
        sentences.append("The results differ. This is a bug: please report it.")
    if len(served) < len(later):
        sentences.append(
            f"{len(later) - len(served)} of {len(later)} later processes were not served by the "
            "cache; the framework's own loader was used"
            + (f" {complaint}" if complaint else ". Run 'trims info' to see why.")
        )
    if served:
        sentences.append(_speed(plain, served))
        sentences.append(_memory(plain, served))
    return are_equal and len(served) == len(later), sentences


def _speed(plain: _Run, served: Sequence[_Run]) -> str:
    cached_s = statistics.median(run.ready_s for run in served)
    ratio = plain.ready_s / cached_s
    verdict = f"{ratio:.0f} times faster" if ratio >= 2 else f"{ratio:.2f} times the speed"
    return (
        f"Once the model is in the cache, a process has its weights after {_time(cached_s)} "
        f"instead of {_time(plain.ready_s)} ({verdict})."
    )


def _memory(plain: _Run, served: Sequence[_Run]) -> str:
    own = statistics.median(run.private_bytes for run in served)
    change = plain.private_bytes - own
    verdict = f"{_size(change)} less" if change >= 0 else f"{_size(-change)} more"
    return (
        f"Each further process takes {_size(own)} of memory of its own instead of "
        f"{_size(plain.private_bytes)} ({verdict})."
    )


def _show(runs: Sequence[_Run], size_bytes: int, sentences: list[str]) -> None:
    print(f"The same program, unchanged, with a model of {_size(size_bytes)}:\n")
    print(_table(runs))
    print("\n#1 starts the daemon and fills the cache.")
    print("OWN is what would be free again if this process ended.\n")
    print("\n".join(textwrap.fill(sentence, _WIDTH) for sentence in sentences))


def _table(runs: Sequence[_Run]) -> str:
    titles = ("PROCESS", "torch.load", "load_state_dict", "ANSWER", "OWN", "SHARED", "RESULT")
    expected = runs[0].checksum
    rows = [
        (
            run.label,
            _time(run.load_s),
            _time(run.load_state_dict_s),
            _time(run.first_answer_s),
            _size(run.private_bytes),
            f"{run.shared_fraction:.0%}" if run.shared_fraction else "no",
            "the same" if run.checksum == expected else "ANOTHER",
        )
        for run in runs
    ]
    return table(titles, rows, right=titles[1:-1])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / _MEGA:.0f} MB"
