"""Checks the documentation: relative links resolve, the configuration table is the code's, and the
figures in the README are the measured ones in docs/results/host.json.

``--write`` writes both tables. ``make docs`` checks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from trims_shim.config import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "configuration.md"
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results" / "host.json"
MARKED = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")

HEAD = """# Configuration

Strongest first: argument, environment variable, `~/.config/trims/trims.toml` (keys in lower case,
without `TRIMS_`), default. `trims info` shows each value and where it comes from. An unknown
`TRIMS_*` variable or an unclear value is an error; a program then runs without the shim, with one
warning. Sizes: `512M`, `8GiB`, `40%` (of the memory the process may use; for settings of a device,
of the device's). Booleans: `1` or `0`.

Settings marked *daemon* are read when the daemon starts: `trims stop` to apply a change.

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
    """The README's table of results, between its marks."""
    measured = json.loads(RESULTS.read_text())
    machine = measured["machine"]
    lines = [
        "| measured | model | without | with trims | gain (smallest to largest of 5 rounds) |",
        "|---|---|---|---|---|",
        *(_row(row) for row in measured["rows"] if _is_shown(row)),
        "",
        f"{machine['processor']}, {machine['processors']} cores, torch "
        f"{machine['versions']['torch']}, {machine['date'][:10]}; medians, fresh processes, timed "
        "after imports.",
    ]
    return "\n".join(lines) + "\n"


def _is_shown(row: dict[str, Any]) -> bool:
    return row["unit"] in ("x", "copies") and not row["subject"].startswith(("tiny", "resnet"))


def _row(row: dict[str, Any]) -> str:
    figure, is_time = row["figure"], row["unit"] == "x"
    sides = [row[side] for side in ("baseline", "shim")]
    texts = [
        _milliseconds(each["median"]) if is_time else f"{each['median']:.2f}" for each in sides
    ]
    gain = f"{figure['median']:.3g} ({figure['low']:.3g} to {figure['high']:.3g})"
    if row["measurement"].startswith("first load"):
        gain = f"takes {gain} times as long"
    elif is_time:
        gain = f"**{figure['median']:.3g}x** ({figure['low']:.3g} to {figure['high']:.3g})"
    else:
        gain = f"**{figure['median']:.2f} copies**"
    return f"| {row['measurement']} | {row['subject']} | {texts[0]} | {texts[1]} | {gain} |"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _with_results(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + results() + match[2], text)


def broken_links() -> list[str]:
    """Relative links that lead nowhere, as ``file: target``."""
    found = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in LINK.findall(page.read_text()):
            if not (page.parent / target).exists():
                found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def main() -> int:
    """Check, or write with ``--write``; the exit status."""
    if "--write" in sys.argv:
        TABLE.write_text(table())
        README.write_text(_with_results(README.read_text()))
    problems = broken_links()
    if not TABLE.exists() or TABLE.read_text() != table():
        problems.append(f"{TABLE.relative_to(ROOT)} is stale: python {sys.argv[0]} --write")
    if README.read_text() != _with_results(README.read_text()):
        problems.append(f"the results in README.md are stale: python {sys.argv[0]} --write")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
