"""Every example runs, as it is and through the cache, with the same answers.

Each runs in a subprocess with a deadline, a temp directory and a daemon of this module's own; the
daemon is stopped at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LIMIT_S = 300
UNMODIFIED = (
    "torch_unmodified.py",
    "safetensors_unmodified.py",
    "transformers_local.py",
    "gpu_unmodified.py",
)
BATCHING = (
    "threads.py",
    "asyncio_padding.py",
    "staged.py",
    "generation.py",
)
HAS_ONNX = importlib.util.find_spec("onnx") is not None
HAS_FASTAPI = importlib.util.find_spec("fastapi") is not None
RESULT_LINES = ("answer", "sum of weights", "same tensor")
"""Starts of the lines that must not depend on how weights were loaded."""

PROGRAMS = """
import runpy, sys
for program in {programs!r}:
    print("#", program, flush=True)
    runpy.run_path(program, run_name="__main__")
if "trims_shim" in sys.modules:
    print("served by the cache:", sys.modules["trims_shim"].stats().served)
"""
"""One after the other, since most of what an example takes are its imports."""

ASKED = """
import asyncio, json, os, sys
from urllib.parse import urlencode

sys.path.insert(0, "examples/batching")
from fastapi_server import app, classify

classify.update(slo_ms=60_000)  # a busy machine drops none

async def ask(path, **query):
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "headers": [],
        "query_string": urlencode(query).encode(), "client": None, "server": None,
    }
    sent = []
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}
    async def send(message):
        sent.append(message)
    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(each.get("body", b"") for each in sent[1:]))

async def work():
    points = [{"x": x / 4, "y": y / 4} for x in range(-4, 5) for y in range(-4, 5)]
    paths = ["/classify", "/classify-in-thread"]
    found = await asyncio.gather(*(ask(path, **each) for path in paths for each in points))
    worker = await ask("/worker")
    while sum(int(size) * count for size, count in worker["batches"].items()) < len(found):
        await asyncio.sleep(0.01)  # a batch is counted just after its answers are there
        worker = await ask("/worker")
    return {"answers": [each["class"] for each in found], **worker}

