"""Check the documentation: links, the pages made from code, and figures.

Relative links must resolve, to the heading; docs/configuration.md must have the settings of the
code, and docs/api.md its signatures and docstrings; and the tables of figures in
README.md, docs/onnxruntime.md, docs/gpu.md and docs/results/README.md must be the measured ones of
docs/results.

``--write`` writes pages and tables. ``make docs`` checks.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The settings are those of this checkout, whatever is installed.
sys.path.insert(0, str(ROOT))

import api_reference  # noqa: E402

from trims_shim.config import SETTINGS  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results" / "host.json"
BATCHING_RESULTS = ROOT / "docs" / "results" / "batching_peers.md"
GPU_RESULTS = tuple(
    ROOT / "docs" / "results" / f"{name}.json" for name in ("gpu", "gpu-memory", "gpu-uploads")
)
OVERHEAD_RESULTS = ROOT / "docs" / "results" / "batching_overhead.json"
ONNX_RESULTS = ROOT / "docs" / "results" / "ort.json"
TASKS = ("load + touch", "load + load_state_dict")
MARKED = re.compile(r"(<!-- ([a-z ]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
FENCED = re.compile(r"^(`{3,}).*?^\1", re.MULTILINE | re.DOTALL)

HEAD = """# Configuration

A setting's value comes from the first of these that has one:

1. an argument, where a function takes it;
2. the environment variable (an empty one counts as not set);
3. `trims/trims.toml` in `$XDG_CONFIG_HOME` or `~/.config`: keys in lower case, without `TRIMS_`
   (`host_bytes = "8GiB"`). There is none where this process may not look for it, as in the home of
   the user before `su`; one that is there has to be readable;
4. the default.

`trims info` shows each value and where it comes from. If a `TRIMS_*` variable or a key is unknown
or its value unclear, the program runs without the shim, with one warning of each process that
imports it (`trims run` is one, too), and `trims` commands that need the cache end with status 2.

- **When it is read.** A process reads its settings once, when it imports `trims_shim`. Settings
  marked *daemon* are read when the daemon starts: `trims stop` to apply a change. (Batchers and
  `trims_shim.fetch` read `TRIMS_CACHE_DIR`, too.)
- **Sizes**: `512M`, `8GiB`, `40%`. A percentage is of the memory the process may use; for settings
  of a device, of the device's; for `TRIMS_PREPARED_BYTES` and `TRIMS_REMOTE_BYTES`, of the file
  system's size.
- **Booleans**: `1` or `0`.

| variable | default | read by | meaning |
|---|---|---|---|
"""


def table() -> str:
    """The configuration page."""
    rows = []
    for setting in SETTINGS:
        reader = "daemon" if setting.is_daemons else "client"
        default = f"`{setting.default}`" if setting.default else ""
        rows.append(f"| `{setting.variable}` | {default} | {reader} | {setting.help} |")
    return HEAD + "\n".join(rows) + "\n"


def results() -> str:
    """The README's tables of results, between their marks."""
    measured = json.loads(RESULTS.read_text())
    machine = measured["machine"]
    rows = [row for row in measured["rows"] if _is_shown(row)]
    loads = [row for row in rows if " vs " in row["measurement"]]
    lines = [
        f"| model | against | {' | '.join(TASKS)} |",
        "|---|---|---|---|",
        *_loads(loads),
        "",
        "| measured | model | without | with trims | |",
        "|---|---|---|---|---|",
        *(_row(row) for row in rows if row not in loads),
        "",
        f"{machine['processor']}, {machine['processors']} cores, torch "
        f"{machine['versions']['torch']}, {machine['date'][:10]}; medians (smallest to largest of "
        "5 rounds), without → with trims; fresh processes, timed after imports.",
    ]
    return "\n".join(lines) + "\n"


def _is_shown(row: dict[str, Any]) -> bool:
    return row["unit"] in ("x", "copies") and not row["subject"].startswith(("tiny", "resnet"))


