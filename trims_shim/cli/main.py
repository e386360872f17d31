"""The command ``trims``: arguments, dispatch, and what an error becomes.

Each command is a function ``(arguments) -> Exit`` in a module of this package that is imported only
when it runs, so that ``trims run`` adds next to nothing to the program's start. Data goes to
stdout, problems to stderr. Only ``warm``, ``demo``, a program under ``run``, and a module that is
measured may start a daemon.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence

from trims_shim import _activate
from trims_shim._version import __version__
from trims_shim.cli.arguments import Commands, Parser, add_command
from trims_shim.cli.batch_arguments import add_batch
from trims_shim.cli.exits import Exit
from trims_shim.cli.plan_arguments import add_plan
from trims_shim.cli.saying import say
from trims_shim.cli.stage_arguments import add_stage
from trims_shim.cli.values import address, count, positive
from trims_shim.config import platform_problem
from trims_shim.errors import ConfigError, DaemonUnavailable, TrimsError
from trims_shim.printable import printable

__all__ = ["main", "make_parser"]

_RUN_USAGE = """\
usage: trims run [--] COMMAND [ARGUMENT ...]

Run a program with the cache, unchanged. COMMAND is a program (python, torchrun,
pytest, a shell script), a Python file, or -m MODULE / -c CODE for this
interpreter. Every Python process that the program starts uses the cache too,
except under python -I, -E or -S. TRIMS_ENABLED=0 turns it off.

The exit status is the program's; 126 and 127 if it cannot be started.

example:
  trims run app.py --port 8000
  trims run torchrun --nproc-per-node 4 train.py
"""


_log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Of a file without a name, which is stdout: others are named where they are written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status (:class:`~trims_shim.cli.exits.Exit`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    _replace_closed_streams()
    _print_every_name()
    try:
        return _dispatch(words)
    except ConfigError as error:
        return _complain(error, Exit.USAGE)
    except DaemonUnavailable as error:
        return _complain(error, Exit.NO_DAEMON)
    except (TrimsError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _end_of_pipe()
        if _is_of_stdout(error):
            _print_no_more()
        return _complain(error, Exit.FAILED)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["run"]:
        # Not argparse: everything after `run` belongs to the program, also what starts with "-".
        return _run(words[1:])
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    arguments = parser.parse_args(words)
    module, _, function = arguments.command.partition(":")
    if platform_problem and not module.startswith(("batch", "stage", "plan", "completion")):
        raise DaemonUnavailable(platform_problem)
    command: Callable[[argparse.Namespace], Exit]
    command = getattr(importlib.import_module(f"trims_shim.cli.{module}"), function)
    code = command(arguments)
    sys.stdout.flush()
    return code


def _run(words: list[str]) -> int:
    is_help = words[:1] in (["-h"], ["--help"])
    if words[:1] == ["--"]:
        words = words[1:]
    if is_help or not words:
        print(_RUN_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return Exit.OK if words else Exit.USAGE
    from trims_shim.cli.running import run

    return run(words)


def _complain(error: BaseException, code: Exit) -> Exit:
    # The import of this package has reported a setting that cannot be used already.
    if str(error) != _activate.config_problem:
        # Of libraries, some messages have several lines.
        text = "\n".join(map(printable, _text(error).split("\n")))
        say(f"trims: {text}")
    _log.debug("this ended the command", exc_info=error)
    return code


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename or repr('')}: {error.strerror}"
    if isinstance(error, OSError) and _is_of_stdout(error):
        return f"stdout: {error.strerror}"
    if isinstance(error, FileNotFoundError):  # of os.getcwd(): all else names what is missing
        return "the working directory has been deleted; cd to another one"
    return str(error)


def _is_of_stdout(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename is None and error.errno in _NO_ROOM


def _replace_closed_streams() -> None:
    """Replace streams that are closed (``>&-``): they are None, which not all code expects.

    From the first on, so that each gets the lowest free descriptor, its own.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _print_every_name() -> None:
    """Escape names of files that stdout's encoding lacks; stderr does so by itself."""
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper):
        return
    # Under LC_ALL=C, surrogateescape lets bytes through that are no text, but no other characters.
    is_ascii = stdout.errors == "surrogateescape" and stdout.encoding.lower() != "utf-8"
    if stdout.errors == "strict" or is_ascii:
        stdout.reconfigure(errors="backslashreplace")


