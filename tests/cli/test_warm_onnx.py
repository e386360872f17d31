"""``trims warm`` of ONNX models: they are prepared, by a real daemon and preparer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from onnx_models import perceptron, save, save_external

from trims_shim.cli import images
from trims_shim.cli import progress as progress_module
from trims_shim.cli.exits import Exit
from trims_shim.cli.progress import Progress
from trims_shim.cli.text import size

from .conftest import Trims

PROGRAM = """\
import sys, onnxruntime, trims_shim
onnxruntime.InferenceSession(sys.argv[1])
print(trims_shim.stats().served)
"""


@pytest.fixture(scope="module")
def trims(new_trims: Callable[[], Trims]) -> Trims:
    trims = new_trims()
    trims.environment.update(
        TRIMS_MIN_BYTES="1", TRIMS_PREPARE_ANYWAY_BYTES="1", TRIMS_PREPARE_PRIORITY="normal"
    )
    return trims


def test_models_are_prepared_and_sessions_find_them(trims: Trims, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    save(perceptron(width=700))(model)
    (tmp_path / "rubbish.onnx").write_bytes(b"rubbish" * 1000)
    done = trims("warm", str(tmp_path), "--json")
    assert done.returncode == Exit.FAILED
    found, rubbish = json.loads(done.stdout)
    assert (found["path"], found["outcome"], found["tier"]) == (str(model), "prepared", "prepared")
    assert found["size_bytes"] == model.stat().st_size
    assert "rubbish.onnx" in rubbish["error"]
    assert trims("run", "-c", PROGRAM, str(model)).stdout == "1\n"
    again = trims("warm", str(model))
    assert again.returncode == Exit.OK
    assert "prepared already" in again.stderr
    assert "being prepared" not in again.stderr
    (row,) = [
        row
        for row in json.loads(trims("status", "--json").stdout)["prepared"]
        if row["state"] == "ready"
    ]
    assert (row["key"], row["leases"]) == (found["digest"], 0)


def test_what_is_excluded_is_said(trims: Trims, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    save(perceptron(seed=6, width=700))(model)
    done = trims("warm", str(model), TRIMS_EXCLUDE=str(tmp_path / "*"))
    assert done.returncode == Exit.OK, "it is asked for all the same"
    assert f"; {model} is excluded (TRIMS_EXCLUDE: " in done.stderr
    assert trims("run", "-c", PROGRAM, str(model), TRIMS_EXCLUDE=str(model)).stdout == "0\n"


def test_waiting_is_said(trims: Trims, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    save_external(perceptron(seed=5, width=700))(model)
    waiting, done = trims("warm", str(model)).stderr.splitlines()
    assert waiting == f"[1/1] {model}: being prepared ..."
    both = size(model.stat().st_size + (tmp_path / "weights.bin").stat().st_size)
    assert done.startswith(f"[1/1] {model}: prepared, {both} in ")


def test_waiting_is_said_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bar stands still, at least the seconds move."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    moments = iter((100.0, 103.2, 104.9))
    with Progress([5], is_quiet=False) as progress:
        bar = progress._bar
        assert bar is not None
        clock = SimpleNamespace(monotonic=lambda: next(moments))
        monkeypatch.setattr(progress_module, "time", clock)
        progress.begin("model.onnx")
        for seconds in (3, 5):
            progress.wait("being prepared")
            assert bar.tasks[0].description == f"model.onnx, being prepared, {seconds} s"


def test_what_cannot_be_done_with_them(trims: Trims, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    save(perceptron())(model)
    done = trims("warm", "--pin", str(model))
    assert done.returncode == Exit.FAILED
    assert "neither pinned nor on a device" in done.stderr
    missing = trims("warm", str(tmp_path / "missing.onnx"))
    assert missing.returncode == Exit.FAILED
    assert "No such file" in missing.stderr


def test_directories_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").touch()
    assert list(images._files(str(tmp_path))) == [str(tmp_path / "model.onnx")]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert list(images._files(str(tmp_path))) == []
    assert list(images._files(str(tmp_path / "model.onnx"))) == [str(tmp_path / "model.onnx")]


def test_a_model_that_is_not_there_needs_no_onnxruntime(trims: Trims, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from trims_shim.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    path = tmp_path / "model.onnx"
    assert "No such file" in trims.python("-c", code, "warm", str(path)).stderr
    path.touch()
    assert "pip install onnxruntime" in trims.python("-c", code, "warm", str(path)).stderr
