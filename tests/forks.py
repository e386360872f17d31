"""What holds in a forked child.

Imports nothing of the package.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

__all__ = ["passes_in_child"]

_LIMIT_S = 60


def passes_in_child(check: Callable[[], object]) -> bool:
    """Whether ``check``, in a forked child, neither raises nor returns False nor takes too long.

    The child ends without any clean-up.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(_LIMIT_S)
            status = 2 if check() is False else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
