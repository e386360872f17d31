"""Files of web servers, with what Python has: no ``requests``, no extra.

Not fsspec's file system for HTTP: it reads a whole file into memory where a server has no ranges,
lets servers compress, gives each transfer five minutes, and makes every error a missing file
(fsspec 2026.9).

Proxies and certificates are those of urllib (``https_proxy``, ``SSL_CERT_FILE``); a password comes
from ``~/.netrc``, as for curl -n, but not from its ``default``: nobody has said that this host is
to have it, and a store refuses signed URLs that come with a password.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import errno
import functools
import math
import netrc
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from html.parser import HTMLParser
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse, InvalidURL, responses
from typing import IO, TypeAlias
from urllib.parse import quote, unquote, urljoin, urlsplit

from trims_shim import diagnostics
from trims_shim._version import __version__
from trims_shim.errors import RemoteError, RemoteUnreachable
from trims_shim.remote.downloading import GivenUp
from trims_shim.remote.listing import Listing, RemoteFile, check_length, name_of, shown
from trims_shim.remote.streams import in_order

__all__ = ["WebFiles"]

_PATIENCE_S = 30.0
"""Without a byte; then the server is asked once more, or given up."""
_CHUNK_BYTES = 1 << 20
_PAGE_LIMIT_BYTES = 4 << 20
_FOLDER_LIMIT = 2000
_BUSY = (429, 503)
"""The server may answer later; it can say when."""
_PAUSES_S = (0.5, 1.0, 2.0)
"""Where it does not say."""
_GONE = (404, 410)
_REFUSED = (401, 403, 407)
_EMPTY = 416
"""No byte of an empty file can be had."""
_ANSWERS = (200, 206)
"""Others may have a body, or none, but it is not the file."""
_COMPRESSIONS = ("gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress")
"""Not "aws-chunked", with which some stores call bytes that are as they should be."""
_COMPRESSED = (".gz", ".tgz", ".z", ".bz2", ".xz", ".br", ".zst")
"""Names of files that are compressed themselves, which some servers (Apache) call an encoding."""
_MODELS = (".safetensors", ".pt", ".pt2", ".pth", ".bin", ".ckpt", ".onnx")
"""Names of files that are no page, whatever the server says."""
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+)?html\b", re.IGNORECASE)
_PAGE_START_BYTES = 1024
_Response: TypeAlias = "HTTPResponse | urllib.error.HTTPError"


class WebFiles:
    """One URL of a web server."""

    is_concurrent = True

    def __init__(self, url: str) -> None:
        self._url = url

    def list(self) -> Listing:
        """The file, or the files that the page of a folder links to, and those in folders below.

        One request for a file, one more for each page. Raises OSError (not there, not allowed),
        RemoteError.
        """
        name = name_of(self._url)
        if not urlsplit(self._url).path.endswith("/"):
            return Listing((self._look(self._url, name),))
        looks = (
            functools.partial(self._look_twice, place, name + below)
            for place, below in self._below()
        )
        files = [look.result() for look in in_order(looks)]
        if not files:
            raise RemoteError(f"{shown(self._url)}: its page has no link to a file below it")
        return Listing(tuple(files))

    def read(self, file: RemoteFile, start: int, end: int | None) -> Iterator[bytes]:
        """Pieces of the bytes from ``start`` on; ends early if the connection does."""
        # A server without ranges answers with the whole file, which is asked for then.
        is_part = start > 0 or end != file.size_bytes
        headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if is_part else {}
        with _answer(file.place, headers) as response:
            if not _is_asked_for(response, file, start if is_part else None):
                raise RemoteUnreachable(
                    f"{shown(file.place)}: the server answered with other bytes than were asked for"
                )
            if start == 0 and _may_be_page(response, file):
                yield _no_page(response, file)
            # read() would lose what had come when the connection is reset, or nothing more comes.
            while piece := response.read1(_CHUNK_BYTES):
                yield piece
            # Python does not tell a connection that ends early from the end of the file.
            if file.size_bytes is None and not _is_whole(response):
                raise RemoteUnreachable(f"{shown(file.place)}: it may not be the whole file")

    def _look_twice(self, url: str, name: str) -> RemoteFile:
        """At one file of many, all of which have to be seen: one broken connection is no end."""
        try:
            return self._look(url, name)
        except GivenUp:
            raise
        except RemoteUnreachable:
            return self._look(url, name)

    def _look(self, url: str, name: str) -> RemoteFile:
        # Not HEAD: a URL that is signed for GET refuses it, and it does not tell of ranges.
        with _answer(url, {"Range": "bytes=0-0"}) as response:
            headers = response.headers
            if _is_page_of_folder(response, url):
                raise RemoteError(f"{shown(url)} is a folder there; write a slash at its end")
            has_ranges = response.status in (206, _EMPTY)
            size = headers.get("Content-Length", "")
            if has_ranges:
                size = headers.get("Content-Range", "").rpartition("/")[2]
            elif not size and headers.get("Transfer-Encoding", "").lower() != "chunked":
                raise RemoteError(f"{shown(url)}: the server does not say where the file ends")
            is_known = size.isdecimal()
            date = headers.get("Last-Modified", "")
            token = headers.get("ETag", "") or date
            size_bytes = int(size) if is_known else None
            # Without a token, parts of two versions would be put together.
            is_seekable = has_ranges and is_known and token != ""
            return RemoteFile(name, url, size_bytes, token, is_seekable, date)

    def _below(self) -> Iterator[tuple[str, str]]:
        """The URLs that its pages link to below them, and what follows the folder's name there."""
        pages = [(self._url, "/")]
        seen = {"/"}
        for page, name in pages:
            with _answer(page, {}) as response:
                links = _Links()
                text = response.read(_PAGE_LIMIT_BYTES + 1)
                if len(text) > _PAGE_LIMIT_BYTES:
                    raise RemoteError(f"{shown(page)} is too long for a list of files")
                is_cut = not isinstance(response, HTTPResponse) or response.length
                if is_cut or not (text or _is_whole(response)):
                    raise RemoteUnreachable(f"{shown(page)}: it may not be the whole page")
                links.feed(text.decode(errors="replace"))
                found = response.geturl()  # Links begin there.
            folder = _folder_of(found)
            if not _is_page_for(folder, found, page):
                raise RemoteError(
                    f"{shown(page)} leads to {shown(found)}, which may be something else; "
                    "name that URL if it is the folder"
                )
            # Not all targets at once: a page may have 400000 links, and its own URL 60 kB.
            for link in dict.fromkeys(links.found):
                # A query sorts the page; others lead up, or away.
                target = _target(found, link)
                place = _meant(target)
                below = name + place.removeprefix(folder)
                if not place.startswith(folder) or {"?", "#"} & set(target) or below in seen:
                    continue
                if len(seen) > _FOLDER_LIMIT:  # which has the folder itself, too
                    raise RemoteError(f"{shown(self._url)} has more than {_FOLDER_LIMIT} files")
                check_length(below)  # Each folder's would be that of the one above, and its own.
                seen.add(below)
                if target.endswith("/"):
                    pages.append((target, below))
                else:
                    yield target, below


