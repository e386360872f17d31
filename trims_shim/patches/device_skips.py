"""What does not end on shared device memory, whichever library it is for: counted, told once.

Imports none of the patched libraries.
"""

from __future__ import annotations

import logging

from trims_shim import diagnostics
from trims_shim.client.cache import cache

__all__ = ["Skips"]


class Skips:
    """Of one library; ``expected`` are reasons that are no fault, beside those of every load."""

    def __init__(self, *expected: str) -> None:
        self._expected = diagnostics.EXPECTED_REASONS | set(expected)
        self.warned: set[str] = set()

    def __call__(self, reason: str, *, what: str) -> None:
        """Count it; it is no fault."""
        diagnostics.count("not_on_device", reason)
        diagnostics.log(logging.DEBUG, "%s: not on shared device memory (%s)", what, reason)

    def error(self, error: Exception, *, what: str) -> None:
        """Count it; warn once if it is a fault. Raises ``error`` under TRIMS_STRICT then.

        Raises what a signal handler raised in any case.
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
