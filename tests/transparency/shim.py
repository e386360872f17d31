"""Everything the suite knows of the package under test: how to start, ask and stop it.

Kept in one file so that a change of the package's interface is a change of one file here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "SocketDirectory",
    "activate",
    "count",
    "counters",
    "environment",
    "is_available",
    "settle",
]

ROOT = Path(__file__).resolve().parents[2]


def is_available() -> bool:
    """Whether there is a package to test: a directory without ``__init__.py`` is none."""
    spec = importlib.util.find_spec("trims_shim")
    return spec is not None and spec.origin is not None


def environment(socket_directory: Path | None, *, min_bytes: str = "256K") -> dict[str, str]:
    """The environment of a run: with an own daemon, or with the shim off where that is None."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRIMS_")}
    kept |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *_inherited_path()]),
    }
    if socket_directory is None:
        return kept | {"TRIMS_ENABLED": "0"}
    # A modest budget: the cases' files together are larger, so that eviction happens, too.
    return kept | {
        "TRIMS_ENABLED": "1",
        "TRIMS_SOCKET_DIR": str(socket_directory),
        "TRIMS_HOST_BYTES": "256M",
        "TRIMS_CACHE_DIR": str(socket_directory / "cache"),
        "TRIMS_MIN_BYTES": min_bytes,
        "TRIMS_PREPARE_ANYWAY_BYTES": "0",
        "TRIMS_PREPARE_PRIORITY": "normal",
        "TRIMS_START_TIMEOUT": "60",
        "TRIMS_STALL_TIMEOUT": "30",
    }


def _inherited_path() -> list[str]:
    inherited = os.environ.get("PYTHONPATH", "")
    return [inherited] if inherited else []


def activate() -> None:
    """Turn the shim on in this process."""
    importlib.import_module("trims_shim")


def settle(socket_directory: Path, timeout_s: float = 300.0) -> None:
    """Wait until the daemon has prepared what it was asked for. Raises TimeoutError."""
    from trims_shim import config, errors
    from trims_shim.client.cache import Cache
    from trims_shim.client.connection import Connection
    from trims_shim.wire import admin

    settings = config.load({}, socket_dir=str(socket_directory), autostart="0")
    try:
        connection = Connection(Cache(settings).endpoint, stall_timeout_s=30)
    except errors.DaemonUnavailable:
        return  # nobody has asked it for anything
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            status: Any = connection.request(admin.GetStatusRequest())
            waiting = [each.names for each in status.prepared if each.state == "preparing"]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"still being prepared: {waiting}")
            time.sleep(0.1)
    finally:
        connection.close()


def counters() -> dict[str, int]:
    """This process's counters, flat: ``{"served:torch_zip": 3}``; empty where there is no shim."""
    module = sys.modules.get("trims_shim")
    return _flat("", module.stats()) if module is not None else {}


def count(flat: Mapping[str, int], event: str) -> int:
    """How often an event happened, over all reasons."""
    return sum(value for key, value in flat.items() if event in key.replace(".", ":").split(":"))


def _flat(prefix: str, value: Any) -> dict[str, int]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        found: dict[str, int] = {}
        for key, item in value.items():
            label = ":".join(map(str, key)) if isinstance(key, tuple) else str(key)
            found |= _flat(f"{prefix}:{label}" if prefix else label, item)
        return found
    return {prefix: value} if type(value) is int else {}


class SocketDirectory:
    """A private directory for an own daemon; leaving it stops the daemon and removes it."""

    def __enter__(self) -> Path:
        # Not below pytest's directory: a UNIX socket's path has at most 107 bytes.
        self.path = Path(tempfile.mkdtemp(prefix="trims-t-"))
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            [sys.executable, "-m", "trims_shim", "stop"],
            env=environment(self.path),
            cwd=ROOT,
            timeout=120,
            check=False,
            capture_output=True,
        )
        shutil.rmtree(self.path, ignore_errors=True)
