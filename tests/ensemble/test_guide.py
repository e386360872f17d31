"""docs/ensembles.md: its commands print what is shown, its names are there, its example runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trims_shim.ensemble as package
from trims_shim.batching import LatencyProfile
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.ensemble import Device, Footprint, MemberProfile, Problem, save_problem

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "ensembles.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)

TORCHVISION = """
import types
import torch

models = types.SimpleNamespace(get_model=lambda name: torch.nn.Linear(4, 2, bias=False))
"""


def test_the_session_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    footprint = Footprint(14_000_000, 220_000_000, 25_000_000)
    members = {
        name: MemberProfile({"cpu": footprint}, {"cpu": profile})
        for name, profile in (
            ("mobilenet", LatencyProfile.linear(26, 14, max_batch_size=16)),
            ("resnet50", LatencyProfile.linear(100, 28, max_batch_size=8)),
        )
    }
    devices = [Device(f"cpu:{core}", 24_000_000_000) for core in (0, 1)]
    save_problem(tmp_path / "ensemble.json", Problem(devices, members))
    monkeypatch.chdir(tmp_path)
    (session,) = [
        text for language, text in BLOCKS if "$ trims plan ensemble ensemble.json" in text
    ]
    command, _, shown = session.partition("\n")
    assert main(command.split()[2:]) == Exit.OK
    assert capsys.readouterr().out == shown


def test_names_that_are_imported_are_there() -> None:
    found = re.findall(r"from trims_shim\.ensemble import (.*)", GUIDE)
    names = {name.strip() for line in found for name in line.split(",")}
    assert names
    assert names <= set(package.__all__)


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torchvision, and checkpoints of its models."""
    code = next(text for language, text in BLOCKS if language == "python")
    for name, factor in (("resnet50", 1.0), ("vit_b_16", 3.0)):
        torch.save({"weight": torch.full((2, 4), factor)}, tmp_path / f"{name}.pt")
    (tmp_path / "torchvision.py").write_text(TORCHVISION)
    code += "        print(scores.tolist() == [[8.0, 8.0]] * 5)\n"
    (tmp_path / "guide.py").write_text(f"import torch\nimages = torch.ones(5, 4)\n{code}")
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr


def test_times_of_the_search_are_those_of_the_results() -> None:
    """Found: times for numbers of devices and members that no result has."""
    results = Path(__file__).resolve().parents[2] / "docs" / "results" / "ensembles.json"
    taken_s = {
        (str(each["devices"]), str(each["members"])): each["taken_s"]["optimise"]
        for each in json.loads(results.read_text())["search"]
    }
    told = re.search(
        r"10,000 allocations in (\S+) s for (\d+) devices and (\d+) members, and in (\S+) s for "
        r"(\d+) and (\d+)",
        " ".join(GUIDE.split()),
    )
    assert told
    assert float(told[1]) == pytest.approx(taken_s[told[2], told[3]], rel=0.1)
    assert float(told[4]) == pytest.approx(taken_s[told[5], told[6]], rel=0.1)
