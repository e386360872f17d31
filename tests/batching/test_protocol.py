"""The vocabulary: what has to hold for it to be used as it is."""

from __future__ import annotations

import dataclasses

import pytest

from trims_shim.batching import protocol
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Drop,
    DropReason,
    Preempt,
    Preempted,
    Request,
    Signal,
)


def test_requests_are_compared_by_identity() -> None:
    """Two callers may ask the same at the same time, and each wants an answer."""
    assert Request(1, 0) != Request(1, 0)
    assert len({Request(1, 0), Request(1, 0)}) == 2


def test_a_request_asks_for_little_unless_told() -> None:
    request = Request(1, 5)
    assert request.deadline_ns == NEVER_NS
    assert (request.priority, request.key, request.weight) == (0, None, 1)


@pytest.mark.parametrize(
    "fixed",
    [Drop((), DropReason.SHED), Preempt(0), Preempted(0, (), 0)],
)
def test_what_is_said_now_and_then_does_not_change(fixed: object) -> None:
    name = dataclasses.fields(fixed)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(fixed, name, 1)


def test_a_payload_is_not_printed() -> None:
    assert "secret" not in repr(Request(1, 0, payload="secret"))


def test_signals_are_exported() -> None:
    assert {TIMER, FLUSH} == set(Signal)
    assert NEVER_NS == (1 << 63) - 1
    assert sorted(protocol.__all__) == sorted(set(protocol.__all__))
