"""A planned cluster in virtual time: what a placement, or planning again and again, is worth.

Each device runs one variant and batches requests by a policy of its own. A request goes to one of
its family's devices at random, by the planned shares. With ``replan``, the demand is estimated, and
every ``period_s`` devices change their variants: what waits there moves to other devices, a running
batch ends, then the new variant loads.

Everything is a :class:`~trims_shim.batching.protocol.Policy` in the simulator's loop. A request's
key is its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Action,
    Drop,
    DropReason,
    Event,
    Finished,
    Request,
    Run,
)
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.simulator import Cluster, Node, Outcome, Report, simulate
from trims_shim.batching.single import Batching
from trims_shim.checks import check_amount
from trims_shim.errors import PlanningError
from trims_shim.planner.placement import Placement, assign
from trims_shim.planner.problem import Option
from trims_shim.planner.replanning import Replanner

if TYPE_CHECKING:
    from random import Random

__all__ = ["Replanning", "Serving", "serve"]

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Replanning:
    """When and how to plan again."""

    plan: Callable[[Mapping[str, float], Placement], Placement]
    """For an estimated demand, and the placement that is running. If it raises PlanningError, that
    one stays."""
    period_s: float = 10.0
    burst: float = 1.1
    """Plan at once when a second has this many times the requests that were planned for, and more
    than chance would have (three standard deviations of a Poisson process)."""

    def __post_init__(self) -> None:
        check_amount("period_s", self.period_s, positive=True)
        check_amount("burst", self.burst, may_be_infinite=True)


class Serving(Cluster):
    """The devices of a placement; ``kinds`` names the kind of each.

    ``load_ns`` returns how long a device takes to load a variant. At the start all are loaded.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        placement: Placement,
        *,
        make_rule: RuleMaker,
        random: Random,
        load_ns: Callable[[Option], int] = lambda option: 0,
        replanning: Replanning | None = None,
    ) -> None:
        self.kinds = tuple(kinds)
        self.placement = placement
        self.loads = 0
        """How often a device has changed its variant."""
        self._replanning = replanning
        self._replanner: Replanner | None = None
        if replanning is not None:
            self._replanner = Replanner(
                placement, period_s=replanning.period_s, burst=replanning.burst
            )
        self._load_ns = load_ns
        self._random = random
        self._devices = [_Device(make_rule) for _ in kinds]
        super().__init__([Node(device, keys=()) for device in self._devices], self._routed)
        self._place(0, placement, load_ns=lambda option: 0)
        self.loads = 0

    @property
    def plans(self) -> int:
        """How often it was planned again."""
        return 0 if self._replanner is None else self._replanner.plans

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """As :class:`~trims_shim.batching.protocol.Policy` has it."""
        replanner = self._replanner
        if isinstance(event, Request):
            if replanner is not None:
                assert isinstance(event.key, str)
                replanner.came(now_ns, event.key)
            actions = self._give(now_ns, event)
        else:
            actions = super().on_event(now_ns, event)
        if replanner is not None and event is not FLUSH and replanner.is_due(now_ns):
            actions = [*actions, *self._plan(now_ns, replanner)]
        return actions

    def next_deadline_ns(self) -> int | None:
        """The next time at which a device, or planning, wants to be asked."""
        wake_ns = super().next_deadline_ns()
        plan_ns = None if self._replanner is None else self._replanner.next_plan_ns()
        if wake_ns is None or plan_ns is None:
            return plan_ns if wake_ns is None else wake_ns
        return min(wake_ns, plan_ns)

    def option_of(self, device: int) -> Option:
        """What runs, or last ran, on a device."""
        option = self._devices[device].running or self._devices[device].option
        assert option is not None
        return option

    # --- planning ---------------------------------------------------------------------------------

    def _plan(self, now_ns: int, replanner: Replanner) -> Sequence[Action]:
        assert self._replanning is not None
        try:
            placement = self._replanning.plan(replanner.wanted_qps(now_ns), replanner.placement)
        except PlanningError:
            placement = replanner.placement  # the one that there is stays, as in a cluster
        replanner.planned(now_ns, placement)
        return self._place(now_ns, placement, load_ns=self._load_ns)

    def _place(
        self, now_ns: int, placement: Placement, *, load_ns: Callable[[Option], int]
    ) -> Sequence[Action]:
        self.placement = placement
        shares = {group.option: group.device_qps for group in placement.groups}
        before = [device.option for device in self._devices]
        homeless: list[Request] = []
        changed: list[int] = []
        for index, option in enumerate(assign(placement, self.kinds, before)):
            node, device = self.nodes[index], self._devices[index]
            node.keys = () if option is None else (option.family,)
            node.weight = 0.0 if option is None else shares[option]
            if option is None or option == device.option:
                continue
            moved = device.switch(now_ns, option, load_ns(option))
            node.open -= len(moved)
            node.cost_ns = _NS_PER_S / option.peak_qps
            homeless += moved
            changed.append(index)
        self.loads += len(changed)
        self.find_hosts()
        actions = [action for index in changed for action in self._ask(index, now_ns, TIMER)]
        for request in sorted(homeless, key=lambda each: each.number):
            actions += self._give(now_ns, request)
        return actions

    def _give(self, now_ns: int, request: Request) -> Sequence[Action]:
        """Give a request to a device; drop it if none has a variant of its family."""
        if request.key not in self.hosted:
            return (Drop([request], DropReason.HOPELESS),)
        return super().on_event(now_ns, request)

    def _routed(self, request: Request, nodes: Sequence[Node]) -> int:
        """Route by the planned shares, to devices that have loaded if there are any."""
        weights = [
            node.weight if isinstance(node.policy, _Device) and node.policy.is_ready else 0.0
            for node in nodes
        ]
        if not any(weights):
            weights = [node.weight or 1.0 for node in nodes]
        return self._random.choices(range(len(nodes)), weights)[0]


