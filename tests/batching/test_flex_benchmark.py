"""The comparison of Flex with its baselines: all of them run, on the same requests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.batching_flex import FACTORS, STAGES, SWEEPS, Cell, plot, table
from benchmarks.batching_flex_systems import SYSTEMS, _packed, run, synthetic


def workload(slos: str = "mixed", devices: int = 2, process: str = "4"):  # type: ignore[no-untyped-def]
    return synthetic(slos=slos, process=process, load=0.9, devices=devices, count=300, seed=1)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_accounts_for_every_request(name: str) -> None:
    """``Report.of`` raises where one is missing."""
    report = run(SYSTEMS[name], workload())
    assert report.requests == len(list(workload().requests()))
    assert 0 < report.on_time <= report.requests


@pytest.mark.parametrize("devices", [1, 2, 8, 20])
@pytest.mark.parametrize("slos", ["equal", "mixed", "heavy"])
def test_dedicated_devices_serve_every_model(slos: str, devices: int) -> None:
    scene = workload(slos, devices)
    packed = _packed(scene)
    assert len(packed) == devices
    assert all(packed)
    assert {name for names in packed for name in names} == set(scene.profiles)


def test_equal_seeds_make_equal_requests() -> None:
    first, second = (
        [(each.arrival_ns, each.key) for each in workload(process="bursty").requests()]
        for _ in range(2)
    )
    assert first == second


def cell(section: str, setting: str, system: str, goodput: float) -> Cell:
    return Cell(section, setting, system, goodput, 0.0, 1.0, 1.0, 0.0, 0.0)


def test_the_table_shows_the_best_in_bold() -> None:
    first, second, *_ = SYSTEMS
    lines = table([cell("grid", "a", first, 0.5), cell("grid", "a", second, 0.75)]).splitlines()
    assert lines[-1] == "| a | 0.500 | **0.750** |"


def test_the_plot_is_drawn_with_and_without_results(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sweeps = [
        cell("lambda", f"{slos}, load {load}, λ {factor}", "ours", 0.9)
        for slos, load in SWEEPS
        for factor in FACTORS
    ]
    stages = [cell("stages", f"1 devices, {each} stages", "paper", 0.9) for each in STAGES]
    for number, cells in enumerate(([], [*sweeps, *stages])):
        path = tmp_path / f"{number}.png"
        plot(cells, path)
        assert path.stat().st_size > 1000