def _end_of_pipe() -> Exit:
    """The reader of our output (``| head``) has left, which is no error; no more is written."""
    _print_no_more()
    return Exit.OK


def _print_no_more() -> None:
    """Else Python tries once more at its end, and from 3.15 on has an exit status of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- arguments ------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands, except for what comes after ``run``."""
    codes = "\n".join(f"  {code.value:3}  {code.meaning}" for code in Exit)
    parser: argparse.ArgumentParser = Parser(
        prog="trims",
        usage="trims [-h] [--version] COMMAND ...",
        description="One copy of every model's weights per machine: look at and steer the cache.",
        epilog=f"exit status:\n{codes}\n\nSettings: `trims info`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trims {__version__}")
    # The list of commands is that of the groups.
    commands = parser.add_subparsers(
        prog="trims", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    for title, adding in _GROUPS.items():
        before = len(commands._choices_actions)
        for add in adding:
            add(commands)
        group = parser.add_argument_group(title)
        group._group_actions += commands._choices_actions[before:]
    return parser


_DEVICE = "cuda:0, or (the beginning of) an id that `trims status` shows"


def _add_first(commands: Commands[argparse.ArgumentParser]) -> None:
    demo = add_command(
        commands,
        "demo",
        "demo:demo",
        "measure what the cache gains here; leaves nothing behind",
        "trims demo --size-mb 1000 --processes 8",
    )
    demo.add_argument(
        "--size-mb",
        type=count,
        default=400,
        metavar="MB",
        help="in steps of 50, the smallest is of 84; default 400",
    )
    demo.add_argument(
        "--processes", type=_several, default=4, metavar="N", help="that load it; default 4"
    )
    # Listed here for the help only; see _dispatch.
    commands.add_parser("run", help="run a program with the cache, unchanged", add_help=False)
    warm = add_command(
        commands,
        "warm",
        "images:warm",
        "load model files into the cache; starts a daemon if none runs",
        "trims warm --pin /models/llama/*.safetensors /models/bert s3://models/vit.pt",
    )
    warm.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a file, a pattern, a directory (models below it), or a URL, which is fetched first",
    )
    warm.add_argument("--pin", action="store_true", help="keep them resident")
    warm.add_argument("--device", metavar="DEVICE", help=f"into a device's memory: {_DEVICE}")
    fetch = add_command(
        commands,
        "fetch",
        "fetch:fetch",
        "download remote models if new or changed; print their paths",
        "trims fetch s3://models/vit.pt https://example.org/bert/",
    )
    fetch.add_argument(
        "urls", nargs="+", metavar="URL", help="a file, or a folder (ends with a slash)"
    )
    fetch.add_argument(
        "--digest", metavar="sha256:HEX", help="what the file has to be; with one URL only"
    )


def _add_looking(commands: Commands[argparse.ArgumentParser]) -> None:
    add_command(
        commands,
        "status",
        "status:status",
        "show the daemon, its memory, images, clients and counters",
        "trims status --json | jq .memory",
    )
    top = add_command(
        commands, "top", "top:top", "watch the cache live (needs rich)", "trims top --interval 0.5"
    )
    top.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="between two pictures; default 1",
    )
    top.add_argument("--once", action="store_true", help="draw once and exit")
    info = add_command(
        commands,
        "info",
        "info:info",
        "show what works here and why, versions, patch points, settings",
        "trims info --probe",
    )
    info.add_argument(
        "--probe",
        action="store_true",
        help="import the libraries, but transformers and peft, and really patch them",
    )
    add_command(
        commands, "ls", "status:list_images", "list the images in the cache", "trims ls --json"
    )
    metrics = add_command(
        commands,
        "metrics",
        "metrics:metrics",
        "print the daemon's numbers for Prometheus, or serve them",
        "trims metrics --listen 9464",
        has_json=False,
    )
    metrics.add_argument(
        "--listen",
        type=address,
        metavar="[HOST:]PORT",
        help="serve them over HTTP until Ctrl-C; without HOST on 127.0.0.1 only",
    )


