"""The thread that has the fleet and the router, and does with Ray what they decide.

Whatever happens (a request, an answer, a load, a plan) is an event in one queue. The thread takes
the events in their order and carries out what follows from them; it waits for nothing else. So
nothing here needs a lock but the list of open requests.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trims_shim.batching.protocol import NEVER_NS
from trims_shim.cluster.fleet import Device, Fleet
from trims_shim.cluster.routing import Action, Router, Send, Ticket
from trims_shim.errors import BatcherClosed, ClusterError, RequestDropped, TrimsError
from trims_shim.outcomes import fail, settle
from trims_shim.planner import Option, Placement, Problem
from trims_shim.planner.replanning import Replanner

if TYPE_CHECKING:
    from trims_shim.cluster.actor import Loaded

__all__ = ["Driver"]

_NS_PER_MS = 1e6
_NS_PER_S = 1e9
_PATIENCE_S = 1.0
"""For nodes to say what they hold; those that do not in time are not preferred."""
_LOOK_NS = 1_000_000_000
"""While requests are open: between looks at whether Ray still runs, as it may leave them open."""

_logger = logging.getLogger(__name__)

Event = Callable[[int], None]
"""Called with the time."""


class Driver:
    """``actors``: one for each device of the fleet, which has ``placement``.

    ``start(number)`` makes another one for a device whose actor Ray does not start anew: somebody
    killed it, or it could not be made. It takes the place of that one in ``actors``.

    ``plan(problem, before=placement)`` plans again, for ``problem`` with another demand and the
    devices that there are. ``replanner``: None to plan no more. ``is_up``: whether Ray still runs;
    calls of actors would start another one.
    """

    def __init__(
        self,
        actors: list[Any],
        fleet: Fleet,
        router: Router,
        *,
        start: Callable[[int], Any],
        placement: Placement,
        problem: Problem,
        plan: Callable[..., Placement],
        replanner: Replanner | None,
        is_up: Callable[[], bool],
    ) -> None:
        self.placement = placement
        self.started: Future[None] = Future()
        """Done when every device has loaded for the first time, or one has failed to."""
        self.nodes: dict[int, str] = {}
        """By the number of a device."""
        self.plans = 0
        """How often it was planned again."""
        self._actors = actors
        self._start = start
        self._ended: set[int] = set()
        """The numbers of devices whose actors Ray does not start anew."""
        self._fleet = fleet
        self._router = router
        self._problem = problem
        self._make_plan = plan
        self._replanner = replanner
        self._is_up = is_up
        self._is_planning = False
        self._no_plan = ""
        """Why there was no plan; told once."""
        self._digests: dict[str, frozenset[str]] = {}
        """By variant: the images that it needs, as far as is known."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._events.put(_look)
        self._lock = threading.Lock()
        self._open: set[Ticket] | None = set()
        """None when the thread has ended."""
        self._end_ns: int | None = None
        self._thread = threading.Thread(target=self._run, name="trims-cluster", daemon=True)
        self._thread.start()

    def take(self, ticket: Ticket) -> None:
        """Take a request, whose payload is (item, future). Raises BatcherClosed."""
        with self._lock:
            if self._open is None or self._end_ns is not None:
                raise BatcherClosed("the service was shut down, or has failed: deploy it again")
            self._open.add(ticket)
        self._events.put(partial(self._arrived, ticket))

    def stop(self, timeout_s: float) -> None:
        """Take no more requests, wait for the answers of the open ones, and end the thread.

        After ``timeout_s``, requests without an answer fail with BatcherClosed.
        """
        with self._lock:
            self._end_ns = time.monotonic_ns() + round(timeout_s * _NS_PER_S)
        self._events.put(_look)
        self._thread.join(min(timeout_s + _PATIENCE_S, threading.TIMEOUT_MAX))

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: TrimsError = BatcherClosed("the service was shut down before it could answer")
        try:
            while not self._is_over(time.monotonic_ns()):
                events = self._next_events()
                if not self._is_up():  # as when the program ends
                    error = ClusterError("Ray was shut down before the service: deploy it again")
                    break
                now_ns = time.monotonic_ns()
                for event in events:
                    event(now_ns)
                self._settle(now_ns)
        # Border: a fault here, or of Ray, must not leave callers waiting.
        except Exception as fault:
            _logger.exception("the service has failed; deploy it again")
            error = ClusterError(f"the service has failed ({fault!r}): deploy it again")
            error.__cause__ = fault
        finally:
            self._end(error)

    def _is_over(self, now_ns: int) -> bool:
        if self._end_ns is None:
            return False
        return not self._open or now_ns >= self._end_ns

    def _next_events(self) -> list[Event]:
        """Wait for an event, or for the time at which something is due."""
        wakes = [self._end_ns, self._router.next_deadline_ns(), self._fleet.next_retry_ns()]
        if self._replanner is not None and not self._is_planning:
            wakes.append(self._replanner.next_plan_ns())
        if self._open:
            wakes.append(time.monotonic_ns() + _LOOK_NS)
        known = [wake_ns for wake_ns in wakes if wake_ns is not None]
        timeout_s = None
        if known:
            timeout_s = max(0.0, (min(known) - time.monotonic_ns()) / _NS_PER_S)
        events = []
        try:
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _settle(self, now_ns: int) -> None:
        for device in self._fleet.begin_loads(now_ns):
            if device.number in self._ended and not self._start_anew(device, now_ns):
                continue
            self._ask(
                device, "load", device.load, device.option, then=partial(self._loaded, device)
            )
        self._obey(now_ns, self._router.settle(now_ns))
        if self._fleet.is_settled and not self.started.done():
            self.started.set_result(None)
        if self._replanner is not None and not self._is_planning and self._replanner.is_due(now_ns):
            self._plan(now_ns, self._replanner)

    def _start_anew(self, device: Device, now_ns: int) -> bool:
        """Make another actor for a device; if that fails, it is lost, and it is tried again."""
        try:
            self._actors[device.number] = self._start(device.number)
        # Border: Ray may refuse for a while; the other devices go on.
        except Exception as error:
            text = "no other actor for device %d (%s), it is tried again: %r"
            _logger.warning(text, device.number, device.kind, error)
            self._fleet.lost(device, device.load, now_ns)
            return False
        self._ended.remove(device.number)
        return True

    def _end(self, error: TrimsError) -> None:
        with self._lock:
            left, self._open = self._open or set(), None
        for ticket in left:
            fail(ticket.payload[1], error, "a request")
        if not self.started.done():
            self.started.set_exception(error)

    def _ask(self, device: Device, method: str, *arguments: Any, then: Callable[..., None]) -> None:
        """Call a method of a device's actor; ``then(load, done, now_ns)`` when it is done."""
        load = device.load
        call = getattr(self._actors[device.number], method)
        done: Future[Any] = call.remote(*arguments).future()
        done.add_done_callback(lambda done: self._events.put(partial(then, load, done)))

    # --- requests ---------------------------------------------------------------------------------

    def _arrived(self, ticket: Ticket, now_ns: int) -> None:
        if self._replanner is not None:
            self._replanner.came(now_ns, ticket.family)
        self._obey(now_ns, self._router.arrived(now_ns, ticket))

    def _obey(self, now_ns: int, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(now_ns, action.ticket)
            else:
                fail(self._close(action.ticket), action.error, "a request")

    def _send(self, now_ns: int, ticket: Ticket) -> None:
        is_limited = ticket.deadline_ns != NEVER_NS
        # The time that is left: clocks of nodes differ.
        limit_ms = (ticket.deadline_ns - now_ns) / _NS_PER_MS if is_limited else math.inf
        assert ticket.device is not None
        item = ticket.payload[0]
        then = partial(self._answered, ticket)
        try:
            self._ask(ticket.device, "answer", ticket.load, item, limit_ms, then=then)
        # Border: an item may raise anything when it is pickled.
        except BaseException as error:
            self._router.answered(now_ns, ticket, "failed")
            fail(self._close(ticket), error, "a request")
            self._events.put(_look)  # there is room for another one

    def _answered(self, ticket: Ticket, load: int, done: Future[Any], now_ns: int) -> None:
        device, error = ticket.device, done.exception()
        assert device is not None
        if error is None and (answer := done.result()):
            self._router.answered(now_ns, ticket, "answered")
            settle(self._close(ticket), answer[0])
        elif error is None:
            # If it was not told to change, its process is a new one.
            self._fleet.lost(device, load, now_ns)
            self._router.returned(ticket)
        elif _is_loss(error):
            self._lost(device, load, error, now_ns)
            self._obey(now_ns, self._router.lost(ticket))
        else:
            cause = _cause(error)
            is_dropped = isinstance(cause, RequestDropped)
            self._router.answered(now_ns, ticket, "dropped" if is_dropped else "failed")
            fail(self._close(ticket), cause, "a request")

    def _close(self, ticket: Ticket) -> Future[Any]:
        with self._lock:
            assert self._open is not None
            self._open.discard(ticket)
        future: Future[Any] = ticket.payload[1]
        return future

    # --- variants ---------------------------------------------------------------------------------

    def _loaded(self, device: Device, load: int, done: Future[Loaded], now_ns: int) -> None:
        if load != device.load:
            return  # the device was lost, and loads once more
        error, option = done.exception(), device.option
        assert option is not None
        if error is None:
            found = done.result()
            self.nodes[device.number] = found.node
            if found.digests:
                self._digests[option.variant] = found.digests
            self._fleet.loaded(device, load)
        elif _is_loss(error):
            self._lost(device, load, error, now_ns)
        else:
            cause = _cause(error)
            text = f"{option.name} ({option.family}) could not be loaded: {cause!r}"
            if option not in self._fleet.unloadable:
                _logger.warning("%s; it is tried again, after pauses that grow", text)
            self._fleet.failed(device, load, now_ns)
            if not self.started.done():
                failure = ClusterError(f"{text}; call its loader in a process of its own")
                failure.__cause__ = cause
                self.started.set_exception(failure)

    def _lost(self, device: Device, load: int, error: BaseException, now_ns: int) -> None:
        if device.load == load and _has_ended(error):
            self._ended.add(device.number)
        self._fleet.lost(device, load, now_ns)

    # --- planning again ---------------------------------------------------------------------------

    def _plan(self, now_ns: int, replanner: Replanner) -> None:
        self._is_planning = True
        present = self._fleet.present
        counts = Counter(device.kind for device in present)
        problem = replace(
            self._problem.asked(replanner.wanted_qps(now_ns)),
            devices={kind: counts[kind] for kind in self._problem.devices},
            options=self._fleet.to_plan(self._problem.options, now_ns),
        )
        asked = {device.number: self._actors[device.number].resident.remote() for device in present}
        # In a thread, as the solver may take seconds.
        solving = threading.Thread(
            target=self._solve, args=(replanner, problem, asked), daemon=True
        )
        try:
            solving.start()
        except RuntimeError as error:  # there may be no more threads
            self._tell(error)
            self._planned(replanner, self.placement, {}, now_ns)

    def _solve(self, replanner: Replanner, problem: Problem, asked: Mapping[int, Any]) -> None:
        placement, resident = self.placement, dict[int, frozenset[str]]()
        try:
            resident = _answers(asked)
            placement = self._make_plan(problem, before=placement)
        # Border: the placement that there is stays.
        except Exception as error:
            self._tell(error)
        self._events.put(partial(self._planned, replanner, placement, resident))

    def _tell(self, error: Exception) -> None:
        if self._no_plan != str(error):
            _logger.warning("no new plan, the old one stays: %s", error)
        self._no_plan = str(error)

    def _planned(
        self,
        replanner: Replanner,
        placement: Placement,
        resident: Mapping[int, frozenset[str]],
        now_ns: int,
    ) -> None:
        self._is_planning = False
        replanner.planned(now_ns, placement)

        def is_warm(device: Device, option: Option) -> bool:
            needed = self._digests.get(option.variant, frozenset())
            return bool(needed) and needed <= resident.get(device.number, frozenset())

        if placement is self.placement:
            return
        try:
            self._fleet.place(placement, is_warm)
            self.placement = placement
            self.plans += 1
        except ValueError as error:  # a device was lost meanwhile
            _logger.warning("a plan is not carried out, the next one will be: %s", error)


def _look(now_ns: int) -> None:
    """An event of no meaning, after which everything is looked at."""


def _is_loss(error: BaseException) -> bool:
    """Whether the actor is lost, and not one that its function has asked."""
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    if isinstance(error, RayTaskError):  # and of the class of what the function raised
        return False
    return isinstance(error, RayActorError | ObjectLostError) or _has_ended(error)


def _has_ended(error: BaseException) -> bool:
    """Whether the lost actor is one that Ray does not start anew."""
    from ray.exceptions import ActorDiedError, ActorPlacementGroupRemoved, ActorUnschedulableError

    # The last two, where what actor_options ask for is gone, are of no common class with the first.
    return isinstance(error, ActorDiedError | ActorPlacementGroupRemoved | ActorUnschedulableError)


def _cause(error: BaseException) -> BaseException:
    """What an actor raised, whose cause has the traceback there; else the error of Ray."""
    from ray.exceptions import RayError, RayTaskError

    if not isinstance(error, RayTaskError):
        return error
    cause: BaseException = error.cause
    # Frozen dataclasses, for example, refuse the usual way.
    object.__setattr__(cause, "__cause__", RayError(str(error)))
    return cause


def _answers(asked: Mapping[int, Any]) -> dict[int, frozenset[str]]:
    """The results that come in time, without those of lost actors."""
    import ray
    from ray.exceptions import RayError

    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_PATIENCE_S)
    found = {}
    for number, reference in asked.items():
        try:
            found[number] = ray.get(reference, timeout=0)
        except RayError:
            continue
    return found
