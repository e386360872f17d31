"""Programs that nobody wrote: see :mod:`.random_programs`.

A few are part of the table. Others by hand, each seed a program:
``RANDOM_PROGRAMS=1000:1200 python -m tests.transparency.run 'random.*' --compare``.
"""

from __future__ import annotations

import os

from .random_programs import Program
from .registry import Work, cases

_FIRST, _, _END = os.environ.get("RANDOM_PROGRAMS", "0:4").partition(":")


@cases({str(seed): seed for seed in range(int(_FIRST), int(_END))})
def program(work: Work, seed: int) -> object:
    return Program(seed, work).run()
