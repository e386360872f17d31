"""Files whose server is gone cost those who load them, and nobody else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import World, content, process_state, wait_until

from faults.dead_server import DeadServer
from trims_shim.daemon.loader import CONCURRENT_LOADS


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DeadServer]:
    try:
        server = DeadServer(str(tmp_path))
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield server
    server.close()


def test_loads_of_dead_files_keep_nobody_waiting(server: DeadServer, running: World) -> None:
    pid, path = running.pid(), running.file(1)
    clients = []
    for number in range(CONCURRENT_LOADS + 1):
        hung = os.path.join(server.path, str(number))
        clients.append(running.spawn(f"say('begun'); open_file({hung!r})"))
        assert clients[-1].hear() == "begun"
    wait_until(lambda: server.reads >= CONCURRENT_LOADS, "all threads read")
    began = time.monotonic()
    assert running.run(f"arena = open_file({path!r}); say(len(data(arena)))") == len(content(1))
    assert time.monotonic() - began < 25, "as long as it takes until loads are given up"
    assert running.pid() == pid

    # Nor do they keep the daemon from stopping.
    for client in clients:
        client.kill()
    running.signal(pid, signal.SIGTERM)
    wait_until(lambda: process_state(pid) in ("", "Z"), "the daemon ends")
