"""Sessions in threads, forked and spawned processes, and at the end of a program."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnxruntime

from .forked import described_here, in_forked_child
from .registry import Work, case, cases
from .sessions import described, made, model_file, options, ran

Session = onnxruntime.InferenceSession


@cases({"one_model": 1, "three_models": 3}, served=True)
def threads_make_sessions(work: Work, count: int) -> object:
    samples = [made("transformer", seed=100 + number) for number in range(count)]
    paths = [model_file(work, each, f"{n}.onnx") for n, each in enumerate(samples)]

    def make(number: int) -> Any:
        given = options()
        given.add_session_config_entry("own.key", "1")
        session = Session(paths[number % count], given)
        return ran(session, samples[number % count].feeds)

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(make, range(18)))


@case(served=True)
def threads_share_a_session(work: Work) -> object:
    sample = made("recogniser", seed=100)
    session = Session(model_file(work, sample), options())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ran(session, sample.feeds), range(12)))
    return [results, threading.active_count()]


@case(served=True)
def child_uses_the_parents_session(work: Work) -> object:
    """One thread: onnxruntime's pools do not survive a fork."""
    sample = made("transformer", seed=100)
    session = Session(model_file(work, sample), options())
    child = in_forked_child(lambda: [ran(session, sample.feeds), described(session)])
    return [child, ran(session, sample.feeds)]


@case(served=True)
def child_makes_its_own_session(work: Work) -> object:
    sample = made("transformer", seed=100)
    path = model_file(work, sample)
    first = ran(Session(path, options()), sample.feeds)
    child = in_forked_child(lambda: ran(Session(path, options()), sample.feeds))
    grandchild = in_forked_child(
        lambda: in_forked_child(lambda: ran(Session(path, options()), sample.feeds))
    )
    return [first, child, grandchild, ran(Session(path, options()), sample.feeds)]


@case()
def child_makes_the_first_session(work: Work) -> object:
    sample = made("transformer", seed=100)
    path = model_file(work, sample)
    child = in_forked_child(lambda: ran(Session(path, options()), sample.feeds))
    return [child, ran(Session(path, options()), sample.feeds)]


@case(served=True)
def parent_drops_while_child_runs(work: Work) -> object:
    sample = made("transformer", seed=100)
    path = model_file(work, sample)
    session = Session(path, options())
    go, going = os.pipe()
    answers, answering = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(go, 1)
            os.write(answering, json.dumps(described_here(ran(session, sample.feeds))).encode())
        finally:
            os._exit(0)
    del session
    os.write(going, b"x")
    os.waitpid(pid, 0)
    return [json.loads(os.read(answers, 1 << 20)), ran(Session(path, options()), sample.feeds)]


def _spawned(path: str, kind: str, seed: int, target: str) -> None:
    sample = made(kind, seed)
    with open(target, "w") as file:
        json.dump(described_here(ran(Session(path, options()), sample.feeds)), file)


@case(served=True)
def multiprocessing_children(work: Work) -> object:
    sample = made("transformer", seed=100)
    path = str(model_file(work, sample))
    own = ran(Session(path, options()), sample.feeds)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_spawned, args=(path, "transformer", 100, f"seen{number}.json"))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(50)
    seen = []
    for number in range(2):
        with open(f"seen{number}.json") as file:
            seen.append(json.load(file))
    return [own, seen, [process.exitcode for process in processes]]


PROGRAM = """
import atexit, sys
if sys.argv[1] == "1":
    import trims_shim
import numpy, onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
feed = {"x": numpy.ones((2, 64), numpy.float32), "ids": numpy.arange(2)}
print(session.run(None, feed)[0].tobytes().hex(), flush=True)
"""
ENDS = {
    "at_exit": (
        "session.own = session\n"
        "atexit.register(lambda: print(session.run(None, feed)[0].sum()))\n"
        "raise KeyError('an error')\n"
    ),
    "thread": (
        "import threading\n"
        "def work():\n    for _ in range(200): session.run(None, feed)\n    print('done')\n"
        "threading.Thread(target=work).start()\n"
    ),
}


@case(timeout_s=120.0)
def ends_of_a_program(work: Work) -> object:
    """Standard output, standard error and exit code, whatever way it ends."""
    model_file(work, made(seed=100))
    shimmed = os.environ["TRIMS_ENABLED"]
    seen: dict[str, object] = {}
    for name, end in ENDS.items():
        path = work.file(f"{name}.py", lambda path, end=end: path.write_text(PROGRAM + end))
        command = [sys.executable, str(path), shimmed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        seen[name] = [done.returncode, done.stdout, done.stderr]
    return seen
