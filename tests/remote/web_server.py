"""A web server of this process, with the faults that servers and networks have."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

PIECE_BYTES = 1 << 16


@dataclass
class Served:
    """A file, and how it is served.

    ``cut_bytes``: the connection ends after so many bytes of a body, ``cuts`` times. ``length``:
    what Content-Length says instead of the truth. ``rate``: bytes a second for each connection.
    ``gate``: bodies wait for it. ``tag``: None for the content's hash. ``date``: Last-Modified.
    ``body_tag``: the tag that all answers have but those to looks; None for the same.
    ``shift``: bodies begin so much later than they should. ``password``: of the header. ``busy``:
    the Retry-After (None for none) of as many answers before those of ``status``.
    """

    content: bytes = b""
    status: int = 200
    busy: list[str | None] = field(default_factory=list)
    has_ranges: bool = True
    tag: str | None = None
    date: str = ""
    body_tag: str | None = None
    shift: int = 0
    location: str = ""
    cut_bytes: int = -1
    cuts: int = 1 << 30
    length: int | None = None
    is_chunked: bool = False
    rate: float = 0.0
    gate: threading.Event | None = None
    password: str = ""
    kind: str = ""
    """Content-Type."""
    encoding: str = ""
    """Content-Encoding."""
    odd_one: bytes = b""
    """What the second body is of: one of the servers behind this name has another version."""
    changes_to: list[bytes] = field(default_factory=list)
    """What it holds from the next bodies on, each of which is still of the one before."""

    @property
    def etag(self) -> str:
        return etag_of(self.content) if self.tag is None else self.tag


def etag_of(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


class WebServer:
    """``files`` by path; ``asked`` counts requests: ``look`` for one byte or none, ``body``."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.files: dict[str, Served] = {}
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"

    def put(self, path: str, content: bytes = b"", **how: object) -> str:
        """Serve a file; its URL."""
        self.files[path] = Served(content, **how)  # type: ignore[arg-type]
        return self.url(path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    world: ClassVar[WebServer]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        served = self.world.files.get(path, Served(status=404))
        if served.busy:
            after = served.busy.pop(0)
            later = {} if after is None else {"Retry-After": after}
            self._begin(429, {"Content-Length": "0", **later})
        elif served.status != 200:
            location = {"Location": served.location} if served.location else {}
            self._begin(served.status, {"Content-Length": str(served.length or 0), **location})
        elif served.password and self.headers.get("Authorization") != served.password:
            self._begin(401, {"Content-Length": "0"})
        else:
            self._serve(served)

    def _serve(self, served: Served) -> None:
        content, etag = served.content, served.etag
        first, last, status = 0, len(content), 200
        known = {
            "ETag": etag,
            "Last-Modified": served.date,
            "Content-Type": served.kind,
            "Content-Encoding": served.encoding,
        }
        headers = {name: value for name, value in known.items() if value}
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        is_look = asked == "0-0"
        if served.body_tag is not None and not is_look:
            headers["ETag"] = served.body_tag
        with self.world.lock:
            self.world.asked["look" if is_look else "body"] += 1
            if served.odd_one and self.world.asked["body"] == 2 and not is_look:
                content, served.odd_one = served.odd_one, b""
                headers["ETag"] = etag_of(content)
        if asked and served.has_ranges:
            if not content:
                self._begin(416, {"Content-Range": "bytes */0", "Content-Length": "5"})
                self.wfile.write(b"empty")
                return
            start, _, end = asked.partition("-")
            first, last = int(start), min(int(end) + 1, len(content))
            if not is_look:
                first, last = first + served.shift, last + served.shift
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(content)}"
        if served.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif served.length != -1:
            length = last - first if served.length is None else served.length
            headers["Content-Length"] = str(length)
        self._begin(status, headers)
        if served.gate is not None and not is_look:
            served.gate.wait(60)
        if not is_look and served.changes_to:
            served.content = served.changes_to.pop(0)
        self._send(served, content[first:last])

    def _send(self, served: Served, body: bytes) -> None:
        is_cut = served.cuts > 0 and 0 <= served.cut_bytes < len(body)
        if is_cut:
            served.cuts -= 1
            body = body[: served.cut_bytes]
        begin = time.monotonic()
        for at in range(0, len(body), PIECE_BYTES):
            piece = body[at : at + PIECE_BYTES]
            frame = b"%x\r\n%b\r\n" % (len(piece), piece) if served.is_chunked else piece
            self.wfile.write(frame)
            if served.rate:
                due_s = begin + (at + len(piece)) / served.rate
                time.sleep(max(0.0, due_s - time.monotonic()))
        if is_cut or served.length is not None:
            self.close_connection = True
        elif served.is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that leaves in the middle is no error here."""


@contextmanager
def serving() -> Iterator[WebServer]:
    """A server until the end of the block."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    handler.world = world = WebServer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield world
    finally:
        for served in world.files.values():
            if served.gate is not None:
                served.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
