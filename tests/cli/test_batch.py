"""``trims batch``: profiles are measured and saved, policies compared, pictures drawn."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trims_shim.batching.policies import POLICIES
from trims_shim.batching.profiles.profile_store import SavedProfile, load_profile, save_profile
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

from .conftest import Trims

LINE = ["--line", "2,20", "--max-batch-size", "16"]
SMALL = [*LINE, "--requests", "400"]
MODULE = """
import time

import torch

batches = []

def double(items):
    batches.append(len(items))
    return [2 * item for item in items]

def odd(items):
    time.sleep(0.05 if len(items) == 3 else 0.002)
    return items

async def later(items):
    return double(items)

def stream(items):
    yield double(items)
    yield double(items)

def lazily(items):
    return (each for each in double(items))

async def stream_later(items):
    yield double(items)

def add(left, right):
    assert left.shape == right.shape
    return left + right

def short(items):
    return items[1:]

def leave(items):
    raise SystemExit(0)

def leave_alone():
    raise SystemExit(0)

def make():
    return torch.zeros(2)

one = 1
"""
DECORATED = """
from trims_shim.batching import batched
from batch_app import make

@batched(slo_ms=100, max_batch_size=3)
def decorated(items):
    return 2 * items

@batched(collate=["list", "auto"], batch_sizes=[2, 4])
def listed(left, right):
    assert isinstance(left, list) and right.shape == (len(left), 2)
    assert len(left) in (2, 4)
    return left

class Service:
    @batched(max_batch_size=3)
    def method(self, items):
        assert isinstance(self, Service)
        return items

    @batched(max_batch_size=3)
    @classmethod
    def of_class(cls, items):
        assert cls is Service
        return items

