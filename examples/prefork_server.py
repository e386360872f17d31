"""A pre-forking server like gunicorn: every worker loads the model, memory holds it once.

    python examples/prefork_server.py                  # with the cache
    TRIMS_ENABLED=0 python examples/prefork_server.py  # each worker with a copy of its own

The parent opens a port and forks workers; each worker loads the model after the fork and answers
HTTP requests. The parent sends requests until every worker has answered, and prints how much of the
machine's memory the workers take together (the sum of their proportional set sizes).
``import trims_shim`` is the only line about trims.
"""

import hashlib
import http.client
import json
import os
import signal
import socket
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
from torch import nn

import trims_shim  # noqa: F401

CHECKPOINT = Path(tempfile.gettempdir()) / f"trims-example-server-{os.getuid()}.pt"
WORKERS = 3
LAYERS, WIDTH = 8, 2048
REQUEST_LIMIT_S = 60


def build() -> nn.Module:
    """A perceptron of about 130 MB."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers).eval()


def make_checkpoint() -> None:
    """Write the checkpoint in a child, so that the parent has never used torch's threads."""
    if CHECKPOINT.exists():
        return
    if os.fork() == 0:
        torch.manual_seed(0)
        unfinished = CHECKPOINT.with_suffix(f".{os.getpid()}")
        torch.save(build().state_dict(), unfinished)
        unfinished.rename(CHECKPOINT)
        os._exit(0)
    os.wait()


def load_model() -> nn.Module:
    """The model with its weights, without an initialisation that would be overwritten."""
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(CHECKPOINT), assign=True)
    return model


class Handler(BaseHTTPRequestHandler):
    """Answers with a checksum of the model's output, the worker's pid and its memory."""

    model: nn.Module

    def do_GET(self) -> None:
        """Run the model once."""
        with torch.no_grad():
            output = self.model(torch.linspace(0, 1, WIDTH))
        checksum = hashlib.sha256(output.numpy().tobytes()).hexdigest()[:16]
        body = json.dumps({"pid": os.getpid(), "answer": checksum}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No access log."""


def work(listener: socket.socket) -> None:
    """Serve requests from the socket that all workers share."""
    Handler.model = load_model()
    server = HTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket = listener
    server.serve_forever()


def proportional_bytes(pid: int) -> int:
    """Memory of a process, with shared pages divided among the processes that map them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss for process {pid}")


def ask(port: int, answers: list[dict[str, str]]) -> None:
    """Add the answer to one request, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
    try:
        connection.request("GET", "/")
        answers.append(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def ask_until_all_answered(port: int, workers: list[int]) -> set[str]:
    """The distinct answers; each round sends one request per worker at the same time."""
    seen: dict[int, str] = {}
    deadline = time.monotonic() + REQUEST_LIMIT_S
    while set(seen) != set(workers):
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(seen)} of {len(workers)} workers answer")
        answers: list[dict[str, str]] = []
        threads = [threading.Thread(target=ask, args=(port, answers)) for _ in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen |= {int(answer["pid"]): answer["answer"] for answer in answers}
    return set(seen.values())


def main() -> None:
    """Fork workers, ask them, report."""
    make_checkpoint()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4 * WORKERS)
    workers = []
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            work(listener)
        workers.append(pid)
    try:
        answers = ask_until_all_answered(listener.getsockname()[1], workers)
        together = sum(proportional_bytes(pid) for pid in workers)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        listener.close()
    print(f"workers          {WORKERS}, all answered")
    print(f"model            {CHECKPOINT.stat().st_size / 1e6:8.0f} MB")
    print(f"memory together  {together / 1e6:8.0f} MB")
    print(f"answers          {' '.join(sorted(answers))}")


if __name__ == "__main__":
    main()