def _folder_of(page: str) -> str:
    """As links below it begin: no "//", "..", "HTTP:"."""
    return _meant(_target(page, "."))


def _target(page: str, link: str) -> str:
    """Where a link leads; empty if that is no URL (``http://[host]/`` in a template)."""
    with contextlib.suppress(ValueError):
        return urljoin(page, link)
    return ""


def _is_page_for(folder: str, found: str, page: str) -> bool:
    """Whether the page that a server has led to may list the folder that was asked for: not what
    looks like the place to log in, to begin, or to choose from all folders."""
    asked = _folder_of(page)
    path, asked_path = (each.split("/", 3)[3:] for each in (folder, asked))
    split = urlsplit(found)
    is_folder = split.path.endswith("/") and split.path != "/" and not split.query
    # The same path on another host may also be that of the whole server.
    return path == asked_path or (is_folder and not asked.startswith(folder))


def _meant(url: str) -> str:
    """However it is escaped: servers escape ``~`` and brackets in links, or do not."""
    return unquote(url, errors="surrogateescape")


def _is_page_of_folder(response: _Response, url: str) -> bool:
    """Whether a server has led to the page of a folder, as all do that are asked without a slash.

    A page only: others add the slash to what is a file.
    """
    path, found = (unquote(urlsplit(each).path) for each in (url, response.geturl()))
    return found == path + "/" and response.headers.get_content_type() == "text/html"


