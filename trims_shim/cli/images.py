"""``trims warm``, ``pin``, ``unpin``, ``evict`` and ``verify``: steer what is in the cache."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import glob
import importlib.util
import mmap
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trims_shim import api, config
from trims_shim.cli.devices import device_named, tier_named
from trims_shim.cli.exits import Exit
from trims_shim.cli.fetch import evict_copies, fetch_all
from trims_shim.cli.progress import Progress
from trims_shim.cli.saying import say
from trims_shim.cli.status import ask
from trims_shim.cli.text import behind_name, counted, print_json, printable, size
from trims_shim.client.cache import cache
from trims_shim.client.listing import every_image
from trims_shim.errors import (
    AccessDenied,
    ConfigError,
    DaemonUnavailable,
    DriverFailure,
    FormatError,
    NoSpace,
    NotServed,
    TrimsError,
    UnknownDevice,
    UnknownImage,
)
from trims_shim.formats.onnx import read_model
from trims_shim.handles import DeviceHandle, Handle
from trims_shim.remote.listing import is_url, shown
from trims_shim.specs import HOST_TIER
from trims_shim.wire import admin, codec

__all__ = ["evict", "pin", "unpin", "verify", "warm"]

MODEL_SUFFIXES = (".safetensors", ".pt", ".pt2", ".pth", ".bin", ".ckpt")
"""Files taken from a directory; a file that is named itself may have any name."""
ONNX_SUFFIX = ".onnx"
"""Also taken if there is an onnxruntime to prepare them with."""


# --- warm -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Warmed:
    """What became of one file."""

    path: str
    digest: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    outcome: str = ""
    tier: str = HOST_TIER
    error: str = ""
    note: str = ""
    """Why the image may be of no use, or what else holds memory."""

    def said(self) -> str:
        """The error, to be shown after the path."""
        return behind_name(self.error, self.path, os.path.abspath(self.path))


def warm(arguments: argparse.Namespace) -> Exit:
    """Load files into the cache, one after the other; the daemon reads each with many threads."""
    fetched = [word for word in arguments.paths if is_url(word)]
    local = {each.url: each for each in fetch_all(fetched, is_quiet=arguments.json)}
    paths_of = {word: local[word].path if word in local else word for word in arguments.paths}
    found = {word: list(_files(path)) if path else [] for word, path in paths_of.items()}
    paths = list(dict.fromkeys(path for each in found.values() for path in each))
    empty = [word for word, each in found.items() if not each]
    # Of a URL that could not be fetched, that has been said.
    missing = [word or "''" for word in empty if word not in local or paths_of[word]]
    if missing:
        names = ", ".join(map(shown, missing))
        say(f"trims warm: no model file in {printable(names)}")
    if not paths and not arguments.json:
        return Exit.FAILED
    tier = HOST_TIER if arguments.device is None else device_named(arguments.device, _devices())
    done = []
    pinned = functools.cache(_pinned_by_path)
    sizes = [_size_of(path) for path in paths]
    with Progress(sizes, is_quiet=arguments.json) as progress:
        for path, size_bytes in zip(paths, sizes, strict=True):
            progress.begin(path)
            warmed = _warm(
                path, size_bytes, tier, is_pinned=arguments.pin, pinned=pinned, progress=progress
            )
            done.append(warmed)
            progress.end(warmed.outcome, error=warmed.said(), note=warmed.note)
    if arguments.json:
        print_json([dataclasses.asdict(each) for each in done])
    for each in done:
        if each.error and arguments.json:
            say(f"trims: {printable(f'{each.path}: {each.said()}')}")
    return Exit.FAILED if empty or any(each.error for each in done) else Exit.OK


def _files(word: str) -> Iterator[str]:
    """The model files that a word of the command line means.

    Also what is missing, and directories that cannot be read, so that they fail.
    """
    matches = [word] if os.path.exists(word) else sorted(glob.glob(word, recursive=True))
    suffixes: tuple[str, ...] = MODEL_SUFFIXES
    if importlib.util.find_spec("onnxruntime") is not None:
        suffixes = (*MODEL_SUFFIXES, ONNX_SUFFIX)
    for match in matches or [word]:
        if not os.path.isdir(match):
            yield match
            continue
        unreadable: list[OSError] = []
        for directory, names, files in os.walk(match, onerror=unreadable.append):
            names.sort()
            for name in sorted(files):
                if name.endswith(suffixes):
                    yield os.path.join(directory, name)
        yield from (error.filename for error in unreadable)


def _size_of(path: str) -> int:
    """The size of a file, and of those beside it that have an ONNX model's weights."""
    try:
        size_bytes = os.path.getsize(path)
    except OSError:
        return 0
    if size_bytes and path.endswith(ONNX_SUFFIX):
        # What is no such model, or not all there, fails when it is prepared.
        with contextlib.suppress(FormatError, OSError, ValueError):
            others = [os.path.join(os.path.dirname(path), each) for each in _locations(path)]
            size_bytes += sum(map(os.path.getsize, others))
    return size_bytes


def _locations(path: str) -> tuple[str, ...]:
    with open(path, "rb") as file:
        return read_model(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)).locations


