"""What a batch says of others: nothing, if it did not run as it was chosen."""

from __future__ import annotations

import pytest

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.replies import BatchFuture, Entry, Failure
from trims_shim.batching.protocol import NEVER_NS, Request


def request_of(number: int, length: int) -> Request:
    entry = Entry((number,), BatchFuture(), NEVER_NS, None)
    return Request(number, 0, key=length, payload=entry)


@pytest.mark.parametrize(("cancelled", "is_typical"), [(None, True), (0, False), (1, True)])
def test_a_batch_without_its_longest_item_says_nothing_of_its_length(
    cancelled: int | None, is_typical: bool
) -> None:
    requests = [request_of(0, 64), request_of(1, 32)]
    if cancelled is not None:
        assert requests[cancelled].payload.reply.cancel()
    job = Job(0, requests, 0)
    entries = job.begin(0)
    job.end(1, [None] * len(entries))
    assert job.key == 64
    assert job.is_typical == is_typical


def test_a_batch_that_failed_or_ran_for_nobody_says_nothing() -> None:
    failed = Job(0, [request_of(0, 64)], 0)
    failed.begin(0)
    failed.end(1, [Failure(ValueError())])
    assert not failed.is_typical
    unwanted = Job(0, [request_of(0, 64)], 0)
    assert unwanted.requests[0].payload.reply.cancel()
    assert not unwanted.begin(0)
    unwanted.end(1, [])
    assert not unwanted.is_typical