def _is_asked_for(response: _Response, file: RemoteFile, start: int | None) -> bool:
    """Whether it has the bytes from ``start`` on, or all; of the version that was looked at."""
    headers = response.headers
    # Some of the servers behind one name may still have, or have already, another version.
    if file.token and not _is_of_version(headers, file):
        return False
    if start is None:
        return response.status == 200
    return response.status == 206 and headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _is_of_version(headers: Message, file: RemoteFile) -> bool:
    """Whether an answer has the tag that the look had, or the date where it has no tag."""
    tag, date = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if file.token.removeprefix("W/") in (tag.removeprefix("W/"), date):
        return True
    return not tag and date != "" and date == file.date


def _may_be_page(response: _Response, file: RemoteFile) -> bool:
    """Whether a server says that what is named as a model is a page, as where it wants a login."""
    is_page = response.headers.get_content_type() == "text/html"
    return is_page and file.name.lower().endswith(_MODELS)


def _no_page(response: _Response, file: RemoteFile) -> bytes:
    """The first bytes. Raises RemoteError if they are those of a page."""
    begin = response.read(_PAGE_START_BYTES)
    if _PAGE.match(begin):
        raise RemoteError(
            f"{shown(file.place)}: a web page came from {shown(response.geturl())}, not the file; "
            "the server may want a login, or the URL is that of a page about the file"
        )
    return begin


def _is_whole(response: _Response) -> bool:
    return isinstance(response, HTTPResponse) and (response.chunked or response.length == 0)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To web servers only (not ftp), and not from https to http: models are often programs.

    Nor to a password: urllib takes it for a port, and says it in its error.
    """

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302
    """Python 3.10 has none, and refuses the number (bpo-40321)."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        fp.close()  # It would be read to its end, of which there may be none.
        if "@" in urlsplit(newurl).netloc:
            raise RemoteError(
                f"{shown(req.full_url)} leads to {shown(newurl)} with a user or password; name "
                "that URL if you trust it, and put them into ~/.netrc"
            )
        # Not req.type, which is the proxy's.
        if urlsplit(newurl).scheme not in ("https", urlsplit(req.full_url).scheme):
            raise RemoteError(
                f"{shown(req.full_url)} leads to {shown(newurl)}, which is not as safe; "
                "name that URL if you trust it"
            )
        known_code = 301 if code == 308 else code
        again = super().redirect_request(req, fp, known_code, msg, headers, newurl)
        if again is None:
            return None
        # The proxy's password; where it goes by that proxy again, urllib adds it again.
        again.remove_header("Proxy-authorization")
        # Where it stays on the server of the password, that is needed again, and known there.
        password = req.get_header("Authorization")
        if password and _is_same_server(req.full_url, newurl):
            again.add_unredirected_header("Authorization", password)
        return again


def _host_of(url: str) -> str:
    """The name that ``~/.netrc`` has; no port."""
    return urlsplit(url).hostname or ""


def _is_same_server(url: str, found: str) -> bool:
    """As for curl and requests: another port may be another user's, but for that of https."""
    kinds = (_kind_of(url), _kind_of(found))
    is_same = kinds[0] == kinds[1] or kinds == (("http", 80), ("https", 443))
    return is_same and _host_of(url) == _host_of(found)


def _kind_of(url: str) -> tuple[str, int]:
    split = urlsplit(url)
    return split.scheme, split.port or (443 if split.scheme == "https" else 80)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        # "<![x[": a comment, as it is to browsers. Python's own raises AssertionError (3.13.0).
        return self.parse_bogus_comment(i, report)