def _loads(rows: list[dict[str, Any]]) -> list[str]:
    """A table line for each model and loader, with all tasks."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        task, _, loader = row["measurement"].partition(" vs ")
        before, after = (_duration(row[side]["median"]) for side in ("baseline", "shim"))
        gain = _figure(row["figure"], "x")
        cells.setdefault((row["subject"], loader), {})[task] = f"{gain}: {before} → {after}"
    return [
        f"| {model} | {loader} | {' | '.join(by_task.get(task, '') for task in TASKS)} |"
        for (model, loader), by_task in cells.items()
    ]


def _row(row: dict[str, Any]) -> str:
    figure, is_time = row["figure"], row["unit"] == "x"
    sides = [row[side] for side in ("baseline", "shim")]
    texts = [_duration(each["median"]) if is_time else f"{each['median']:.2f}" for each in sides]
    if is_time:
        judged = f"takes {_figure(figure, 'times as long')}"
    else:
        judged = f"**{figure['median']:.2f} copies**"
    return f"| {row['measurement']} | {row['subject']} | {texts[0]} | {texts[1]} | {judged} |"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def onnx_results(path: Path = ONNX_RESULTS, *, is_short: bool = False) -> str:
    """The table of results with onnxruntime, or a line that says that there are none.

    A short one has what was promised for the first model, and what is missed for any.
    """
    if not path.exists():
        return "*Not measured yet: `make bench-ort` measures it on your machine.*\n"
    measured = json.loads(path.read_text())
    machine = measured["machine"]
    rows = measured["rows"]
    promised = [row for row in rows if row["target"]]
    if is_short:
        rows = [row for row in promised if row["subject"] == promised[0]["subject"]]
    lines = [
        "| measured | model | onnxruntime | with trims | gain (smallest to largest) | target |",
        "|---|---|---|---|---|---|",
        *(_onnx_row(row) for row in rows),
        "",
        *([_missed(promised), ""] if is_short else ()),
        *(f"Left out: {reason}." for reason in measured["left_out"]),
        *(f"**Not valid: {fault}.**" for fault in measured["faults"]),
        f"{machine['processor']}, {machine['processors']} cores, onnxruntime "
        f"{machine['versions']['onnxruntime']}, {machine['date'][:10]}; medians of up to "
        f"{measured['plan']['rounds']} rounds, fresh processes, timed after imports.",
    ]
    return "\n".join(lines) + "\n"


def _missed(promised: list[dict[str, Any]]) -> str:
    """How many targets are met, and which are not, for all models."""
    missed = [row for row in promised if not row["is_met"]]
    told = [
        f"{row['measurement']}, {row['subject']}: {_figure(row['figure'], row['unit'])}, "
        f"{_verdict(row).partition(':')[0]}"
        for row in missed
    ]
    models = len({row["subject"] for row in promised})
    count = (
        f"{len(promised) - len(missed)} of {len(promised)} targets, for {models} models, are met."
    )
    return " ".join([count, *(["Missed:", "; ".join(told) + "."] if told else ())])


def _onnx_row(row: dict[str, Any]) -> str:
    sides = [_quantity(row[side], row["measured"]) for side in ("baseline", "shim")]
    gain = _figure(row["figure"], row["unit"])
    cells = [row["measurement"], row["subject"], *sides, gain, _verdict(row)]
    return f"| {' | '.join(cells)} |"


def _figure(figure: dict[str, Any], unit: str) -> str:
    spread = ""
    if len(figure["samples"]) > 1:
        spread = f" ({figure['low']:.3g} to {figure['high']:.3g})"
    if unit == "x":
        return f"**{figure['median']:.3g}x**{spread}"
    return f"{figure['median']:.3g}{spread} {unit}"


def _quantity(side: dict[str, Any] | None, measured: str) -> str:
    if side is None:
        return ""
    if measured == "bytes":
        mega = side["median"] / 1e6
        return f"{mega:.0f} MB" if mega >= 10 else f"{mega:.1f} MB"
    return _duration(side["median"])


def _verdict(row: dict[str, Any]) -> str:
    target = row["target"]
    if not target:
        return ""
    is_least = target["at_least"] is not None
    bound = f"≥ {target['at_least']:.3g}" if is_least else f"≤ {target['at_most']:.3g}"
    return f"{bound}: {'met' if row['is_met'] else '**missed**'}"


def gpu_results(*, is_short: bool = False) -> str:
    """The table of results on a GPU."""
    runs = [json.loads(path.read_text()) for path in GPU_RESULTS]
    rows = [row for run in runs for row in run["rows"]]
    if is_short:
        rows = [
            row
            for row in rows
            if row["measurement"].startswith(_GPU_TOLD) and row["subject"].startswith(_GPU_SUBJECTS)
        ]
    machine = runs[0]["machine"]
    lines = [
        "| measured | model | without | with trims | figure (smallest to largest) | target |",
        "|---|---|---|---|---|---|",
        *(_gpu_row(row) for row in rows),
        "",
        *(f"**Not valid: {fault}.**" for run in runs for fault in run["faults"]),
        f"{machine['device']['name']}, driver {machine['device']['driver']}, "
        f"{machine['processors']} cores, torch {machine['versions']['torch']}, "
        f"{machine['date'][:10]}; medians of up to {runs[0]['plan']['rounds']} rounds; a sample is "
        "a process after its imports and the creation of its context; files in memory.",
    ]
    return "\n".join(lines) + "\n"


_GPU_TOLD = (
    "the load alone, device hit vs torch.load",
    "device hit vs torch.load",
    "device hit vs ideal",
    "first load",
    "connect",
    "copies in device memory, 8",
)
_GPU_SUBJECTS = ("vgg16-224", "gpt2", "decoder-7b", "15000 MB")


def _gpu_row(row: dict[str, Any]) -> str:
    is_time = row["unit"] == "x"
    sides = ["", ""]
    if row["baseline"] is not None:
        sides = [
            _duration(row[side]["median"]) if is_time else f"{row[side]['median']:.2f}"
            for side in ("baseline", "shim")
        ]
    unit = row["unit"] or "of it"
    if is_time and row["measurement"].endswith(("vs ideal", "page cache")):
        unit = "times as long"
    figure = _figure(row["figure"], unit)
    cells = [row["measurement"], row["subject"], *sides, figure, _verdict(row)]
    return f"| {' | '.join(cells)} |"


def batching_results() -> str:
    """The first table of the comparison with other batchers, and its conditions."""
    _, conditions, first, *_ = BATCHING_RESULTS.read_text().strip().split("\n\n")
    return f"{first}\n\n{conditions}\n"


def overhead_results() -> str:
    """What each batcher adds to a lone request, alone and beside a model."""
    rows = json.loads(OVERHEAD_RESULTS.read_text())["rows"]
    lines = ["| time added to a call, µs | alone | beside a model |", "|---|---:|---:|"]
    for row in rows:
        missed = ": **missed**" if row["is_met"] is False else ""
        lines.append(f"| {row['title']} | {row['added_us']:.0f}{missed} | {row['beside_us']:.0f} |")
    return "\n".join(lines) + "\n"


WRITTEN = {
    "batching results": batching_results,
    "overhead results": overhead_results,
    "results": results,
    "onnx results": lambda: onnx_results(is_short=True),
    "all onnx results": onnx_results,
    "gpu results": lambda: gpu_results(is_short=True),
    "all gpu results": gpu_results,
}
"""Makers of the text between the marks ``<!-- name -->`` and ``<!-- end of name -->``."""
PAGES = (
    README,
    *(ROOT / "docs" / name for name in ("onnxruntime.md", "gpu.md", "results/README.md")),
)


def _with_results(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + WRITTEN[match[2]]() + match[3], text)


def broken_links() -> list[str]:
    """Relative links to files or headings that are not there, as ``file: target``."""
    found = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target, anchor in LINK.findall(page.read_text()):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in _anchors(path)):
                found.append(f"{page.relative_to(ROOT)}: {target}{anchor and '#' + anchor}")
    return found


@functools.cache
def _anchors(page: Path) -> frozenset[str]:
    """Of the headings of a page, as GitHub makes them: without markup and punctuation."""
    found: collections.Counter[str] = collections.Counter()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found[re.sub(r"[^\w\- ]", "", text).replace(" ", "-")] += 1
    again = {f"{name}-{number}" for name in found for number in range(1, found[name])}
    return frozenset(found) | again


def main() -> int:
    """Check, or write with ``--write``; return the exit status."""
    made = {
        ROOT / "docs" / "configuration.md": table(),
        ROOT / "docs" / "api.md": api_reference.page(ROOT),
    }
    if "--write" in sys.argv:
        for page, text in made.items():
            page.write_text(text)
        for page in PAGES:
            page.write_text(_with_results(page.read_text()))
    problems = broken_links()
    for page, text in made.items():
        if not page.exists() or page.read_text() != text:
            problems.append(f"{page.relative_to(ROOT)} is stale: python {sys.argv[0]} --write")
    for page in PAGES:
        if page.read_text() != _with_results(page.read_text()):
            name = page.relative_to(ROOT)
            problems.append(f"the results in {name} are stale: python {sys.argv[0]} --write")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