class _Device:
    """The policy of one device: that of its variant, once that has loaded."""

    def __init__(self, make_rule: RuleMaker) -> None:
        self.option: Option | None = None
        self.running: Option | None = None
        """The option of the batch that runs."""
        self.is_ready = False
        self._make_rule = make_rule
        self._policy: Batching | None = None
        self._arrived: list[Request] = []
        """Before it was ready."""
        self._load_ns = 0
        self._ready_ns: int | None = None
        """When it will be; None while a batch of the variant before runs."""

    def switch(self, now_ns: int, option: Option, load_ns: int) -> list[Request]:
        """Load another variant; return what waited for the one before."""
        waiting = [*self._arrived]
        if self._policy is not None:
            waiting += [each for rule in self._policy.rules.values() for each in rule.queue]
        profile = option.profile
        self._policy = Batching(
            lambda key: self._make_rule(profile, max_batch_size=profile.max_batch_size)
        )
        self.option = option
        self._arrived = []
        self._load_ns = load_ns
        self.is_ready = not load_ns and self.running is None
        self._ready_ns = None if self.running is not None else now_ns + load_ns
        return waiting

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """As :class:`~trims_shim.batching.protocol.Policy` has it."""
        if isinstance(event, Finished):
            self.running = None
        if self._policy is None:
            return ()
        if self.is_ready:
            return self._told(self._policy.on_event(now_ns, event))
        if isinstance(event, Request):
            self._arrived.append(event)
        if self.running is None and self._ready_ns is None:
            self._ready_ns = now_ns + self._load_ns
        if self._ready_ns is None or now_ns < self._ready_ns:
            return ()
        self.is_ready = True
        actions: list[Action] = []
        for request in self._arrived:
            actions += self._told(self._policy.on_event(now_ns, request))
        self._arrived = []
        return actions

    def next_deadline_ns(self) -> int | None:
        """When it has loaded, or when its variant's policy wants to be asked."""
        if self._policy is None:
            return None
        return self._policy.next_deadline_ns() if self.is_ready else self._ready_ns

    def _told(self, actions: Sequence[Action]) -> Sequence[Action]:
        if any(isinstance(action, Run) for action in actions):
            self.running = self.option
        return actions


def serve(serving: Serving, requests: Sequence[Request]) -> tuple[Outcome, Report]:
    """Simulate ``requests``, sorted by arrival; the report has the accuracy of answers in time."""
    accuracies: dict[int, float] = {}
    """By the number of a batch's first request."""

    def service_ns(device: int, batch: Sequence[Request]) -> int:
        option = serving.option_of(device)
        accuracies[batch[0].number] = option.accuracy
        return option.profile.taken_ns(len(batch))

    outcome = simulate(serving, requests, service_ns=service_ns)
    return outcome, Report.of(
        outcome,
        devices=len(serving.kinds),
        accuracy_of=lambda each: accuracies[each.batch[0].number],
    )