def _add_steering(commands: Commands[argparse.ArgumentParser]) -> None:
    for name, help in (
        ("pin", "keep an image resident until it is unpinned"),
        ("unpin", "let a pinned image be evicted again"),
    ):
        pin = add_command(commands, name, f"images:{name}", help, f"trims {name} /models/bert.pt")
        _add_image(pin)
    evict = add_command(
        commands,
        "evict",
        "images:evict",
        "drop images, ONNX models and copies of URLs that nobody uses",
        "trims evict 3f2a9c01d4e5",
    )
    verify = add_command(
        commands,
        "verify",
        "images:verify",
        "hash images again and compare; status 1 if memory was damaged",
        "trims verify --all",
    )
    for parser in (evict, verify):
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--device", metavar="DEVICE", help=f"only there: {_DEVICE}")
        remote = ", or remote (copies on disk)" if parser is evict else ""
        where.add_argument("--tier", metavar="TIER", help=f"only there: host, or a device{remote}")
        which = parser.add_mutually_exclusive_group(required=True)
        more = "; or a URL, or digits of a prepared model's key (see `trims status`)"
        _add_image(which, nargs="?", more=more if parser is evict else "")
        which.add_argument("--all", action="store_true", help="every image")
    stop = add_command(
        commands,
        "stop",
        "daemon:stop",
        "stop the daemon, wait for its end, print its last statistics",
        "trims stop",
    )
    stop.add_argument(
        "--timeout",
        type=positive,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait; default 10",
    )


def _add_image(
    parser: argparse._ActionsContainer, nargs: str | None = None, *, more: str = ""
) -> None:
    help = f"path of a model file, or the first 6 or more digits of a digest (see `trims ls`){more}"
    parser.add_argument("image", nargs=nargs, metavar="IMAGE", help=help)


def _add_setting_up(commands: Commands[argparse.ArgumentParser]) -> None:
    autostart = add_command(
        commands,
        "autostart",
        "autostart:autostart",
        "let TRIMS_ENABLED=1 switch the cache on for this Python",
        "trims autostart install && TRIMS_ENABLED=1 python app.py",
    )
    autostart.add_argument(
        "action",
        choices=("install", "remove", "status"),
        help="write the .pth file that does it, delete it, or say whether it is there",
    )
    autostart.add_argument(
        "--site-packages", metavar="DIRECTORY", help="default: that of this interpreter"
    )
    add_command(
        commands,
        "completion",
        "completion:completion",
        "print a script that completes commands and options in bash",
        "source <(trims completion)   # in ~/.bashrc",
        has_json=False,
    )
    add_command(
        commands,
        "daemon",
        "daemon:serve",
        "serve in the foreground; programs start one by themselves",
        "TRIMS_HOST_BYTES=32GiB TRIMS_IDLE_EXIT=0 trims daemon",
        has_json=False,
    )


def _interval(text: str) -> float:
    value = positive(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0.05 and 3600 seconds")
    return value


def _several(text: str) -> int:
    value = count(text)
    if value < 2:
        raise argparse.ArgumentTypeError("must be 2 or more: one fills the cache, others share it")
    return value


_GROUPS: dict[str, tuple[Callable[[Commands[argparse.ArgumentParser]], None], ...]] = {
    "start here": (_add_first,),
    "look": (_add_looking,),
    "steer what is cached": (_add_steering,),
    "set up": (_add_setting_up,),
    "besides the cache": (add_batch, add_stage, add_plan),
}
"""The commands, in the order in which people need them."""
