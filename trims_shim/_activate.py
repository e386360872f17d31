"""The work of ``import trims_shim``: read the settings, and patch. Never raises; a light import.

All three ways in end here: the import, ``trims run`` (through the bootstrap's sitecustomize) and
``trims autostart``.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trims_shim.config import Config

__all__ = ["activate", "config_problem"]

_HANDLER = "trims_shim"
"""Names the handler of the log, by which it is found again."""
config_problem = ""
"""The unusable setting that keeps the shim inactive in this process; empty if none."""


def activate() -> None:
    """Patch the configured libraries; on an unusable setting, patch nothing and log a warning."""
    try:
        _activate()
    # Border: a tool that changes code at its import (beartype.claw) may break ours, but no program.
    except Exception as error:
        from trims_shim import diagnostics

        diagnostics.pass_on(error)
        _stay_inactive(f"{type(error).__name__}: {error}")


def _activate() -> None:
    global config_problem
    from trims_shim import config as configuration
    from trims_shim.errors import ConfigError

    try:
        settings = configuration.current()
    except ConfigError as error:
        config_problem = str(error)
        _stay_inactive(config_problem)
        return
    _set_up_logging(settings)
    if not (settings.enabled and settings.patches):
        return
    if configuration.platform_problem:
        _stay_inactive(configuration.platform_problem)
    else:
        from trims_shim import patches

        patches.enable(settings.patches, elide_copies=settings.elide_copies)


def _stay_inactive(reason: str) -> None:
    import logging

    logging.getLogger("trims_shim").warning("trims_shim stays inactive: %s", reason)


def _set_up_logging(settings: Config) -> None:
    """Set up the requested logging; without a request, the program's own set-up decides."""
    if settings.source("log") == "default" and not settings.log_file:
        return
    import contextlib
    import logging
    import os

    from trims_shim.diagnostics import LogFile, is_unseen

    logger = logging.getLogger("trims_shim")
    logger.setLevel(settings.log.upper())
    handler: logging.Handler = logging.StreamHandler()
    handler.addFilter(is_unseen)
    if settings.log_file:
        # Fails for a relative path in a deleted working directory: stderr then takes the log.
        with contextlib.suppress(OSError):
            handler = LogFile(os.path.expanduser(settings.log_file))
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    handler.name = _HANDLER
    # Of an import before a reload: it would write each line once more.
    for earlier in [each for each in logger.handlers if each.name == _HANDLER]:
        logger.removeHandler(earlier)
        earlier.close()
    logger.addHandler(handler)
