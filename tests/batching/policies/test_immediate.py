"""The greedy server."""

from __future__ import annotations

from batching.checking import ms
from batching.policies.instances import Instance, run
from trims_shim.batching.policies import Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request


def test_what_is_queued_runs_at_once_however_late() -> None:
    requests = tuple(Request(number, ms(number), ms(1)) for number in range(5))
    instance = Instance(requests, LatencyProfile.linear(2, 20, max_batch_size=3))
    assert run(Immediate, instance).log == [
        (0, "run", (0,)),
        (ms(22), "run", (1, 2, 3)),
        (ms(48), "run", (4,)),
    ]
