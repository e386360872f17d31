"""Who joins, what goes on, who starts: the state machine around the rules of a staged model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from trims_shim.batching.policies import Auto, Immediate
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import (
    FLUSH,
    NEVER_NS,
    TIMER,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Finished,
    Request,
    Run,
)
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.mechanism.batches import Batch, Part
from trims_shim.batching.staged.profiles.stage_profile import StagedProfile
from trims_shim.batching.staged.scheduler import RunStage, StagedBatching, StageEnded
from trims_shim.batching.staged.staged_rules import StagedRule

PROFILE = StagedProfile([LatencyProfile([10, 20, 30, 40])] * 4)


class Scripted(StagedRule):
    """Runs, stretches and splits as it is told; keeps what it was told itself."""

    def __init__(self, *, most: int = 4) -> None:
        super().__init__(PROFILE, max_batch_size=most)
        self.wait_ns: int | None = None
        self.joins = 0
        self.sizes: Sequence[int] = ()
        self.drops_first = False
        self.is_alone = False
        self.is_whole = False
        self.border: Any = ...
        self.asked: list[tuple[Any, ...]] = []
        self.met: list[bool] = []
        self.finished: list[Finished] = []

    def choose(self, now_ns: int) -> int:
        self.asked.append(("choose", len(self.queue), self.others, self.has_rivals))
        if self.wait_ns is None:
            return self.room()
        self.wake_ns = now_ns + self.wait_ns
        return 0

    def runs_whole(self, now_ns: int, size: int) -> bool:
        return self.is_whole

    def stretch(self, now_ns: int, batch: Batch, room: int) -> int:
        self.asked.append(("stretch", batch.number, room, self.others))
        if self.drops_first:
            self.drop(self.queue.take(1), DropReason.SHED)
        return self.joins

    def may_run_beside(self, now_ns: int, part: Part) -> bool:
        return not self.is_alone

    def split(self, now_ns: int, part: Part) -> Sequence[int]:
        self.asked.append(("split", part.stage, part.size))
        return self.sizes

    def next_split(self, now_ns: int, part: Part) -> int | None:
        return super().next_split(now_ns, part) if self.border is ... else self.border

    def on_met(self, is_joined: bool) -> None:
        self.met.append(is_joined)

    def on_finished(self, now_ns: int, finished: Finished) -> None:
        self.finished.append(finished)


class Serving:
    """A policy, what it runs, and what it was asked."""

    def __init__(self, make_rule: Callable[[Hashable], Rule] | None = None, **options: Any) -> None:
        self.rules: dict[Hashable, Scripted] = {}
        self.policy = StagedBatching(make_rule or self._make, **{"stages": 3, **options})
        self.running: list[RunStage] = []
        self.whole: list[Run] = []
        """All so far; only the last one may run."""
        self.dropped: list[int] = []
        self.now_ns = 0
        self._number = 0

    def _make(self, key: Hashable) -> Scripted:
        return self.rules.setdefault(key, Scripted())

    def rule(self, key: Hashable = None) -> Scripted:
        return self._make(key)

    def ask(self, key: Hashable = None, **options: Any) -> Request:
        self._number += 1
        request = Request(self._number, self.now_ns, key=key, **options)
        self.tell(request)
        return request

    def tell(self, event: Any) -> Sequence[Action]:
        actions = self.policy.on_event(self.now_ns, event)
        for action in actions:
            if isinstance(action, RunStage):
                self.running.append(action)
            elif isinstance(action, Run):
                self.whole.append(action)
            elif isinstance(action, Drop):
                self.dropped.extend(request.number for request in action.requests)
        return actions

    def end(
        self, run: RunStage | None = None, left: Sequence[Request] = (), **options: Any
    ) -> None:
        """Of what has run the longest, or of this."""
        run = run or self.running[0]
        self.running.remove(run)
        self.now_ns += 10
        self.tell(StageEnded(run.device, run.batch, 0, part=run.part, left=left, **options))

    def end_whole(self) -> None:
        """Of the last batch that ran whole."""
        run = self.whole[-1]
        self.now_ns += 10
        self.tell(Finished(run.device, run.batch, 0))

    def shown(self) -> list[tuple[int, list[int]]]:
        """What runs: stages and requests."""
        return [(run.stage, [request.number for request in run.batch]) for run in self.running]


def test_the_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_active is 0"):
        Serving(max_active=0)
    with pytest.raises(ValueError, match="devices is 0"):
        Serving(devices=0)


def test_a_batch_runs_all_stages_before_the_next_is_formed() -> None:
    serving = Serving(lambda key: Immediate(PROFILE, max_batch_size=4))
    serving.ask()
    serving.ask()
    seen = []
    while serving.running:
        seen += serving.shown()
        serving.end()
        if len(seen) == 1:
            serving.ask()
    assert seen == [(stage, numbers) for numbers in ([1], [2, 3]) for stage in range(3)]


def test_a_batch_runs_whole_where_its_rule_says_so() -> None:
    serving = Serving()
    serving.rule().is_whole = True
    serving.ask()
    assert serving.whole[-1].batch[0].number == 1
    serving.ask()
    serving.ask()
    assert serving.shown() == [], "nobody enters it"
    serving.end_whole()
    assert [request.number for request in serving.whole[-1].batch] == [2, 3]
    assert [len(each.batch) for each in serving.rule().finished] == [1]
    serving.rule().is_whole = False
    serving.ask()
    serving.end_whole()
    assert serving.shown() == [(0, [4])]


def test_answers_after_the_last_stage_keep_no_later_batch_from_running_whole() -> None:
    serving = Serving()
    request = serving.ask()
    serving.end()
    serving.end()
    serving.end(left=[request])
    serving.rule().is_whole = True
    serving.ask()
    assert [request.number for request in serving.whole[-1].batch] == [2]


def test_no_batch_runs_whole_beside_another() -> None:
    serving = Serving(devices=2)
    serving.rule().is_whole = True
    serving.ask()
    assert serving.shown() == [(0, [1])]
    serving = Serving()
    serving.ask("a")
    serving.rule("b").is_whole = True
    serving.ask("b")
    while serving.running:
        serving.end()
    assert [request.number for request in serving.whole[-1].batch] == [2], "when it is alone"


def test_none_does_where_stages_answer_some_early() -> None:
    """In a whole batch they would wait for the others."""
    serving = Serving()
    first = serving.ask()
    serving.end(left=[first])
    serving.rule().is_whole = True
    serving.ask()
    assert [stage for stage, _ in serving.shown()] == [0]
    serving = Serving(has_loop=True)
    serving.rule().is_whole = True
    serving.ask()
    assert [stage for stage, _ in serving.shown()] == [0], "nor where nobody knows when they end"
    serving = Serving(may_run_whole=False)
    serving.rule().is_whole = True
    serving.ask()
    assert [stage for stage, _ in serving.shown()] == [0], "nor on a device that takes only stages"


def test_those_who_leave_for_another_reason_are_no_reason_against_it() -> None:
    serving = Serving()
    first = serving.ask()
    serving.end(left=[first], has_exits=False)
    serving.rule().is_whole = True
    serving.ask()
    assert [request.number for request in serving.whole[-1].batch] == [2]


def test_with_two_devices_two_batches_are_on_their_way() -> None:
    serving = Serving(devices=2)
    serving.ask()
    serving.end()
    serving.ask()
    assert serving.shown() == [(1, [1]), (0, [2])]
    assert len({run.device for run in serving.running}) == 2


def test_a_part_waits_if_it_gains_nothing_beside_others() -> None:
    """A device stays free then; with the next event it is asked again."""
    serving = Serving(devices=2)
    serving.ask()
    serving.end()
    serving.rule().is_alone = True
    serving.ask()
    assert serving.shown() == [(1, [1])]
    serving.end()
    assert serving.shown() == [(2, [1])]
    serving.end()
    assert serving.shown() == [(0, [2])]


def test_a_stage_is_not_run_twice_at_once() -> None:
    serving = Serving(devices=2, stages=1)
    serving.ask()
    serving.ask()
    assert serving.shown() == [(0, [1])]


def test_rules_are_told_of_meetings_and_once_of_those_who_cannot_be_joined() -> None:
    serving = Serving(stages=4)
    serving.rule().joins = 1
    serving.ask()
    serving.ask()
    serving.end()
    serving.end()
    assert serving.shown() == [(1, [1, 2])]
    serving.end(is_joined=True)
    assert serving.rule().met == [True]
    serving.end(is_joined=False)
    serving.end(is_joined=False)
    assert serving.rule().met == [True, False]


# --- running on -----------------------------------------------------------------------------------


def test_what_is_alone_may_run_on_to_its_end() -> None:
    serving = Serving()
    serving.ask()
    assert serving.running[0].until == 2
    serving.end(through=2)
    assert serving.policy.pipeline.may_new
    assert not len(serving.policy.pipeline.table)


def test_a_batch_may_run_on_to_where_it_may_be_split() -> None:
    for border, until in ((None, 2), (2, 1), (1, 0)):
        serving = Serving()
        serving.rule().border = border
        serving.ask()
        serving.ask()
        serving.ask()
        serving.end()
        serving.end()  # the first one's last stages; two waited
        serving.end()
        assert (serving.shown(), serving.running[0].until) == ([(0, [2, 3])], until)
        serving.end(through=until)
        assert serving.shown() == ([(until + 1, [2, 3])] if until < 2 else [])


def test_a_batch_of_a_rule_that_never_splits_runs_on_from_any_stage() -> None:
    serving = Serving(lambda key: Immediate(PROFILE, max_batch_size=4))
    serving.ask()
    serving.ask()
    serving.ask()
    for _ in range(3):
        serving.end()
    assert (serving.shown(), serving.running[0].until) == ([(0, [2, 3])], 2)
    last = serving.ask()
    serving.end(through=0)
    assert serving.running[0].until == 1  # somebody waits
    serving.tell(Cancelled(last))
    serving.end()
    assert (serving.shown(), serving.running[0].until) == ([(2, [2, 3])], 2)


def test_who_is_finished_on_the_way_leaves_where_he_is() -> None:
    serving = Serving(lambda key: Immediate(PROFILE, max_batch_size=4))
    serving.ask()
    ended, other = serving.ask(), serving.ask()
    for _ in range(3):
        serving.end()
    serving.end(left=[ended], through=1)
    assert serving.shown() == [(2, [other.number])]


def test_a_loop_is_asked_about_after_each_step() -> None:
    serving = Serving(has_loop=True)
    serving.ask()
    assert serving.running[0].until == 1
    serving.end(through=1)
    assert (serving.running[0].stage, serving.running[0].until) == (2, 2)


def test_where_something_is_to_be_decided_nothing_runs_on() -> None:
    serving = Serving()
    serving.ask()
    serving.ask()
    serving.ask()
    serving.end(through=0)  # two wait
    assert serving.running[0].until == 1
    serving.end()
    serving.end()
    assert (serving.shown(), serving.running[0].until) == ([(0, [2, 3])], 0)  # may be split
    serving = Serving(devices=2)
    serving.ask()
    assert serving.running[0].until == 0  # another could start beside it
    serving = Serving()
    serving.rule("a").wait_ns = 10
    serving.ask("a")
    serving.ask("b")
    assert serving.running[0].until == 0  # another one waits


def test_who_comes_while_it_runs_on_joins_where_it_is_then() -> None:
    serving = Serving()
    serving.rule().joins = 1
    serving.ask()
    serving.ask()
    serving.end(through=1)
    assert serving.shown() == [(0, [2])]
    serving.end()
    serving.end()
    assert serving.shown() == [(2, [1, 2])]


# --- stretch --------------------------------------------------------------------------------------


def test_newcomers_join_catch_up_and_go_on_with_the_others() -> None:
    serving = Serving()
    serving.rule().joins = 4
    serving.ask()
    serving.end()
    serving.ask()
    seen = []
    while serving.running:
        serving.end()
        seen += serving.shown()
    assert seen == [(0, [2]), (1, [2]), (2, [1, 2])]


def test_room_is_what_the_batch_and_the_limits_leave() -> None:
    serving = Serving(max_active=4)
    serving.ask()
    serving.end()
    for _ in range(6):
        serving.ask()
    serving.end()
    assert ("stretch", 0, 3, 0) in serving.rule().asked


def test_a_stretched_batch_is_no_larger_than_any_other() -> None:
    serving = Serving()
    serving.rule().joins = 9
    serving.ask()
    serving.end()
    for _ in range(6):
        serving.ask()
    serving.end()
    assert serving.shown() == [(0, [2, 3, 4])]


def test_a_stretched_batch_weighs_no_more_than_any_other() -> None:
    serving = Serving(max_weight=5)
    serving.rule().joins = 4
    serving.ask(weight=2)
    serving.end()
    for weight in (1, 1, 2):
        serving.ask(weight=weight)
    serving.end()
    assert serving.shown() == [(0, [2, 3])]


def test_who_is_too_heavy_to_join_is_not_asked_about() -> None:
    serving = Serving(max_weight=5)
    serving.ask(weight=2)
    serving.end()
    serving.ask(weight=4)
    serving.end()
    assert not [row for row in serving.rule().asked if row[0] == "stretch"]


def test_a_rule_may_give_up_requests_instead() -> None:
    serving = Serving()
    serving.rule().joins = 4
    serving.rule().drops_first = True
    serving.ask()
    serving.end()
    serving.ask()
    serving.end()
    assert serving.dropped == [2]
    assert serving.shown() == [(2, [1])]


def test_only_requests_of_its_key_join_a_batch() -> None:
    serving = Serving()
    serving.rule("a").joins = serving.rule("b").joins = 4
    serving.ask("a")
    serving.end()
    serving.ask("b")
    serving.end()
    assert serving.shown() == [(2, [1])]


def test_the_newest_batch_is_joined_while_an_earlier_one_runs() -> None:
    serving = Serving(devices=2, stages=4)
    serving.ask()
    serving.end()
    serving.ask()
    serving.end(serving.running[1])
    assert serving.shown() == [(1, [1])]
    serving.rule().joins = 4
    serving.ask()
    assert serving.shown() == [(1, [1]), (0, [3])]
    assert serving.running[1].part.batch.number == 1


def test_plain_rules_neither_stretch_nor_split() -> None:
    serving = Serving(lambda key: Auto(PROFILE, max_batch_size=4))
    serving.ask()
    serving.end()
    serving.ask()
    serving.end()
    assert serving.shown() == [(2, [1])]


def test_a_batch_whose_requests_leave_early_is_not_filled_up_for_ever() -> None:
    """The one that does not leave waits for them."""
    serving = Serving(stages=2)
    serving.rule().joins = 4
    serving.ask()
    serving.ask()
    batch = serving.running[0].part.batch
    serving.end()
    for _ in range(20):
        if not serving.running[0].stage:
            serving.ask()
            serving.end(left=serving.running[0].batch)
    assert serving.shown() == [(1, [1])]
    assert batch.size == 2 * serving.rule().max_batch_size


# --- split ----------------------------------------------------------------------------------------


def test_a_batch_is_split_where_its_rule_says() -> None:
    serving = Serving()
    serving.tell(FLUSH)
    blocker = serving.ask("other")
    for _ in range(4):
        serving.ask()
    while serving.running[0].batch[0] is blocker:
        serving.end()
    serving.rule().sizes = (3, 1)
    seen = []
    while serving.running:
        seen += serving.shown()
        serving.end()
    assert seen == [(0, [2, 3, 4, 5]), (1, [2, 3, 4]), (2, [2, 3, 4]), (1, [5]), (2, [5])]
    assert [row for row in serving.rule().asked if row[0] == "split"] == [("split", 1, 4)]


@pytest.mark.parametrize("wrong", [(3, 1), (1,), (2, 0), (3, -1)])
def test_a_split_loses_nobody(wrong: tuple[int, ...]) -> None:
    serving = Serving()
    serving.rule().wait_ns = 10
    serving.ask()
    serving.ask()
    serving.tell(FLUSH)
    serving.rule().sizes = wrong
    with pytest.raises(ValueError, match="a part of 2 cannot be split"):
        serving.end()


def test_a_split_into_one_is_none() -> None:
    serving = Serving()
    serving.ask()
    serving.rule().sizes = (1,)
    serving.end()
    assert not serving.running[0].part.batch.is_split


# --- what rules are told --------------------------------------------------------------------------


def test_rules_know_the_devices_the_loop_and_who_else_waits() -> None:
    serving = Serving(devices=1, has_loop=True)
    serving.ask("a")
    for key in "bbc":
        serving.ask(key)
    serving.end()
    rule = serving.rule("b")
    assert (rule.devices, rule.has_loop) == (1, True)
    serving.end()
    assert rule.asked == [("choose", 2, 1, True)]


def whole(rule: Scripted) -> tuple[int, int, bool]:
    (finished,) = rule.finished
    return len(finished.batch), finished.started_ns, finished.is_typical


def test_a_batch_that_went_through_alone_teaches_its_rule() -> None:
    serving = Serving()
    serving.now_ns = 5
    serving.ask()
    while serving.running:
        serving.end()
    assert whole(serving.rule()) == (1, 5, True)


def test_one_that_was_joined_on_its_way_is_not_typical() -> None:
    serving = Serving()
    serving.rule().joins = 4
    serving.ask()
    serving.end()
    serving.ask()
    while serving.running:
        serving.end()
    assert whole(serving.rule()) == (2, 0, False)


def test_one_of_which_any_stage_was_not_typical_is_not() -> None:
    serving = Serving()
    serving.ask()
    serving.end(is_typical=False)
    while serving.running:
        serving.end()
    assert whole(serving.rule()) == (1, 0, False)


def test_one_that_some_left_early_is_not_typical() -> None:
    serving = Serving()
    serving.rule().wait_ns = 10
    first = serving.ask()
    serving.ask()
    serving.tell(FLUSH)
    serving.end(left=[first])
    while serving.running:
        serving.end()
    assert whole(serving.rule()) == (1, 0, False)


def test_a_timer_is_set_only_for_what_could_start_then() -> None:
    serving = Serving(devices=2)
    serving.rule("b").wait_ns = 100
    serving.ask("b")
    assert serving.policy.next_deadline_ns() == 100
    serving.ask("a")
    assert serving.policy.next_deadline_ns() is None  # the first stage is busy
    serving.now_ns = 200
    serving.tell(TIMER)
    assert serving.policy.next_deadline_ns() is None
    serving.end()
    assert serving.policy.next_deadline_ns() == 310


def test_flushing_waits_for_nobody() -> None:
    serving = Serving()
    serving.rule().wait_ns = 100
    serving.ask()
    assert not serving.running
    serving.tell(FLUSH)
    assert serving.shown() == [(0, [1])]


def test_who_is_cancelled_is_taken_out_wherever_he_is() -> None:
    serving = Serving()
    running, queued = serving.ask(), serving.ask()
    serving.tell(Cancelled(queued))
    serving.tell(Cancelled(running))
    serving.end()
    assert not serving.running
    assert serving.policy.pipeline.active == 0
    serving.tell(Cancelled(running))


def test_no_more_are_on_their_way_than_allowed() -> None:
    serving = Serving(devices=2, max_active=2)
    for _ in range(5):
        serving.ask()
        assert serving.policy.pipeline.active <= 2
    while serving.running:
        serving.end()
        assert serving.policy.pipeline.active <= 2
    assert not serving.rule().queue


# --- loops ----------------------------------------------------------------------------------------


def test_a_loop_gives_way_to_keys_of_which_nothing_is_on_its_way() -> None:
    serving = Serving(stages=2, has_loop=True)
    serving.ask("a")
    serving.end()
    assert serving.shown() == [(1, [1])]
    serving.ask("b")
    serving.ask("a")
    seen = []
    for _ in range(4):
        serving.end()
        seen += serving.shown()
    assert seen == [(0, [2]), (1, [1]), (1, [2]), (1, [1])]


def test_a_loop_is_not_joined_while_others_cannot_begin() -> None:
    serving = Serving(stages=2, pairs=1, has_loop=True)
    serving.rule("a").joins = 4
    first = serving.ask("a")
    serving.end()
    serving.ask("b")
    serving.ask("a")
    for _ in range(3):
        serving.end()
        assert serving.shown() == [(1, [1])]
    serving.end(left=[first])
    assert serving.shown() == [(0, [2])]


def test_a_loop_says_nothing_about_how_long_batches_take() -> None:
    serving = Serving(stages=1, has_loop=True)
    first = serving.ask()
    serving.end(left=[first])
    assert whole(serving.rule()) == (1, 0, False)


def test_deadlines_decide_between_keys() -> None:
    serving = Serving()
    serving.ask("busy")
    serving.ask("late", deadline_ns=NEVER_NS)
    serving.ask("soon", deadline_ns=1_000)
    for _ in range(3):
        serving.end()
    assert serving.shown() == [(0, [3])]
