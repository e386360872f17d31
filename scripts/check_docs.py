"""Checks the documentation: relative links resolve, and the configuration table is the code's.

``--write`` writes the table. ``make docs`` checks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trims_shim.config import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "configuration.md"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")

HEAD = """# Configuration

Strongest first: argument, environment variable, `~/.config/trims/trims.toml` (keys in lower case,
without `TRIMS_`), default. `trims info` shows each value and where it comes from. An unknown
`TRIMS_*` variable or an unclear value is an error; a program then runs without the shim, with one
warning. Sizes: `512M`, `8GiB`, `40%` (of the memory the process may use). Booleans: `1` or `0`.

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
    problems = broken_links()
    if not TABLE.exists() or TABLE.read_text() != table():
        problems.append(f"{TABLE.relative_to(ROOT)} is stale: python {sys.argv[0]} --write")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
