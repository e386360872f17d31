"""Tables in Markdown and pictures, as all benchmarks write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["can_draw", "markdown_table", "pyplot", "save_picture"]


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1
) -> list[str]:
    """The lines of a table; columns after the first ``texts`` are aligned to the right."""
    rule = "|---" * texts + "|---:" * (len(head) - texts) + "|"
    return [_line(head), rule, *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def can_draw(path: Path) -> bool:
    """Whether there is matplotlib; if not, say that this picture is left out.

    A machine with a GPU may lack it; the results are written already.
    """
    try:
        pyplot()
    except ImportError:
        print(f"left out: {path}, as matplotlib is not installed")
        return False
    return True


def pyplot() -> Any:
    """The module of matplotlib, for pictures in files. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of :func:`pyplot` to a file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
