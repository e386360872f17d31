"""What commands measure: objects that the user names, and items to call them with."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.batching.profiles.profiling import sizes_to_measure
from trims_shim.cli.arguments import refuse
from trims_shim.errors import ConfigError, TrimsError
from trims_shim.printable import first_line, printable

__all__ = [
    "import_from_here",
    "items_of",
    "made",
    "measuring",
    "named",
    "on_device",
    "random_tensor",
    "running",
    "sizes_of",
]

_FAULTS = (Exception, SystemExit)
"""What the user's code raises: a script may end the program where it is only to be imported."""


def import_from_here() -> None:
    """Make the current directory importable, as ``python -m`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def sizes_of(arguments: argparse.Namespace, largest: int) -> list[int]:
    """The batch sizes to measure. Raises ConfigError for one that no profile's file may have."""
    sizes = sorted(set(arguments.sizes or sizes_to_measure(largest)))
    if arguments.output and sizes[-1] > LARGEST_SIZE:
        raise ConfigError(
            f"a file has batches of up to {LARGEST_SIZE}, not of {sizes[-1]}; measure smaller ones"
        )
    return sizes


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Around all code of the user: what it prints goes to stderr, and Ctrl-C ends it."""
    with _heeding_ctrl_c(), _printing_apart():
        yield


@contextlib.contextmanager
def _printing_apart() -> Iterator[None]:
    """What measured code prints goes to stderr, also from its processes: stdout is for data."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


@contextlib.contextmanager
def _heeding_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C also where measured code made something else of it.

    An import of torch that is interrupted goes on, or fails as if numpy could not be imported.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return
    pressed = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def named(name: str) -> Any:
    """The object that ``MODULE:NAME`` names.

    Raises ConfigError for another form, TrimsError if there is no such object, or its module does
    not get imported.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"{name!r} names nothing; write MODULE:NAME, such as app:classify")
    try:
        found: Any = importlib.import_module(module_name)
    except _FAULTS as error:
        names = (module_name, module_name.partition(".")[0])
        if isinstance(error, ModuleNotFoundError) and error.name in names:
            raise TrimsError(
                f"there is no module {module_name} in {os.getcwd()} or on the path of "
                f"{sys.executable}"
            ) from None
        raise _fault(f"{module_name} cannot be imported", error) from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TrimsError(f"{module_name} has no {path}") from None
        except _FAULTS as error:  # of a property, or of a module that imports only now
            raise _fault(f"{name} cannot be had", error) from error
    return found


def made(found: Any, name: str, *how: Any) -> Any:
    """Call ``found`` if it is a function. Raises TrimsError unless it takes ``how`` and returns."""
    if not callable(found):
        return found
    try:
        inspect.signature(found).bind(*how)
    except TypeError as error:
        takes = f"is called with {len(how)} arguments here"
        raise TrimsError(f"{name} {takes}, to make what is measured: {error}") from None
    except ValueError:
        pass  # A compiled function does not say what it takes.
    try:
        return found(*how)
    except TrimsError:
        raise
    except _FAULTS as error:
        raise _fault(f"{name} makes nothing", error) from error


def _fault(what: str, error: BaseException) -> TrimsError:
    """An error of the user's code, to be raised from that."""
    said = printable(f"{type(error).__name__}: {first_line(error)}")
    return TrimsError(f"{what}: {said}; TRIMS_LOG=debug shows where")


# --- an item --------------------------------------------------------------------------------------


def items_of(arguments: argparse.Namespace, *, length: int | None = None) -> list[Any]:
    """One item: a value for each argument of the function, from ``--item`` or ``--shape``.

    ``length`` is the argument of a function that makes an item, and replaces a None in a shape.
    """
    if arguments.item:
        refuse(arguments, ("--dtype",), "with --item")
        how = () if length is None else (length,)
        return [made(named(name), name, *how) for name in arguments.item]
    shapes = [[length if each is None else each for each in shape] for shape in arguments.shape]
    return [random_tensor(shape, arguments.dtype, arguments.device) for shape in shapes]


def random_tensor(shape: Sequence[Any], dtype_name: str, device: str) -> Any:
    """A torch tensor, the same each time.

    Raises ConfigError for an unknown data type, TrimsError without torch, the device, or room.
    """
    try:
        import torch
    except ImportError as error:
        raise TrimsError(
            f"--shape makes tensors of torch ({error}): install it, or make items with --item"
        ) from error

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype {dtype_name} is not a data type of torch")
    generator = torch.Generator().manual_seed(0)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(*shape, generator=generator)
        else:
            # Two values that are valid as tokens, labels and flags alike.
            values = torch.randint(0, 2, shape, generator=generator)
        values = values.to(dtype)
    except (TypeError, RuntimeError) as error:  # too large, or no tensors are made of that type
        what = f"--shape {','.join(map(str, shape))} --dtype {dtype_name}"
        raise TrimsError(f"{what}: {first_line(error)}") from None
    with on_device(device):
        return values.to(device)


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Raise TrimsError for errors that torch raises if there is no such device."""
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as error:
        raise TrimsError(f"--device {device}: {error}") from None


@contextlib.contextmanager
def running(name: str, arguments: argparse.Namespace, size: int) -> Iterator[None]:
    """Raise TrimsError, which names the batch and the options of its items, for what it raises."""
    try:
        yield
    except TrimsError:
        raise
    except _FAULTS as error:
        if arguments.item:
            given = [f"--item {each}" for each in arguments.item]
        else:
            shapes = [[each or "N" for each in shape] for shape in arguments.shape]
            given = [f"--shape {','.join(map(str, shape))}" for shape in shapes]
            given.append(f"--dtype {arguments.dtype}")
        what = f"{name} does not run with a batch of {size} of {' '.join(given)}"
        raise _fault(what, error) from error
