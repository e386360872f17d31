"""The window in which requests of one length come together."""

from __future__ import annotations

from batching.checking import ms
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request
from trims_shim.batching.staged.policies.inputs import InputDiversity
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile

# The first stage takes 14 ms with a full batch; the whole takes 22 ms for one and 24 for two.
PROFILE = StagedProfile([LatencyProfile.linear(1, 10, max_batch_size=4)] * 2)


def rule_with(*requests: Request) -> InputDiversity:
    rule = InputDiversity(PROFILE, max_batch_size=4)
    for request in requests:
        rule.queue.add(request)
        rule.on_arrival(request.arrival_ns, request)
    return rule


def test_one_waits_as_long_as_a_full_batch_takes_in_the_first_stage() -> None:
    rule = rule_with(Request(0, ms(5)), Request(1, ms(9)))
    assert rule.choose(ms(10)) == 0
    assert rule.wake_ns == ms(5 + 14)
    assert rule.choose(ms(19)) == 2


def test_a_full_batch_waits_no_more() -> None:
    assert rule_with(*(Request(each, 0) for each in range(4))).choose(0) == 4


def test_deadlines_end_the_window() -> None:
    rule = rule_with(Request(0, 0, ms(30)))
    assert rule.choose(0) == 0
    assert rule.wake_ns == ms(30 - 24)
    assert rule.choose(ms(6)) == 1
