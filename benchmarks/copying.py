"""How fast files get into memory: ``python -m benchmarks.copying``.

Host: a file in the page cache, and one on the disk, is read into a new segment by plain threads
that do nothing else (the read rate), by the engine without the hash, and as the daemon does it.
Device, if there is one: plain reads into buffers, plain pinned copies, and uploads and downloads by
both engines, which are compared with the slower of these two. Every sample is a fresh process;
sides alternate, and ratios are taken within a round.

Writes ``docs/results/copying.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    ROOT,
    Summary,
    Worker,
    alternate,
    argument_parser,
    describe_machine,
    pair_ratios,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

Result = dict[str, Any]
_WRITE_BYTES = 16 << 20
_PLAIN, _PINNED = "plain read", "pinned copy"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sides that are measured together, and the limit that their rate is compared with.

    ``limit`` chooses the time of a round from those of ``peers``: a side that reads is compared
    with the fastest peer, a side that reads and copies with the slowest.
    """

    title: str
    task: str
    is_cached: bool
    sides: tuple[str, ...]
    peers: tuple[str, ...]
    limit: Callable[[Iterable[float]], float]
    engine: str = ""


HOST = (
    Comparison(
        "host, page cache", "host", True, (_PLAIN, "fill, not hashed", "fill"), (_PLAIN,), min
    ),
    Comparison(
        "host, disk",
        "host",
        False,
        (_PLAIN, "plain read, O_DIRECT", "fill, not hashed", "fill", "fill, never O_DIRECT"),
        (_PLAIN, "plain read, O_DIRECT"),
        min,
    ),
)


def _device_comparisons() -> Iterator[Comparison]:
    uploads = ("upload, not hashed", "upload", "upload, first of a process, not hashed")
    sides = (_PLAIN, _PINNED, *uploads, "download")
    for engine in ("native", "python"):
        for is_cached in (True, False):
            where = "page cache" if is_cached else "disk"
            title = f"device, {where}, {engine}"
            yield Comparison(title, "device", is_cached, sides, (_PLAIN, _PINNED), max, engine)


def _devices() -> tuple[list[str], str]:
    """Names of the devices, or why there are none. A child process starts the driver."""
    code = (
        "from trims_shim.memory.driver import driver\n"
        "for each in driver().devices(): print(each.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.strip().splitlines()
    return done.stdout.splitlines(), lines[-1] if lines else "the driver shows no device"


def _sample(comparison: Comparison, side: str, path: Path) -> Callable[[], Result]:
    arguments: Result = {"side": side, "path": str(path), "is_cached": comparison.is_cached}
    if comparison.engine:
        arguments["engine"] = comparison.engine

    def run() -> Result:
        module = "benchmarks.copying_task"
        with Worker(comparison.task, module=module, **arguments) as worker:
            return worker.result()

    return run


def _measure(comparison: Comparison, path: Path, rounds: int) -> Result:
    sides = {side: _sample(comparison, side, path) for side in comparison.sides}
    samples = alternate(sides, rounds, warmups=1)
    digests = {run["digest"] for runs in samples.values() for run in runs} - {""}
    if len(digests) > 1:
        raise RuntimeError(f"{comparison.title}: not the same bytes: {digests}")
    seconds = {side: [run["seconds"] for run in runs] for side, runs in samples.items()}
    peers = zip(*(seconds[peer] for peer in comparison.peers), strict=True)
    limits = [comparison.limit(times) for times in peers]
    size = path.stat().st_size
    return {
        "title": comparison.title,
        "size_bytes": size,
        "bytes_per_s": {
            side: Summary.of([size / each for each in times]) for side, times in seconds.items()
        },
        "share_of_limit": {side: pair_ratios(limits, times) for side, times in seconds.items()},
        "samples": samples,
    }


def _make_file(directory: Path, size_mib: int) -> Path:
    """Make a file whose size is no multiple of a block, like model files."""
    path = directory / f"{size_mib}-MiB"
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size_mib << 20, _WRITE_BYTES):
            file.write(os.urandom(_WRITE_BYTES))
        file.write(b"x" * 1234)
        os.fsync(file.fileno())
    return path


def _table(results: Sequence[Result], rounds: int) -> Table:
    from rich.table import Table

    table = Table(title=f"copies, medians of {rounds} (min to max)", header_style="bold")
    table.add_column("where", no_wrap=True)
    for name in ("MiB", "side", "GB/s", "of the limit"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for result in results:
        for side, rate in result["bytes_per_s"].items():
            share = result["share_of_limit"][side]
            table.add_row(
                result["title"],
                str(result["size_bytes"] >> 20),
                side,
                f"{rate.median / 1e9:.2f} ({rate.low / 1e9:.2f} to {rate.high / 1e9:.2f})",
                f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})",
            )
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure host memory, and device 0 where there is one."""
    from rich.console import Console

    parser = argument_parser("copying", __doc__, harmless=("directory",))
    parser.add_argument("--size-mib", type=int, nargs="+", default=[512, 1344])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where files are made: on the disk to read")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    devices, reason = _devices()
    comparisons = [*HOST, *(_device_comparisons() if devices else ())]
    results = []
    with tempfile.TemporaryDirectory(prefix="trims-bench-", dir=options.directory) as directory:
        for size_mib in options.size_mib:
            path = _make_file(Path(directory), size_mib)
            results += [_measure(each, path, options.rounds) for each in comparisons]
            path.unlink()
    content = {
        "machine": describe_machine(),
        "devices": devices,
        "no_device_because": "" if devices else reason,
        "results": results,
    }
    write_json(options.output / "copying.json", content)
    console.print(_table(results, options.rounds))
    if not devices:
        console.print(f"no device was measured: {reason}")
    console.print(f"written: {options.output / 'copying.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