service = Service()
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A user's module in the current directory; gives what was imported of it."""
    (tmp_path / "batch_app.py").write_text(MODULE)
    (tmp_path / "decorated_app.py").write_text(DECORATED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda: sys.modules["batch_app"]
    for name in ("batch_app", "decorated_app"):
        sys.modules.pop(name, None)


def run_json(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["batch", *words, "--json"]) == Exit.OK
    return json.loads(capsys.readouterr().out)


# --- profile --------------------------------------------------------------------------------------


def test_profile_is_measured_saved_and_used_again(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:double", "--item", "batch_app:one", "--sizes", "1,2,4"]
    assert main(["batch", *words, "--repeats", "2", "-o", "made.json"]) == Exit.OK
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["1", "2", "4"]
    assert "[3/3] batch of 4: about " in err
    assert set(app().batches) == {1, 2, 4}
    assert app().batches.count(2) >= 2
    assert load_profile("made.json").max_batch_size == 4
    found = run_json(
        "simulate", "--profile", "made.json", "--requests", "50", "--policy", "auto", capsys=capsys
    )
    assert found["auto"]["requests"] == 50


def test_profile_as_a_table(
    app: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took_ns = {1: 22_000_000, 4: 28_000_000}
    monkeypatch.setattr("trims_shim.cli.batch_profile.measure", lambda *_, **__: took_ns)
    assert main(["batch", "profile", "batch_app:double", "--item", "batch_app:one"]) == Exit.OK
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["BATCH", "MS", "MS/ITEM", "ITEMS/S"],
        ["1", "22.000", "22.000", "45"],
        ["4", "28.000", "7.000", "143"],
        [],
        ["about", "20", "+", "2", "b", "ms"],
    ]


def test_profile_runs_each_size_as_often_as_asked_for_and_once_before(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:double", "--item", "batch_app:one", "--sizes", "2"]
    run_json(*words, "--repeats", "3", capsys=capsys)
    assert app().batches == [2, 2, 2, 2]


def test_profile_with_a_size_that_takes_longer_than_a_larger_one(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:odd", "--item", "batch_app:one", "--sizes", "3,8"]
    assert main(["batch", *words, "--repeats", "3"]) == Exit.OK
    assert "quicker than one of 3: to fill such\nbatches up, batched(batch_sizes=[8])" in (
        capsys.readouterr().out
    )
    assert run_json(*words, "--repeats", "3", capsys=capsys)["slow_sizes"] == [3]


def test_profile_of_a_size_that_a_file_may_not_have(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:double", "--item", "batch_app:one", "-o", "made.json"]
    assert main(["batch", *words, "--max-batch-size", "65537"]) == Exit.USAGE
    assert "batches of up to 65536, not of 65537" in capsys.readouterr().err
    assert not app().batches
    assert not Path("made.json").exists()


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_profile_where_streams_are_closed(closed: str, trims: Trims, tmp_path: Path) -> None:
    (tmp_path / "printing_app.py").write_text(
        "def double(items):\n    print('!')\n    return items"
    )
    words = "batch profile printing_app:double --shape 1 --sizes 1 -o made.json"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m trims_shim {words} {closed}'],
        env=trims.environment,
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == Exit.OK, done.stderr
    assert load_profile(tmp_path / "made.json").max_batch_size == 1


@pytest.mark.parametrize("name", ["lazily", "later", "stream", "stream_later"])
def test_profile_of_other_kinds_of_functions(
    name: str, app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", f"batch_app:{name}", "--item", "batch_app:one", "--sizes", "2"]
    found = run_json(*words, "--repeats", "1", capsys=capsys)
    assert set(found["latency_ns"]) == {"2"}
    assert set(app().batches) == {2}


def test_profile_of_random_tensors_for_each_argument(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:add", "--shape", "3,2", "--shape", "3,2", "--dtype", "int64"]
    found = run_json(*words, "--max-batch-size", "6", "--repeats", "1", capsys=capsys)
    assert list(found["latency_ns"]) == ["1", "2", "4", "6"]


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (
            ["profile", "builtins:list", "--item", "batch_app:add"],
            "is called with 0 arguments",
            Exit.FAILED,
        ),
        (
            ["simulate", *SMALL, "--policy", "window:wait=5"],
            "no option 'wait'; there are wait_ms",
            Exit.USAGE,
        ),
    ],
)
def test_what_a_name_lacks_is_said(
    words: list[str],
    message: str,
    code: Exit,
    app: Callable[[], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["batch", *words]) == code
    assert message in capsys.readouterr().err


def test_random_tensors_need_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["batch", "profile", "builtins:list", "--shape", "3"]) == Exit.FAILED
    assert "make items with --item" in capsys.readouterr().err


def test_profile_of_a_batcher_has_its_sizes(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "decorated_app:decorated", "--item", "batch_app:make", "--repeats", "1"]
    found = run_json(*words, capsys=capsys)
    assert list(found["latency_ns"]) == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["service.method", "Service.of_class"])
def test_profile_of_a_method(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["profile", f"decorated_app:{name}", "--item", "batch_app:make", "--repeats", "1"]
    assert set(run_json(*words, capsys=capsys)["latency_ns"]) == {"1", "2", "3"}


def test_profile_of_a_batcher_has_its_collate_for_each_argument(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "decorated_app:listed", "--repeats", "1", "--sizes", "2,4"]
    words += ["--item", "batch_app:make"] * 2
    assert list(run_json(*words, capsys=capsys)["latency_ns"]) == ["2", "4"]


@pytest.mark.parametrize(
    ("target", "item", "complaint"),
    [
        ("nosuch_app:double", "batch_app:one", "there is no module nosuch_app"),
        ("batch_app:nosuch", "batch_app:one", "batch_app has no nosuch"),
        ("batch_app:one", "batch_app:one", "is int, not a function"),
        ("batch_app:double", "batch_app:nosuch", "batch_app has no nosuch"),
    ],
)
def test_profile_of_what_is_not_there(
    target: str,
    item: str,
    complaint: str,
    app: Callable[[], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["batch", "profile", target, "--item", item]) == Exit.FAILED
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import nosuch_library", "ModuleNotFoundError: No module named 'nosuch_library'"),
        ("open('nosuch.pt')", "FileNotFoundError: [Errno 2] No such file or directory: 'nosuch"),
        ("def (", "SyntaxError: invalid syntax"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_profile_of_a_module_that_cannot_be_imported(
    source: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_app.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["batch", "profile", "broken_app:double", "--shape", "3"]
    assert main(words) == Exit.FAILED
    error = capsys.readouterr().err
    assert f"trims: broken_app cannot be imported: {complaint}" in error
    assert error.endswith("; TRIMS_LOG=debug shows where\n")


def test_profile_of_a_function_that_fails(
    trims: Trims,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_app.py").write_text("def double(batch): raise OSError('no room')\n")
    words = ("batch", "profile", "failing_app:double", "--shape", "3")
    given = "a batch of 1 of --shape 3 --dtype float32"
    said = f"trims: failing_app:double does not run with {given}: OSError: no room; "
    assert main(list(words)) == Exit.FAILED
    assert capsys.readouterr().err == f"{said}TRIMS_LOG=debug shows where\n"
    shown = trims(*words, cwd=tmp_path, TRIMS_LOG="debug").stderr
    assert said in shown
    assert 'failing_app.py", line 1, in double' in shown
    (tmp_path / "item_app.py").write_text("def one():\n    raise KeyError('no room')\n")
    assert main([*words[:3], "--item", "item_app:one"]) == Exit.FAILED
    error = capsys.readouterr().err
    assert error.startswith("trims: item_app:one makes nothing: KeyError: 'no room'; ")


def test_profile_of_a_name_that_fails_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lazy_app.py").write_text("def __getattr__(name): import nosuch_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["batch", "profile", "lazy_app:double", "--shape", "3"]) == Exit.FAILED
    said = "trims: lazy_app:double cannot be had: ModuleNotFoundError: No module named 'nosuch_"
    assert capsys.readouterr().err.startswith(said)


def test_profile_of_code_that_ends_the_program(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["batch", "profile", "batch_app:leave", "--item"]
    assert main([*words, "batch_app:one"]) == Exit.FAILED
    assert "leave does not run with a batch of 1 of --item batch_app:one: SystemExit: 0" in (
        capsys.readouterr().err
    )
    assert main([*words, "batch_app:leave_alone"]) == Exit.FAILED
    assert "leave_alone makes nothing: SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize("then", ["raise ImportError('cannot load module')", "pass"])
def test_ctrl_c_that_an_import_makes_something_else_of(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deaf_app.py").write_text(
        "import os, signal\n"
        "double = lambda items: items\n"
        f"try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: {then}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deaf_app", raising=False)
    words = ["batch", "profile", "deaf_app:double", "--item", "os:sep"]
    assert main([*words, "--json"]) == Exit.INTERRUPTED
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_target_is_an_object_in_a_module(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "profile", "batch_app", "--item", "batch_app:one"]) == Exit.USAGE
    assert "write MODULE:NAME" in capsys.readouterr().err


def test_profile_on_a_device_that_is_not_there(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:double", "--shape", "3", "--device", "nosuch"]
    assert main(["batch", *words]) == Exit.FAILED
    assert "trims: --device nosuch: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("99999999999,9999999999", "float32"), (f"{1 << 70}", "int64"), ("3", "quint8")],
)
def test_profile_with_tensors_that_cannot_be_made(
    shape: str, dtype: str, app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:double", "--shape", shape, "--dtype", dtype]
    assert main(["batch", *words]) == Exit.FAILED
    assert f"trims: --shape {shape} --dtype {dtype}: " in capsys.readouterr().err


def test_profile_of_a_function_that_loses_results(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "batch_app:short", "--item", "batch_app:one", "--sizes", "2"]
    assert main(["batch", *words]) == Exit.FAILED
    assert "short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("item", "given"),
    [
        (["--shape", "3,2", "--shape", "2,3"], "--shape 3,2 --shape 2,3 --dtype float32"),
        (
            ["--item", "batch_app:make", "--item", "batch_app:one"],
            "--item batch_app:make --item batch_app:one",
        ),
    ],
)
def test_profile_of_items_that_the_function_does_not_take(
    item: list[str], given: str, app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "profile", "batch_app:add", *item]) == Exit.FAILED
    said = f"trims: batch_app:add does not run with a batch of 1 of {given}: "
    assert capsys.readouterr().err.startswith(said)


# --- simulate -------------------------------------------------------------------------------------


def test_simulation_compares_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json("simulate", *SMALL, "--load", "0.8", capsys=capsys)
    assert list(found) == list(POLICIES)
    for report in found.values():
        parts = report["on_time"], report["late"], report["dropped"], report["unanswered"]
        assert sum(parts) == report["requests"] == 400
        assert report["violation_ratio"] == pytest.approx(1 - report["on_time"] / 400)


def test_simulation_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *SMALL, "--rate", "40", "--policy", "immediate", "--policy", "early_drop"]
    assert main(["batch", *words, "--arrivals", "uniform", "--devices", "2"]) == Exit.OK
    head, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == "2 x 20 + 2 b ms (b up to 16); 400 requests at 40/s, SLO 100 ms"
    assert titles.split()[:4] == ["POLICY", "VIOLATIONS", "LATE", "DROPPED"]
    assert [row.split()[:4] for row in rows] == [
        ["immediate", "0.00%", "0", "0"],
        ["early_drop", "0.00%", "0", "0"],
    ]


def test_simulation_is_the_same_by_seed_and_differs_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", *SMALL, "--cv", "2", "--jitter-ms", "1"]
    first = run_json(*words, "--seed", "3", capsys=capsys)
    assert run_json(*words, "--seed", "3", capsys=capsys) == first
    assert run_json(*words, "--seed", "4", capsys=capsys) != first


@pytest.mark.parametrize("random", [[], ["--arrivals", "uniform", "--jitter-ms", "1"]])
def test_a_seed_is_that_of_arrivals_and_of_times(
    random: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", *SMALL, "--policy", "immediate", *random, "--seed"]
    first, second = (run_json(*words, seed, capsys=capsys) for seed in ("1", "2"))
    assert first != second


def test_a_coefficient_of_variation_is_that_of_the_arrivals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", *SMALL, "--policy", "immediate", "--arrivals", "gamma", "--cv"]
    regular, irregular = (
        run_json(*words, cv, capsys=capsys)["immediate"]["p99_ms"] for cv in ("0.1", "4")
    )
    assert irregular > 1.5 * regular


def test_load_and_busy_share_are_those_of_all_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *SMALL, "--policy", "immediate", "--arrivals", "uniform", "--devices"]
    one, two = (run_json(*words, devices, capsys=capsys)["immediate"] for devices in ("1", "2"))
    assert two["duration_s"] == pytest.approx(one["duration_s"] / 2, rel=0.05)
    assert 0.5 < two["busy_share"] <= 1


def test_jitter_makes_answers_late(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *SMALL, "--policy", "immediate", "--rate", "1", "--slo-ms", "23"]
    words += ["--arrivals", "uniform"]
    assert run_json(*words, capsys=capsys)["immediate"]["late"] == 0
    assert run_json(*words, "--jitter-ms", "5", capsys=capsys)["immediate"]["late"] > 100


def test_spread_makes_some_batches_slower_and_others_quicker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", *SMALL, "--policy", "immediate", "--rate", "1", "--arrivals", "uniform"]
    exact = run_json(*words, capsys=capsys)["immediate"]
    spread = run_json(*words, "--spread", "0.5", capsys=capsys)["immediate"]
    assert spread["p50_ms"] < exact["p50_ms"] == exact["p99_ms"] == 22 < spread["p99_ms"]
    assert spread["busy_share"] == pytest.approx(exact["busy_share"], rel=0.1)


def test_load_is_a_share_of_what_is_answered_within_the_objective(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Batches of up to 5 take no longer than 30 ms: 5 in 30 ms is 166.7/s; of all, 16 in 52 ms.
    for slo_ms, rate in (("30", 83.33), ("100", 153.8)):
        words = ["simulate", *SMALL, "--slo-ms", slo_ms, "--load", "0.5", "--arrivals", "uniform"]
        assert main(["batch", *words, "--policy", "immediate"]) == Exit.OK
        head = capsys.readouterr().out.splitlines()[0]
        assert f"at {rate:.4g}/s" in head


def test_policies_take_options(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["window:wait_ms=0", "window:wait_ms=40"]
    words = [word for name in names for word in ("--policy", name)]
    found = run_json("simulate", *SMALL, "--load", "0.3", *words, capsys=capsys)
    assert list(found) == names
    assert found[names[1]]["mean_batch"] > found[names[0]]["mean_batch"]


def test_traces_are_merged_and_have_objectives_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("0,1,21\n1000,1,300\n")
    (tmp_path / "b.txt").write_text("500,1,300\n")
    paths = ["--trace", str(tmp_path / "a.txt"), "--trace", str(tmp_path / "b.txt")]
    words = ["simulate", "--line", "2,20", "--policy", "immediate", *paths]
    assert run_json(*words, capsys=capsys)["immediate"]["late"] == 1
    assert run_json(*words, "--slo-ms", "22", capsys=capsys)["immediate"]["late"] == 0
    assert run_json(*words, "--requests", "2", capsys=capsys)["immediate"]["requests"] == 2
    assert main(["batch", *words]) == Exit.OK
    assert "; 3 requests at 2/s, SLO 21 to 300 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "complaint"),
    [
        ("0,1,300\nlater\n", [], "line 2 of the trace"),
        ("", [], "there is no request in it"),
    ],
)
def test_what_is_no_trace(
    text: str, words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    assert main(["batch", "simulate", "--line", "2,20", "--trace", str(path)]) == Exit.FAILED
    assert complaint in capsys.readouterr().err


def test_a_trace_that_needs_an_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("0\n")
    assert main(["batch", "simulate", "--line", "2,20", "--trace", str(path)]) == Exit.USAGE
    assert "give one with --slo-ms" in capsys.readouterr().err


def test_a_profile_does_not_know_larger_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "profile.json")
    save_profile(path, SavedProfile({1: 5e6, 4: 8e6}, max_batch_size=4))
    words = ["simulate", "--profile", path, "--requests", "100", "--policy", "immediate"]
    assert main(["batch", *words]) == Exit.OK
    assert "(b up to 4)" in capsys.readouterr().out
    for size in ("3", "4"):
        assert main(["batch", *words, "--max-batch-size", size]) == Exit.OK
        assert f"(b up to {size})" in capsys.readouterr().out
    assert main(["batch", *words, "--max-batch-size", "5"]) == Exit.USAGE
    assert "knows batches of up to 4, not of 5" in capsys.readouterr().err


def test_a_file_that_is_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text("[]")
    assert main(["batch", "simulate", "--profile", str(path)]) == Exit.FAILED
    assert str(path) in capsys.readouterr().err
    assert main(["batch", "simulate", "--profile", str(tmp_path / "nosuch")]) == Exit.FAILED
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "nosuch"], "early_drop"),
        (["--policy", "window:nosuch=1"], "nosuch"),
        (["--policy", "window:wait_ms"], "is not OPTION=VALUE"),
        (["--slo-ms", "21"], "every answer would be late"),
        (["--arrivals", "uniform", "--cv", "2"], "--cv is of gamma arrivals"),
        (["--line", "1e8,1e8", "--slo-ms", "1e9", "--load", "1e-9"], "give a higher rate"),
        (["--max-batch-size", "100000000"], "--max-batch-size 100000000"),
    ],
)
def test_what_cannot_be_simulated(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "simulate", *SMALL, *words]) == Exit.USAGE
    assert complaint in capsys.readouterr().err


# --- plot -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["profile", "latency", "load"])
def test_plots_are_pictures(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    more = {
        "profile": LINE,
        "latency": [*SMALL, "--policy", "immediate"],
        "load": [*SMALL, "--policy", "immediate", "--loads", "0.5,1.2"],
    }
    assert main(["batch", "plot", what, *more[what], "-o", str(path)]) == Exit.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.out == f"drawn: {path}\n"
    assert printed.err == ("[1/1] immediate\n" if what == "load" else "")


def test_a_line_of_one_point_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    words = ["--line", "2,20", "--max-batch-size", "1", "-o", str(path)]
    assert main(["batch", "plot", "profile", *words]) == Exit.OK
    picture = path.read_text(encoding="utf-8")
    assert "fill: #1f77b4" in picture  # a marker of the first line; lines have only a stroke


def test_more_lines_than_there_are_colours_can_be_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    policies = [["--policy", f"window:wait_ms={wait_ms}"] for wait_ms in range(1, 12)]
    words = [*SMALL, "-o", str(path), *itertools.chain(*policies)]
    assert main(["batch", "plot", "latency", *words]) == Exit.OK
    assert "stroke-dasharray" in path.read_text(encoding="utf-8")


def test_data_of_plots(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policy", "early_drop"]
    latency, rate = run_json("plot", "profile", *LINE, capsys=capsys)["panels"]
    assert latency["lines"][0]["y"][0] == 22
    assert rate["lines"][0]["y"][-1] == pytest.approx(16 / 0.052)
    (panel,) = run_json("plot", "load", *words, "--loads", "1.5,0.2", capsys=capsys)["panels"]
    (line,) = panel["lines"]
    assert line["x"] == [0.2, 1.5]
    assert line["y"][0] < 0.05 < 0.2 < line["y"][1]
    (panel,) = run_json("plot", "latency", *words, "--load", "1.5", capsys=capsys)["panels"]
    (line,) = panel["lines"]
    assert line["x"] == sorted(line["x"])
    assert line["x"][-1] <= 100
    assert 0.5 < line["y"][-1] < 1  # those that were dropped are never answered


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["load"], "--output has to name a file"),
        (["load", "-o", "plot.txt"], ".png"),
        (["load", "-o", "plot.png", "--rate", "3"], "use --loads"),
    ],
)
def test_what_cannot_be_drawn(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "plot", *words, *SMALL]) == Exit.USAGE
    assert complaint in capsys.readouterr().err


