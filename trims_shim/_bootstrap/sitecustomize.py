"""Start-up hook of ``trims run``: imports trims_shim, then the program's own sitecustomize.

First on PYTHONPATH, so that Python finds it instead of another one. Takes its directory out of
``sys.path`` (not out of the environment: child processes need it). Whatever goes wrong with the
shim, the program starts; what the program's own sitecustomize raises is raised as if it had been
found directly. Any Python that the program starts may come here, Python 2 included: hence no
annotations and no f-strings.
"""

import importlib
import os
import sys


def _activate():
    # type: () -> None
    try:
        import trims_shim  # noqa: F401
    # Border: this is the start of somebody else's program.
    except Exception as error:
        # Only for the program that was asked for: its helpers may be other interpreters.
        if os.environ.get("_TRIMS_RUN_PID") == str(os.getpid()):
            words = (sys.executable, type(error).__name__, error)
            sys.stderr.write("trims run: %s runs without the cache: %s: %s" % words)  # noqa: UP031
            sys.stderr.write("; install trims_shim for this interpreter\n")


def _chain():
    # type: () -> None
    ours = os.path.dirname(os.path.abspath(__file__))
    # Not abspath: the working directory may be gone. site has made directories absolute.
    sys.path[:] = [path for path in sys.path if os.path.normpath(path) != ours]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        # As site does. In Python 2, errors have no name, and it lets all of them pass.
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


_activate()
_chain()
