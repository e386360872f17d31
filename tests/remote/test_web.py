"""What web servers answer: sizes, tags, ranges, folders, and what goes wrong."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import os
import signal
import socket
import threading
import time
import traceback
import tracemalloc
import urllib.error
import urllib.request
from email.utils import formatdate
from http.client import HTTPMessage
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from trims_shim.errors import RemoteError, RemoteUnreachable
from trims_shim.remote import web as module
from trims_shim.remote.downloading import GivenUp, download
from trims_shim.remote.listing import RemoteFile
from trims_shim.remote.streams import STREAMS
from trims_shim.remote.web import WebFiles, _password, _Redirects

from .web_server import PIECE_BYTES, WebServer, serving

CONTENT = os.urandom(300_000)


def looked(url: str) -> RemoteFile:
    (found,) = WebFiles(url).list().files
    return found


def read(url: str, start: int = 0, end: int | None = -1) -> bytes:
    files = WebFiles(url)
    (file,) = files.list().files
    return b"".join(files.read(file, start, file.size_bytes if end == -1 else end))


def test_one_request_tells_size_tag_and_ranges(web: WebServer) -> None:
    url = web.put("m/vit.pt", CONTENT)
    assert looked(url) == RemoteFile("vit.pt", url, len(CONTENT), web.files["m/vit.pt"].etag, True)
    assert web.asked == {"look": 1}


def test_parts_and_the_whole(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT)
    assert read(url) == CONTENT
    assert read(url, 100, 200) == CONTENT[100:200]
    assert read(url, 1) == CONTENT[1:]
    assert read(url, 299_999) == CONTENT[-1:]


def test_a_server_without_ranges(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT, has_ranges=False)
    assert looked(url).size_bytes == len(CONTENT)
    assert not looked(url).is_seekable
    assert read(url) == CONTENT
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        read(url, 100)


def test_lengths(web: WebServer) -> None:
    empty = looked(web.put("empty", b""))
    assert (empty.size_bytes, empty.is_seekable) == (0, False)
    chunked = looked(url := web.put("chunked", CONTENT, has_ranges=False, is_chunked=True))
    assert (chunked.size_bytes, chunked.is_seekable) == (None, False)
    assert read(url) == CONTENT
    with pytest.raises(RemoteError, match="does not say where the file ends"):
        looked(web.put("endless", CONTENT, has_ranges=False, length=-1))


def test_what_a_server_compresses_unasked_is_not_the_file(web: WebServer) -> None:
    """Objects that were stored with an encoding, and proxies that ask for one."""
    url = web.put("model.json", CONTENT, encoding="gzip")
    with pytest.raises(RemoteError, match=r"model\.json: .* compressed \(gzip\).*not asked for"):
        read(url)
    url = web.put("stored.json", CONTENT, encoding="aws-chunked, gzip")
    with pytest.raises(RemoteError, match=r"compressed \(aws-chunked, gzip\)"):
        read(url)
    url = web.put("plain.json", CONTENT, encoding="identity")
    (file,) = WebFiles(url).list().files
    web.files["plain.json"].encoding = "br"
    with pytest.raises(RemoteError, match=r"compressed \(br\)"):
        list(WebFiles(url).read(file, 0, file.size_bytes))


def test_what_is_compressed_itself_is_the_file(web: WebServer) -> None:
    """Apache calls that an encoding, too (``AddEncoding x-gzip .gz``)."""
    assert read(web.put("model.tar.gz", CONTENT, encoding="x-gzip")) == CONTENT
    assert read(web.put("model.bin", CONTENT, encoding="aws-chunked")) == CONTENT


def test_a_date_tells_of_a_change_where_no_tag_does(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT, tag="", date="Mon, 01 Jun 2026 00:00:00 GMT")
    files = WebFiles(url)
    listing = files.list()
    (file,) = listing.files
    assert b"".join(files.read(file, 0, 100)) == CONTENT[:100]
    web.put("vit.pt", CONTENT, tag="", date="Tue, 02 Jun 2026 00:00:00 GMT")
    assert files.list().version != listing.version
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        list(files.read(file, 0, 100))


def test_the_date_tells_where_only_the_look_had_no_tag(web: WebServer) -> None:
    date = "Mon, 01 Jun 2026 00:00:00 GMT"
    url = web.put("vit.pt", CONTENT, tag="", date=date, body_tag='"1"')
    files = WebFiles(url)
    (file,) = files.list().files
    assert b"".join(files.read(file, 0, len(CONTENT))) == CONTENT


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_date_tells_where_only_the_look_had_a_tag(web: WebServer, has_ranges: bool) -> None:
    date = "Mon, 01 Jun 2026 00:00:00 GMT"
    how = {"tag": '"1"', "date": date, "has_ranges": has_ranges}
    url = web.put("vit.pt", CONTENT, body_tag="", **how)
    files = WebFiles(url)
    (file,) = files.list().files
    assert b"".join(files.read(file, 0, len(CONTENT))) == CONTENT
    others = ({"body_tag": '"2"'}, {"body_tag": "", "date": ""}, {"body_tag": "", "date": "1970"})
    for other in others:
        web.put("vit.pt", CONTENT, **{**how, **other})
        with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
            list(files.read(file, 0, len(CONTENT)))


def test_other_bytes_than_were_asked_for_are_not_taken(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT, shift=1)
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        read(url, 100, 200)
    url = web.put("vit.pt", CONTENT, shift=9)
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        read(url, 1, 200)


def test_a_server_that_says_nothing_more_is_given_up(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    gate = threading.Event()
    url = web.put("vit.pt", CONTENT, gate=gate)
    try:
        with pytest.raises(RemoteUnreachable, match="timed out"):
            read(url)
    finally:
        gate.set()


def test_what_came_before_a_server_says_nothing_more_is_not_lost(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.put("vit.pt", CONTENT, rate=PIECE_BYTES / 5)
    file = looked(url)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    came = []
    with pytest.raises(RemoteUnreachable, match="timed out"):
        came.extend(WebFiles(url).read(file, 0, file.size_bytes))
    assert b"".join(came) == CONTENT[:PIECE_BYTES]


def test_a_busy_server_is_asked_again_when_it_says(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    now_s = 1_767_225_600.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    busy = [None, "7", formatdate(now_s + 9, usegmt=True)]
    assert read(web.put("vit.pt", CONTENT, busy=list(busy))) == CONTENT
    assert pauses == [0.5, 7.0, 9.0]
    pauses.clear()
    assert read(web.put("vit.pt", CONTENT, busy=["0", "soon", formatdate(0)])) == CONTENT
    assert pauses == [0.5, 1.0, 2.0], "what says nothing, or is over"


@pytest.mark.parametrize("busy", [["3600"], ["9" * 400], ["0"] * 4])
def test_a_server_that_stays_busy_is_given_up(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, busy: list[str | None]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda pause_s: None)
    with pytest.raises(RemoteUnreachable, match="429 Too Many Requests"):
        looked(web.put("vit.pt", CONTENT, busy=(left := list(busy))))
    assert not left


def test_a_server_that_stays_busy_is_given_up_by_a_download_at_once(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Found: downloads tried again whatever had been tried, and asked 16 times."""
    monkeypatch.setattr(time, "sleep", lambda pause_s: None)
    files = WebFiles(web.put("vit.pt", CONTENT))
    listing = files.list()
    web.files["vit.pt"].busy = (left := [None] * 20)
    with pytest.raises(RemoteUnreachable, match="429 Too Many Requests"):
        download(files, listing, str(tmp_path), progress=lambda _: None, make_room=lambda _: None)
    assert len(left) == 20 - 4


