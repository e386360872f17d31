"""The files of a model's external data: where they lie, and what they are at the moment.

Owns the rule of where they may lie. Not only content decides whether onnxruntime (1.32) loads a
model: it refuses data that symbolic links lead out of the model's directory, so that a prepared
model of the same content does not stand for this one. Earlier versions ask less.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from trims_shim.specs import Identity

__all__ = ["external_identities", "external_path", "is_inside"]


def external_path(model: str, location: str) -> str:
    """Of the data that the model of this path has at a location."""
    return os.path.join(os.path.dirname(model), location)


def is_inside(model: str, location: str) -> bool:
    """Whether the data are below the model's directory, or below that of the file it is a link to.

    Raises OSError, ValueError for a location that is no path.
    """
    found = os.path.realpath(external_path(model, location))
    directories = os.path.realpath(os.path.dirname(model)), os.path.dirname(os.path.realpath(model))
    return any(os.path.commonpath((found, each)) == each for each in directories)


def external_identities(model: str, locations: Iterable[str]) -> tuple[Identity, ...] | None:
    """Of a model's external files as they are now; None where one is not to be had."""
    try:
        wanted = list(locations)
        if not all(is_inside(model, each) for each in wanted):
            return None
        return tuple(Identity.from_stat(os.stat(external_path(model, each))) for each in wanted)
    except (OSError, ValueError):  # ValueError: a location with a NUL
        return None