def test_plot_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["plot", "profile", *LINE, "-o", str(tmp_path / "plot.png")]
    assert main(["batch", *words]) == Exit.FAILED
    assert "pip install matplotlib" in capsys.readouterr().err


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["profile"],
        ["profile", "a:b"],
        ["profile", "a:b", "--item", "a:c", "--shape", "3"],
        ["profile", "a:b", "--shape", "3,0"],
        ["profile", "a:b", "--shape", "3", "-o", "nosuch/made.json"],
        ["profile", "a:b", "--shape", "3", "-o", "/"],
        ["plot", "load", "--line", "2,20", "-o", "nosuch/plot.png"],
        ["simulate"],
        ["simulate", "--line", "2"],
        ["simulate", "--line", "0,0"],
        ["simulate", "--line", "2,x"],
        ["simulate", "--line", "2,20", "--slo-ms", "0"],
        ["simulate", "--line", "2,20", "--slo-ms", "inf"],
        ["simulate", "--line", "2,20", "--jitter-ms", "1e300"],
        ["simulate", "--line", "2,20", "--rate", "1e-300"],
        ["simulate", "--line", "2,20", "--jitter-ms", "-1"],
        ["simulate", "--line", "2,20", "--spread", "-1"],
        ["simulate", "--line", "2,20", "--load", "1", "--rate", "1"],
        ["plot", "nosuch", "--line", "2,20"],
    ],
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["batch", *words])
    assert end.value.code == Exit.USAGE
    assert "usage: trims batch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["profile", "simulate", "plot"])
def test_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["batch", name, "--help"])
    text = capsys.readouterr().out
    assert f"example:\n  trims batch {name} " in text
    assert "--json" in text