@pytest.mark.parametrize("where", ["socket.create_connection", "http.client.HTTPResponse.read1"])
def test_what_a_signal_handler_raises_is_no_answer(
    where: str, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a time limit of the program's, which the copy from before would hide."""

    def handler(*_: object) -> None:
        raise TimeoutError("the program's own")

    url = web.put("vit.pt", CONTENT)
    monkeypatch.setattr(where, lambda *_, **__: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="the program's own"):
            read(url)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_chunks_that_end_early_are_noticed(web: WebServer) -> None:
    url = web.put("chunked", CONTENT, has_ranges=False, is_chunked=True, cut_bytes=9000)
    with pytest.raises(RemoteUnreachable, match=r"IncompleteRead|not reachable"):
        read(url)


@pytest.mark.parametrize("page", [b"<!DOCTYPE html>", b"\n <HTML>", b"\xef\xbb\xbf<html lang=en>"])
def test_a_page_is_no_model(page: bytes, web: WebServer) -> None:
    """That of a login, to which the server leads; or one about the file, at its name."""
    page += b"log in" * 1000
    web.put("login", page, kind="text/html; charset=utf-8", has_ranges=False)
    url = web.put("vit.PT", status=302, location="/login?next=secret")
    with pytest.raises(RemoteError, match=r"vit\.PT: a web .* from \S*/login, not") as raised:
        read(url)
    assert not isinstance(raised.value, RemoteUnreachable), "asked again, it would be the same"
    with pytest.raises(RemoteError, match=r"blob/vit\.onnx: a web page came"):
        read(web.put("blob/vit.onnx", page, kind="text/html", is_chunked=True))
    assert read(web.put("index.html", page, kind="text/html")) == page
    assert read(web.put("vit.bin", page)) == page, "nobody says that it is a page"


def test_a_model_that_is_called_a_page_is_whole(web: WebServer) -> None:
    url = web.put("vit.pt", CONTENT, kind="text/html")
    assert read(url) == CONTENT
    assert read(url, 0, 100) == CONTENT[:100]
    assert read(url, 5) == CONTENT[5:]
    url = web.put("chunked.pt", CONTENT, kind="text/html", has_ranges=False, is_chunked=True)
    assert read(url) == CONTENT
    assert read(web.put("html.pt", b"<htmlx>", kind="text/html")) == b"<htmlx>"
    within = web.put("within.pt", b"12345<html>", kind="text/html")
    assert read(within, 5) == b"<html>", "a part of it may begin with what looks like a page"


@pytest.mark.parametrize("length", [-1, len(CONTENT)])
def test_a_file_of_unknown_size_may_not_just_end(web: WebServer, length: int) -> None:
    """Nobody would notice that it is cut off."""
    url = web.put("vit.pt", CONTENT, has_ranges=False, length=length, cut_bytes=9000)
    file = RemoteFile("vit.pt", url, None, "", False)
    with pytest.raises(RemoteUnreachable, match="may not be the whole file"):
        list(WebFiles(url).read(file, 0, None))
    web.put("vit.pt", CONTENT, has_ranges=False)
    assert b"".join(WebFiles(url).read(file, 0, None)) == CONTENT


def test_the_text_of_an_error_is_not_the_file(web: WebServer) -> None:
    url = web.put("vit.pt", status=416)
    with pytest.raises(RemoteUnreachable, match="other bytes than were asked for"):
        list(WebFiles(url).read(RemoteFile("vit.pt", url, None, "", False), 0, None))


def test_an_answer_without_the_file_is_none(web: WebServer) -> None:
    """As of firewalls that want to see a browser: nothing, which is no empty file."""
    with pytest.raises(RemoteUnreachable, match="the server says 202 Accepted"):
        looked(web.put("vit.pt", status=202))
    with pytest.raises(RemoteUnreachable, match="the server says 204 No Content"):
        looked(web.put("bert/", status=204))


def test_what_servers_refuse(web: WebServer) -> None:
    with pytest.raises(FileNotFoundError, match="404 Not Found: '") as missing:
        looked(web.url("missing.pt?signature=secret"))
    assert missing.value.errno == errno.ENOENT
    assert missing.value.filename == web.url("missing.pt")
    with pytest.raises(PermissionError, match="403 Forbidden: '") as refused:
        looked(web.put("private", status=403))
    assert refused.value.errno == errno.EACCES
    with pytest.raises(FileNotFoundError, match="410 Gone"):
        looked(web.put("gone.pt", status=410))
    with pytest.raises(PermissionError, match="407 Proxy Authentication Required"):
        looked(web.put("vit.pt", status=407))
    with pytest.raises(RemoteUnreachable, match="500 Internal Server Error"):
        looked(web.put("broken", status=500))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 \x1bc\r\n\r\n",
        b"HTTP/1.1 403 \x1bc\r\n\r\n",
        b"HTTP/1.1 500 \x1bc\r\n\r\n",
        b"\x1bc 200 OK\r\n\r\n",
        b"HTTP/1.1 302 OK\r\nLocation: gopher://\x1bc\r\n\r\n",
        b"HTTP/1.1 302 OK\r\nLocation: http://h:\x1bc/\r\n\r\n",
        b"HTTP/1.1 302 OK\r\nLocation: ftp://h/\x9bc/\r\n\r\n",
    ],
)
def test_messages_do_not_steer_the_terminal(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((OSError, RemoteError)) as raised:
            looked(f"http://127.0.0.1:{server.getsockname()[1]}/x.pt")
        thread.join(60)
    assert str(raised.value).isprintable()
    assert str(getattr(raised.value, "strerror", "")).isprintable()


def test_no_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        port = taken.getsockname()[1]
        with pytest.raises(RemoteUnreachable, match=r"x.pt: not reachable: .*refused"):
            looked(f"http://127.0.0.1:{port}/x.pt?secret")
    with pytest.raises(RemoteUnreachable, match=r"x.pt: not reachable: no host given"):
        looked("http:///x.pt")


@pytest.mark.parametrize("kind", ["http", "https"])
@pytest.mark.parametrize("proxy", ["http://me:secret", "me:secret", "http://me:secret@host:secret"])
def test_a_password_where_a_proxys_port_should_be_is_not_said(
    kind: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was, as the port that is no number."""
    monkeypatch.setenv(f"{kind}_proxy", proxy)
    module._opener.cache_clear()
    try:
        with pytest.raises(RemoteUnreachable, match="in a proxy's setting") as raised:
            looked(f"{kind}://a.example/vit.pt")
    finally:
        module._opener.cache_clear()
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_redirects_are_followed_and_the_name_stays(web: WebServer) -> None:
    web.put("store/0123", CONTENT)
    url = web.put("vit.pt", status=302, location="/store/0123")
    assert looked(url).name == "vit.pt"
    assert looked(url).is_seekable
    assert read(url, 5, 10) == CONTENT[5:10]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_each_kind_of_redirect_is_followed(
    status: int, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 knows no 308."""
    kind = urllib.request.HTTPRedirectHandler
    newer = kind.redirect_request

    def older(self: Any, req: Any, fp: Any, code: int, *rest: Any) -> urllib.request.Request | None:
        if code == 308:
            raise urllib.error.HTTPError(req.full_url, code, "", HTTPMessage(), fp)
        return newer(self, req, fp, code, *rest)

    monkeypatch.setattr(kind, "redirect_request", older)
    monkeypatch.delattr(kind, "http_error_308", raising=False)
    monkeypatch.setattr(module, "_opener", module._opener.__wrapped__)
    web.put("there.pt", CONTENT)
    url = web.put("vit.pt", status=status, location="/there.pt")
    assert read(url) == CONTENT


def test_redirects_without_end_are_named(web: WebServer) -> None:
    url = web.put("vit.pt", status=302, location="/there")
    web.put("there", status=302, location="/vit.pt")
    with pytest.raises(RemoteUnreachable, match=r"vit\.pt: .* 302 Found, and leads .* without end"):
        looked(url)


def test_a_redirect_to_a_local_file_is_refused(web: WebServer) -> None:
    url = web.put("vit.pt", status=302, location="file:///etc/passwd")
    with pytest.raises(RemoteUnreachable, match="302"):
        looked(url)


def test_a_redirect_to_ftp_is_refused(web: WebServer) -> None:
    """Anybody on the way could change what comes; and its answers are not those of a web server."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        place = f"ftp://127.0.0.1:{other.getsockname()[1]}/vit.pt"
        with pytest.raises(RemoteError, match=r"vit.pt leads to ftp://.*name that URL"):
            looked(web.put("vit.pt", status=302, location=place))
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_redirect_from_https_to_http_is_refused() -> None:
    answer = io.BytesIO(b"moved")
    request = urllib.request.Request("https://a.example/vit.pt?secret")
    with pytest.raises(RemoteError, match=r"https://a.example/vit.pt leads to http://b.example/x,"):
        _Redirects().redirect_request(
            request, answer, 302, "Found", HTTPMessage(), "http://b.example/x?secret"
        )
    for kind in ("http", "https"):
        again = _Redirects().redirect_request(
            urllib.request.Request(f"{kind}://a.example/x"),
            answer,
            302,
            "Found",
            HTTPMessage(),
            "https://b.example/x",
        )
        assert again is not None


@pytest.mark.parametrize("kind", ["http", "https"])
def test_a_redirect_by_a_proxy_is_as_safe_as_without(kind: str) -> None:
    request = urllib.request.Request("http://a.example/vit.pt")
    request.set_proxy("proxy.example", kind)
    again = _Redirects().redirect_request(
        request, io.BytesIO(), 302, "Found", HTTPMessage(), "http://b.example/x"
    )
    assert again is not None
    request = urllib.request.Request("https://a.example/vit.pt")
    request.set_proxy("proxy.example", kind)
    with pytest.raises(RemoteError, match="not as safe"):
        _Redirects().redirect_request(
            request, io.BytesIO(), 302, "Found", HTTPMessage(), "http://b.example/x"
        )


@pytest.mark.parametrize("place", ["http://me:secret@127.0.0.1/x", "//me:secret@host:80/x"])
def test_a_redirect_with_a_password_is_refused_without_saying_it(
    place: str, web: WebServer
) -> None:
    with pytest.raises(RemoteError, match=r"vit.pt leads to http://[^ ]*/x with a user") as raised:
        looked(web.put("vit.pt", status=302, location=place))
    assert "secret" not in str(raised.value)


def test_the_body_of_a_redirect_is_not_read(web: WebServer) -> None:
    """It may have no end."""
    web.put("store/0123", CONTENT)
    url = web.put("vit.pt", b"moved", status=302, location="/store/0123", length=1 << 40)
    assert looked(url).size_bytes == len(CONTENT)


def test_passwords_come_from_netrc_and_go_to_their_host_only(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    password = "Basic " + base64.b64encode(b"me:secret").decode()
    url = web.put("private.pt", CONTENT, password=password)
    with pytest.raises(PermissionError, match="401"):
        looked(url)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert looked(url).size_bytes == len(CONTENT)
    assert looked(web.put("here.pt", status=302, location="/private.pt")).name == "here.pt"
    # localhost is another name than the one in .netrc.
    there = web.base.replace("127.0.0.1", "localhost") + "/private.pt"
    with pytest.raises(PermissionError, match="401"):
        looked(web.put("moved.pt", status=302, location=there))


@pytest.mark.parametrize(
    ("url", "found", "is_kept"),
    [
        ("https://a.example/x", "https://A.example:443/y", True),
        ("http://a.example:8080/x", "http://a.example:8080/y", True),
        ("http://a.example/x", "https://a.example/x", True),
        ("http://a.example:80/x", "https://a.example:443/x", True),
        ("https://a.example/x", "https://a.example:8443/x", False),
        ("http://a.example/x", "http://a.example:443/x", False),
        ("http://a.example:8080/x", "https://a.example/x", False),
        ("http://a.example/x", "https://b.example/x", False),
    ],
)
def test_a_password_does_not_go_to_another_port(url: str, found: str, is_kept: bool) -> None:
    """Found: it did, and another user of the host may listen there."""
    request = urllib.request.Request(url)
    request.add_unredirected_header("Authorization", "Basic secret")
    again = _Redirects().redirect_request(request, io.BytesIO(), 302, "Found", HTTPMessage(), found)
    assert again is not None
    assert again.has_header("Authorization") == is_kept


def test_the_default_password_of_netrc_goes_to_no_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would go to all of them; often it is that of ftp (``anonymous``)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = "machine a.example login me password secret\ndefault login me password other\n"
    (tmp_path / ".netrc").write_text(lines)
    (tmp_path / ".netrc").chmod(0o600)
    assert _password("https://a.example/x")
    assert not _password("https://b.example/x")


def test_the_password_of_a_proxy_does_not_go_where_it_leads() -> None:
    """That may be a host that is asked without a proxy."""
    request = urllib.request.Request("http://a.example/vit.pt")
    request.set_proxy("proxy.example", "http")
    request.add_header("Proxy-authorization", "Basic secret")  # as urllib does
    again = _Redirects().redirect_request(
        request, io.BytesIO(), 302, "Found", HTTPMessage(), "https://b.example/x"
    )
    assert again is not None
    assert "Basic secret" not in dict(again.header_items()).values()


def test_why_no_password_was_sent(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that others may read is not taken: the error was that of a wrong password."""
    monkeypatch.setenv("HOME", str(tmp_path))
    url = web.put("private.pt", CONTENT, password="another")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o644)
    with pytest.raises(PermissionError, match=r"401 Unauthorized; ~/.netrc has no password for it"):
        looked(url)
    (tmp_path / ".netrc").chmod(0o600)
    with pytest.raises(PermissionError, match=r"401 Unauthorized: '"):
        looked(url)


@pytest.mark.parametrize(
    ("url", "machine"), [("http://HOST.example:80/x", "host.example"), ("http://[::1]:80/x", "::1")]
)
def test_hosts_in_netrc(
    url: str, machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = f"machine {machine} login me password secret\n"
    (tmp_path / ".netrc").write_text(text)
    (tmp_path / ".netrc").chmod(0o600)
    assert _password(url)
    assert not _password("http://other.example/x")
    (tmp_path / ".netrc").write_bytes(text.encode() + b"machine \xe4 login me password secret\n")
    _password(url)


@pytest.mark.parametrize("name", ["m\u00f6 del+;%.pt", "a%23b?.pt", "a%2520.pt", "a'(b)&c=d.pt"])
def test_names_with_other_characters(name: str, web: WebServer) -> None:
    web.put(f"x/{name}", CONTENT)
    web.put("x/", f'<a href="{quote(name)}">x</a>'.encode())
    (file,) = WebFiles(web.url("x/")).list().files
    assert file.name == f"x/{name}"
    assert looked(web.url(f"x/{quote(name)}")).name == name


PAGE = b"""<![x[ a comment ]]> <![]>
<html><a href="../">up</a> <a href="?C=N;O=D">Name</a> <a href="/">top</a>
<a href="config.json">x</a> <a href='with%20space.bin'>x</a> <a href="config.json">again</a>
<a href="below/">below/</a> <a href="http://elsewhere.example/x.bin">x</a> <a name="here">x</a>
<link href="style.css"> <a href="http://[host]/">no URL</a> <a href="//[">none</a>"""


def test_what_is_no_text_on_the_command_line_is_asked_for_as_its_bytes(web: WebServer) -> None:
    """Python gives such arguments as it gives such names of files: as surrogates."""
    url = web.put("m\u00f6del.pt", CONTENT)
    assert read(url.encode().decode("ascii", "surrogateescape")) == CONTENT


def test_a_folder_is_what_its_page_links_to(web: WebServer) -> None:
    url = web.put("bert/", PAGE)
    for name in ("config.json", "with space.bin", "below/a.bin", "below/deep/b.bin"):
        web.put(f"bert/{name}", CONTENT)
    web.put("bert/below/", b'<a href="a.bin">a</a><a href="deep/">deep</a><a href="../">up</a>')
    web.put("bert/below/deep/", f'<a href="{web.url("bert/below/deep/b.bin")}">b</a>'.encode())
    listing = WebFiles(url).list()
    assert {file.name for file in listing.files} == {
        "bert/config.json",
        "bert/with space.bin",
        "bert/below/a.bin",
        "bert/below/deep/b.bin",
    }
    assert listing.is_folder


@pytest.mark.parametrize("path", ["models//bert/", "/models/bert/", "models/x/../bert/", "?C=M"])
def test_a_folder_whose_url_is_unlike_its_links(path: str, web: WebServer) -> None:
    """Links are resolved to the shortest form of a URL, which servers treat alike."""
    folder = "models/bert/"
    page = b'<a href="a.bin">a</a><a href="below/">below</a>'
    web.put(path.lstrip("/"), page)
    web.put(folder, page)
    web.put(folder + "below/", b'<a href="b.bin">b</a>')
    web.put(folder + "a.bin", CONTENT)
    web.put(folder + "below/b.bin", CONTENT)
    url = web.url(folder + path if path.startswith("?") else path).replace("http", "HTTP", 1)
    names = [file.name for file in WebFiles(url).list().files]
    assert names == ["bert/a.bin", "bert/below/b.bin"]


@pytest.mark.parametrize("links", ["a.bin {}", "/v2/a.bin /v2/{}", "./a.bin {base}/v2/{}"])
def test_a_folder_that_has_moved_is_read_where_it_is(links: str, web: WebServer) -> None:
    """Links begin there, as in a browser; names stay those that were asked for."""
    words = links.format("below/", base=web.base).split()
    web.put("v2/", "".join(f'<a href="{word}">x</a>' for word in words).encode())
    web.put("v2/a.bin", CONTENT)
    web.put("v2/below/", status=302, location="/other/")
    web.put("other/", b'<a href="b.bin">b</a><a href="/v2/below/c.bin">away</a>')
    web.put("other/b.bin", CONTENT)
    url = web.put("bert/", status=301, location="/v2/")
    files = WebFiles(url).list().files
    assert [(file.name, file.place) for file in files] == [
        ("bert/a.bin", web.url("v2/a.bin")),
        ("bert/below/b.bin", web.url("other/b.bin")),
    ]


@pytest.mark.parametrize("place", ["login", "login/?next=/my/bert/", ""])
def test_a_page_that_is_no_folder_is_not_taken_for_one(place: str, web: WebServer) -> None:
    """Its links would be taken for the files."""
    web.put(place.partition("?")[0], b'<a href="help.html">x</a>')
    for folder in ("", "my/", "my/bert/", "login/"):
        web.put(f"{folder}help.html", b"help")
    url = web.put("my/bert/", status=302, location=f"/{place}")
    with pytest.raises(RemoteError, match=r"bert/ leads to http://[^?]*, which may be something"):
        WebFiles(url).list()
    with serving() as other:
        other.put(place.partition("?")[0], b'<a href="help.html">x</a>')
        web.put("my/bert/", status=302, location=other.url(place))
        with pytest.raises(RemoteError, match=r"bert/ leads to http://"):
            WebFiles(url).list()


def test_a_folder_that_leads_to_the_one_above_is_not_that(web: WebServer) -> None:
    """All the others would be taken for its files, or itself again without end."""
    page = b'<a href="a.bin">x</a><a href="bert/">x</a>'
    url = web.put("my/", page)
    web.put("my/a.bin", CONTENT)
    web.put("my/bert/", status=302, location="/my/")
    for each in (url, f"{url}bert/"):
        with pytest.raises(RemoteError, match=r"/my/bert/ leads to http://\S*/my/, which may be"):
            WebFiles(each).list()


@pytest.mark.parametrize("place", ["", "?C=N", "my%20models/?C=N"])
def test_a_folder_at_another_host_may_be_the_whole_server(place: str, web: WebServer) -> None:
    """As one that leads from http to https; with the query of its page."""
    path = unquote(place).partition("?")[0]
    web.put(path, b'<a href="a.bin">x</a>')
    web.put(f"{path}a.bin", CONTENT)
    with serving() as other:
        other.put(path, status=301, location=web.url(place))
        (file,) = WebFiles(other.url(place)).list().files
    assert file.place == web.url(f"{place.partition('?')[0]}a.bin")


def test_another_page_of_the_same_folder_lists_it(web: WebServer) -> None:
    url = web.put("my models/", status=302, location="/my%20models/index.html?C=N")
    web.put("my models/index.html", b'<a href="a.bin">x</a>')
    web.put("my models/a.bin", CONTENT)
    assert [file.name for file in WebFiles(url).list().files] == ["my models/a.bin"]


@pytest.mark.parametrize("folder", ["~me/(my models)/", "%7Eme/%28my%20models%29/"])
def test_links_may_be_escaped_otherwise_than_the_url_of_their_folder(
    folder: str, web: WebServer
) -> None:
    """Absolute links, as Tomcat's and IIS' are; beside the first, which is the same file."""
    links = ("/~me/%28my%20models%29/a.bin", "/%7eme/(my%20models)/a.bin", "caf%e9.bin")
    web.put("~me/(my models)/", "".join(f'<a href="{link}">x</a>' for link in links).encode())
    web.put("~me/(my models)/a.bin", CONTENT)
    web.put("~me/(my models)/caf\ufffd.bin", CONTENT)
    names = [file.name for file in WebFiles(web.url(folder)).list().files]
    assert names == ["(my models)/a.bin", "(my models)/caf\udce9.bin"]


def test_files_of_a_folder_are_looked_at_together(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.bin" for number in range(2 * STREAMS)]
    links = "".join(f'<a href="{name}">x</a>' for name in names)
    url = web.put("bert/", links.encode())
    for name in names:
        web.put(f"bert/{name}", b"1234")
    together = threading.Barrier(STREAMS)
    look = WebFiles._look

    def waiting(self: WebFiles, url: str, name: str) -> RemoteFile:
        together.wait(30)
        return look(self, url, name)

    monkeypatch.setattr(WebFiles, "_look", waiting)
    assert [file.name for file in WebFiles(url).list().files] == [f"bert/{n}" for n in names]


@pytest.mark.parametrize(("error", "times"), [(RemoteUnreachable, 2), (GivenUp, 1)])
def test_a_connection_that_breaks_does_not_end_the_look_at_a_folder(
    error: type[RemoteUnreachable], times: int, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of a folder takes one. Of a server that is busy, enough has been asked."""
    url = web.put("bert/", b'<a href="vit.pt">x</a>')
    web.put("bert/vit.pt", CONTENT)
    look = WebFiles._look
    asked: list[str] = []

    def breaking(self: WebFiles, url: str, name: str) -> RemoteFile:
        asked.append(name)
        if len(asked) == 1:
            raise error("it broke")
        return look(self, url, name)

    monkeypatch.setattr(WebFiles, "_look", breaking)
    with pytest.raises(GivenUp) if error is GivenUp else contextlib.nullcontext():
        assert len(WebFiles(url).list().files) == 1
    assert asked == ["bert/vit.pt"] * times


def test_a_folder_that_is_asked_for_without_its_slash_is_no_file(web: WebServer) -> None:
    """The server leads to the page that lists it."""
    web.put("my models/", PAGE, kind="text/html; charset=utf-8")
    web.put("model/", CONTENT, kind="application/octet-stream")
    url = web.put("my models", status=301, location="/my%20models/")
    with pytest.raises(RemoteError, match="my models is a folder there; write a slash at its end"):
        looked(url)
    assert looked(web.put("model", status=301, location="/model/")).name == "model"


@pytest.mark.parametrize("link", ["..%2f..%2fx", "%2e%2e/x", "a%00b", "%2fetc%2fpasswd"])
def test_a_folder_with_hostile_names_is_refused(web: WebServer, link: str) -> None:
    url = web.put("bert/", f'<a href="{link}">x</a>'.encode())
    for path in ("bert/../../x", "bert/../x", "bert/a\0b", "bert//etc/passwd"):
        web.put(path, CONTENT)
    with pytest.raises(RemoteError, match=r"no name for a file|no link to a file"):
        WebFiles(url).list()


def test_a_page_that_is_too_long_is_not_cut_off(web: WebServer) -> None:
    web.put("long/a", CONTENT)
    page = b'<a href="a">a</a>' + b" " * (4 << 20) + b'<a href="b">b</a>'
    with pytest.raises(RemoteError, match="too long for a list"):
        WebFiles(web.put("long/", page)).list()


def test_many_links_of_a_page_with_a_long_url_take_no_more_memory(web: WebServer) -> None:
    """A page of 4 MiB may have 400000 of them."""
    place = "a/" * 15_000
    web.put(place, "".join(f'<a href="../{number}">x</a>' for number in range(1000)).encode())
    url = web.put("bert/", status=302, location=f"/{place}")
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError, match="no link to a file"):
            WebFiles(url).list()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 << 20, "where they lead is 30 MB"


def test_folders_in_folders_with_long_names_are_not_asked_for(web: WebServer) -> None:
    """With names of 1 MiB, those of 40 in each other would be 1 GB."""
    page = b'<a href="' + b"a" * 3000 + b'/">x</a>'
    url = web.put("deep/", page)
    web.put("deep/" + "a" * 3000 + "/", page)
    with pytest.raises(RemoteError, match="no name for a file"):
        WebFiles(url).list()
    assert web.asked["body"] == 1


def test_a_page_in_another_encoding_is_read(web: WebServer) -> None:
    """Its text may be anything; names in links are of ASCII, or escaped."""
    web.put("latin/a", CONTENT)
    url = web.put("latin/", b'<h1>Mod\xe8les</h1><a href="a">\xe9</a>')
    assert [file.name for file in WebFiles(url).list().files] == ["latin/a"]


def test_a_page_that_is_cut_off_is_no_list(web: WebServer) -> None:
    web.put("cut/a", CONTENT)
    page = b'<a href="a">a</a>' + b" " * 100 + b'<a href="b">b</a>'
    with pytest.raises(RemoteUnreachable, match="may not be the whole page"):
        WebFiles(web.put("cut/", page, cut_bytes=50, length=len(page))).list()
    # As an answer is that ends within its headers; those that were to come are not missed.
    with pytest.raises(RemoteUnreachable, match="may not be the whole page"):
        WebFiles(web.put("cut/", b"", length=-1)).list()


def test_a_folder_of_as_many_files_as_may_be_is_read(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was refused, as it counted itself."""
    monkeypatch.setattr(module, "_FOLDER_LIMIT", 3)
    for name in "abcd":
        web.put(f"bert/{name}", CONTENT)
    links = [f'<a href="{name}">x</a>' for name in "abcd"]
    url = web.put("bert/", "".join(links[:3]).encode())
    assert len(WebFiles(url).list().files) == 3
    web.put("bert/", "".join(links).encode())
    with pytest.raises(RemoteError, match="more than 3 files"):
        WebFiles(url).list()


def test_a_folder_without_files_and_one_without_end(web: WebServer) -> None:
    with pytest.raises(RemoteError, match="no link to a file"):
        WebFiles(web.put("none/", b"<html>hello")).list()
    links = "".join(f'<a href="{number}/">x</a>' for number in range(3000))
    with pytest.raises(RemoteError, match="more than 2000 files"):
        WebFiles(web.put("many/", links.encode())).list()
