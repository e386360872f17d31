"""Lines in panels as a picture, with matplotlib, which is no dependency of this package."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from trims_shim.cli.arguments import refuse
from trims_shim.cli.exits import Exit
from trims_shim.cli.text import print_json
from trims_shim.errors import ConfigError, TrimsError
from trims_shim.replacing import replace_file, target_of

__all__ = ["Drawing", "Line", "Panel", "show"]

_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = 10
"""Of matplotlib; further lines have them again, in another style."""
_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True, slots=True)
class Line:
    """A name, and as many ``x`` as ``y``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes, and the lines in them; ``is_share`` if ``y`` is from 0 to 1."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """Panels side by side."""

    title: str
    panels: Sequence[Panel]


def show(make: Callable[[], Drawing], arguments: argparse.Namespace) -> Exit:
    """Draw what ``make`` returns into ``--output``, or print its data with ``--json``."""
    if arguments.json:
        refuse(arguments, ("--output",), "with --json, which draws nothing")
    else:
        _check_output(arguments.output)
    drawing = make()
    if arguments.json:
        print_json(asdict(drawing))
        return Exit.OK
    _draw(drawing, arguments.output)
    print(f"drawn: {arguments.output}")
    return Exit.OK


def _check_output(path: str | None) -> None:
    """Raise an error if ``path`` cannot be drawn; to be called before the work, not after."""
    if not path or os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"--output has to name a file that ends in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise TrimsError(
            "matplotlib draws the picture, and is not installed: run `pip install matplotlib`, "
            "or print the data with --json"
        )


def _draw(drawing: Drawing, path: str) -> None:
    """Write it to ``path``, in the format of its suffix."""
    # Not pyplot, which looks for a display and keeps figures.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(drawing.panels), 4.8), layout="constrained")
    figure.suptitle(_plain(drawing.title), fontsize="small")
    all_axes = figure.subplots(1, len(drawing.panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, drawing.panels, strict=True):
        for number, line in enumerate(panel.lines):
            marker = "o" if len(line.x) == 1 else ""  # a line of one point is not seen
            style = _STYLES[number // _COLOURS % len(_STYLES)]
            axes.plot(line.x, line.y, style, marker=marker, label=_plain(line.name))
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.set_ylim(bottom=0, top=1 if panel.is_share else None)
        axes.grid(alpha=0.3)
        if len(panel.lines) > _COLOURS:  # they would cover the lines
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="x-small")
        elif len(panel.lines) > 1:
            axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format=os.path.splitext(path)[1][1:], dpi=150)
    replace_file(target_of(path), picture.getvalue())


def _plain(text: str) -> str:
    """Of names of files and objects, what is between dollars is no formula."""
    return text.replace("$", r"\$")
