"""What parallel reads of a remote file gain and cost: ``python -m benchmarks.remote``.

A web server of another process gives each connection so many bytes a second, after a pause, as
object stores do; or as many as it can. Each figure is the median of alternating downloads of one
file (``--size-mb``), checked and with its fsync, as ``trims fetch`` does them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socketserver
import statistics
import tempfile
import time
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection

import trims_shim
from trims_shim.remote import streams, web

SERVERS = ((20.0, 0.05), (50.0, 0.03), (100.0, 0.03), (0.0, 0.03), (0.0, 0.0))
"""MB a second for each connection (0: no limit), and seconds before the first byte."""
STREAMS = (1, 4, 8, 16)
_PIECE_BYTES = 1 << 18


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        _, rate, pause, path = self.path.partition("?")[0].split("/", 3)
        time.sleep(float(pause))
        with open("/" + path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last = 0, size - 1
            if asked := self.headers.get("Range"):
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                last = min(last, size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("ETag", f'"{path}"')
            self.end_headers()
            self.wfile.flush()
            begin, at = time.monotonic(), first
            while at <= last:
                length = min(_PIECE_BYTES, last + 1 - at)
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, length)
                if float(rate):
                    due_s = begin + (at - first) / float(rate) / 1e6
                    time.sleep(max(0.0, due_s - time.monotonic()))


class _Server(socketserver.ForkingTCPServer):
    request_queue_size = 128


def _serve(ready: Connection) -> None:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        ready.send(server.server_address[1])
        server.serve_forever(poll_interval=0.05)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="trims-remote-")
    os.environ["TRIMS_CACHE_DIR"] = os.path.join(directory, "cache")
    path = os.path.join(directory, "model.bin")
    with open(path, "wb") as file:
        for _ in range(arguments.size_mb):
            file.write(os.urandom(1 << 20))
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(theirs,))
    server.start()
    try:
        print("MB/s and pause of a connection | " + " | ".join(f"{n} streams" for n in STREAMS))
        base = f"http://127.0.0.1:{ours.recv()}"
        for rate, pause in SERVERS:
            print(f"{rate or 'no limit'}, {pause} s | " + _row(base, rate, pause, path, arguments))
    finally:
        server.terminate()
        server.join()
        shutil.rmtree(directory)


def _row(base: str, rate: float, pause: float, path: str, how: argparse.Namespace) -> str:
    took: dict[int, list[float]] = {each: [] for each in STREAMS}
    for number in range(how.repeats):
        for count in STREAMS:
            streams.STREAMS = count
            web.WebFiles.is_concurrent = count > 1
            start = time.monotonic()
            # The query makes it another file, which is not there yet.
            copy = trims_shim.fetch(f"{base}/{rate}/{pause}{path}?{number},{count}")
            took[count].append(time.monotonic() - start)
            os.unlink(copy)  # As this process lives, the budget does not apply.
    speeds = (how.size_mb * 1.048576 / statistics.median(each) for each in took.values())
    return " | ".join(f"{speed:.0f} MB/s" for speed in speeds)


if __name__ == "__main__":
    main()
