"""Counts and reports what does not end on shared device memory, for every library.

Imports none of the patched libraries.
"""

from __future__ import annotations

import logging

from trims_shim import diagnostics
from trims_shim.client.cache import cache

__all__ = ["Skips"]


class Skips:
    """The skips of one library; ``expected`` reasons are no fault, like EXPECTED_REASONS."""

    def __init__(self, *expected: str) -> None:
        self._expected = diagnostics.EXPECTED_REASONS | set(expected)
        self.warned: set[str] = set()

    def __call__(self, reason: str, *, what: str) -> None:
        """Count a skip that is no fault."""
        diagnostics.count("not_on_device", reason)
        diagnostics.log(logging.DEBUG, "%s: not on shared device memory (%s)", what, reason)

    def error(self, error: Exception, *, what: str) -> None:
        """Count a skip; warn once per reason if it is a fault.

        Raises ``error`` if it is a fault and TRIMS_STRICT is set. Passes on an exception of a
        signal handler in any case.
        """
        diagnostics.pass_on(error)
        reason = diagnostics.reason_of(error)
        self(reason, what=what)
        if reason in self._expected:
            return
        if cache().config.strict:
            raise error
        if reason not in self.warned:
            self.warned.add(reason)
            diagnostics.log(
                logging.WARNING,
                "%s: not shared on the device (%s): %s. Run `trims info` for details.",
                what,
                reason,
                error,
            )