def _warm(
    path: str,
    size_bytes: int,
    tier: str,
    *,
    is_pinned: bool,
    pinned: Callable[[], Mapping[str, set[str]]],
    progress: Progress,
) -> _Warmed:
    """Load a file. ``pinned``: see :func:`_pinned_by_path`."""
    start = time.monotonic()
    before = _hits()
    try:
        device = None if tier == HOST_TIER else tier
        if path.endswith(ONNX_SUFFIX):
            return _prepare(path, size_bytes, device, is_pinned=is_pinned, progress=progress)
        with api.open(path, device=device) as handle:
            earlier = ""
            if is_pinned:
                cache().request(admin.PinImageRequest(handle.digest, is_pinned=True))
                earlier = _still_pinned(pinned(), os.path.abspath(path), handle.digest)
            seconds = time.monotonic() - start
            outcome = "in the cache already" if _hits() > before else "loaded"
            return _Warmed(
                path,
                handle.digest,
                handle.size_bytes,
                seconds,
                outcome,
                tier,
                note="; ".join(filter(None, [_note_of(handle), earlier])),
            )
    except (ConfigError, DaemonUnavailable, DriverFailure, UnknownDevice):
        raise  # Every other file would fail likewise.
    except TrimsError as error:
        return _Warmed(path, tier=tier, error=str(error))
    except OSError as error:
        return _Warmed(path, tier=tier, error=error.strerror or str(error))


def _pinned_by_path() -> dict[str, set[str]]:
    """The digests of pinned images, by the paths that they were loaded from."""
    found: dict[str, set[str]] = {}
    for image in every_image(cache()):
        for name in image.names if image.is_pinned else ():
            found.setdefault(name, set()).add(image.digest)
    return found


def _still_pinned(pinned: Mapping[str, set[str]], path: str, digest: str) -> str:
    """What is said of images that were pinned when a path had other contents; else empty.

    ``pinned``: see :func:`_pinned_by_path`. ``digest`` is of what the path has now.
    """
    notes = []
    for each in sorted(pinned.get(path, set()) - {digest}):
        note = f"`trims unpin {each[:12]}` frees an earlier version"
        # It may be what another file has now.
        if also := sorted(name for name in pinned if each in pinned[name] and name != path):
            note += f", which was loaded from {', '.join(also)}, too"
        notes.append(note)
    return " and ".join(notes)


def _excluded(path: str) -> str:
    """What is said of a file that the user has excluded; else empty."""
    try:
        cache().refuse_excluded(os.path.abspath(path))
    except NotServed as error:
        return f"{error}, so frameworks read it themselves"
    return ""


def _note_of(handle: Handle | DeviceHandle) -> str:
    if note := _excluded(handle.name):
        return note
    least = config.current().min_bytes
    if handle.size_bytes < least:
        return f"smaller than TRIMS_MIN_BYTES ({size(least)}), so frameworks read it themselves"
    try:
        has_records = bool(handle.records)
    except FormatError:
        has_records = False
    if has_records:
        return ""
    return "neither a zip of torch.save nor safetensors, so frameworks read it themselves"


def _prepare(
    path: str, size_bytes: int, device: str | None, *, is_pinned: bool, progress: Progress
) -> _Warmed:
    """Prepare an ONNX model."""
    start = time.monotonic()
    before = _prepared()
    key = api.warm(
        path, device=device, pin=is_pinned, waiting=lambda: progress.wait("being prepared")
    )
    outcome = "prepared" if _prepared() > before else "prepared already"
    seconds = time.monotonic() - start
    note = _excluded(path)
    return _Warmed(path, key, size_bytes, seconds, outcome, "prepared", note=note)


def _prepared() -> int:
    return api.stats().events.get("warmed:prepared", 0)


def _hits() -> int:
    return api.stats().hits


# --- the others -----------------------------------------------------------------------------------


def pin(arguments: argparse.Namespace) -> Exit:
    """Keep an image resident."""
    return _pin(arguments, is_pinned=True)


def unpin(arguments: argparse.Namespace) -> Exit:
    """Let an image be evicted again."""
    return _pin(arguments, is_pinned=False)


def _pin(arguments: argparse.Namespace, *, is_pinned: bool) -> Exit:
    name = arguments.image
    request = admin.PinImageRequest(_name_of(name), is_pinned=is_pinned)
    try:
        reply = cache().request(request)
    except UnknownImage:
        if is_pinned and name.endswith(ONNX_SUFFIX):
            raise UnknownImage(f"{name}: prepared ONNX models are not pinned") from None
        if is_pinned and os.path.isfile(name):
            raise UnknownImage(
                f"{name} is not in the cache; `trims warm --pin {shlex.quote(name)}`"
            ) from None
        raise
    if arguments.json:
        print_json({"digest": reply.digest, "is_pinned": is_pinned})
    else:
        state = "pinned" if is_pinned else "no longer pinned"
        print(f"{printable(reply.digest[:12])} is {state}")
    return Exit.OK


