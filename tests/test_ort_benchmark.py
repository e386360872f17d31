"""The benchmark of onnxruntime sessions judges and reports what it measured, and nothing else.

From canned samples: what is a fault, what meets a target, what the documentation shows of it. One
smoke run measures for real, with small models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import check_docs  # noqa: E402

from benchmarks import ort, ort_sessions  # noqa: E402
from benchmarks.gpu_plan import Clock  # noqa: E402
from benchmarks.harness import write_json  # noqa: E402
from benchmarks.ort_plan import FULL, Model, Run, check_equal, check_served  # noqa: E402
from benchmarks.plan import Findings  # noqa: E402

MODEL = Model("bert-base", "/nowhere/bert.onnx", 438_000_000)
SMOKE_S = 400


def sample(seconds: float, *, mapped: int = 1, checksum: str = "a") -> dict[str, Any]:
    return {
        "create_s": seconds,
        "peak_bytes": int(seconds * 1e9),
        "mapped_bytes": mapped,
        "first_run_s": 0.05,
        "run_s": [0.04, 0.03, 0.05],
        "checksum": checksum,
        "fallbacks": {},
    }


def judged(shim_s: float, *, mapped: int = 1) -> Run:
    run = Run(FULL, Clock(60.0))
    results = {side: [sample(0.8)] * 3 for side in ("from a path", "from bytes")}
    for side in results.copy():
        results[f"{side}, trims"] = [sample(shim_s, mapped=mapped)] * 3
    ort_sessions._judge_creation(run, MODEL, results, is_left_alone=False)
    ort_sessions._judge_runs(run, MODEL, results)
    return run


def test_ratio_decides_about_the_target() -> None:
    for shim_s, is_met in ((0.1, True), (0.3, False)):
        rows = {row.measurement: row for row in judged(shim_s).findings.rows}
        assert rows["session from a path"].is_met is is_met
        assert rows["session from bytes"].is_met is None
        assert rows["inference"].is_met is True


def test_session_that_maps_nothing_is_a_fault() -> None:
    assert judged(0.1).findings.faults == []
    assert judged(0.1, mapped=0).findings.faults != []
    findings = Findings()
    assert check_served("it", [sample(1.0), sample(1.0, mapped=0)], findings) != ""
    assert len(findings.faults) == 1


def test_other_bits_are_a_fault() -> None:
    findings = Findings()
    check_equal("it", [sample(1.0), sample(2.0)], findings)
    assert findings.faults == []
    check_equal("it", [sample(1.0), sample(1.0, checksum="b")], findings)
    assert findings.faults == ["it: the outputs differ between the variants"]


def test_what_does_not_fit_is_left_out_and_named() -> None:
    run = Run(FULL, Clock(0.0))
    ort_sessions.measure_sessions(run)
    assert run.findings.rows == []
    assert run.left_out == [f"sessions of {name}: no time left" for name in FULL.models]


def test_documentation_shows_verdicts_and_what_is_missing(tmp_path: Path) -> None:
    run = judged(0.3)
    run.left_out.append("sessions of gpt2: no time left")
    run.findings.faults.append("interrupted: what follows was not measured")
    machine = {
        "processor": "a processor",
        "processors": 2,
        "date": "2026-01-02T03:04:05",
        "versions": {"onnxruntime": "1.31.1"},
    }
    ort._write(run, machine, tmp_path)
    written = tmp_path / "ort.json"
    shown = check_docs.onnx_results(written)
    wanted = (
        "| session from a path | bert-base (438 MB) | 800 ms | 300 ms | **2.67x** (2.67 to 2.67)"
    )
    assert f"{wanted} | ≥ 4: **missed** |" in shown
    assert "| peak memory while creating | bert-base (438 MB) | 800 MB | 300 MB |" in shown
    assert "Left out: sessions of gpt2: no time left." in shown
    assert "**Not valid: interrupted: what follows was not measured.**" in shown
    assert "first inference" in shown
    short = check_docs.onnx_results(written, is_short=True)
    assert "first inference" not in short
    assert "Missed: session from a path, bert-base (438 MB): **2.67x** (2.67 to 2.67), ≥ 4" in short


def test_documentation_says_when_nothing_was_measured(tmp_path: Path) -> None:
    assert "Not measured yet" in check_docs.onnx_results(tmp_path / "ort.json")


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "ort.json", {"old": True})
    ort._write(judged(0.1), {}, tmp_path)
    assert "rows" in json.loads((tmp_path / "ort.json").read_text())
    assert [file.name for file in tmp_path.iterdir()] == ["ort.json"]


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_S + 10)
def test_smoke_run_measures_with_equal_bits(tmp_path: Path) -> None:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRIMS_")}
    command = [sys.executable, "-m", "benchmarks.ort", "--quick", "--rounds=1"]
    done = subprocess.run(
        [*command, "--models=mobilenetv2", f"--output={tmp_path}"],
        cwd=ROOT,
        env=variables | {"TRIMS_BENCH_DIR": str(tmp_path / "models")},
        capture_output=True,
        text=True,
        timeout=SMOKE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "ort.json").read_text())
    measured = {row["measurement"] for row in found["rows"]}
    assert {"session from a path", "memory of each further process"} <= measured
    assert (tmp_path / "ort.png").stat().st_size > 0
