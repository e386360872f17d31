"""Whether a prepared ONNX model may take the original's place.

Owns the comparison of sessions: everything a program can ask one for (inputs, outputs, overridable
initializers, model metadata, providers), the bits of what it computes, and the time that it takes
to create. Sessions come from :class:`trims_shim.daemon.preparer.optimising.Sessions`; the
original's is gone before the prepared one is created, so that the memory of one model is enough.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from trims_shim.daemon.preparer import probing
from trims_shim.daemon.preparer.optimising import Refusal
from trims_shim.daemon.preparer.probe_inputs import Argument
from trims_shim.daemon.preparer.probing import Probes

__all__ = ["Description", "Reference", "describe", "observe", "share_from", "verify"]

_REPEATED_BELOW_S = 0.2
_REPEATS = 5
_SHARED_ANYWAY_BYTES = 20 << 20
"""This much memory is worth sharing, even if creating a session takes longer than before."""
_NOISE_S = 0.001
"""Noise of the times compared. The cost of asking does not count: a refused client asked, too."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a session says of itself."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    overridable: tuple[Argument, ...]
    meta: tuple[tuple[str, str], ...]
    providers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the original was like: its description, its outputs, and CPU seconds to create it."""

    description: Description
    probes: Probes
    creation_s: float


def share_from(size_bytes: int) -> None:
    """Set from how many bytes of weights on a model may make sessions slower to create.

    For the whole process.
    """
    global _SHARED_ANYWAY_BYTES
    _SHARED_ANYWAY_BYTES = size_bytes


def describe(session: Any) -> Description:
    """Ask a session of onnxruntime's binding."""
    return Description(
        inputs=_arguments(session.inputs_meta),
        outputs=_arguments(session.outputs_meta),
        overridable=_arguments(session.overridable_initializers),
        meta=_metadata(session.model_meta),
        providers=tuple(
            (name, repr(sorted(session.get_provider_options().get(name, {}).items())))
            for name in session.get_providers()
        ),
    )


def observe(create: Callable[[], Any]) -> Reference:
    """Create the original, ask it, and run it. Raises what ``create`` raises."""
    session, creation_s = _created(create)
    description = describe(session)
    outputs = [each.name for each in description.outputs]
    probes = probing.collect(session, description.inputs, outputs)
    return Reference(description, probes, creation_s)


def verify(reference: Reference, create: Callable[[], Any], *, weights_bytes: int) -> str:
    """Compare a prepared model, opened by ``create``; return what comparing the outputs gave.

    ``weights_bytes``: what processes would share. Raises Refusal (``metadata_differs``,
    ``does_not_run``, ``outputs_differ``, ``no_gain``).
    """
    session, creation_s = _created(create)
    _check_description(reference.description, describe(session))
    try:
        different, note = reference.probes.differences(session)
    except Exception as error:
        raise Refusal("does_not_run", f"{type(error).__name__}: {error}") from error
    if different:
        raise Refusal("outputs_differ", f"other bits in {', '.join(different)}")
    is_slower = creation_s > reference.creation_s + _NOISE_S
    if is_slower and weights_bytes < _SHARED_ANYWAY_BYTES:
        raise Refusal(
            "no_gain",
            f"a session takes {1e3 * creation_s:.1f} ms, and {1e3 * reference.creation_s:.1f} ms "
            f"from the original",
        )
    return note


def _created(create: Callable[[], Any]) -> tuple[Any, float]:
    """A session, and the least CPU time that one took; the clock says little at low priority."""
    best_s, total_s = float("inf"), 0.0
    for _ in range(_REPEATS):
        session = None
        started_s = time.thread_time()
        session = create()
        taken_s = time.thread_time() - started_s
        best_s, total_s = min(best_s, taken_s), total_s + taken_s
        if total_s > _REPEATED_BELOW_S:
            break
    # Leftovers of earlier sessions are freed now, not when the model runs.
    gc.collect()
    return session, best_s


def _check_description(expected: Description, found: Description) -> None:
    for field in fields(Description):
        ours, theirs = getattr(expected, field.name), getattr(found, field.name)
        if ours != theirs:
            wrong = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
            raise Refusal("metadata_differs", f"{field.name}: {wrong[:1] or len(theirs)}")


def _arguments(nodes: Any) -> tuple[Argument, ...]:
    return tuple(Argument(node.name, node.type, tuple(node.shape)) for node in nodes)


def _metadata(meta: Any) -> tuple[tuple[str, str], ...]:
    names = sorted(name for name in dir(meta) if not name.startswith("_"))
    return tuple((name, _text(getattr(meta, name))) for name in names)


def _text(value: Any) -> str:
    return repr(sorted(value.items()) if isinstance(value, dict) else value)
