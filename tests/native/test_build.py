"""The package installs on machines that cannot build the extension; it then copies in Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "native", tmp_path / "native")
    package = tmp_path / "trims_shim"
    package.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "trims_shim" / name, package)
    shutil.copy(ROOT / "_trims_pytest.py", tmp_path)
    return tmp_path


def build(sources: Path, *, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nimport sys; sys.argv = ['setup.py', 'build']\n" + (
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=sources,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def built(sources: Path) -> tuple[list[Path], list[Path]]:
    output = sources / "build"
    return list(output.rglob("_version.py")), list(output.rglob("_native*.so"))


def test_without_a_compiler(sources: Path) -> None:
    pytest.importorskip("pybind11")
    done = build(sources, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert done.returncode == 0, done.stderr
    assert 'building extension "trims_shim._native" failed' in done.stdout + done.stderr
    modules, extensions = built(sources)
    assert modules
    assert not extensions


def test_without_pybind11(sources: Path) -> None:
    done = build(sources, before="import sys; sys.modules['pybind11'] = None")
    assert done.returncode == 0, done.stderr
    modules, extensions = built(sources)
    assert modules
    assert not extensions


WITHOUT_SEMAPHORES = """
import multiprocessing.synchronize

class Refused:
    def __init__(self, *arguments, **options):
        raise OSError(38, "Function not implemented")

multiprocessing.synchronize.SemLock = Refused
multiprocessing.synchronize.Lock = Refused
"""


def test_without_semaphores(sources: Path) -> None:
    """As where there is no /dev/shm: only the compilers cannot run side by side."""
    pytest.importorskip("pybind11")
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    for number, each in enumerate((sources / "native").glob("*.cpp")):
        each.write_text(f"int number_{number}() {{ return {number}; }}")  # the true ones take long
    done = build(sources, before=WITHOUT_SEMAPHORES)
    assert done.returncode == 0, done.stderr
    modules, extensions = built(sources)
    assert modules
    assert extensions
