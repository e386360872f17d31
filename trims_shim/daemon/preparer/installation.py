"""Which onnxruntime this process has: both ends of a preparation must have the same one.

The client puts it into its recipes, and the preparer refuses if it has found another one. Not for
the daemon itself, which never imports onnxruntime.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

__all__ = ["Installation", "installation"]


class Installation(NamedTuple):
    """As a :class:`SessionRecipe` names it; ``package`` is its directory."""

    package: str
    runtime: str
    build: str


@functools.cache
def installation() -> Installation:
    """Identify the loaded onnxruntime. Imports it: raises whatever that raises.

    To be called when onnxruntime is imported: later, another one may have been installed in its
    place, while this process still runs the one that it has loaded.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as binding

    library = os.path.abspath(binding.__file__)
    status = os.stat(library)
    return Installation(
        package=os.path.dirname(os.path.dirname(library)),
        runtime=str(onnxruntime.__version__),
        build=f"{binding.get_build_info()}; {status.st_size} bytes of {status.st_mtime_ns}",
    )
