"""The documentation agrees with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_links_resolve_and_the_configuration_table_is_current() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_docs.py")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_reason_not_to_serve_a_session_is_explained() -> None:
    package = ROOT / "trims_shim"
    sources = [
        *package.glob("patches/onnxruntime_*.py"),
        *package.glob("daemon/prepare*.py"),
        *package.glob("daemon/prob*.py"),
        *(
            package / "daemon" / f"{name}.py"
            for name in ("interpreters", "model_files", "optimising", "verifying")
        ),
        package / "client" / "prepared.py",
    ]
    said = re.compile(r'(?:(?:NotServed|Refusal|_failed)\(\s*|reason=)"([a-z_]+)"')
    reasons = {reason for path in sources for reason in said.findall(path.read_text())}
    assert {"small_file", "outputs_differ", "other_user", "prepared_failed"} <= reasons
    page = (ROOT / "docs" / "onnxruntime.md").read_text()
    reasons = {"preparer_*" if each.startswith("preparer_") else each for each in reasons}
    assert sorted(each for each in reasons if f"`{each}`" not in page) == []
