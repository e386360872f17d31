"""How patches of all libraries ask the cache of this process for files, on the host tier.

Where the cache has none, the functions return None and count the reason; the framework then loads
by itself. Imports none of the patched libraries.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from trims_shim import diagnostics
from trims_shim.client.cache import cache
from trims_shim.errors import ConfigError, TrimsError

if TYPE_CHECKING:
    from trims_shim.client.arenas import Arena, Image
    from trims_shim.specs import Variant

__all__ = [
    "absolute",
    "arena_of_file",
    "from_anywhere",
    "is_strict",
    "opened",
    "or_none",
    "variant_image",
]

_Step = TypeVar("_Step", bound=Callable[..., Any])


def or_none(step: _Step) -> _Step:
    """Let a function that returns None where the framework has to load do so after any error.

    With TRIMS_STRICT, unexpected errors pass.
    """

    @functools.wraps(step)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        # Border: the shim never makes a load fail; after any error the original loader runs.
        except Exception as error:
            reason = diagnostics.reason_of(error)
            if reason not in diagnostics.EXPECTED_REASONS and is_strict():
                raise
            diagnostics.fallback(reason, error)
            return None

    return attempt  # type: ignore[return-value]


def is_strict() -> bool:
    """Whether unexpected errors are raised."""
    try:
        return bool(cache().config.strict)
    except ConfigError:
        return False


@contextlib.contextmanager
def opened(filename: str | os.PathLike[str]) -> Iterator[int | None]:
    """Open a file for the block; yield its descriptor, or None where it cannot be opened.

    The original loader opens it next and raises its own error.
    """
    try:
        descriptor = os.open(filename, os.O_RDONLY | os.O_CLOEXEC)
    # Border: a null byte, a character that no name can have, an audit hook of the program.
    except Exception as error:
        diagnostics.pass_on(error)
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def absolute(name: Any) -> str:
    """Return the absolute path, the cache's name for a file that the program calls ``name``.

    ``trims pin PATH`` therefore means the same file in every directory. Raises nothing of its own.
    """
    if isinstance(name, int):
        return f"file descriptor {name}"
    found = "an open file"
    try:
        found = os.fsdecode(name)
        return os.path.abspath(found)
    # Border: the working directory is gone; the program has put an object there.
    except Exception as error:
        diagnostics.pass_on(error)
        return found


def from_anywhere(filename: str) -> str:
    """The same file in every working directory; ``..`` after a link is left to the kernel."""
    try:
        return os.path.join(os.getcwd(), filename)
    except OSError:
        return filename


def arena_of_file(descriptor: int, name: object) -> Arena | None:
    """Return the arena of an open file; None (counted) where the framework has to load it."""
    shared = cache()
    path = absolute(name)
    try:
        return shared.open(descriptor, name=path)
    # Border: the shim never makes a load fail; after any error the original loader runs.
    except Exception as error:
        reason = diagnostics.reason_of(error)
        if shared.config.strict and reason not in diagnostics.EXPECTED_REASONS:
            raise
        diagnostics.fallback(reason, error, what=path)
        return None


def variant_image(image: Image, variant: Variant) -> Image | None:
    """Return a variant of an image, or None (counted)."""
    try:
        found = cache().variant(image, variant)
    except TrimsError as error:
        diagnostics.pass_on(error)
        diagnostics.count(str(variant), error.reason)
        return None
    diagnostics.count(str(variant), "copied" if found is None else "served")
    return found
