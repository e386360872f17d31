"""``trims stage``: models are cut and measured, profiles saved and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx_models import perceptron, save

from trims_shim.batching import Batcher
from trims_shim.batching.staged.profiles.profile_files import (
    SavedStages,
    load_saved_stages,
    save_staged_profile,
)
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

MODULE = """
import torch

from trims_shim.batching import Batcher, Pad, batched
from trims_shim.batching.staged.activations import EarlyExit
from trims_shim.batching.staged.model import StagedModel

batches = []
now_ns = 0

def embed(items):
    batches.append(len(items))
    return items

def slow_if_long(items):
    global now_ns
    now_ns += 20_000 * sum(len(item) for item in items)
    return items

def slower_each_time(items):
    global now_ns
    batches.append(len(items))
    now_ns += 1000 * len(batches)
    return items

def all_leave(items):
    return EarlyExit([True] * len(items), items, None)

def add(left, right):
    assert left.shape == right.shape
    return left + right

def padded(batch, ones):
    global seen
    seen = batch.values, batch.mask, ones
    return ones

def head(sums):
    return sums

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x):
        return self.layers(x).relu()

def make_staged():
    return StagedModel([embed, slow_if_long], name="made")

def make_items(length=3):
    return [0] * length

def make_tensors(length):
    return [torch.zeros(8)] * length

@batched(max_batch_size=3)
def plain(items):
    return items

class ByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 8)

    def forward(self, ids, scale):
        return self.head(self.embedding(ids)) * scale[:, None, None]

