"""The package in an archive, as zipapp makes them: no part of it can be opened by its path."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
from onnx_models import perceptron, save
from safetensors.numpy import save_file

from trims_shim.cli.exits import Exit

from .conftest import ROOT, Trims


def test_all_of_it_works_from_an_archive(new_trims: Callable[[], Trims], tmp_path: Path) -> None:
    """The daemon, the preparer of ONNX models, and what reads the package's own source."""
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (ROOT / "trims_shim").rglob("*.py"):
            file.write(path, path.relative_to(ROOT))
    save_file({"w": numpy.zeros(1 << 18, numpy.float32)}, tmp_path / "model.safetensors")
    save(perceptron(seed=16, width=700))(tmp_path / "model.onnx")
    trims = new_trims()
    trims.environment.update(
        PYTHONPATH=str(archive),
        TRIMS_MIN_BYTES="1",
        TRIMS_PREPARE_ANYWAY_BYTES="1",
        TRIMS_PREPARE_PRIORITY="normal",
    )
    done = trims("warm", str(tmp_path), "--json", cwd=tmp_path)
    assert done.returncode == Exit.OK, done.stderr
    assert [each["outcome"] for each in json.loads(done.stdout)] == ["prepared", "loaded"]
    found = json.loads(trims("info", "--json", cwd=tmp_path).stdout)
    assert found["daemon"]["is_running"]
    assert "torch.serialization:_load" in {each["target"] for each in found["patches"]}
