"""Models that cannot be prepared: for how long, and what is said about them.

The negative cache of :mod:`trims_shim.daemon.prepared.store`, its only user. Pure, without a clock.
A model is refused for good if the reason is lasting, else for a time that grows with every attempt.
A preparer that dies of one model twice is a lasting reason.

The place of a refusal is the model's key if its content is known, and the reason does not lie with
the client's installation or file; else what the client offered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from trims_shim.daemon.prepared.values import Action, DropRefusal, Failure, KeepRefusal
from trims_shim.daemon.recent import Recent
from trims_shim.wire.admin import PreparedStatus

__all__ = ["Refusals"]

_FIRST_PAUSE_NS = 60 * 10**9
_PAUSE_GROWTH = 4
_LONGEST_PAUSE_NS = 3600 * 10**9
_DEATH = "preparer_died"
_DEATHS_ALLOWED = 1
_REFUSALS_LIMIT = 4096


@dataclass(slots=True)
class _Refusal:
    key: str
    failure: Failure
    runtime: str
    names: tuple[str, ...]
    refused_ns: int
    until_ns: int
    attempts: int = 1
    deaths: int = 0

    def holds(self, now_ns: int) -> bool:
        # Not before it was refused: if the clock was set back, the pause might never end.
        return self.failure.is_lasting or self.refused_ns <= now_ns < self.until_ns


class Refusals:
    """See the module docstring."""

    def __init__(self) -> None:
        self._refusals: Recent[Hashable, _Refusal] = Recent(_REFUSALS_LIMIT)

    # --- in and out -------------------------------------------------------------------------------

    def add(
        self,
        place: Hashable,
        failure: Failure,
        now_ns: int,
        *,
        key: str,
        name: str,
        runtime: str,
    ) -> list[Action]:
        """The model at a place could not be prepared; ``key`` is empty if unknown."""
        before = self._refusals.get(place)
        attempts = 1 if before is None else before.attempts + 1
        deaths = (0 if before is None else before.deaths) + (failure.reason == _DEATH)
        if deaths > _DEATHS_ALLOWED:
            failure = Failure(failure.reason, failure.message, is_lasting=True)
        pause = min(_LONGEST_PAUSE_NS, _FIRST_PAUSE_NS * _PAUSE_GROWTH ** (attempts - 1))
        names = (name,) if name else ()
        gone = self._refusals.put(
            place,
            _Refusal(key, failure, runtime, names, now_ns, now_ns + pause, attempts, deaths),
        )
        # A key's refusal may be a file, which nobody would delete before the next start.
        actions: list[Action] = [DropRefusal(gone)] if isinstance(gone, str) else []
        if failure.is_lasting and key:
            actions.append(KeepRefusal(key, failure.reason, failure.message, runtime, names))
        return actions

    def remember(self, refusal: KeepRefusal, refused_ns: int) -> None:
        """An earlier daemon could not prepare a model."""
        failure = Failure(refusal.reason, refusal.message, is_lasting=True)
        self._refusals.put(
            refusal.key,
            _Refusal(refusal.key, failure, refusal.runtime, refusal.names, refused_ns, until_ns=0),
        )

    def forget(self, *places: Hashable) -> None:
        """Forget models that have been prepared."""
        for place in places:
            self._refusals.pop(place, None)

    def drop(self, places: Iterable[Hashable]) -> list[Action]:
        """Drop refusals, to try these models again."""
        dropped = [self._refusals.pop(place) for place in places]
        return [DropRefusal(each.key) for each in dropped if each.failure.is_lasting and each.key]

    # --- questions --------------------------------------------------------------------------------

    def find(self, *places: Hashable, now_ns: int) -> Failure | None:
        """Why the model at one of these places is refused at this moment."""
        for place in places:
            refusal = self._refusals.get(place)
            if refusal is not None and refusal.holds(now_ns):
                return refusal.failure
        return None

    def places(self) -> list[Hashable]:
        """The places of all refusals."""
        return list(self._refusals)

    def named(self, name: str) -> list[Hashable]:
        """The places of the models that were asked for by this name."""
        return [place for place, each in self._refusals.items() if name in each.names]

    def keyed(self, keys: Iterable[str]) -> list[Hashable]:
        """The places of the models with one of these keys."""
        wanted = set(keys)
        return [place for place, each in self._refusals.items() if each.key in wanted]

    def keys(self) -> set[str]:
        """The keys of all refusals; an empty one among them if one is not known."""
        return {each.key for each in self._refusals.values()}

    def rows(self, now_ns: int) -> list[PreparedStatus]:
        """Refusals that hold, the newest first."""
        return [_row(each) for each in reversed(self._refusals.values()) if each.holds(now_ns)]


def _row(refusal: _Refusal) -> PreparedStatus:
    return PreparedStatus(
        key=refusal.key,
        state="refused",
        size_bytes=0,
        leases=0,
        hits=0,
        used_ns=refusal.refused_ns,
        prepare_ns=0,
        names=refusal.names,
        runtime=refusal.runtime,
        reason=refusal.failure.reason,
    )
