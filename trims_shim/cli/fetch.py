"""``trims fetch``, and what ``warm``, ``evict`` and ``info`` know of remote models."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trims_shim import config
from trims_shim.cli.exits import Exit
from trims_shim.cli.progress import Progress
from trims_shim.cli.saying import say
from trims_shim.cli.text import behind_name, counted, print_json, printable, size
from trims_shim.errors import ConfigError, RemoteError, TrimsError
from trims_shim.remote import fetching
from trims_shim.remote.copies import Copies
from trims_shim.remote.listing import key_of, shown

__all__ = ["FetchedUrl", "evict_copies", "fetch", "fetch_all"]


@dataclass(frozen=True, slots=True)
class FetchedUrl:
    """What became of one URL."""

    url: str
    path: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    outcome: str = ""
    error: str = ""


def fetch(arguments: argparse.Namespace) -> Exit:
    """Download what is not there yet; print the paths."""
    if arguments.digest and len(arguments.urls) > 1:
        raise ConfigError("a digest is of one file; name one URL with --digest")
    fetched = fetch_all(arguments.urls, digest=arguments.digest, is_quiet=arguments.json)
    if arguments.json:
        print_json([dataclasses.asdict(each) | {"url": shown(each.url)} for each in fetched])
    else:
        for each in fetched:
            if each.path:
                print(each.path)
    return Exit.FAILED if any(each.error for each in fetched) else Exit.OK


def fetch_all(
    urls: Sequence[str], *, digest: str | None = None, is_quiet: bool
) -> list[FetchedUrl]:
    """Fetch one after the other, with progress; errors are shown, and do not stop the others."""
    done = []
    with Progress([0] * len(urls), is_quiet=is_quiet) as progress:
        for url in urls:
            progress.begin(shown(url))
            fetched = _fetch(url, digest, progress)
            done.append(fetched)
            progress.end(fetched.outcome, error=fetched.error, note="")
            if fetched.error and is_quiet:
                say(f"trims: {printable(f'{shown(url)}: {fetched.error}')}")
    return done


def _fetch(url: str, digest: str | None, progress: Progress) -> FetchedUrl:
    start = time.monotonic()
    try:
        found = fetching.fetch(
            url,
            digest=digest,
            progress=progress.reach,
            waiting=lambda: progress.wait("being downloaded by another process"),
        )
    except ConfigError:
        raise
    except TrimsError as error:
        return FetchedUrl(url, error=behind_name(str(error), shown(url)))
    except OSError as error:
        where = "" if error.filename in (None, shown(url)) else f" ({error.filename})"
        return FetchedUrl(url, error=printable(f"{error.strerror or error}{where}"))
    seconds = time.monotonic() - start
    size_bytes = _size_of(found.path)
    progress.reach(size_bytes, size_bytes)
    return FetchedUrl(url, found.path, size_bytes, seconds, found.outcome.value)


def _size_of(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(
        os.path.getsize(os.path.join(directory, name))
        for directory, _, names in os.walk(path)
        for name in names
    )


def evict_copies(url: str, *, as_json: bool) -> Exit:
    """Delete the copies of one URL, or all (of an empty one), that no process uses."""
    copies = Copies.of(config.current())
    copies.check_eviction()
    found = copies.copies(key_of(url) if url else "")
    if url and not found:
        raise RemoteError(f"{shown(url)}: there is no copy of it")
    gone = [each for each in found if copies.evict(each.name)]
    freed_bytes = sum(each.size_bytes for each in gone)
    if as_json:
        print_json({"copies": len(gone), "freed_bytes": freed_bytes})
    else:
        left = len(found) - len(gone)
        in_use = f" ({left} in use)" if left else ""
        print(f"evicted {counted(len(gone), 'remote model')}, {size(freed_bytes)}{in_use}")
    return Exit.OK
