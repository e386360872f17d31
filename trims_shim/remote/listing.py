"""What a URL stands for, and the names that it gets on this machine. Pure.

Names come from elsewhere, and become paths here: one that leads out of its folder, or that cannot
be beside another, is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from trims_shim.errors import ConfigError, RemoteError

__all__ = [
    "Listing",
    "RemoteFile",
    "check_length",
    "is_url",
    "is_web",
    "key_of",
    "name_of",
    "shown",
    "version_of",
    "without_queries",
]

_FORM = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII | re.IGNORECASE)
_WEB = re.compile(r"https?://", re.ASCII | re.IGNORECASE)
_WEB_WITHIN = re.compile(r"::https?://", re.ASCII | re.IGNORECASE)
_QUERY = re.compile(r"[?#].*", re.DOTALL)
# Matches from each beginning: one that had to reach a query would take minutes for many of them.
_WEB_IN_TEXT = re.compile(r"https?://[^\s'\"]*", re.ASCII | re.IGNORECASE)
_SIGNATURE = re.compile(r"(x-(amz|goog)-)?signature=|sig=", re.ASCII | re.IGNORECASE)
_SIGNED_BY = re.compile(
    # S3 and Google Cloud Storage, by their versions 4 and 2; CloudFront; Azure's shared access.
    r"(x-(amz|goog)-[^=]*|awsaccesskeyid|googleaccessid|expires|signature|key-pair-id|policy"
    r"|s(v|s|rt|r|p|e|t|pr|ip|ig|dd|k(oid|tid|t|e|s|v)))=",
    re.ASCII | re.IGNORECASE,
)
_USER = re.compile(r"://[^/]*@")
_PASSWORD = re.compile(r"(://[^/@:]*):[^/]*(?=@)")
_STORE_VERSION = re.compile(r"(\?(versionid|generation)=[^?/]*|#[0-9]{10,})$", re.IGNORECASE)
"""How s3fs, adlfs and gcsfs name one version of an object."""
_KEY_DIGITS = 20
_PART_LIMIT_BYTES = 255
_NAME_LIMIT_BYTES = 2048
"""Half of Linux' limit of a path; the other half is for the directory of copies."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file, and what the remote says of it.

    ``name``: its path on this machine, relative, beginning with :func:`name_of` its URL.
    ``place``: what the remote knows it by. ``token``: differs when the content does; empty if the
    remote has none. ``size_bytes``: None if it is not known. ``is_seekable``: parts can be read, as
    the size is known, and told from those of another version. ``date``: of the last change, if a
    web server says it.
    """

    name: str
    place: str
    size_bytes: int | None
    token: str
    is_seekable: bool
    date: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a URL stands for, at one moment."""

    files: tuple[RemoteFile, ...]

    def __post_init__(self) -> None:
        """Raises RemoteError for names that cannot be files of one folder here."""
        names = [file.name for file in self.files]
        for name in names:
            if not _is_name(name):
                raise _no_name(name)
        counted = Counter(names)
        # Only those that are names: all folders of 2000 long names are 2 GB.
        folders = {
            name[:at]
            for name in names
            for at, each in enumerate(name)
            if each == "/" and name[:at] in counted
        }
        for name, times in counted.items():
            if name in folders:
                raise RemoteError(f"{name!r} is a file and a folder; rename one of them")
            if times > 1:
                raise RemoteError(f"two files have the same name here: {name!r}")

    @property
    def version(self) -> str:
        """Differs when any file does."""
        known = [(file.name, file.size_bytes, file.token) for file in self.files]
        return _digits(repr(sorted(known, key=repr)))

    @property
    def is_folder(self) -> bool:
        """Whether the URL is that of a folder, even if there is one file in it."""
        return any("/" in file.name for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files, as far as it is known."""
        return sum(file.size_bytes or 0 for file in self.files)


def is_url(text: str) -> bool:
    """Whether a word of the command line means something remote, even if it names nothing."""
    return _FORM.match(text) is not None


def is_web(url: str) -> bool:
    """Whether a web server has it; ``zip://x::https://...`` is not one of its files."""
    return _WEB.match(url) is not None


def key_of(url: str) -> str:
    """The name of a URL among those of others, however it is signed. Raises ConfigError if none."""
    if not is_url(url) or url.endswith("://"):
        raise ConfigError(
            f"{shown(url)!r} is no URL; write for example s3://bucket/model.safetensors"
        )
    if is_web(url):
        _check_host(url)
        url = _unsigned(url)
    return _digits(url)


def _unsigned(url: str) -> str:
    """Without what signs it, which is new each time. The server is asked with it all the same."""
    place, mark, query = url.partition("?")
    words = query.split("&")
    if not any(map(_SIGNATURE.match, words)):
        return url
    return place + mark + "&".join(each for each in words if not _SIGNED_BY.match(each))


def _check_host(url: str) -> None:
    try:
        host = urlsplit(url).netloc
    except ValueError as error:
        raise ConfigError(f"{shown(url)!r} is no URL: {error}") from error
    if "@" in host:
        raise ConfigError(f"{shown(url)}: user and password belong in ~/.netrc, not in a URL")


def version_of(digest: str) -> str:
    """The version of a copy that was verified with a digest."""
    return _digits(digest)


def name_of(url: str) -> str:
    """The last part of a URL's path, which the local file or folder is called, too."""
    if is_web(url):
        split = urlsplit(url)
        part = (split.netloc + split.path).rstrip("/").rpartition("/")[2]
        # Some stores have an object's whole name in the last part: "o/models%2Fvit.pt?alt=media".
        return unquote(part).rpartition("/")[2]
    path = _STORE_VERSION.sub("", url.partition("::")[0].partition("://")[2])
    return path.rstrip("/").rpartition("/")[2]


def shown(url: str) -> str:
    """A URL for messages: without password and query, which may hold secrets."""
    if not is_web(url):
        within = _WEB_WITHIN.search(url)  # "zip://x::https://..."
        if within is not None:
            return shown(url[: within.start()]) + "::" + shown(url[within.start() + 2 :])
        return _PASSWORD.sub(r"\1", url)
    return _USER.sub("://", _QUERY.sub("", url))


def without_queries(text: str) -> str:
    """What a store says, for messages: its package may name a web URL with what signs it."""
    return _WEB_IN_TEXT.sub(lambda url: _QUERY.sub("", url[0]), text)


def check_length(name: str) -> None:
    """Raises RemoteError for a name that no file can have, nor a folder of one: it is too long."""
    if len(name) > _NAME_LIMIT_BYTES:
        raise _no_name(name)


def _no_name(name: str) -> RemoteError:
    start = name[:_NAME_LIMIT_BYTES]
    return RemoteError(f"{start!r} is no name for a file here; rename it where it is")


def _is_name(name: str) -> bool:
    if "\0" in name or len(name) > _NAME_LIMIT_BYTES:
        return False
    try:
        parts = name.encode("utf-8", "surrogateescape").split(b"/")
    except UnicodeEncodeError:
        return False
    return all(part not in (b"", b".", b"..") and len(part) <= _PART_LIMIT_BYTES for part in parts)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_KEY_DIGITS]
