"""The oldest Python that the package supports can import it: CI runs another one.

mypy checks names and syntax for it, but not what a class or an expression does at run time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Other packages need not be installed there: mocks stand for them. Left out is what looks into
# torch or onnxruntime at import, itself or by what it imports.
PROGRAM = """
import importlib, pkgutil, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

class Mocks(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        is_other = top not in sys.stdlib_module_names and top != "trims_shim"
        return ModuleSpec(name, self, is_package=True) if is_other else None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.append(Mocks())
import trims_shim

LEFT_OUT = tuple(
    "trims_shim.patches." + name
    for name in ("torch_", "onnxruntime_", "transformers_dtype", "transformers_load")
)
names = [info.name for info in pkgutil.walk_packages(trims_shim.__path__, "trims_shim.")]
for name in names:
    if not name.startswith(LEFT_OUT):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name}: {error!r}")
print(len(names), "modules")
"""


def _oldest_python() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'requires-python = ">=([\d.]+)"', text)
    assert version is not None
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{version[1]}.*/bin/python"))
    named = shutil.which(f"python{version[1]}")
    for python in [*map(str, found), *([named] if named else [])]:
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"no Python {version[1]} on this machine")


def test_modules_can_be_imported() -> None:
    """Found: the entry point of a started daemon could not."""
    environment = os.environ | {"TRIMS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [_oldest_python(), "-B", "-c", PROGRAM],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *failed, counted = done.stdout.splitlines()
    assert int(counted.split()[0]) > 300
    assert not failed