class Branch(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1

def make_mapping(length=3):
    return {"ids": torch.ones(length, dtype=torch.int64), "scale": torch.tensor(2.0)}

by_name = ByName().eval()
branching = torch.nn.Sequential(*[Branch() for _ in range(4)]).eval()
training = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
staged = make_staged()
batcher = Batcher(staged, max_batch_size=3, collate="list")
with_function = batched(model=staged, max_batch_size=3, collate="list")(embed)
adding = StagedModel([add, head])
slower = StagedModel([slower_each_time])
padding = Batcher(StagedModel([padded]), collate=[Pad(), "list"], max_batch_size=2)
leaving = StagedModel([all_leave, head])
failing = StagedModel([lambda batch: batch.nothing], name="failing")
module = Module().eval()
one = 1
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """A user's module in the current directory, which has the time; gives what was imported."""
    (tmp_path / "stage_app.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    clock = SimpleNamespace(perf_counter_ns=lambda: getattr(found(), "now_ns", 0))
    monkeypatch.setattr("trims_shim.cli.stage.time", clock)
    yield found
    sys.modules.pop("stage_app", None)


def found() -> Any:
    return sys.modules.get("stage_app")


def run_json(*words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["stage", *words, "--json"]) == Exit.OK
    return json.loads(capsys.readouterr().out)


STAGED = ["profile", "stage_app:staged", "--item", "stage_app:make_items", "--collate", "list"]


# --- profile --------------------------------------------------------------------------------------


def test_each_stage_is_measured_and_saved(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STAGED, "--sizes", "1,2,4", "--repeats", "2", "-o", "made.json"]
    assert main(["stage", *words]) == Exit.OK
    out, err = capsys.readouterr()
    titles, *rows = out.splitlines()[:4]
    assert titles.split() == ["STAGE", "MS(1)", "MS(2)", "MS(4)", "PREFERS"]
    assert [row.split()[:2] for row in rows[:2]] == [["0", "embed"], ["1", "slow_if_long"]]
    assert rows[2].split()[0] == "all"
    assert "stages: 2\ninput diversity: not looked at" in out
    assert "saved: Batcher(model, profile='made.json')" in out
    assert "[3/3] batch of 4\n" in err
    assert set(app().batches) == {1, 2, 4}
    saved = load_saved_stages("made.json")
    assert saved.stages == ("embed", "slow_if_long")
    assert saved.name == "stage_app:staged"
    assert saved.machine
    with Batcher(app().staged, profile="made.json", max_batch_size=4, collate="list") as batcher:
        assert batcher.profile == load_saved_stages("made.json").profile
        assert batcher([7]) == [7]


def test_two_at_once_are_measured_if_asked_for(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STAGED, "--sizes", "1,2", "--repeats", "1", "--lanes", "-o", "made.json"]
    assert main(["stage", *words]) == Exit.OK
    assert "\ntwo at once: " in capsys.readouterr().out
    width = load_saved_stages("made.json").width
    assert width is not None
    with Batcher(
        app().staged, profile="made.json", max_batch_size=2, collate="list", devices=2
    ) as batcher:
        assert batcher([7]) == [7]
        found = batcher.profile
        assert isinstance(found, StagedProfile)
        assert found.width == width


def test_sizes_go_up_to_the_largest(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(*STAGED, "--max-batch-size", "6", "--repeats", "1", capsys=capsys)
    assert list(found["inputs"][0]["latencies_ns"][0]) == ["1", "2", "4", "6"]
    found = run_json(*STAGED, "--repeats", "1", capsys=capsys)
    assert max(map(int, found["inputs"][0]["latencies_ns"][0])) == 64


def test_items_of_several_lengths_are_measured_apart(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STAGED, "--sizes", "1,2", "--lengths", "50,5", "--repeats", "3"]
    found = run_json(*words, "-o", "made.json", capsys=capsys)
    assert [each["length"] for each in found["inputs"]] == [5, 50]
    assert found["diversity"]["inputs"] is True
    short, long = (each["latencies_ns"][1] for each in found["inputs"])
    assert short == {"1": 100_000, "2": 200_000}
    assert long == {"1": 1_000_000, "2": 2_000_000}
    saved = load_saved_stages("made.json")
    assert saved.lengths == [5, 50]
    assert saved.profile_for(5).latency_ns(2) < saved.profile.latency_ns(2)


def test_a_busy_machine_is_told(app: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "stage_app:slower", "--item", "stage_app:one", "--sizes", "1"]
    assert main(["stage", *words]) == Exit.OK
    assert "the same batch takes 100% longer than at its best" in capsys.readouterr().err
    assert main(["stage", *STAGED, "--sizes", "1"]) == Exit.OK
    assert "longer than at its best" not in capsys.readouterr().err


def test_a_function_makes_the_model(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "stage_app:make_staged", *STAGED[2:], "--sizes", "1", "--repeats", "1"]
    assert run_json(*words, capsys=capsys)["stages"] == ["embed", "slow_if_long"]


@pytest.mark.parametrize("name", ["batcher", "with_function"])
def test_a_batcher_has_a_model_its_sizes_and_its_batches(
    name: str, app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", f"stage_app:{name}", "--item", "stage_app:make_items", "--repeats", "1"]
    found = run_json(*words, capsys=capsys)
    assert found["stages"] == ["embed", "slow_if_long"]
    assert list(found["inputs"][0]["latencies_ns"][0]) == ["1", "2", "3"]


def test_random_tensors_for_each_argument(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "stage_app:adding", "--shape", "3,N", "--shape", "3,N", "--sizes", "2"]
    words += ["--dtype", "int64", "--lengths", "4,8", "--repeats", "1"]
    found = run_json(*words, capsys=capsys)
    assert [each["length"] for each in found["inputs"]] == [4, 8]
    assert found["stages"] == ["add", "head"]


def test_arguments_of_a_batcher_are_batched_as_it_does(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    items = ["--item", "stage_app:make_items", "--item", "stage_app:one"]
    words = ["profile", "stage_app:padding", *items, "--sizes", "2", "--repeats", "1"]
    assert run_json(*words, capsys=capsys)["stages"] == ["padded"]
    values, mask, ones = app().seen
    assert (values, mask, ones) == ([[0, 0, 0]] * 2, [[True] * 3] * 2, [1, 1])


def test_no_batch_is_begun_after_the_limit(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STAGED, "--lengths", "100", "--sizes", "1,2,64", "--limit-s", "0.01"]
    found = run_json(*words, capsys=capsys)
    assert list(found["inputs"][0]["latencies_ns"][1]) == ["1", "2"]
    assert 64 not in app().batches
    assert found["max_batch_size"] == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stage_app", *STAGED[2:]], "write MODULE:NAME"),
        ([*STAGED[1:], "--stages", "3"], "has its stages already (2)"),
        (["stage_app:adding", "--shape", "N"], "say with --lengths"),
        (["stage_app:adding", "--shape", "3", "--lengths", "2"], "write N where the length is"),
    ],
)
def test_words_that_do_not_fit(
    words: list[str],
    complaint: str,
    app: Callable[[], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stage", "profile", *words]) == Exit.USAGE
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stage_app:nosuch", *STAGED[2:]], "stage_app has no nosuch"),
        (["stage_app:one", *STAGED[2:]], "is int: not a StagedModel"),
        (["stage_app:plain", *STAGED[2:]], "a function without stages; `trims batch profile`"),
        (["stage_app:make_items", *STAGED[2:]], "is list: not a StagedModel"),
        (["nosuch.onnx", "--shape", "3"], "there is no file nosuch.onnx"),
        (["stage_app:leaving", *STAGED[2:]], "is finished before stage 1"),
        (
            ["stage_app:failing", *STAGED[2:]],
            "stage_app:failing does not run with a batch of 1 of --item",
        ),
        ([*STAGED[1:], "--device", "nosuch"], "--device nosuch: device 'nosuch'"),
        (
            ["stage_app:adding", "--shape", "N", "--shape", "4", "--lengths", "3"],
            "does not run with a batch of 1 of --shape N --shape 4 --dtype float32: AssertionError",
        ),
        (
            ["stage_app:by_name", "--shape", "3"],
            "trims: slice_model: ByName does not run with the example: ",
        ),
        (
            ["stage_app:module", "--item", "stage_app:one", "--collate", "concatenate"],
            "stage_app:module does not run with a batch of 2 of --item stage_app:one: TypeError",
        ),
        (
            ["stage_app:module", "--item", "stage_app:make_tensors", "--lengths", "1,3"],
            "items of 1 and of 3 are not of equally many tensors",
        ),
    ],
)
def test_what_cannot_be_measured(
    words: list[str],
    complaint: str,
    app: Callable[[], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stage", "profile", *words]) == Exit.FAILED
    assert complaint in capsys.readouterr().err


# --- cutting --------------------------------------------------------------------------------------

MODULE_WORDS = ["profile", "stage_app:module", "--shape", "8", "--sizes", "1,4", "--repeats", "1"]


def test_a_module_is_cut_into_as_many_stages_as_are_asked_for(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(*MODULE_WORDS, "--stages", "3", capsys=capsys)
    assert len(found["stages"]) == len(found["inputs"][0]["latencies_ns"]) == 3
    assert found["tries"] == []


def test_the_number_of_stages_is_tried_out(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Six small layers take less time than what it costs to go from stage to stage."""
    assert main(["stage", *MODULE_WORDS, "-o", "made.json"]) == Exit.OK
    out, err = capsys.readouterr()
    assert "saved: Batcher(slice_model(..., 1), profile='made.json')" in out
    assert "stages: 1, of 1, 2, 3 that were tried" in out
    assert "[3/8] 3 stages: batch of 4 in " in err


def test_a_module_that_takes_names_gets_mappings(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "stage_app:by_name", "--item", "stage_app:make_mapping", "--repeats", "1"]
    words += ["--sizes", "1,3", "--stages", "2", "--lengths", "4,7"]
    found = run_json(*words, capsys=capsys)
    assert len(found["stages"]) == 2
    assert [each["length"] for each in found["inputs"]] == [4, 7]


def test_what_cannot_be_traced_is_cut_at_its_blocks(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "stage_app:branching", *MODULE_WORDS[2:], "--stages", "3"]
    assert main(["stage", *words, "-o", "made.json"]) == Exit.OK
    assert "saved: Batcher(slice_blocks(..., 3), profile='made.json')" in capsys.readouterr().out
    assert len(load_saved_stages("made.json").profile.stages) == 3


def test_what_neither_way_of_cutting_takes_is_said_once(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "stage_app:training", *MODULE_WORDS[2:], "--stages", "3"]
    assert main(["stage", *words]) == Exit.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trims: Sequential cannot be cut into stages: it is in train mode")


def test_more_stages_than_there_are_places_to_cut(
    app: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stage", *MODULE_WORDS, "--stages", "1000"]) == Exit.FAILED
    assert "stages at most, not 1000" in capsys.readouterr().err


def test_an_onnx_file_is_cut_without_a_daemon(trims: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    save(perceptron())(tmp_path / "model.onnx")
    (tmp_path / "items.py").write_text(
        "import numpy as np\n"
        "def make(): return {'x': np.ones(64, np.float32), 'ids': np.int64(3)}\n"
    )
    words = ["stage", "profile", "model.onnx", "--item", "items:make", "--sizes", "1,2"]
    done = trims(*words, "--stages", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["stages"]) == 2
    assert not trims.sockets.exists()
    done = trims(*words, "--stages", "100", cwd=tmp_path)
    assert done.returncode == Exit.FAILED
    assert "stages at most, not 100" in done.stderr


# --- plot -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = str(tmp_path / "profile.json")
    short = ({1: 1e6, 4: 1e6}, {1: 1e6, 4: 4e6})
    long = ({1: 2e6, 4: 2e6}, {1: 5e6, 4: 20e6})
    save_staged_profile(path, SavedStages({8: short, 64: long}, 4, stages=("embed", "head")))
    return path


def test_a_saved_profile_that_is_a_link_stays_one(saved: str, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(saved)
    save_staged_profile(link, SavedStages({8: ({1: 1e6},)}, 1))
    assert link.is_symlink()
    assert list(load_saved_stages(saved).latencies_ns) == [8]


def test_a_plot_is_a_picture(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    assert main(["stage", "plot", saved, "-o", str(path)]) == Exit.OK
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"drawn: {path}\n"


def test_names_in_a_picture_are_no_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = str(tmp_path / "profile.json"), tmp_path / "made.svg"
    name = "a$\\nosuch{$b"
    latencies = {None: ({1: 1e6}, {1: 1e6})}
    save_staged_profile(path, SavedStages(latencies, 1, stages=(name, "head"), name=name))
    assert main(["stage", "plot", path, "-o", str(picture)]) == Exit.OK
    drawn = picture.read_text()
    assert f"<!-- {name}: 2 stages -->" in drawn
    assert f"<!-- 0 {name} -->" in drawn


def test_data_of_a_plot(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    latency, share, whole = run_json("plot", saved, capsys=capsys)["panels"]
    assert [line["name"] for line in latency["lines"]] == ["0 embed", "1 head"]
    assert latency["lines"][1]["y"] == [5, 10, 15, 20]
    assert share["lines"][0]["y"] == [0.25, 0.5, 0.75, 1]
    assert share["lines"][1]["y"] == [1] * 4
    assert [line["name"] for line in whole["lines"]] == ["items of 8", "items of 64"]
    assert whole["lines"][0]["y"][-1] == pytest.approx(800)
    latency, *_ = run_json("plot", saved, "--length", "8", capsys=capsys)["panels"]
    assert latency["lines"][1]["y"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--output has to name a file"),
        (["-o", "plot.txt"], ".png"),
        (["--length", "7", "-o", "plot.png"], "no items of 7; lengths in it: 8, 64"),
    ],
)
def test_what_cannot_be_drawn(
    saved: str, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stage", "plot", saved, *words]) == Exit.USAGE
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text("[]")
    assert main(["stage", "plot", str(path), "--json"]) == Exit.FAILED
    assert str(path) in capsys.readouterr().err


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["profile"],
        ["profile", "a:b"],
        ["profile", "a:b", "--item", "a:c", "--shape", "3"],
        ["profile", "a:b", "--shape", "3,0"],
        ["profile", "a:b", "--shape", "M"],
        ["profile", "a:b", "--shape", "3", "--stages", "0"],
        ["profile", "a:b", "--shape", "3", "--collate", "nosuch"],
        ["profile", "a:b", "--shape", "3", "-o", "nosuch/made.json"],
        ["plot"],
    ],
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["stage", *words])
    assert end.value.code == Exit.USAGE
    assert "usage: trims stage" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["profile", "plot"])
def test_help_of_a_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stage", name, "--help"])
    assert f"trims stage {name}" in capsys.readouterr().out.split("example:")[1]
