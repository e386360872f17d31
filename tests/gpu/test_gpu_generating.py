"""Prompts that are continued together on a device's streams get the tokens that each gets alone.

Keys and values of running rows are written in place, on whichever stream has the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.forking import server


@pytest.mark.parametrize("prefill_stages", [1, 3])
def test_tokens_are_those_of_the_processor(
    torch_device: str, record: Callable[..., None], prefill_stages: int
) -> None:
    with server("tests.gpu.generating_cases", {"TRIMS_ENABLED": "0"}) as running:
        found = running.run(
            "tokens",
            device=torch_device,
            lanes=[torch_device, torch_device],
            count=60,
            prefill_stages=prefill_stages,
        )
    record("equal" if not found["wrong"] else "different", **found)
    assert not found["wrong"]
    assert not found["failures"]
    assert found["where"] == ["cuda"]
