"""A process that gives way has a low priority of everything, and its threads do too."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trims_shim.daemon import background

CODE = """\
import json, os, resource, threading
from trims_shim.daemon import background
background.{call}()
policies = []
thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(json.dumps([
    os.getpriority(os.PRIO_PROCESS, 0),
    os.sched_getscheduler(0),
    policies[0],
    open("/proc/self/oom_score_adj").read().strip(),
    list(resource.getrlimit(resource.RLIMIT_CORE)),
]))
"""


def outcome(call: str, *, has_session: bool = True) -> list[object]:
    """(nice, policy, policy of a thread, first to be killed, core files) of a process."""
    root = Path(background.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(call=call)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root), "TRIMS_ENABLED": "0"},
        start_new_session=has_session,
    )
    return list(json.loads(done.stdout))


def own() -> list[object]:
    score = Path("/proc/self/oom_score_adj").read_text().strip()
    policy = os.sched_getscheduler(0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return [nice, policy, policy, score, list(resource.getrlimit(resource.RLIMIT_CORE))]


def test_giving_way() -> None:
    batch = os.SCHED_BATCH
    assert outcome("give_way") == [10, batch, batch, *own()[3:]]


def test_others_of_the_session_keep_their_priority() -> None:
    """Where autogroups are on, nice is of a whole session, this test's included."""
    group = Path("/proc/self/autogroup")
    if not group.exists():
        pytest.skip("this kernel has no autogroups")
    before = group.read_text()
    outcome("give_way", has_session=False)
    assert group.read_text() == before


def test_being_expendable() -> None:
    assert outcome("be_expendable") == [*own()[:3], "1000", [0, 0]]


def test_a_kernel_that_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    for name in ("setpriority", "sched_setscheduler"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(background, "open", refuse, raising=False)
    monkeypatch.setattr(background, "_IOPRIO_SET", {})
    monkeypatch.setattr(background, "_SET_MEMPOLICY", {})
    background.give_way()
    background.be_ordinary()
    background.be_expendable()