for _ in range(2):
    pid = os.fork()
    if pid == 0:
        print(json.dumps(asyncio.run(asyncio.wait_for(work(), 120))), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print(json.dumps(asyncio.run(asyncio.wait_for(work(), 120))))
"""
"""A master that has loaded the application, two workers that it forks, and then itself."""

MADE_AGAIN = """
import os
from fastapi_server import CHECKPOINT, load_model, make_checkpoint

first = os.stat(CHECKPOINT)
make_checkpoint()
print(os.path.samestat(first, os.stat(CHECKPOINT)))
lock = CHECKPOINT.with_suffix(".lock")
lock.unlink()
lock.mkdir()  # as another user's, it cannot be opened
load_model()
lock.rmdir()
"""
"""What a second worker does that started at the same moment, and then one of another user."""

BROKEN_OFF = """
import os, runpy, tempfile
import onnx, safetensors.torch, torch, transformers

def save(*arguments):
    path = arguments[-1]
    os.mkdir(path) if os.path.basename(path).startswith("trims-example-bert") else open(path, "x")
    raise KeyboardInterrupt

torch.save = safetensors.torch.save_file = onnx.save = save
transformers.BertModel.save_pretrained = save
for program in {programs!r}:
    pid = os.fork()
    if pid == 0:
        members = runpy.run_path(program)
        members.get("make_checkpoint", members["main"])()
        os._exit(0)
    os.waitpid(pid, 0)
    print(*sorted(os.listdir(tempfile.gettempdir())))
"""
"""The first runs of programs that are interrupted while they write their models."""

Run = Callable[..., str]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Variables that lead to a daemon and a temp directory of this module."""
    directory = Path(tempfile.mkdtemp(prefix="trims-ex-"))  # short: socket paths are limited
    sockets = directory / "s"
    sockets.mkdir(mode=0o700)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRIMS_")}
    variables = inherited | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(directory),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "TRIMS_SOCKET_DIR": str(sockets),
        "TRIMS_START_TIMEOUT": "60",
        "TRIMS_STALL_TIMEOUT": "60",
        # Low, the default, is a tenth of what each other test on this machine gets.
        "TRIMS_PREPARE_PRIORITY": "normal",
    }
    try:
        yield variables
    finally:
        stop = [sys.executable, "-m", "trims_shim", "stop"]
        subprocess.run(stop, env=variables, cwd=ROOT, timeout=LIMIT_S, check=False)
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Run:
    """Run Python with these arguments and return what it prints."""

    def run(*arguments: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def results(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(RESULT_LINES)]


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


def test_unmodified_programs_give_the_same_results_with_trims(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "programs.py"
    program.write_text(PROGRAMS.format(programs=[str(EXAMPLES / name) for name in UNMODIFIED]))
    plain = run(str(program), TRIMS_ENABLED="0")
    assert len(results(plain)) >= len(UNMODIFIED)
    first = run("-m", "trims_shim", "run", str(program))
    second = run("-m", "trims_shim", "run", str(program))
    assert results(plain) == results(first) == results(second)
    assert number(r"served by the cache: (\d+)", second) >= len(UNMODIFIED)


@pytest.fixture(scope="module")
def unfinished(run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of what programs leave whose first run is interrupted while they write a model."""
    if not HAS_ONNX:
        pytest.skip("needs onnx")
    names = (*UNMODIFIED, "onnx_unmodified.py", "prefork_server.py", "numpy_records.py")
    programs = [str(EXAMPLES / name) for name in names]
    directory = tmp_path_factory.mktemp("unfinished")
    output = run("-c", BROKEN_OFF.format(programs=programs), TMPDIR=str(directory))
    files = [name for name in os.listdir(directory) if name.startswith("trims-example-")]
    assert len(files) == len(names), output
    return files


def test_a_first_run_that_is_interrupted_leaves_no_part_of_a_model(unfinished: list[str]) -> None:
    """Found: each run after that failed on the broken file."""
    assert all(re.search(r"\.\d+$", name) for name in unfinished), unfinished


def test_each_user_has_files_of_their_own(unfinished: list[str]) -> None:
    """Found: safetensors makes files that only their owner may read; others' runs failed."""
    assert all(f"-{os.getuid()}." in name for name in unfinished), unfinished


def test_onnx_program_is_given_the_prepared_model(run: Run, environment: dict[str, str]) -> None:
    program = str(EXAMPLES / "onnx_unmodified.py")
    plain = run(program, TRIMS_ENABLED="0")
    first = run("-m", "trims_shim", "run", program)
    prepared = Path(environment["XDG_CACHE_HOME"]) / "trims" / "prepared"
    end = time.monotonic() + LIMIT_S
    while not any(not found.parent.name.startswith(".") for found in prepared.glob("*/entry.json")):
        assert time.monotonic() < end, "the model was not prepared"
        time.sleep(0.1)
    served = run("-c", "import trims_shim\n" + PROGRAMS.format(programs=[program]))
    assert results(served) == results(first) == results(plain) != []
    assert "served by the cache: 1" in served


def test_prefork_workers_share_the_weights(run: Run) -> None:
    program = str(EXAMPLES / "prefork_server.py")
    own = run(program, TRIMS_ENABLED="0")
    shared = run(program)
    assert results(own) == results(shared) != []
    model = number(r"model +(\d+) MB", own)
    saved = number(r"together +(\d+) MB", own) - number(r"together +(\d+) MB", shared)
    assert saved > model, "three workers must share at least two copies, less what they write"


def test_records_are_views_that_are_private_for_writing(run: Run) -> None:
    output = run(str(EXAMPLES / "numpy_records.py"))
    assert "opened 8 records" in output
    assert "numpy and torch agree: True" in output
    assert "a write stays private: True" in output


@pytest.fixture(scope="module")
def batching(run: Run) -> dict[str, str]:
    """What each example of batching prints."""
    programs = [str(EXAMPLES / "batching" / name) for name in BATCHING]
    outputs = run("-c", PROGRAMS.format(programs=programs)).split("# ")[1:]
    return dict(zip(BATCHING, outputs, strict=True))


def test_threads_are_batched(batching: dict[str, str]) -> None:
    output = batching["threads.py"]
    assert "same answers: True" in output
    assert "answered 500 of 500" in output
    assert number(r"([\d.]+) rows for each batch", output) > 1.5


def test_sentences_are_padded_and_batched(batching: dict[str, str]) -> None:
    output = batching["asyncio_padding.py"]
    assert "same vectors as alone: True" in output
    # Whether short ones go by themselves depends on what batches take here.
    assert re.search(r"shapes the model saw: \[(\(\d+, \d+\)(, )?)+\]", output)
    assert number(r"64 sentences in (\d+) batches", output) < 32


def test_a_slow_model_makes_room_for_a_quick_one(run: Run) -> None:
    output = run(str(EXAMPLES / "batching" / "two_models.py"))
    assert output.count("same answers: True") == 2
    assert "preemption factor 3.03" in output


def test_newcomers_catch_up_with_a_batch_on_its_way(batching: dict[str, str]) -> None:
    output = batching["staged.py"]
    assert "same answers: True" in output
    assert "pieces: [3, 2, 1]" in output
    assert "an answer: [5, 4, 3, 2, 1]" in output


def test_prompts_are_continued_together(batching: dict[str, str]) -> None:
    output = batching["generation.py"]
    assert "same tokens as alone: True" in output
    assert "streamed in 23 pieces, the same: True" in output
    assert number(r"([\d.]+) rows for each step", output) > 1.5


def test_two_models_vote(run: Run) -> None:
    output = run(str(EXAMPLES / "ensemble.py"))
    assert number(r"estimated: (\d+) samples/s", output) > 0
    (answer,) = results(output)
    assert sum(map(int, re.findall(r"\d+", answer))) == 1000


def test_workers_of_a_web_server_share_weights_and_batch_requests(run: Run) -> None:
    stand_in = [] if HAS_FASTAPI else [str(ROOT / "tests" / "fastapi_stand_in")]
    path = os.pathsep.join([str(ROOT), *stand_in])
    plain = run("-c", ASKED, PYTHONPATH=path, TRIMS_ENABLED="0")
    shared = run("-c", ASKED, PYTHONPATH=path)
    workers = [json.loads(line) for line in [*plain.splitlines(), *shared.splitlines()]]
    assert len(workers) == 6
    first = workers[0]["answers"]
    assert first[: len(first) // 2] == first[len(first) // 2 :]
    assert len(set(first)) > 1
    for worker in workers:
        assert worker["answers"] == first
        batches = {int(size): count for size, count in worker["batches"].items()}
        assert sum(size * count for size, count in batches.items()) == len(first)
        assert max(batches) > 1
    assert [worker["loads from the cache"] for worker in workers] == [0, 0, 0, 0, 0, 1]


def test_workers_that_start_together_make_one_checkpoint(run: Run) -> None:
    """Found: one replaced the file that the other was loading, which then fell back."""
    stand_in = [] if HAS_FASTAPI else [str(ROOT / "tests" / "fastapi_stand_in")]
    path = os.pathsep.join([str(EXAMPLES / "batching"), str(ROOT), *stand_in])
    output = run("-c", MADE_AGAIN, PYTHONPATH=path, TRIMS_ENABLED="0")
    assert output.split() == ["True"]


def test_suite_with_a_model_per_test_passes_with_trims(run: Run) -> None:
    output = run(str(EXAMPLES / "pytest_project" / "compare.py"), "--rounds", "1")
    assert number(r"(\d+) tests passed in every run", output) > 0
    assert number(r"whole process .*: ([\d.]+) x", output) > 0


def test_no_rounds_are_refused_before_anything_runs() -> None:
    """Found: the suite ran once, and then came the traceback of a median of nothing."""
    command = [sys.executable, str(EXAMPLES / "pytest_project" / "compare.py"), "--rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "--rounds has to be 1 or more" in done.stderr
