"""Lines in pictures can be seen and told apart, however many they are."""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trims_shim.cli.drawing import Drawing, Line, Panel, show
from trims_shim.cli.exits import Exit

figure = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Draws panels into a file; returns matplotlib's figure."""
    found: list[Any] = []
    save = figure.Figure.savefig

    def note(self: Any, *arguments: Any, **options: Any) -> None:
        found.append(self)
        save(self, *arguments, **options)

    def draw(*panels: Panel, name: str = "plot.svg") -> Any:
        arguments = argparse.Namespace(json=False, output=str(tmp_path / name), given=set())
        assert show(lambda: Drawing("title", panels), arguments) == Exit.OK
        return found[-1]

    monkeypatch.setattr(figure.Figure, "savefig", note)
    return draw


def panel(lines: int = 1, *, points: int = 2, is_share: bool = False) -> Panel:
    x = range(points)
    return Panel("x", "y", [Line(f"line {i}", x, x) for i in range(lines)], is_share)


@pytest.mark.parametrize(("lines", "has_names"), [(1, False), (2, True), (10, True), (11, True)])
def test_several_lines_have_their_names_beside_them_if_they_are_many(
    drawn: Callable[..., Any], lines: int, *, has_names: bool
) -> None:
    (axes,) = drawn(panel(lines)).axes
    legend = axes.get_legend()
    assert (legend is not None) == has_names
    if legend is not None:
        is_beside = legend.get_window_extent().x0 >= axes.get_window_extent().x1
        assert is_beside == (lines > 10)


def test_each_ten_lines_have_another_style(drawn: Callable[..., Any]) -> None:
    (axes,) = drawn(panel(41)).axes
    styles = [line.get_linestyle() for line in axes.get_lines()]
    assert styles == ["-"] * 10 + ["--"] * 10 + ["-."] * 10 + [":"] * 10 + ["-"]


@pytest.mark.parametrize(("points", "marker"), [(1, "o"), (2, "")])
def test_points_are_marked_where_there_is_no_line(
    drawn: Callable[..., Any], points: int, marker: str
) -> None:
    (axes,) = drawn(panel(points=points)).axes
    assert axes.get_lines()[0].get_marker() == marker


def test_panels_are_side_by_side_and_begin_at_0(drawn: Callable[..., Any]) -> None:
    wide = drawn(panel(), panel(is_share=True))
    assert wide.get_figwidth() == 2 * drawn(panel()).get_figwidth()
    values, shares = wide.axes
    assert values.get_ylim()[0] == 0
    assert shares.get_ylim() == (0, 1)


def test_suffixes_may_be_in_capitals(drawn: Callable[..., Any], tmp_path: Path) -> None:
    drawn(panel(), name="plot.PNG")
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    drawn: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "plot.svg"
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"plot\.svg"):
            drawn(panel())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["plot.svg"]


def test_a_picture_at_a_link_is_drawn_into_its_target(
    drawn: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "plot.svg").symlink_to("target.svg")
    drawn(panel())
    assert (tmp_path / "plot.svg").is_symlink()
    assert (tmp_path / "target.svg").read_text().startswith("<?xml")
