"""The key of a prepared model: everything that decides what onnxruntime makes of a model.

Also owns the version of what the preparer writes: raising it makes new models of the same sources.
Equal keys mean equal files, bit for bit, on one machine.
"""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

from trims_shim.daemon.prepared.values import Content
from trims_shim.specs import Digest
from trims_shim.wire import codec
from trims_shim.wire.messages import SessionRecipe

__all__ = ["LAYOUT_VERSION", "entry_key"]

LAYOUT_VERSION = 6
"""Raised by every change of what is prepared, how it is verified, or how it is stored."""


class _Parts(NamedTuple):
    """What is hashed; the codec's encoding is canonical."""

    layout: int
    digest: Digest
    externals: tuple[tuple[str, ...], ...]
    recipe: SessionRecipe
    cpu: str


def entry_key(content: Content, recipe: SessionRecipe, *, cpu: str) -> str:
    """64 hexadecimal digits. ``cpu`` identifies the processor, see :func:`.cpu_identity`."""
    externals: tuple[tuple[str, ...], ...] = tuple(sorted(content.externals))
    if content.place:
        externals += ((content.place,),)
    parts = _Parts(LAYOUT_VERSION, content.digest, externals, recipe, cpu)
    key: str = blake3(codec.encode(parts)).hexdigest()
    return key
