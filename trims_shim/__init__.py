"""trims_shim: load a model's weights once per machine, and share them between all processes.

Importing the package is all it takes: ``torch.load``, safetensors, ``load_state_dict`` and
``onnxruntime.InferenceSession`` then take weights from a local cache daemon that keeps one copy for
every process. On any trouble the framework's own loader runs. ``TRIMS_ENABLED=0`` turns the import
into a no-op.

The import is cheap (no torch, no ZeroMQ, no thread, no daemon); the daemon starts with the first
load. See docs/quickstart.md.

PYTEST_DONT_REWRITE: without it, pytest warns if `trims run` imported the package before pytest.
"""

from __future__ import annotations

from trims_shim._activate import activate
from trims_shim._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trims_shim.api import (
        DeviceHandle,
        Handle,
        disable,
        disabled,
        enable,
        enabled,
        fetch,
        info,
        open,
        stats,
        warm,
    )
    from trims_shim.errors import ConfigError, TrimsError

__all__ = [
    "ConfigError",
    "DeviceHandle",
    "Handle",
    "TrimsError",
    "__version__",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "fetch",
    "info",
    "open",
    "stats",
    "warm",
]

_FROM_ERRORS = ("ConfigError", "TrimsError")


def __getattr__(name: str) -> object:
    """Public names, imported on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'trims_shim' has no attribute {name!r}")
    import importlib

    from trims_shim.late_imports import ensure_imported

    home = "trims_shim.errors" if name in _FROM_ERRORS else "trims_shim.api"
    ensure_imported(home)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


activate()
