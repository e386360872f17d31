"""``trims`` and ``python -m trims_shim``."""

import sys

from trims_shim.cli.exits import Exit

__all__ = ["main"]


def main() -> int:
    """Run the command of ``sys.argv``; return its exit status. Ctrl-C may come amid the imports."""
    try:
        from trims_shim.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
