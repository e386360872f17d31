"""``trims completion``: a bash script that completes commands and options of ``trims``.

Made from the parser, so it has what ``trims --help`` has; the script itself starts no Python. bash
completes what the script does not know (files, values of options, what comes after ``run``).
It does so only if the script offers nothing, so options are offered only after a dash.
"""

from __future__ import annotations

import argparse

from trims_shim.cli.exits import Exit
from trims_shim.cli.main import make_parser

__all__ = ["completion"]

_SCRIPT = """\
_trims() {{
    local IFS=' ' word="${{COMP_WORDS[COMP_CWORD]}}" words='' hidden='-*' before
    [[ $word == -* ]] && hidden=''
    before="${{COMP_WORDS[*]:1:COMP_CWORD-1}} "
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
        =|{valued}) return ;;
    esac
    case "$before" in
{cases}
    esac
    IFS=$' \\n'
    COMPREPLY=($(compgen -W "$words" -X "$hidden" -- "$word"))
}}
complete -o default -F _trims trims
"""


def completion(arguments: argparse.Namespace) -> Exit:
    """Print the script."""
    parser = make_parser()
    words = _words(parser, "")
    # The first case that fits counts, so a command of a command comes before the command itself.
    cases = [
        f'        "{path} "*) words="{words[path]}" ;;' for path in sorted(words, reverse=True)
    ]
    cases[-1] = f'        " ") words="{words[""]}" ;;'
    valued = "|".join(sorted(_valued(parser)))
    print(_SCRIPT.format(valued=valued, cases="\n".join(cases)), end="")
    return Exit.OK


def _words(parser: argparse.ArgumentParser, path: str) -> dict[str, str]:
    """What may follow each sequence of commands: ``{"": "status top ...", "batch": ...}``."""
    found: dict[str, str] = {}
    options = [
        each
        for action in parser._actions
        for each in action.option_strings
        if each.startswith("--")
    ]
    words = list(options)
    for action in parser._actions:
        if action.option_strings or not action.choices:
            continue
        words += map(str, action.choices)
        for name in action.choices:
            deeper = f"{path} {name}".lstrip()
            if isinstance(action, argparse._SubParsersAction):
                found |= _words(action.choices[name], deeper)
            else:  # Chosen once; next may be a file, the name of which begins alike.
                found[deeper] = " ".join(options)
    return found | {path: " ".join(words)}


def _valued(parser: argparse.ArgumentParser) -> set[str]:
    """The options of all commands that a value follows: no word of the command."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(_valued, action.choices.values()))
        elif action.nargs != 0:
            found |= set(action.option_strings)
    return found
