"""The documentation agrees with the code."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from trims_shim import config, diagnostics, errors, inspection, patches
from trims_shim.batching.staged import slice_onnx
from trims_shim.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[1]


def test_links_resolve_and_the_configuration_table_is_current() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_docs.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_batcher_whose_overhead_was_measured_is_told() -> None:
    results = ROOT / "docs" / "results"
    page = (results / "README.md").read_text()
    rows = json.loads((results / "batching_overhead.json").read_text())["rows"]
    told = [f"| {row['title']} | {row['added_us']:.0f}" for row in rows]
    assert [line for line in told if line not in page] == []


def test_every_patch_point_is_named() -> None:
    page = (ROOT / "docs" / "transparency.md").read_text()
    files = [patch_file for patch_file, *_ in patches.PATCH_FILES]
    found = {target for each in files for target, _ in inspection._declared(each)}
    assert "peft.tuners.tuners_utils:BaseTuner.merge_adapter" in found
    missing = [each for each in found if not any(f"{name}`" in page for name in _names(each))]
    assert sorted(missing) == []


def _names(target: str) -> list[str]:
    """By which a page may tell of a function: its own, that of its class or of its module."""
    module, _, path = target.partition(":")
    return [module, *path.split(".")]


def test_every_reason_for_a_fallback_is_explained() -> None:
    package = ROOT / "trims_shim"
    sources = [*package.glob("patches/[!o]*.py"), *package.glob("client/[!p]*.py")]
    said = re.compile(r'(?:NotServed|fallback|skip)\(\s*"([a-z_]+)"')
    reasons = {reason for path in sources for reason in said.findall(path.read_text())}
    kinds = (errors.DaemonError, errors.RequestRefused, errors.WireError, errors.FormatError)
    told = [each for each in vars(errors).values() if isinstance(each, type)]
    reasons |= {each.reason for each in told if issubclass(each, kinds) and each not in kinds}
    reasons |= {errors.MemoryFailure.reason, errors.DriverFailure.reason, errors.ConfigError.reason}
    reasons.add(diagnostics.reason_of(ValueError("a bug")))
    # What only commands meet, and a device that is no CUDA device.
    reasons -= {errors.UnknownImage.reason, "device"}
    assert {"small_file", "daemon_timeout", "no_space", "internal_error"} <= reasons
    pages = [ROOT / "docs" / f"{name}.md" for name in ("troubleshooting", "transparency")]
    text = "".join(page.read_text() for page in pages)
    assert sorted(each for each in reasons if f"`{each}`" not in text) == []


def test_every_reason_not_to_serve_a_session_is_explained() -> None:
    package = ROOT / "trims_shim"
    sources = [
        *package.glob("patches/onnxruntime_*.py"),
        *package.glob("daemon/prepare[dr]/*.py"),
        package / "client" / "prepared.py",
    ]
    said = re.compile(r'(?:(?:NotServed|Refusal|_failed)\(\s*|reason=)"([a-z_]+)"')
    reasons = {reason for path in sources for reason in said.findall(path.read_text())}
    assert {"small_file", "outputs_differ", "other_user", "prepared_failed"} <= reasons
    page = (ROOT / "docs" / "onnxruntime.md").read_text()
    reasons = {"preparer_*" if each.startswith("preparer_") else each for each in reasons}
    assert sorted(each for each in reasons if f"`{each}`" not in page) == []


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", page, flags=re.MULTILINE)
    quoted = {text for cell in cells for text in re.findall(r'(?<!=)"([^"`]+)"', cell)}
    assert "trims_shim stays inactive" in quoted
    others = {"Trying to resize storage that is not resizable", "illegal memory access"}
    sources = [path.read_text() for path in (ROOT / "trims_shim").rglob("*.py")]
    code = re.sub(r'"\s+f?"', "", "\n".join(sources))  # literals over several lines, joined
    assert sorted(each for each in quoted - others if each not in code) == []


def test_commands_are_understood() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    line = re.compile(r"^(?:[$#]|   ) (?:[A-Z_]+=\S+ )*trims (?!run )(.*)$", re.MULTILINE)
    found = [words for page in pages for words in line.findall(page.read_text())]
    assert "plan herd herd.toml" in found
    for words in found:
        assert make_parser().parse_args(shlex.split(words, comments=True))


def test_the_extra_for_onnx_stages_brings_an_onnxruntime_that_can_be_cut() -> None:
    """Found: it was content with 1.19. Before 1.21, onnxruntime does not find a stage's weights."""
    needed = re.search(r"onnxruntime ([0-9.]+)", slice_onnx.__doc__ or "")
    assert needed
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = config.load_toml(file)["project"]["optional-dependencies"]
    assert f"onnxruntime>={needed[1]}" in extras["onnx"]
    assert f"onnxruntime {needed[1]} or later" in (ROOT / "docs" / "stages.md").read_text()
