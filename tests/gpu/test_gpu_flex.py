"""Batches that are given up with their kernels under way harm no other answer.

Memory of a batch that is given up is used again at once: what still reads or writes it then is a
wrong answer here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.forking import server

ROUNDS = 10


@pytest.mark.parametrize("streams", [1, 2])
def test_answers_have_the_bits_of_the_processor(
    torch_device: str, record: Callable[..., None], streams: int
) -> None:
    with server("tests.gpu.flex_cases", {"TRIMS_ENABLED": "0"}) as running:
        found = running.run(
            "answers",
            device=torch_device,
            lanes=[torch_device] * streams,
            rounds=ROUNDS,
            width=2048,
        )
    record("equal" if not found["wrong"] else "different", **found)
    assert not found["wrong"]
    assert found["preemptions"] >= ROUNDS
