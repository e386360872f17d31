"""What a simulation is judged by: one row of figures, in which no request is missing.

A violation is a request that was not answered by its deadline, for whatever reason: answered late,
dropped, or never answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trims_shim.batching.simulator.loop import Execution, Outcome

__all__ = ["Report", "percentile"]

_NS_PER_MS = 1e6
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Report:
    """``requests`` is the sum of ``on_time``, ``late``, ``dropped`` and ``unanswered``."""

    requests: int
    on_time: int
    late: int
    dropped: int
    unanswered: int
    duration_s: float
    """From the first arrival to the last event."""
    mean_batch: float
    """Items in an answered batch; 0 where there was none."""
    busy_share: float
    """Share of the devices' time in which batches ran."""
    wasted_share: float
    """Share of the devices' time spent on batches that were given up at an exit point."""
    preemptions: int
    p50_ms: float
    """Of the latencies of all answers, also late ones; 0 if there were none."""
    p99_ms: float
    accuracy: float | None = None
    """Mean over the answers in time; None if there were none, or without ``accuracy_of``."""

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        *,
        devices: int = 1,
        accuracy_of: Callable[[Execution], float] | None = None,
    ) -> Report:
        """The report of a finished simulation; ``accuracy_of`` returns that of a batch's answers.

        Raises ValueError if a request is not accounted for.
        """
        latencies, on_time, score = _answers(outcome, accuracy_of)
        answered = len(latencies)
        dropped, unanswered = len(outcome.dropped), len(outcome.unanswered)
        if answered + dropped + unanswered != outcome.requests:
            raise ValueError(
                f"of {outcome.requests} requests {answered} were answered, {dropped} dropped and "
                f"{unanswered} not answered: this is not all of them"
            )
        duration_ns = outcome.end_ns - outcome.start_ns
        given_up = [each for each in outcome.executions if each.is_preempted]
        wasted_ns = sum(each.ended_ns - each.started_ns for each in given_up)
        batches = len(outcome.executions) - len(given_up)
        return cls(
            requests=outcome.requests,
            on_time=on_time,
            late=answered - on_time,
            dropped=dropped,
            unanswered=unanswered,
            duration_s=duration_ns / _NS_PER_S,
            mean_batch=answered / batches if batches else 0.0,
            busy_share=_ratio(outcome.busy_ns, devices * duration_ns),
            wasted_share=_ratio(wasted_ns, devices * duration_ns),
            preemptions=len(given_up),
            p50_ms=percentile(latencies, 0.50) / _NS_PER_MS,
            p99_ms=percentile(latencies, 0.99) / _NS_PER_MS,
            accuracy=score / on_time if accuracy_of is not None and on_time else None,
        )

    @property
    def violations(self) -> int:
        """Late, dropped and unanswered."""
        return self.late + self.dropped + self.unanswered

    @property
    def violation_ratio(self) -> float:
        """The share of violations in all requests."""
        return _ratio(self.violations, self.requests)

    @property
    def goodput_qps(self) -> float:
        """Answers in time for each second."""
        return _ratio(self.on_time, self.duration_s)


def percentile(ascending: Sequence[float], share: float) -> float:
    """Of sorted values, by nearest rank; 0 for none."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def _answers(
    outcome: Outcome, accuracy_of: Callable[[Execution], float] | None
) -> tuple[list[int], int, float]:
    """(ascending latencies in ns, how many were in time, the sum of their accuracies)."""
    latencies: list[int] = []
    on_time = 0
    score = 0.0
    for each in outcome.executions:
        if each.is_preempted:
            continue
        end_ns, timely = each.ended_ns, 0
        for request in each.batch:
            latencies.append(end_ns - request.arrival_ns)
            if end_ns <= request.deadline_ns:
                timely += 1
        on_time += timely
        if accuracy_of is not None:
            score += timely * accuracy_of(each)
    latencies.sort()
    return latencies, on_time, score


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
