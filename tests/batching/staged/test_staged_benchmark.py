"""The simulated comparison of staged policies: all of them run, on the same requests."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import staged_measuring
from benchmarks.staged_policies import main
from benchmarks.staged_policies_report import Cell, gains, plot, report
from benchmarks.staged_scenes import LOADS, SCENES, line_stages, measured_scene, run
from benchmarks.staged_systems import PEAK_SYSTEMS, SYSTEMS, is_of
from trims_shim.batching.simulator import Report
from trims_shim.batching.staged.profiles.profile_files import SavedStages, save_staged_profile


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("scene", ["BERT-like, wide", "LinkNet-like, narrow"])
def test_every_system_accounts_for_every_request(name: str, scene: str) -> None:
    """``Report.of`` raises where one is missing."""
    for way in SYSTEMS[name]:
        outcome = run(SCENES[scene], way, LOADS["step"], count=40, seed=1)
        assert Report.of(outcome).requests == outcome.requests > 20
        assert outcome.answered


def test_all_systems_get_the_same_requests_with_keys_or_without() -> None:
    scene = SCENES["BERT-like, wide"]
    own, mixed = (
        scene.requests((0.5,), count=200, seed=3, is_bucketed=is_bucketed)
        for is_bucketed in (True, False)
    )
    assert [(r.arrival_ns, r.payload) for r in own] == [(r.arrival_ns, r.payload) for r in mixed]
    assert [r.key for r in own] == [r.payload for r in own]
    assert {r.key for r in mixed} == {None}
    assert {r.payload for r in own} == {32, 64, 96, 128}


def test_a_step_is_a_change_of_rate() -> None:
    scene = SCENES["VGG-like, wide"]
    stream = scene.requests((0.2, 1.0, 0.2), count=1400, seed=1, is_bucketed=True)
    third_ns = stream[-1].arrival_ns / 3
    middle = [r for r in stream if third_ns < r.arrival_ns < 2 * third_ns]
    assert [r.arrival_ns for r in stream] == sorted(r.arrival_ns for r in stream)
    assert len(middle) == pytest.approx(1000, rel=0.15)
    assert len(stream) == pytest.approx(1400, rel=0.15)


def test_the_models_take_about_half_of_the_objective_at_most() -> None:
    for scene in SCENES.values():
        largest_ms = scene.unstaged.profile(max(scene.profiles)).latency_ns(64) / 1e6
        assert 79 < largest_ms < 100


def test_stages_of_a_line_are_as_long_as_it() -> None:
    for stages in (1, 3, 20):
        assert line_stages(1.3, 4, stages).latency_ns(10) == pytest.approx(17e6, rel=1e-6)


def test_only_what_differs_is_measured() -> None:
    assert not is_of("split only", "load")
    assert is_of("split only", "operator")
    assert is_of("dvabatch", "input")
    assert all(
        way.setting in ("", "2 ms", "20 ms") for ways in PEAK_SYSTEMS.values() for way in ways
    )


def test_a_measured_profile_becomes_a_scene(tmp_path: Path) -> None:
    latencies = [{1: 4e6, 8: 10e6}, {1: 2e6, 8: 3e6}]
    path = tmp_path / "measured.json"
    save_staged_profile(path, SavedStages({None: latencies}, 8, name="mine"))
    scene = measured_scene(path, device="narrow")
    assert scene.name == "mine (measured), narrow"
    assert scene.qos_ms == pytest.approx(2.2 * 13)
    outcome = run(scene, SYSTEMS["dvabatch"][0], LOADS["high"], count=50, seed=1)
    assert max(len(each.batch) for each in outcome.stage_executions) <= 8


def test_a_tiny_run_writes_everything_and_keeps_other_sections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--quick", "--requests", "30", "--scenes", "VGG-like, narrow", "--out", str(tmp_path)]
    assert main([*tiny, "--sections", "latencies"]) == 0
    assert main([*tiny, "--sections", "peaks"]) == 0
    found = json.loads((tmp_path / "staged_policies.json").read_text())
    assert {each["section"] for each in found["cells"]} == {"latencies", "peaks"}
    text = (tmp_path / "staged_policies.md").read_text()
    assert text in capsys.readouterr().out
    assert "**Simulated**" in text
    assert "VGG-like, narrow" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "staged_policies.png").stat().st_size > 1000


# --- the report -----------------------------------------------------------------------------------


def cell(system: str, mean_ms: float | None, load: str = "low", section: str = "latencies") -> Cell:
    return Cell(section, "VGG-like, wide", system, "2", load, mean_ms, 0, 9, 0.25, 1, 1, 100)


def test_a_gain_is_the_share_that_the_mean_is_lower() -> None:
    cells = [cell("dvabatch", 6), cell("immediate", 8), cell("dvabatch", None, "high")]
    assert gains(cells, "immediate", device="wide") == {("VGG-like, wide", "low"): 0.25}
    assert gains(cells, "immediate", device="narrow") == {}
    assert "| wide | immediate | -25% |  |  |  | -25% | -25% (VGG-like, low) |" in report(
        cells, {"requests": 1, "seeds": 1}
    )


def test_what_was_violated_or_not_measured_is_shown() -> None:
    text = report([cell("window", None), cell("dvabatch", 6.25)], {"requests": 1, "seeds": 1})
    assert "| window | - / 9 (25.0%) |  |  |  |" in text
    assert "| dvabatch | 6.2 / 9 (25.0%) |  |  |  |" in text


def test_the_plot_is_drawn_with_and_without_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sections = ("latencies", "peaks", "pairs", "stages")
    cells = [cell("dvabatch", 6.0, load, each) for each in sections for load in ("low", "high")]
    for number, drawn in enumerate(([], cells)):
        path = tmp_path / f"{number}.png"
        plot(drawn, path)
        assert path.stat().st_size > 1000


# --- measured profiles ----------------------------------------------------------------------------


@dataclass
class Served:
    """Two stages, as the serving benchmark's models have them."""

    stages = (lambda value: value + 1, lambda value: value * 2)

    def item(self, number: int) -> Any:
        import torch

        return torch.zeros(3)

    def whole(self, value: Any) -> Any:
        return self.stages[1](self.stages[0](value))


def test_a_model_is_measured_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ModuleType("benchmarks.staged_models")
    models.make_served = lambda name, device: Served()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.staged_models", models)
    tiny = ["--models", "vgg", "--sizes", "1", "2", "--repeats", "1"]
    assert staged_measuring.main([*tiny, "--out", str(tmp_path)]) == 0
    assert "a batch of 1 beside another takes" in capsys.readouterr().out
    path = tmp_path / "staged_profile_vgg.json"
    profiles = ["--profile", str(path), "--scenes", "--sections", "pairs"]
    assert measured_scene(path, device="wide").staged.stages == 2
    assert main(["--quick", *profiles, "--device", "wide", "--out", str(tmp_path / "out")]) == 0
    assert "| vgg (measured), wide, high load |" in capsys.readouterr().out


def test_alone_and_beside_all_calls_are_made() -> None:
    callers: list[int] = []
    staged_measuring.slowdown(lambda: callers.append(get_ident()), (), "cpu", rounds=2)
    assert callers.count(get_ident()) == 1 + 2 * 3
    assert len(callers) == 1 + 2 * (3 + 2 * 3)
