"""Batches that are entered and left between stages on a device's streams answer as one by one.

Each stage of each batch runs on one of two streams, and its activations go on to whichever is free
next: what is read before it is written, or freed while it is read, is a wrong answer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.forking import Server, server

KINDS = ("bert", "ragged bert", "resnet", "u-net", "early exit", "gpt")


@pytest.fixture(scope="module")
def tasks(torch_device: str) -> Iterator[Server]:
    with server("tests.gpu.staged_cases", {"TRIMS_ENABLED": "0"}) as running:
        yield running


@pytest.mark.parametrize("policy", ["dvabatch", "restless"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_bits_of_unbatched_execution(
    tasks: Server, torch_device: str, record: Callable[..., None], kind: str, policy: str
) -> None:
    lanes = [torch_device, torch_device]
    found = tasks.run(
        "answers", kind=kind, policy=policy, device=torch_device, lanes=lanes, count=60
    )
    record("equal" if not found["wrong"] else "different", **found)
    assert not found["wrong"]
    assert not found["failures"]
