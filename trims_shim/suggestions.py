"""What somebody may have meant who wrote a name that is not known. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str], *, spell: Callable[[str], str] = repr) -> str:
    """Return ``; did you mean 'auto'?`` for the nearest known name; empty if none is near."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {spell(near[0])}?" if near else ""
