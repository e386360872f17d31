"""The files of a model's external data: where they lie, and their identities at the moment.

Owns the rule of where they may lie. Content alone does not decide whether onnxruntime loads a
model: version 1.32 refuses data that symbolic links lead out of the model's directory, so that a
prepared model of the same content must not stand for this one. Earlier versions check less.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

from trims_shim.specs import Identity

__all__ = [
    "external_identities",
    "external_path",
    "is_inside",
    "is_private",
    "links_to",
    "may_others_write",
]

_LINKS_LIMIT = 40
"""Linux's own (path_resolution(7))."""


def external_path(model: str, location: str) -> str:
    """The path of the data that the model at ``model`` has at a location."""
    return os.path.join(os.path.dirname(model), location)


def is_inside(model: str, location: str) -> bool:
    """Whether the data are below the model's directory, or below that of the file it is a link to.

    Raises OSError, ValueError for a location that is no path.
    """
    found = os.path.realpath(external_path(model, location))
    directories = os.path.realpath(os.path.dirname(model)), os.path.dirname(os.path.realpath(model))
    return any(os.path.commonpath((found, each)) == each for each in directories)


def external_identities(model: str, locations: Iterable[str]) -> tuple[Identity, ...] | None:
    """The identities of a model's external files now; None if one cannot be had."""
    try:
        wanted = list(locations)
        if not all(is_inside(model, each) for each in wanted):
            return None
        return tuple(Identity.from_stat(os.stat(external_path(model, each))) for each in wanted)
    except (OSError, ValueError):  # ValueError: a location with a NUL
        return None


def links_to(path: str) -> tuple[Identity, ...]:
    """The symbolic links on an absolute path, also on theirs; one put in another's place differs.

    Raises OSError.
    """
    found: list[Identity] = []
    here, names = "/", path.split("/")[::-1]
    while names:
        step = os.path.join(here, names.pop())
        status = os.lstat(step)
        # What a descriptor is open on, such as a memfd, may have no name to go on with.
        if not stat.S_ISLNK(status.st_mode) or status.st_dev == os.lstat("/proc").st_dev:
            here = step
            continue
        if len(found) == _LINKS_LIMIT:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        found.append(Identity.from_stat(status))
        target = os.readlink(step)
        names += target.split("/")[::-1]
        here = "/" if os.path.isabs(target) else here
    return tuple(found)


def may_others_write(status: os.stat_result) -> bool:
    """Whether anybody but us and root may change a file, or what is in a directory."""
    is_theirs = status.st_uid not in (os.geteuid(), 0)
    return is_theirs or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def is_private(path: str) -> bool:
    """Whether nobody but us and root can change a file, or where its path leads.

    False in doubt, and where symbolic links lead to it. Raises OSError.
    """
    if os.path.realpath(path) != path:
        return False
    if may_others_write(os.stat(path)):
        return False
    while path != (path := os.path.dirname(path)):
        status = os.stat(path)
        # In a sticky directory (/tmp) others cannot rename what is ours.
        is_sticky = status.st_uid in (os.geteuid(), 0) and status.st_mode & stat.S_ISVTX
        if may_others_write(status) and not is_sticky:
            return False
    return True
