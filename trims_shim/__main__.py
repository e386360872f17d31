"""``python -m trims_shim`` is ``trims``."""

import sys

from trims_shim.cli.main import main

sys.exit(main())
