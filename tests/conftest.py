"""What all tests share: no user settings, no daemon of the machine, short property tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "short", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("short")

# Before anything imports trims_shim. Tests that want a daemon make a socket directory of their own.
for _name in [name for name in os.environ if name.startswith("TRIMS_")]:
    del os.environ[_name]
os.environ["TRIMS_AUTOSTART"] = "0"
os.environ["TRIMS_SOCKET_DIR"] = os.path.join(tempfile.gettempdir(), "trims-tests-without-daemon")
os.environ["XDG_CONFIG_HOME"] = os.devnull


@pytest.fixture
def no_leak() -> Iterator[None]:
    """The test leaves no descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., str]:
    """Make a file of some content in the test's directory; its path."""

    def make(content: bytes, name: str = "model.bin") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return make
