"""What tests of preparation share: the recipe of an ordinary session, and a request for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trims_shim.daemon.preparer import main as preparer
from trims_shim.daemon.preparer.installation import installation
from trims_shim.wire import duties, messages
from trims_shim.wire.duties import PrepareReply, SourceHashed

__all__ = ["Daemon", "opened", "prepare", "recipe", "request"]


def recipe(**fields: Any) -> messages.SessionRecipe:
    """Of a session without options."""
    found = installation()
    values: dict[str, Any] = {
        "runtime": found.runtime,
        "build": found.build,
        "providers": (("CPUExecutionProvider",),),
        "level": "ORT_ENABLE_ALL",
    }
    return messages.SessionRecipe(**{**values, **fields})


def request(path: str | Path, directory: str | Path, **fields: Any) -> duties.PrepareRequest:
    """For the model at a path; ``fields`` of the recipe, or of the request."""
    own = {
        name: fields.pop(name)
        for name in ("protocol", "source", "package", "path", "externals")
        if name in fields
    }
    values: dict[str, Any] = {
        "protocol": messages.PROTOCOL_VERSION,
        "source": -1,
        "path": os.fspath(path),
        "recipe": recipe(**fields),
        "package": installation().package,
        "directory": os.fspath(directory),
    }
    return duties.PrepareRequest(**{**values, **own})


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """A descriptor of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Daemon:
    """Takes part in the conversation."""

    def __init__(self, is_wanted: bool = True) -> None:
        self.is_wanted = is_wanted
        self.hashed: list[SourceHashed] = []

    def __call__(self, hashed: SourceHashed) -> bool:
        self.hashed.append(hashed)
        return self.is_wanted


def prepare(
    path: Path, directory: Path, daemon: Daemon | None = None, **fields: Any
) -> PrepareReply:
    with opened(path) as source:
        asked = request(path, directory, source=source, **fields)
        reply = preparer.prepare(asked, daemon or Daemon())
    assert reply is not None
    return reply