@contextlib.contextmanager
def _answer(url: str, headers: dict[str, str]) -> Iterator[_Response]:
    """The answer to a GET. Raises OSError (not there, not allowed), RemoteUnreachable."""
    try:
        with _opened(url, headers) as response:
            if isinstance(response, HTTPResponse) and response.status not in _ANSWERS:
                raise RemoteUnreachable(f"{shown(url)}: the server says {_said(response.status)}")
            _check_encoding(response, url)
            yield response
    except urllib.error.HTTPError as error:
        raise _meaning(error, url) from error
    except InvalidURL:
        # It has the proxy's password in its words where that is written as if it were a port.
        raise RemoteUnreachable(
            f"{shown(url)}: not reachable: no valid host and port, there or in a proxy's setting"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        # urllib wraps what is raised while it connects, without `from`.
        diagnostics.pass_on(reason if isinstance(reason, BaseException) else error)
        raise RemoteUnreachable(f"{shown(url)}: not reachable: {reason}") from error


def _check_encoding(response: _Response, url: str) -> None:
    """Raises RemoteError if these are not the bytes of the file: without being asked for, some
    proxies compress, and stores give what was stored compressed."""
    encoding = ",".join(response.headers.get_all("Content-Encoding", [])).lower()
    is_compressed = any(each.strip() in _COMPRESSIONS for each in encoding.split(","))
    if is_compressed and not name_of(url).lower().endswith(_COMPRESSED):
        raise RemoteError(
            f"{shown(url)}: the server sends it compressed ({encoding}), which was not asked for; "
            "store it there as it is, or turn that off"
        )


def _opened(url: str, headers: dict[str, str]) -> _Response:
    """The answer, if need be a later one of a server that is busy."""
    pauses_s = iter(_PAUSES_S)
    while True:
        try:
            # A new one each time: urllib writes the proxy into it.
            response: HTTPResponse = _opener().open(_request(url, headers), timeout=_PATIENCE_S)
            return response
        except urllib.error.HTTPError as error:
            if error.code == _EMPTY:
                return error
            error.close()
            wait_s = max(next(pauses_s, math.inf), _retry_after_s(error.headers))
            if error.code not in _BUSY or wait_s > _PATIENCE_S:
                raise
        time.sleep(wait_s)


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    # Of a command line in another encoding, as of files' names, the bytes are what was meant.
    whole = quote(url, safe="%/:=&?~#+!$,;'@()*[]", errors="surrogateescape")
    request = urllib.request.Request(whole, headers=headers)
    request.add_header("User-Agent", f"trims_shim/{__version__}")
    if password := _password(url):
        request.add_unredirected_header("Authorization", password)
    return request


def _retry_after_s(headers: Message) -> float:
    """In how many seconds the server wants to be asked again (RFC 9110, 10.2.3); 0 if unknown."""
    text = headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    return 0.0


def _said(status: int) -> str:
    return f"{status} {responses.get(status, '')}".rstrip()


def _meaning(error: urllib.error.HTTPError, url: str) -> Exception:
    said = _said(error.code)
    if error.msg.startswith(_Redirects.inf_msg):
        said += ", and leads from one place to the next without end"
    if error.code == HTTPStatus.UNAUTHORIZED and not _password(url):
        # Python reads no other ~/.netrc, and says so in errors that may hold what is in it.
        said += "; ~/.netrc has no password for it, or others may read that file"
    if error.code in _BUSY:
        return GivenUp(f"{shown(url)}: the server says {said}")
    if error.code in _GONE:
        return FileNotFoundError(errno.ENOENT, f"the server says {said}", shown(url))
    if error.code in _REFUSED:
        return PermissionError(errno.EACCES, f"the server says {said}", shown(url))
    return RemoteUnreachable(f"{shown(url)}: the server says {said}")


def _password(url: str) -> str:
    with contextlib.suppress(OSError, UnicodeError, netrc.NetrcParseError):
        # Not authenticators(), which gives all other hosts what is there for ``default``.
        found = netrc.netrc().hosts.get(_host_of(url))
        if found is not None:
            pair = f"{found[0]}:{found[2]}".encode()
            return "Basic " + base64.b64encode(pair).decode("ascii")
    return ""
