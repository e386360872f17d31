"""Has an ONNX model prepared before it is needed, for sessions on the CPU without options.

The recipe is that of ``onnxruntime.InferenceSession(path)`` in this interpreter; sessions with
options that change the graph are prepared when they are first made. Nothing is patched here, and no
session is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import onnxruntime  # noqa: F401  before our own: its import has patches applied, which import those

from trims_shim import diagnostics
from trims_shim.client.cache import cache
from trims_shim.client.prepared import PreparedModel
from trims_shim.errors import DaemonTimeout, NotServed
from trims_shim.patches.onnxruntime_models import absolute, opened
from trims_shim.patches.onnxruntime_recipe import default_recipe, open_prepared

__all__ = ["prepare"]

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_PATIENCE_S = 60.0
"""Beyond ``prepare_timeout``: for other models whose turn is first."""


def prepare(path: str, *, waiting: Callable[[], None] | None = None) -> PreparedModel:
    """The prepared model of a file of any size; its lease is the caller's. Blocks until it is done.

    ``waiting`` is called at least twice a second meanwhile, and not if it is prepared already.
    Starts the daemon when none runs. Raises OSError for the file, NotServed if it cannot be
    prepared, other TrimsError when the cache cannot take it.
    """
    config = cache().config
    recipe = default_recipe(prepack=config.ort_prepack)
    os.stat(path)
    deadline_s = time.monotonic() + config.prepare_timeout + _PATIENCE_S
    pause_s = 0.0
    while True:
        with opened(path, min_bytes=0) as descriptor:
            try:
                model = open_prepared(recipe, descriptor=descriptor, path=absolute(path))
                diagnostics.count("warmed", "prepared" if pause_s else "already")
                return model
            except NotServed as error:
                if error.reason != "preparing":
                    raise
        if time.monotonic() > deadline_s:
            raise DaemonTimeout(f"{path} is not prepared in time; see `trims status`")
        if waiting is not None:
            waiting()
        pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        time.sleep(pause_s)
