"""Exit points: where they are, and which are refused."""

from __future__ import annotations

import pytest

from trims_shim.batching.policies.preemptible import PreemptibleModel, even_exits
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import NEVER_NS

PROFILE = LatencyProfile([100, 200])


def test_even_exits_are_between_stages() -> None:
    assert even_exits(4) == (0.25, 0.5, 0.75)
    assert even_exits(1) == ()
    with pytest.raises(ValueError, match="at least one"):
        even_exits(0)


@pytest.mark.parametrize(
    ("size", "passed_ns", "exit_ns"),
    [(1, 0, 25), (1, 25, 25), (1, 26, 50), (2, 26, 50), (2, 150, 150), (1, 76, NEVER_NS)],
)
def test_the_next_exit_is_at_the_end_of_this_stage(size: int, passed_ns: int, exit_ns: int) -> None:
    model = PreemptibleModel(PROFILE, 2, even_exits(4))
    assert model.next_exit_ns(size, passed_ns) == exit_ns


def test_a_model_in_one_piece_has_no_exit() -> None:
    assert PreemptibleModel(PROFILE, 2).next_exit_ns(1, 0) == NEVER_NS


@pytest.mark.parametrize("exits", [(0.0,), (1.0,), (0.5, 0.5), (0.6, 0.4), (-0.1,)])
def test_exits_that_do_not_ascend_are_refused(exits: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="do not ascend"):
        PreemptibleModel(PROFILE, 2, exits)


def test_sizes_that_the_profile_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size is 3"):
        PreemptibleModel(PROFILE, 3)
