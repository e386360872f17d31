"""The simulated comparison: rows from cells, and the rule by which a policy counts as better.

Simulates nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from benchmarks.batching_trace_cells import Result
from benchmarks.proteus_artefact import ArtefactRun

__all__ = [
    "ARTEFACT_NAMES",
    "DEFAULT",
    "POLICY_NAMES",
    "Findings",
    "Row",
    "Target",
    "is_best",
    "ordered",
]

DEFAULT = "auto"
_NOISE = 2.0
"""Standard deviations of a difference of two counts, each taken to vary as its square root."""
_POISSON = "zipf_exponential"
ARTEFACT_NAMES = {"accscale": "Proteus", "nexus": "Nexus", "aimd": "AIMD"}
"""The artefact's batching algorithms: Proteus' own, its versions of Nexus' and Clipper's."""
POLICY_NAMES = {
    "auto": "trims (auto)",
    "proteus": "Proteus",
    "proteus_head": "Proteus, drops heads",
    "early_drop": "Nexus early drop",
    "clockwork": "Clockwork",
    "cork": "BentoML Cork",
    "aimd": "Clipper AIMD",
    "immediate": "immediate",
    "window": "10 ms window",
}
"""In the order of the tables; other policies go last."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one load: means over the seeds."""

    subject: str
    load: float
    routing: str
    policy: str
    results: tuple[Result, ...]

    @property
    def ratio(self) -> float:
        """Share of violations."""
        return fmean(each.report.violation_ratio for each in self.results)

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest share of violations of a seed."""
        ratios = [each.report.violation_ratio for each in self.results]
        return min(ratios), max(ratios)

    @property
    def violations(self) -> int:
        """Summed over the seeds."""
        return sum(each.report.violations for each in self.results)

    @property
    def requests(self) -> int:
        """Summed over the seeds."""
        return sum(each.report.requests for each in self.results)

    def mean(self, name: str) -> float:
        """Mean of a figure of the report."""
        values = [getattr(each.report, name) for each in self.results]
        return fmean(each for each in values if each is not None)

    def share(self, name: str) -> float:
        """A count of the report as a share of all requests."""
        return fmean(getattr(each.report, name) / each.report.requests for each in self.results)


@dataclass(frozen=True, slots=True)
class Target:
    """A promise, and the figure that was found."""

    name: str
    wanted: str
    figure: str
    is_met: bool


class Findings:
    """All rows, and which policy is best where."""

    def __init__(self, results: Iterable[Result], artefact: Sequence[ArtefactRun]) -> None:
        grouped: dict[tuple[str, float, str, str], list[Result]] = {}
        for each in results:
            cell = each.cell
            key = (cell.subject, cell.load, cell.routing, cell.policy)
            grouped.setdefault(key, []).append(each)
        self.rows = [Row(*key, tuple(found)) for key, found in grouped.items()]
        self.artefact = list(artefact)

    def contests(self) -> list[list[Row]]:
        """Groups of rows that differ only in the policy."""
        found: dict[tuple[str, float, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.subject, row.load, row.routing), []).append(row)
        return list(found.values())

    @property
    def traces(self) -> list[str]:
        """Names of the traces, in the order of the plan."""
        return list(dict.fromkeys(row.subject for row in self.rows if row.routing))

    def on(self, subject: str, *, routing: str = "", load: float = 0.0) -> list[Row]:
        """The rows of one contest; none if it was not simulated."""
        place = (subject, routing, load)
        return [row for row in self.rows if (row.subject, row.routing, row.load) == place]

    def targets(self) -> list[Target]:
        """Judge the targets from the rows; leave out those that cannot be judged."""
        return [*self._best_everywhere(), *self._fewer_than_artefact()]

    def _best_everywhere(self) -> Iterable[Target]:
        contests = [rows for rows in self.contests() if any(r.policy == DEFAULT for r in rows)]
        if not contests:
            return
        lost = [rows for rows in contests if not is_best(rows, DEFAULT)]
        places = ", ".join(_place(rows[0]) for rows in lost)
        yield Target(
            "the default is best or within noise of best",
            f"in all {len(contests)} cells",
            f"in {len(contests) - len(lost)}" + (f"; not in {places}" if lost else ""),
            not lost,
        )

    def _fewer_than_artefact(self) -> Iterable[Target]:
        """On its Poisson trace; Proteus' paper has 3.8 to 4 x over AIMD, 2 to 3 x over Nexus."""
        for batching, factor in (("accscale", 25.0), ("aimd", 3.8), ("nexus", 2.0)):
            found = self.factor(_POISSON, batching)
            if found is not None:
                yield Target(
                    f"fewer violations than the artefact's {ARTEFACT_NAMES[batching]}, lateness "
                    f"corrected, on {_POISSON}",
                    f"at least {factor:g} x",
                    f"{found:.1f} x",
                    found >= factor,
                )

    def factor(self, trace: str, batching: str) -> float | None:
        """The artefact's violations as a multiple of the default's; None if unknown."""
        theirs = [run for run in self.artefact if (run.trace, run.batching) == (trace, batching)]
        ours = [row for row in self.on(trace, routing="random") if row.policy == DEFAULT]
        if not theirs or not ours or not ours[0].violations:
            return None
        is_whole = all(each.report.requests == theirs[0].requests for each in ours[0].results)
        return theirs[0].ratio / ours[0].ratio if is_whole else None


def is_best(rows: Sequence[Row], policy: str) -> bool:
    """Whether no other row has fewer violations by more than noise."""
    ours = next(row for row in rows if row.policy == policy)
    return all(
        ours.violations - row.violations <= _NOISE * sqrt(ours.violations + row.violations)
        for row in rows
    )


def _place(row: Row) -> str:
    return f"{row.subject} {row.routing}" if row.routing else f"{row.subject} {row.load:g}"


def ordered(policies: Iterable[str]) -> list[str]:
    """Rows in the order of the tables."""
    places = list(POLICY_NAMES)
    return sorted(policies, key=lambda each: places.index(each) if each in places else len(places))
