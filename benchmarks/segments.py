"""What each kind of segment memory costs on this machine: ``python -m benchmarks.segments``.

Measures, for every kind that :func:`trims_shim.memory.host.probe` finds: making and filling a
segment, mapping it privately, reading every page for the first time and again; per GiB, each sample
in a fresh process. Kinds that do not work here are listed with the reason. For comparison there are
anonymous memory, the page cache of a file, and explicit huge pages (``MFD_HUGETLB``), which the
daemon does not use because an administrator must reserve them.

Writes ``docs/results/segments.json``.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    Summary,
    alternate,
    argument_parser,
    describe_machine,
    run_once,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

GIB = 1 << 30
STEPS = ("fill_s", "map_s", "first_touch_s", "second_touch_s")
COMPARED = ("anonymous", "file", "hugetlb")
"""Kinds that the product does not use for segments."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of memory, and whether it works here."""

    name: str
    is_available: bool
    reason: str = ""


def _kinds(size_bytes: int) -> list[Kind]:
    from trims_shim.memory.host import probe

    found = [Kind(each.kind.value, each.is_available, each.reason) for each in probe()]
    return [*found, Kind("anonymous", True), Kind("file", True), _hugetlb(size_bytes)]


def _hugetlb(size_bytes: int) -> Kind:
    try:
        descriptor = os.memfd_create("trims-bench", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    except OSError as error:
        return Kind("hugetlb", False, f"memfd_create(MFD_HUGETLB): {error}")
    try:
        os.ftruncate(descriptor, size_bytes)
        mmap.mmap(descriptor, size_bytes).close()  # reserves, and so fails where none are left
    except (OSError, ValueError) as error:
        return Kind("hugetlb", False, f"no {size_bytes >> 20} MiB of huge pages reserved: {error}")
    finally:
        os.close(descriptor)
    return Kind("hugetlb", True)


def _table(kinds: Sequence[Kind], per_gib: dict[str, dict[str, Summary]], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, header_style="bold")
    table.add_column("memory", no_wrap=True)
    for name in ("create + fill", "map", "first touch", "second touch"):
        table.add_column(f"{name} (ms/GiB)", justify="right")
    table.add_column("remark")
    for kind in kinds:
        steps = per_gib.get(kind.name)
        shown = [_milliseconds(steps[step]) for step in STEPS] if steps else [""] * len(STEPS)
        remark = "for comparison" if kind.name in COMPARED else ""
        table.add_row(kind.name, *shown, kind.reason or remark)
    return table


def _milliseconds(summary: Summary) -> str:
    return f"{summary.median * 1e3:.2f} ({summary.low * 1e3:.2f} to {summary.high * 1e3:.2f})"


def _sample(kind: str, size_bytes: int, path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: run_once("segment", kind=kind, size_bytes=size_bytes, path=str(path))


def _measure(kinds: Sequence[Kind], size_bytes: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trims-bench-") as directory:
        path = Path(directory) / "file"
        usable = [kind.name for kind in kinds if kind.is_available]
        sides = {name: _sample(name, size_bytes, path) for name in usable}
        return alternate(sides, rounds, warmups=1)


def _per_gib(samples: dict[str, Any], size_bytes: int) -> dict[str, dict[str, Summary]]:
    scale = GIB / size_bytes
    return {
        name: {step: Summary.of([run[step] * scale for run in runs]) for step in STEPS}
        for name, runs in samples.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every kind that works here."""
    from rich.console import Console

    parser = argument_parser("segments", __doc__)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    size_bytes = options.size_mib << 20
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine, kinds = describe_machine(), _kinds(size_bytes)
    samples = _measure(kinds, size_bytes, options.rounds)
    per_gib = _per_gib(samples, size_bytes)
    content = {
        "machine": machine,
        "size_bytes": size_bytes,
        "kinds": [asdict(kind) for kind in kinds],
        "seconds_per_gib": per_gib,
        "samples": samples,
    }
    write_json(options.output / "segments.json", content)
    title = f"host segments, medians of {options.rounds} (min to max)"
    console.print(_table(kinds, per_gib, title))
    console.print(f"written: {options.output / 'segments.json'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
