"""``trims`` as a user runs it, in a socket directory of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
MODEL_BYTES = 2 << 20


@dataclass(frozen=True)
class Trims:
    """Runs commands; ``sockets`` does not exist until a daemon is started."""

    sockets: Path
    environment: dict[str, str]

    def __call__(
        self, *words: str, stdin: str = "", cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``trims WORDS``."""
        return self.python("-m", "trims_shim", *words, stdin=stdin, cwd=cwd, **variables)

    def python(
        self, *words: str, stdin: str = "", cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run this interpreter."""
        return subprocess.run(
            [sys.executable, *words],
            env=self.environment | variables,
            input=stdin,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )


@pytest.fixture(scope="session")
def new_trims() -> Iterator[Callable[[], Trims]]:
    """Makes a Trims with a directory of its own; daemons are stopped at the end."""
    base = Path(tempfile.mkdtemp(prefix="trims-cli-"))  # short: socket paths are limited
    made: list[Trims] = []
    ours = ("TRIMS_", "_TRIMS_", "PYTEST_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}

    def make() -> Trims:
        sockets = base / f"s{len(made)}"
        variables = {"TRIMS_SOCKET_DIR": str(sockets), "PYTHONPATH": str(ROOT)}
        variables |= {"TRIMS_START_TIMEOUT": "60"}
        variables |= {"TRIMS_HOST_BYTES": "64M", "HOME": str(base), "XDG_CONFIG_HOME": str(base)}
        variables |= {"XDG_CACHE_HOME": str(base / f"c{len(made)}")}
        made.append(Trims(sockets, inherited | variables))
        return made[-1]

    try:
        yield make
    finally:
        for trims in made:
            if trims.sockets.exists():
                trims("stop")
        shutil.rmtree(base)


@pytest.fixture
def trims(new_trims: Callable[[], Trims]) -> Trims:
    """No daemon runs."""
    return new_trims()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of model size; its content does not matter to the cache."""
    path = tmp_path_factory.mktemp("models") / "bert.safetensors"
    path.write_bytes(os.urandom(MODEL_BYTES))
    return path


@pytest.fixture(scope="module")
def warmed(new_trims: Callable[[], Trims], model: Path) -> Trims:
    """A daemon runs and has the model."""
    trims = new_trims()
    done = trims("warm", str(model))
    assert done.returncode == 0, done.stderr
    return trims
