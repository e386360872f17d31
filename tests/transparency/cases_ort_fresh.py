"""Cases that need an interpreter of their own: order of imports, warnings as errors, settings.

This module does not import onnxruntime: the order of the imports is what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from .registry import Work, case


def _model(work: Work, seed: int) -> Any:
    """Made in another process, so that this one has not imported anything."""
    program = (
        "import sys, onnx_models\n"
        "onnx_models.save(onnx_models.sample('transformer', int(sys.argv[1])))('model.onnx')\n"
    )
    work.file("maker.py", lambda path: path.write_text(program))
    command = [sys.executable, "maker.py", str(seed)]
    work.file("model.onnx", lambda path: subprocess.run(command, check=True, timeout=50))
    return work.directory / "model.onnx"


@case(early=False, served=True)
def names_imported_before_the_shim(work: Work) -> object:
    """``from onnxruntime import InferenceSession``, subclasses and options from before."""
    path = _model(work, 100)
    from onnxruntime import InferenceSession, SessionOptions

    class Derived(InferenceSession):  # type: ignore[misc]
        """A subclass from before the shim."""

    before = InferenceSession(path)
    bound = before.set_providers
    options = SessionOptions()
    work.enable_shim()

    from .sessions import described, made, ran

    feeds = made("transformer", 100).feeds
    new_options = SessionOptions()
    new_options.add_session_config_entry("own.key", "1")
    sessions = [
        InferenceSession(path),
        Derived(path),
        InferenceSession(path, options),
        InferenceSession(path, new_options),
        InferenceSession(path, options),
    ]
    bound(["CPUExecutionProvider"])
    return [[described(each), ran(each, feeds)] for each in [before, *sessions]]


@case(early=False)
def options_from_before_the_shim(work: Work) -> object:
    """What was configured before the shim came cannot be known, and must hold all the same."""
    path = _model(work, 100)
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    options.add_session_config_entry("session.disable_prepacking", "1")
    work.enable_shim()

    from .sessions import described, made, ran

    session = InferenceSession(path, options)
    return [described(session), ran(session, made("transformer", 100).feeds)]


@case(served=True)
def names_imported_after_the_shim(work: Work) -> object:
    path = _model(work, 100)
    from onnxruntime import InferenceSession

    from .sessions import described, made, ran

    session = InferenceSession(path)
    return [described(session), ran(session, made("transformer", 100).feeds)]


PROGRAM = """
import sys
if "shim" in sys.argv:
    import trims_shim
{body}
"""


def _program(work: Work, name: str, body: str, *options: str, **variables: str) -> list[object]:
    path = work.file(f"{name}.py", lambda path: path.write_text(PROGRAM.format(body=body)))
    shimmed = ["shim"] if os.environ["TRIMS_ENABLED"] == "1" else []
    done = subprocess.run(
        [sys.executable, *options, str(path), *shimmed],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **variables},
    )
    return [done.returncode, done.stdout, done.stderr]


RUN = """
import numpy, onnxruntime
{before}
session = onnxruntime.InferenceSession("model.onnx", options)
print(session.run(None, {{"ids": numpy.arange(6).reshape(2, 3)}})[0].tobytes().hex()[:400])
"""


@case()
def programs_of_their_own(work: Work) -> object:
    """Warnings as errors in development mode, optimised, and without onnxruntime at all."""
    _model(work, 100)
    strict = (
        "import gc, warnings\nwarnings.simplefilter('ignore')\n"
        + RUN.format(before="warnings.simplefilter('error'); options = None")
        + "del session; gc.collect()\n"
    )
    light = "print(sorted(m for m in ('onnxruntime', 'onnx', 'numpy') if m in sys.modules))"
    return [
        _program(work, "strict", strict, "-X", "dev", "-OO"),
        _program(work, "light", light),
    ]


@case()
def without_prepacking(work: Work) -> object:
    """``TRIMS_ORT_PREPACK=off`` gives what session.disable_prepacking gives, served or not."""
    _model(work, 100)
    before = (
        "options = onnxruntime.SessionOptions()\n"
        "if 'shim' not in sys.argv:\n"
        "    options.add_session_config_entry('session.disable_prepacking', '1')\n"
    )
    body = RUN.format(before=before)
    return _program(work, "off", body, TRIMS_ORT_PREPACK="off")
