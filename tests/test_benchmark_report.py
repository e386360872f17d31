"""How benchmarks write and show what they have measured."""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import (
    batching_policies,
    gpu,
    host,
    simulator_speed,
    staged_measuring,
    staged_policies_report,
    staged_serving_report,
)
from benchmarks.harness import ROOT, Summary, WorkerFailed, argument_parser, write_json
from benchmarks.plan import Findings, Plan
from benchmarks.report import Curve, Row, plot

CURVE = Curve("load", "torch.load", ((1e6, Summary.of([0.1])), (1e7, Summary.of([0.2, 0.4]))))


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Limits the size of the files that this process writes, until the end of the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot([CURVE], path, subtitle="medians"),
        lambda path: staged_serving_report.plot({}, path),
        lambda path: staged_policies_report.plot([], path),
    ],
    ids=["loads", "staged serving", "staged policies"],
)
def test_plot_is_left_out_without_matplotlib(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    draw: Callable[[Path], None],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "gpu.png"
    draw(path)
    assert not path.exists()
    assert f"left out: {path}" in capsys.readouterr().out


def test_results_of_an_earlier_run_outlast_a_full_disk(
    tmp_path: Path, file_size_limit: Callable[[int], None]
) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"rounds": [1]})
    file_size_limit(1 << 16)
    with pytest.raises(OSError, match="File too large"):
        write_json(path, {"rounds": list(range(1 << 16))})
    assert json.loads(path.read_text()) == {"rounds": [1]}


@pytest.mark.parametrize("benchmark", [batching_policies, simulator_speed], ids=["own", "common"])
def test_a_run_whose_results_cannot_be_written_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], benchmark: ModuleType
) -> None:
    (tmp_path / "file").touch()
    arguments = ["--output", str(tmp_path / "file" / "results"), "--requests", "10"]
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(arguments)
    assert "Not a directory" in capsys.readouterr().err


def test_the_directory_of_the_results_is_made(tmp_path: Path) -> None:
    output = tmp_path / "results" / "new"
    arguments = ["--quick", "--requests", "10", "--policies", "auto", "--output", str(output)]
    assert batching_policies.main(arguments) == 0
    assert (output / "batching_policies.json").is_file()


def test_a_section_that_fails_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: Plan, findings: Findings) -> None:
        findings.rows.append(Row("load", "tiny"))

    def failing(_: Plan, __: Findings) -> None:
        raise WorkerFailed("load: no result within 180 s")

    monkeypatch.setattr(
        host, "_SECTIONS", {"opens": measured, "loads": failing, "import": measured}
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert host.main(["--output", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "host.json").read_text())
    assert found["faults"] == ["loads: WorkerFailed: load: no result within 180 s"]
    assert len(found["rows"]) == 2


def test_a_part_of_a_benchmark_does_not_replace_the_results_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parser = argument_parser("made_up", "", harmless=("minutes",))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=int)
    for whole in ([], ["--rounds", "5", "--minutes", "3"]):
        assert parser.parse_args(whole).output == ROOT / "docs" / "results"
    assert capsys.readouterr().err == ""
    temporary = parser.parse_args(["--rounds", "2"]).output
    assert temporary.parent == tmp_path
    told = capsys.readouterr().err
    assert told == f"not the whole benchmark (--rounds): results go to {temporary}\n"
    own = ["--rounds", "2", "--output", str(tmp_path)]
    assert parser.parse_args(own).output == tmp_path


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--sizes", "4", "-1"]], ids=" ".join)
def test_nothing_is_measured_with_counts_below_one(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argument_parser("made_up", "")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(wrong)
    assert end.value.code == 2
    assert f"argument {wrong[0]}: at least 1 is needed\n" in capsys.readouterr().err
    assert parser.parse_args([]).sizes == (1, 2)


@pytest.mark.parametrize("benchmark", [gpu, staged_measuring], ids=["gpu", "staged measuring"])
def test_a_model_that_there_is_not_is_wrong_usage(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        benchmark.main(["--models", "nosuch", "--out", str(tmp_path)])
    assert end.value.code == 2
    assert "invalid choice: 'nosuch' (choose from" in capsys.readouterr().err


def test_an_ensemble_benchmark_that_fails_late_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from benchmarks import ensembles

    def fail(rounds: int) -> None:
        raise WorkerFailed("no answer")

    monkeypatch.setattr(ensembles, "ensure_checkpoint", lambda *_: None)
    monkeypatch.setattr(ensembles, "_searched", lambda devices, members: devices * members)
    monkeypatch.setattr(ensembles, "_throughputs", lambda rounds: {"rounds": rounds})
    monkeypatch.setattr(ensembles, "_sharing", fail)
    with pytest.raises(WorkerFailed):
        ensembles.main(["--rounds", "3", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "ensembles.json").read_text())
    assert found.keys() == {"machine", "search", "throughput"}
    assert found["throughput"] == {"rounds": 3}
