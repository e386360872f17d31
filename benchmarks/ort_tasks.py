"""Tasks of the onnxruntime benchmark, one per process: ``python -m benchmarks.ort_tasks TASK``.

Owns the timed regions. Both sides of a comparison run the same lines; the only difference is that a
process with ``TRIMS_ENABLED=1`` imports trims_shim first. Imports, reading a model's bytes and
making inputs are not timed; connecting to the daemon is. Only the exporting task imports torch, so
that the memory is that of onnxruntime and numpy.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_memory import areas, peak_bytes, reset_peak
from benchmarks.tasks import main, pause

__all__: list[str] = []

_WARM_UPS = 2
_VOCABULARY = 1000


def _fallbacks() -> dict[str, int]:
    """The shim's counts of sessions that were left to onnxruntime, by reason."""
    if os.environ.get("TRIMS_ENABLED") != "1":
        return {}
    import trims_shim

    return trims_shim.stats().fallbacks


def _options(entries: Mapping[str, str]) -> Any:
    """Session options with these config entries; None, as in most programs, without any."""
    import onnxruntime

    if not entries:
        return None
    options = onnxruntime.SessionOptions()
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def _feeds(session: Any) -> dict[str, Any]:
    """Inputs that depend on the names and shapes only."""
    import numpy as np

    random = np.random.RandomState(0)
    feeds = {}
    for each in session.get_inputs():
        if each.name == "mask":
            feeds[each.name] = np.ones(each.shape, np.int64)
        elif each.type == "tensor(int64)":
            feeds[each.name] = random.randint(1, _VOCABULARY, each.shape)
        else:
            feeds[each.name] = random.standard_normal(each.shape).astype(np.float32)
    return feeds


def _checksum(outputs: Sequence[Any]) -> str:
    """A checksum that is equal for outputs of equal types, shapes and bits."""
    digest = hashlib.sha256()
    for each in outputs:
        digest.update(f"{each.dtype} {each.shape}".encode())
        digest.update(each.tobytes())
    return digest.hexdigest()


def _mapped_bytes(directory: str) -> int:
    """Bytes of a directory's files that this process has mapped, as the kernel reports it."""
    inside = [area for area in areas("self") if directory and area.path.startswith(directory)]
    return sum(area.end - area.start for area in inside)


def _create(
    model: str, how: str, entries: Mapping[str, str], prepared: str
) -> tuple[Any, dict[str, Any]]:
    import numpy  # noqa: F401
    import onnxruntime

    source: Any = Path(model).read_bytes() if how == "bytes" else model
    options = _options(entries)
    resident_bytes = reset_peak()
    began = time.time()
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    create_s = time.perf_counter() - start
    facts = {
        "began": began,
        "create_s": create_s,
        "peak_bytes": peak_bytes() - resident_bytes,
        "mapped_bytes": _mapped_bytes(prepared),
        "fallbacks": _fallbacks(),
    }
    return session, facts


def _timed_runs(session: Any, feeds: dict[str, Any], runs: int) -> list[float]:
    times = []
    for _ in range(_WARM_UPS + runs):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    return times[_WARM_UPS:]


def session(
    *,
    model: str,
    how: str = "path",
    entries: Mapping[str, str] | None = None,
    prepared: str = "",
    runs: int = 0,
) -> dict[str, Any]:
    """Create a session, run it, and report times, memory and the outputs' checksum.

    ``how`` is ``path`` or ``bytes``; ``prepared`` is the directory that a hit maps.
    """
    made, facts = _create(model, how, entries or {}, prepared)
    feeds = _feeds(made)
    start = time.perf_counter()
    outputs = made.run(None, feeds)
    facts["first_run_s"] = time.perf_counter() - start
    facts["checksum"] = _checksum(outputs)
    facts["run_s"] = _timed_runs(made, feeds, runs) if runs else []
    return facts


def hold(*, model: str, prepared: str = "") -> None:
    """Create a session from a path, run it once, and keep it until released."""
    made, facts = _create(model, "path", {}, prepared)
    checksum = _checksum(made.run(None, _feeds(made)))
    pause(facts | {"pid": os.getpid(), "checksum": checksum})


def export(*, name: str) -> dict[str, Any]:
    """Make a model's file if the cache of models lacks it."""
    import contextlib

    from benchmarks.ort_models import ensure_model

    with contextlib.redirect_stdout(sys.stderr):  # the exporter prints
        path = ensure_model(name)
    return {"path": str(path), "size_bytes": path.stat().st_size}


def start(*, path: str) -> dict[str, Any]:
    """Start a daemon by a load that has nothing to do with onnxruntime."""
    import trims_shim

    trims_shim.warm(path)
    return {}


if __name__ == "__main__":
    main(session, hold, export, start)
