"""``trims plan ensemble``: measures members, chooses an allocation, prints it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.ensemble.making import random_problem
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.cli.plan_ensemble import _devices, _members
from trims_shim.ensemble import load_problem, save_problem

PROGRAM = """
from functools import partial
from trims_shim.ensemble import Member

def load(factor, device):
    return lambda batch: batch * factor

members = [Member("one", partial(load, 1)), Member("other", partial(load, 2))]

def made():
    return members

def item():
    return "text"

def load_text(device):
    return lambda texts: [text.upper() for text in texts]

texts = [Member("text", load_text)]
nothing = 3
"""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "ensemble.json"
    save_problem(path, random_problem(Random(1), devices=2, members=2))
    return path


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ensemble_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*words: str) -> Exit:
    return Exit(main(["plan", "ensemble", *words]))


def test_the_matrix_of_a_measured_problem(
    problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(problem)) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["DEVICE", "m0", "m1", "FREE"]
    assert [line.split()[0] for line in lines[1:3]] == ["gpu:0", "gpu:1"]
    assert lines[4].endswith("times as many as with")
    assert lines[5] == "one worker for each member and batches of 8"
    assert max(map(len, lines)) <= 80


def test_json_has_both_allocations(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(problem), "--json") == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == ["gpu:0", "gpu:1"]
    assert found["members"] == ["m0", "m1"]
    assert found["samples_per_s"] >= found["first"]["samples_per_s"] > 0
    assert [len(row) for row in found["batch_sizes"]] == [2, 2]
    assert run(str(problem), "--json", "--tries", "1") == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert found["batch_sizes"] == found["first"]["batch_sizes"]


@pytest.mark.usefixtures("program")
def test_members_are_measured_and_saved(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ensemble_program:members", "--shape", "3", "--devices", "cpu", "--repeats", "1"]
    assert run(*words, "--batch-sizes", "2,4", "-o", "saved.json") == Exit.OK
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["measuring one on cpu", "measuring other on cpu"]
    assert shown.out.split()[:4] == ["DEVICE", "one", "other", "FREE"]
    assert list(load_problem("saved.json").members) == ["one", "other"]


@pytest.mark.usefixtures("program")
def test_a_function_may_make_the_members() -> None:
    assert [member.name for member in _members("ensemble_program:made")] == ["one", "other"]


@pytest.mark.usefixtures("program")
def test_a_function_that_makes_none_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ensemble_program:load", "--shape", "4") == Exit.FAILED
    assert "ensemble_program:load is called with 0 arguments here" in capsys.readouterr().err


@pytest.mark.usefixtures("program")
def test_samples_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ensemble_program:texts", "--item", "ensemble_program:item", "--devices", "cpu"]
    assert run(*words, "--batch-sizes", "2", "--repeats", "1") == Exit.OK
    assert "text" in capsys.readouterr().out


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["ensemble_program:members"], Exit.USAGE, "give --shape or --item"),
        (["ensemble_program:nothing", "--shape", "3"], Exit.FAILED, "no list of"),
        (["ensemble_program:no", "--shape", "3"], Exit.FAILED, "has no no"),
        (
            ["ensemble_program:members", "--shape", "3", "--devices", "tpu"],
            Exit.USAGE,
            "'tpu' is no device",
        ),
        (
            ["ensemble_program:members", "--shape", "3", "--batch-sizes", "8,9999999999999"],
            Exit.USAGE,
            "--batch-sizes has 9999999999999, which is more than 65536",
        ),
        (["missing.json"], Exit.FAILED, "missing.json"),
        (["/tmp"], Exit.USAGE, "'/tmp' is neither MODULE:NAME, such as app:members, nor a .json"),
    ],
)
def test_what_cannot_be(
    words: list[str], status: Exit, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == status
    assert message in capsys.readouterr().err


def test_a_file_has_what_members_are_measured_with(
    problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--shape", "--devices", "--batch-sizes", "--repeats")
    for words in zip(options, ("3", "cpu", "4", "3"), strict=True):
        assert run(str(problem), *words) == Exit.USAGE
        assert "was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("cpu", ["cpu"]),
        ("cpu:0-3,8,cuda:0,cuda:1", ["cpu:0-3,8", "cuda:0", "cuda:1"]),
        ("cpu:0 cpu:1", ["cpu:0", "cpu:1"]),
        ("cpu:0,1, cuda:0", ["cpu:0,1", "cuda:0"]),
    ],
)
def test_lists_of_devices(text: Any, expected: Any) -> None:
    assert _devices(text) == expected
