"""One case, or some, by hand.

python -m tests.transparency.run --list
python -m tests.transparency.run load_args.plain             what is observed without the shim
python -m tests.transparency.run load_args.plain --shim      the same with it
python -m tests.transparency.run 'load_args.*' --compare     differences only, both passes
python -m tests.transparency.run 'load_args.*' --rerun       original against original: a case that
                                                             differs from itself proves nothing
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import sys
from typing import Any

from . import compare, runs, shim
from .registry import Case, load_topics

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the number of cases that failed or differ, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", default=["*"], help="case names, * matches")
    parser.add_argument("--slow", action="store_true", help="print the slowest cases")
    parser.add_argument("--list", action="store_true", help="print the table and leave")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--shim", action="store_true", help="show what is observed with the shim")
    mode.add_argument("--compare", action="store_true", help="compare without and with")
    mode.add_argument("--rerun", action="store_true", help="compare without and without")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(shim.ROOT / "tests"))
    table = load_topics()
    selected = [case for case in table.values() if _matches(case, options.patterns)]
    if options.list:
        for case in selected:
            print(f"{case.name:60} served={case.served} elided={case.elided}")
        print(f"{len(selected)} cases")
        return 0
    with contextlib.ExitStack() as stack:
        sockets = None
        if options.shim or options.compare:
            sockets = stack.enter_context(shim.SocketDirectory())
        if options.shim or not (options.compare or options.rerun):
            return _show(runs.run(selected, sockets, runs.PASSES))
        original, other = runs.run_both(selected, sockets)
        if other is None:
            other = runs.run(selected, None, runs.PASSES)
    if options.slow:
        _show_slowest(original)
    return _show_differences(selected, original, other, options.compare)


def _matches(case: Case, patterns: list[str]) -> bool:
    # A parameter's brackets are no character class.
    escaped = [pattern.replace("[", "[[]") for pattern in patterns]
    return any(fnmatch.fnmatchcase(case.name, pattern) for pattern in escaped)


def _show(results: runs.Results) -> int:
    print(json.dumps(results, indent=1))
    return int(any("failed" in seen for case in results.values() for seen in case.values()))


def _show_slowest(results: runs.Results) -> None:
    taken = {
        f"{name} ({label})": seen.get("seconds", 0.0)
        for name, observations in results.items()
        for label, seen in observations.items()
    }
    for name in sorted(taken, key=lambda name: -taken[name])[:25]:
        print(f"{taken[name]:8.2f} s  {name}")


def _show_differences(
    selected: list[Case], original: runs.Results, other: runs.Results, with_counters: bool
) -> int:
    bad = 0
    for case in selected:
        for label in runs.PASSES:
            lines = _problems(case, original[case.name]["first"], other[case.name][label])
            if with_counters:
                seen = other[case.name][label].get("counters", {})
                served = case.served_in(label)
                lines += compare.expectation_errors(seen, served, case.elided, case.reason)
            for line in lines:
                print(f"{case.name} ({label}): {line}")
            bad += bool(lines)
    print(f"{len(selected)} cases, {bad} passes differ")
    return int(bad > 0)


def _problems(case: Case, expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    failed = dict.fromkeys(seen["failed"] for seen in (expected, actual) if "failed" in seen)
    if failed:
        return list(failed)
    found = compare.differences(expected, actual)
    allowed = compare.DIFFERENCES.get(case.name, {})
    return compare.readable({path: text for path, text in found.items() if path not in allowed})


if __name__ == "__main__":
    sys.exit(main())
