"""What says which rows are finished is booleans, however they are given."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from trims_shim.batching.staged import EarlyExit, Stepped
from trims_shim.errors import BadBatch


@pytest.mark.parametrize(
    "flags",
    [[True, False], (True,), [], numpy.array([True, False]), list(numpy.array([True, False]))],
)
def test_flags(flags: Any) -> None:
    assert EarlyExit(flags, [], []).finished is flags
    assert Stepped([], [], flags).finished is flags


def test_flags_of_torch() -> None:
    torch = pytest.importorskip("torch")
    flags = torch.tensor([True, False])
    for each in (flags, list(flags), flags.tolist()):
        assert Stepped([], [], each).finished is each


@pytest.mark.parametrize(
    "other", [[1, 0], ["a"], "ab", None, True + 0, {"token": [True]}, numpy.array([1]), [None]]
)
def test_what_is_no_flag_is_refused(other: Any) -> None:
    with pytest.raises(BadBatch, match="EarlyExit: finished has to be a boolean for each row"):
        EarlyExit(other, [], [])
    with pytest.raises(BadBatch, match="Stepped: finished has to be a boolean for each row"):
        Stepped([], [], other)


@pytest.mark.parametrize("flags", [[True, False], numpy.array([True, False])])
def test_rows_that_go_on_with_nothing_are_refused(flags: Any) -> None:
    """Found: each step got the arguments of the first one again, without end."""
    with pytest.raises(BadBatch, match="not finished and state is None"):
        Stepped(None, ["a", "b"], flags)
    Stepped(None, ["a", "b"], [True, True])
