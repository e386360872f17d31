"""The tree in the docstring is the tree of classes, and some test raises each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trims_shim import errors
from trims_shim.errors import NotServed, TrimsError

TESTS = Path(__file__).parent
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def drawn_tree() -> dict[str, str]:
    """Parent of each class in the docstring."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([│├└─ ]*)([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}
    assert drawn_tree() == real


def test_all_are_exported() -> None:
    assert sorted(CLASSES) == errors.__all__


def test_reasons_are_distinct() -> None:
    reasons = [kind.reason for name, kind in CLASSES.items() if name != "NotServed"]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[a-z_]+", reason) for reason in reasons)


def test_not_served_has_the_reason_it_is_given() -> None:
    assert NotServed("small_file").reason == "small_file"
    assert str(NotServed("small_file")) == "small_file"
    assert str(NotServed("small_file", "17 bytes")) == "17 bytes"


def test_an_error_without_a_message() -> None:
    assert TrimsError.reason == "error"
    assert all(str(kind("text")) == "text" for kind in CLASSES.values())


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_some_test_expects_it(name: str) -> None:
    """Either ``pytest.raises(Name...)`` or an ``isinstance(..., Name)``, or a subclass of it."""
    wanted = {each for each, kind in CLASSES.items() if issubclass(kind, CLASSES[name])}
    pattern = re.compile(
        r"(?:pytest\.raises\(|isinstance\([^)]*,)[^)]*\b(?:" + "|".join(sorted(wanted)) + r")\b"
    )
    files = (path for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    assert any(pattern.search(path.read_text()) for path in files), f"no test raises {name}"
