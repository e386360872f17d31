"""The promise: with the shim, on the first load and on a warm one, a program observes what it
observes without it: values, types, aliases, errors, warnings, output.

Each case is run once without the shim and twice with it. One case by hand:
``python -m tests.transparency.run NAME --compare``; whether it agrees with itself: ``--rerun``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import compare, runs, shim
from .registry import CASES, Case, load_topics

pytestmark = pytest.mark.slow

load_topics()
ALL = list(CASES.values())
PAIR = tuple[runs.Results, runs.Results | None]


@pytest.fixture(scope="session")
def observations(request: pytest.FixtureRequest) -> Iterator[PAIR]:
    """Observations of the selected cases only, so that ``-k`` runs what it names."""
    names = {
        item.callspec.params["case"].name  # type: ignore[attr-defined]
        for item in request.session.items
        if "observations" in getattr(item, "fixturenames", ())
    }
    selected = [case for case in ALL if case.name in names]
    if not shim.is_available():
        yield runs.run_both(selected, None)
        return
    with shim.SocketDirectory() as sockets:
        yield runs.run_both(selected, sockets)


def _seen(observation: dict[str, Any]) -> dict[str, Any]:
    if "failed" in observation:
        pytest.fail(f"the case itself failed:\n{observation['failed']}", pytrace=False)
    return observation


@pytest.mark.timeout(3600)  # The first test waits for all observations.
@pytest.mark.parametrize("label", runs.PASSES)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_shim_changes_nothing(case: Case, label: str, observations: PAIR) -> None:
    original, shimmed = observations
    if shimmed is None:
        pytest.skip("trims_shim has no __init__.py: nothing to test yet")
    expected, actual = _seen(original[case.name]["first"]), _seen(shimmed[case.name][label])
    found = compare.differences(expected, actual)
    allowed = compare.DIFFERENCES.get(case.name, {})
    stale = {path: reason for path, reason in allowed.items() if path not in found}
    # While a model is being prepared, the session is the original.
    assert not stale or case.served_in(label) is None, f"in DIFFERENCES but equal: {stale}"
    if found := {path: text for path, text in found.items() if path not in allowed}:
        lines = compare.readable(found)
        pytest.fail("\n".join(["differs (without -> with):", *lines]), pytrace=False)
    served = case.served_in(label)
    errors = compare.expectation_errors(actual["counters"], served, case.elided, case.reason)
    assert not errors, errors


def test_table_is_large_enough_to_be_a_proof() -> None:
    assert len(ALL) >= 400
    assert sum(case.served is True for case in ALL) >= 200
    assert sum(case.served is True and case.is_prepared for case in ALL) >= 120
    assert set(compare.DIFFERENCES) <= set(CASES)