def evict(arguments: argparse.Namespace) -> Exit:
    """Drop one image or prepared model, or all that are neither leased nor pinned."""
    is_anywhere = arguments.tier is None and arguments.device is None
    is_of_url = not arguments.all and is_url(arguments.image)
    is_remote = arguments.tier == "remote" or (is_anywhere and is_of_url)
    if is_remote and (arguments.all or arguments.image):
        return evict_copies("" if arguments.all else arguments.image, as_json=arguments.json)
    if arguments.image == "":  # Perhaps a variable that was not set; to the daemon it means all.
        raise UnknownImage("no image has an empty name; `trims evict --all` drops every one")
    name = "" if arguments.all else _name_of(arguments.image)
    tier = _tier_of(arguments)
    images, prepared, problem = _evict(name, tier)
    if arguments.json:
        keys = {"prepared": prepared.keys, "prepared_freed_bytes": prepared.freed_bytes}
        print_json(codec.plain(images) | keys)
    else:
        text = f"evicted {counted(len(images.digests), 'image')}, {size(images.freed_bytes)}"
        if prepared.keys or not images.digests:
            models = counted(len(prepared.keys), "prepared model")
            text += f", and {models}, {size(prepared.freed_bytes)}"
        if arguments.all and (left := _at(tier)):
            text += f" ({counted(len(left), 'image')} pinned or in use)"
        print(text)
    if problem is not None:
        raise problem
    return Exit.OK


def _evict(
    name: str, tier: str
) -> tuple[admin.EvictImageReply, admin.EvictPreparedReply, NoSpace | None]:
    """A name may mean an image, a prepared model, or both; prepared models are at no tier.

    Where images were evicted, and prepared models could not be: with the error, not by raising it.
    """
    images, prepared, problem = (
        admin.EvictImageReply((), 0),
        admin.EvictPreparedReply((), 0),
        None,
    )
    unknown: list[TrimsError] = []
    try:
        images = cache().request(admin.EvictImageRequest(name, tier))
    except UnknownImage as error:
        unknown.append(error)
    if not tier:
        try:
            prepared = cache().request(admin.EvictPreparedRequest(name))
        except (UnknownImage, AccessDenied) as error:  # another user's daemon prepares none for us
            unknown.append(error)
        except NoSpace as error:
            if not images.digests:
                raise
            problem = error
    if len(unknown) == (1 if tier else 2):
        raise UnknownImage("; ".join(str(e) for e in unknown if isinstance(e, UnknownImage)))
    return images, prepared, problem


def _at(tier: str) -> list[str]:
    """The digests of the images at a tier, or at all of them."""
    found = (image for image in every_image(cache()) if tier in ("", image.tier))
    return list(dict.fromkeys(image.digest for image in found))


def verify(arguments: argparse.Namespace) -> Exit:
    """Hash images again, wherever they are; a different digest means damaged memory."""
    tier = _tier_of(arguments)
    images = _at(tier) if arguments.all else [_name_of(arguments.image)]
    checked = []
    for image in images:
        try:
            checked.append(cache().request(admin.VerifyImageRequest(image, tier)))
        except UnknownImage:
            if not arguments.all:
                raise  # Under --all, it was evicted meanwhile, which is no error.
    damaged = [reply for reply in checked if reply.computed != reply.digest]
    if arguments.json:
        print_json([codec.plain(r) | {"is_sound": r not in damaged} for r in checked])
    else:
        for reply in checked:
            for check in reply.tiers:
                where = f" on {check.tier}" if len(reply.tiers) > 1 else ""
                verdict = f"{reply.digest[:12]} {_verdict(reply.digest, check, where)}"
                print(printable(verdict))
    return Exit.FAILED if damaged else Exit.OK


def _verdict(digest: str, check: admin.TierCheck, where: str) -> str:
    if check.error:
        return f"NOT CHECKED{where}: {check.error}"
    if check.computed == digest:
        return f"sound{where}"
    return (
        f"DAMAGED{where}: its bytes now hash to {check.computed[:12]}; run `trims evict "
        f"{digest[:12]}`, restart what uses it, and check the machine's memory"
    )


def _tier_of(arguments: argparse.Namespace) -> str:
    """The tier that ``--device`` or ``--tier`` means; empty if neither is given."""
    if arguments.device is not None:
        return device_named(arguments.device, _devices())
    # An empty word is refused, too: it may be a variable that was not set.
    return "" if arguments.tier is None else tier_named(arguments.tier, _devices())


def _name_of(text: str) -> str:
    """An image's name at the daemon: paths become absolute, digests stay what they are."""
    if is_url(text):
        url = shown(text)
        raise UnknownImage(
            f"{url}: name its local file; `trims fetch {shlex.quote(url)}` prints the path"
        )
    of_file = re.sub(r"( \(\w+\))+$", "", text)  # else a variant: a.pt (float32)
    is_path = os.sep in text or os.path.exists(text) or os.path.exists(of_file)
    return os.path.abspath(text) if is_path else text


def _devices() -> Iterator[str]:
    """Ids of the running daemon's devices, which is asked only when needed."""
    try:
        yield from (device.device for device in ask().devices)
    except DaemonUnavailable:
        return
