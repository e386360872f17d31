"""What an index of packages gives: the source archive, and the wheel that is made from it.

Everything else here runs from the repository, where no file can be missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
SERVED = """
import sys, trims_shim  # trims run has imported it already
path = sys.argv[1]
with trims_shim.open(path) as model, open(path, "rb") as file:
    assert model.buffer() == file.read()
print(trims_shim.__file__)
"""


def _names(folder: Path) -> set[str]:
    """The files of a folder, without what running and building leave, and editors' settings."""
    return {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("[!.]*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }


def _build(kind: str, source: Path, target: Path) -> Path:
    """As pip does it; without a compiler, which would take a minute and is optional."""
    target.mkdir()
    without_compiler = {"CC": "/bin/false", "CXX": "/bin/false"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(target)],
        cwd=source,
        env={**os.environ, **without_compiler},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    # Not in the repository itself: building writes beside the sources, and collects what is there.
    copy = folder / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    packed = _build("sdist", copy, folder / "made")
    subprocess.run(["tar", "-xf", packed, "-C", folder], check=True, timeout=60)
    (unpacked,) = folder.glob("trims_shim-*")
    return unpacked


@pytest.fixture(scope="module")
def installed(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from it, unpacked as pip does."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(_build("wheel", archive, folder / "made")) as file:
        file.extractall(folder / "installed")
    return folder / "installed"


def test_the_archive_is_complete_and_no_larger(archive: Path) -> None:
    for folder in ("trims_shim", "native"):
        assert _names(archive / folder) == _names(ROOT / folder)
    assert (archive / "CHANGELOG.md").exists()
    assert (archive / "LICENSE").exists()
    assert not (archive / "tests").exists()
    assert not (archive / "benchmarks").exists()


def test_the_wheel_is_complete_and_no_larger(installed: Path) -> None:
    assert _names(installed / "trims_shim") == _names(ROOT / "trims_shim")
    others = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert others == {"trims_shim", "_trims_pytest.py"}


def test_what_the_wheel_says_of_itself(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    points = (metadata / "entry_points.txt").read_text()
    assert "trims = trims_shim.__main__:main" in points
    assert "trims = _trims_pytest" in points
    text = Parser().parsestr((metadata / "METADATA").read_text())
    assert text["License-Expression"] == "Apache-2.0"
    # Nothing heavy comes with the package itself.
    needed = [each for each in text.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert {each.split(">=")[0] for each in needed} == {"pyzmq", "msgpack", "blake3", "tomli"}


def test_programs_are_served_by_the_wheel_alone(
    installed: Path, socket_directory: Path, tmp_path: Path
) -> None:
    program, model = tmp_path / "program.py", tmp_path / "model.bin"
    program.write_text(SERVED)
    model.write_bytes(bytes(range(256)) * (1 << 13))
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "TRIMS_AUTOSTART": "1",
        "TRIMS_SOCKET_DIR": str(socket_directory),
    }

    def trims(*arguments: str) -> str:
        command = [sys.executable, "-m", "trims_shim", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert trims("run", str(program), str(model)).startswith(str(installed))
        assert str(model) in trims("status", "--json")
    finally:
        trims("stop")


def test_a_set_up_that_was_interrupted_makes_the_environment_again(tmp_path: Path) -> None:
    """It has a Python by then, but no pip."""
    python, half_made = tmp_path / "python", tmp_path / "venv" / "bin" / "python"
    half_made.parent.mkdir(parents=True)
    half_made.write_text("#!/bin/sh\nexit 1\n")
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || { echo "$@"; exit 3; }\n')
    for each in (python, half_made):
        each.chmod(0o755)
    names = {"PYTHON": str(python), "VENV": str(tmp_path / "venv")}
    ended = subprocess.run(
        [str(ROOT / "scripts" / "setup.sh")],
        env=os.environ | names,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stdout == f"-m venv --upgrade-deps {tmp_path / 'venv'}\n", ended.stderr
    assert ended.returncode == 3
