"""What runs unattended on a machine with a GPU works before it gets there.

The script's arguments, the report, the verdicts from canned samples, the time box, a dry run on the
emulated device, and on the processor what needs torch on a device. What a GPU would say is not
tested here: tests/gpu does that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import gpu_report  # noqa: E402
from gpu import flex_cases, generating_cases, onnx_file, staged_cases  # noqa: E402
from gpu.test_gpu_staged import KINDS  # noqa: E402

from benchmarks import gpu_cold, gpu_memory  # noqa: E402
from benchmarks.forking import Server, server  # noqa: E402
from benchmarks.gpu_plan import (  # noqa: E402
    FULL,
    TRIAL,
    Clock,
    Plan,
    Run,
    estimate_s,
    rounds_within,
    share_s,
)
from benchmarks.gpu_processes import stable_free_bytes  # noqa: E402
from benchmarks.harness import WorkerFailed  # noqa: E402
from trims_shim.errors import DaemonError  # noqa: E402

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
VGG_BYTES = 553_430_176
DRY_RUN_S = 1500


def check(
    *arguments: str, script: Path = SCRIPT, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRIMS_")}
    return subprocess.run(
        [str(script), *arguments],
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "scripts/gpu_check.sh [--wheels DIR]"),
        (["--help"], "scripts/gpu_check.sh [--wheels DIR]"),
        (["--wheels"], "--wheels needs a value"),
        (["--wheels", "/nowhere"], "/nowhere is not a directory"),
        (["--steps", "tests,dance"], "there is no step dance"),
        (["--budget-s", "soon"], "--budget-s takes a whole number"),
        (["--output", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_wrong_arguments_end_before_anything_is_done(arguments: list[str], message: str) -> None:
    done = check("--dry-run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path) -> None:
    probe = "from gpu.rawcuda import why_no_device; print(why_no_device())"
    answer = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=True,
    )
    if not answer.stdout.strip():
        pytest.skip("this machine has a CUDA device")
    done = check("--output", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "--dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_cut_off_has_a_report(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRIMS_")}
    with subprocess.Popen(
        [str(SCRIPT), "--dry-run", "--output", str(tmp_path), "--steps", "tests"],
        env=environment | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        is_under_way = any("SKIPPED" in line for line in running.stdout)
        os.killpg(running.pid, signal.SIGTERM)
    assert is_under_way
    (report,) = tmp_path.iterdir()
    found = json.loads(report.read_text())
    assert [step["status"] for step in found["steps"]] == [0, 143]
    assert "skipped" in {each["outcome"] for each in found["tests"]}


def test_benchmarks_that_are_ended_leave_no_checkpoints(tmp_path: Path) -> None:
    output, checkpoints, temporary = (tmp_path / name for name in ("output", "shm", "tmp"))
    for directory in (checkpoints, temporary):
        directory.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRIMS_")}
    environment |= {"TRIMS_BENCH_DIR": str(checkpoints), "TMPDIR": str(temporary)}
    arguments = ["--trial", "--only", "cold", "--output", str(output)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        end = time.monotonic() + 60
        while not list(checkpoints.glob("*/*")) and time.monotonic() < end:
            time.sleep(0.05)
        is_under_way = running.poll() is None
        running.terminate()
    assert is_under_way
    assert [*checkpoints.iterdir(), *temporary.iterdir()] == []


WITHOUT_PYBIND11 = """
import sys
sys.modules["pybind11"] = None
# Of a package installed as editable, which has an engine.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""


def test_a_copy_engine_that_is_not_built_is_a_failed_step(tmp_path: Path) -> None:
    root, output = tmp_path / "root", tmp_path / "output"
    nothing_built = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("scripts", "native", "trims_shim", "tests/emulated_cuda"):
        shutil.copytree(ROOT / name, root / name, ignore=nothing_built)
    needed = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "_trims_pytest.py")
    for name in (*needed, "tests/processes.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "sitecustomize.py").write_text(WITHOUT_PYBIND11)
    arguments = ("--dry-run", "--output", str(output), "--steps", "native")
    done = check(*arguments, script=root / "scripts" / SCRIPT.name)
    assert done.returncode == 1, done.stderr
    report = json.loads((output / "gpu-dry-run-check.json").read_text())
    native = report["steps"][-1]
    assert (native["step"], native["status"]) == ("native", 1)
    assert any("no copy engine" in line for line in native["output"])


@pytest.mark.slow
@pytest.mark.timeout(DRY_RUN_S + 20)
def test_dry_run_on_the_emulated_device(tmp_path: Path) -> None:
    arguments = ["--dry-run", "--output", str(tmp_path), "--steps", "tests,benchmarks"]
    arguments += ["--budget-s", str(DRY_RUN_S - 20)]
    # Everything but the models, which torch would load to the CPU here.
    arguments += ["--", "--only", "maps", "processes", "uploads", "--rounds", "1"]
    done = check(*arguments, timeout_s=DRY_RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-dry-run-check.json").read_text())
    assert report["is_dry_run"]
    steps = [step["step"] for step in report["steps"]]
    assert steps == ["environment", "tests", "memory", "benchmarks"]
    assert {step["status"] for step in report["steps"]} == {0}
    assert set(report["test_outcomes"]) == {"passed", "skipped"}
    assert {"clients go on", "one copy", "no leak"} <= {e["verdict"] for e in report["experiments"]}
    results = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    assert results["is_trial"]
    assert results["faults"] == []
    assert any("torch on a device" in reason for reason in results["left_out"])
    measured = {row["measurement"] for row in results["rows"]}
    assert "open + map" in measured
    assert "copies in device memory, 2 processes" in measured
    assert "copy engine, share of the slower limit" in measured
    # Nothing here may look like a promise kept.
    assert {row["target"] for row in results["rows"]} == {None}


def test_the_model_for_onnxruntime_is_one(tmp_path: Path) -> None:
    """It is written without the onnx package, which a machine with a GPU may lack."""
    import numpy
    import onnx
    import onnxruntime

    path = onnx_file.write_dense(str(tmp_path / "model.onnx"))
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ids = numpy.array([0, onnx_file.ROWS - 1])
    (output,) = session.run(None, {"ids": ids})
    assert output.shape == (2, onnx_file.WIDTH)
    assert numpy.isfinite(output).all()
    assert not numpy.array_equal(*output)
    other = onnx_file.write_dense(str(tmp_path / "other.onnx"), seed=2)
    assert Path(other).read_bytes() != Path(path).read_bytes()


# --- what needs torch on a device, on the processor -----------------------------------------------


@pytest.mark.parametrize("policy", ["dvabatch", "restless"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages(kind: str, policy: str) -> None:
    arguments = {"kind": kind, "policy": policy, "device": "cpu", "lanes": ["cpu", "cpu"]}
    found = staged_cases.answers(**arguments, count=8)
    assert (found["wrong"], found["failures"]) == ([], 0)


@pytest.mark.parametrize("prefill_stages", [1, 3])
def test_generation(prefill_stages: int) -> None:
    arguments = {"device": "cpu", "lanes": ["cpu", "cpu"], "prefill_stages": prefill_stages}
    found = generating_cases.tokens(**arguments, count=8)
    assert (found["wrong"], found["failures"], found["where"]) == ([], 0, ["cpu"])


@pytest.mark.parametrize("lanes", [1, 2])
def test_batches_that_are_given_up(lanes: int) -> None:
    found = flex_cases.answers(device="cpu", lanes=["cpu"] * lanes, rounds=3, width=64)
    assert found["wrong"] == 0
    assert found["preemptions"] >= 3


# --- the report -----------------------------------------------------------------------------------

OUTCOMES = (
    {"test": "a::good", "outcome": "passed", "seconds": 1.5, "why": ""},
    {"test": "a::bad", "outcome": "failed", "seconds": 2.0, "why": "assert 1 == 2"},
    {"test": "a::left", "outcome": "skipped", "seconds": 0.0, "why": "no unshare"},
)


def test_report_holds_what_there_is_so_far(tmp_path: Path) -> None:
    work, output = tmp_path / "work", tmp_path / "check.json"
    work.mkdir()
    assert gpu_report.main([str(work), str(output)]) == 0
    assert json.loads(output.read_text())["steps"] == []
    steps = [
        {"step": "native", "seconds": 3, "status": 0},
        {"step": "tests", "seconds": 9, "status": 1},
    ]
    (work / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (work / "tests.log").write_text("\n".join(f"line {i}" for i in range(200)))
    (work / "tests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in OUTCOMES))
    (work / "experiments.jsonl").write_text('{"experiment": "a", "verdict": "kept"}\n{"exper')
    assert gpu_report.main([str(work), str(output)]) == 0
    found = json.loads(output.read_text())
    assert [step["status"] for step in found["steps"]] == [0, 1]
    assert "output" not in found["steps"][0]
    assert found["steps"][1]["output"][-1] == "line 199"
    assert len(found["steps"][1]["output"]) == gpu_report.LOG_LINES
    assert found["test_outcomes"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert found["tests"] == list(OUTCOMES)
    assert found["experiments"] == [{"experiment": "a", "verdict": "kept"}]


def test_only_missing_wheels_are_installed(tmp_path: Path) -> None:
    wanted = ["absent_a-1-py3-none-any.whl", "absent_b-1-cp38-abi3-manylinux_2_28_x86_64.whl"]
    others = ["msgpack-1.0-py3-none-any.whl", "absent_c-1-cp27-cp27m-any.whl", "other.txt"]
    for name in (*wanted, *others):
        (tmp_path / name).touch()
    assert [Path(path).name for path in gpu_report.missing(tmp_path)] == wanted


# --- verdicts -------------------------------------------------------------------------------------


def sample(total_s: float, *, shared: float = 1.0, checksum: int = 7) -> dict[str, Any]:
    return {
        "load_s": total_s / 2,
        "total_s": total_s,
        "checksum": checksum,
        "output": [1.0, 2.0],
        "is_finite": True,
        "shared": shared,
    }


def make_run(plan: Plan = FULL) -> Run:
    return Run(plan, Clock(1000), Path("/nowhere"), "GPU-0")


def sides(**changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Five rounds of each side: torch.load takes 5 s, the ideal 0.1 s."""
    seconds = {"torch.load": 5.0, "ideal": 0.1, gpu_cold.HIT: 0.104, "safetensors": 2.0}
    made = {name: [sample(value) for _ in range(5)] for name, value in seconds.items()}
    return made | changes


def verdicts(run: Run) -> dict[str, bool | None]:
    return {row.measurement: row.is_met for row in run.findings.rows}


def test_targets_are_judged_from_the_samples() -> None:
    run = make_run()
    gpu_cold.judge(run, "vgg16-224", VGG_BYTES, sides())
    assert run.findings.faults == []
    found = verdicts(run)
    assert found["device hit vs ideal"] is True
    assert found["device hit vs torch.load"] is True  # 48 times, the paper's small models: 24
    slow = make_run()
    gpu_cold.judge(slow, "vgg16-224", VGG_BYTES, sides(**{gpu_cold.HIT: [sample(0.3)] * 5}))
    assert verdicts(slow)["device hit vs ideal"] is False
    assert verdicts(slow)["device hit vs torch.load"] is False


def test_the_headline_is_no_target_where_the_baseline_leaves_no_room() -> None:
    run = make_run()
    # The ideal is 50 times faster; the paper's large models gained 210.
    gpu_cold.judge(run, "vgg16-896", 6_719_057_056, sides())
    row = next(r for r in run.findings.rows if r.measurement == "device hit vs torch.load")
    assert row.target is None
    assert "50.0x" in row.note


def test_a_first_load_may_cost_a_tenth_more() -> None:
    for seconds, is_met in ((5.4, True), (5.6, False)):
        run = make_run()
        gpu_cold.judge(run, "gpt2", 497_759_232, sides(**{gpu_cold.FIRST: [sample(seconds)] * 5}))
        assert verdicts(run)["first load, file in the page cache"] is is_met


def test_small_models_are_promised_nothing() -> None:
    run = make_run()
    gpu_cold.judge(run, "googlenet", 27_994_208, sides(**{gpu_cold.HIT: [sample(1.0)] * 5}))
    assert verdicts(run)["device hit vs ideal"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ideal": [sample(0.1, checksum=8)] * 5}, "the weights differ"),
        ({gpu_cold.HIT: [sample(0.1, shared=0.5)] * 5}, "not in shared memory"),
        ({"ideal": [sample(0.1) | {"output": [1.0, 9.0]}] * 5}, "the outputs differ"),
        ({"ideal": [sample(0.1) | {"is_finite": False}] * 5}, "not finite"),
    ],
)
def test_invalid_comparisons_are_faults(changed: dict[str, Any], message: str) -> None:
    run = make_run()
    gpu_cold.judge(run, "vgg16-224", VGG_BYTES, sides(**changed))
    assert message in " ".join(run.findings.faults)


def test_one_curve_for_each_way_in_order_of_size() -> None:
    run = make_run()
    for name, size in (("vgg16-224", VGG_BYTES), ("resnet50", 102_441_032)):
        gpu_cold.judge(run, name, size, sides())
    curves = {curve.name: [size for size, _ in curve.points] for curve in run.findings.curves}
    assert set(curves) == set(sides()) & set(gpu_cold.PLOTTED)
    assert curves["ideal"] == [102_441_032, VGG_BYTES]


def test_every_side_has_an_estimate_and_the_whole_plan_is_named() -> None:
    assert estimate_s(VGG_BYTES, tuple(gpu_cold.SIDES), 5) > 0
    from benchmarks.gpu_models import SUBJECTS

    assert set(FULL.models) | {"tiny"} == set(SUBJECTS)
    assert set(TRIAL.models) <= set(SUBJECTS)


# --- models that cannot be measured ---------------------------------------------------------------


class FakeCache:
    """A daemon, and a server of it, on a machine with room for all models but one."""

    def __init__(self, directory: Path, *, too_large: str = "", refused: str = "") -> None:
        self.directory, self.too_large, self.refused = directory, too_large, refused
        self.device_id = ""
        self.server: Any = self

    def run(self, task: str, *, name: str, **arguments: Any) -> dict[str, Any]:
        if task == "cold_start":
            return sample(1.0)
        path = self.directory / f"{name}.{arguments['file_format']}"
        if name == self.too_large:
            raise WorkerFailed("checkpoint: not done within 90 s")
        path.touch()
        return {"path": str(path)}

    learn = run

    def tiers(self, path: str) -> set[str]:
        return {"host"}

    def keep_on_host(self, path: str) -> None:
        """It is there."""

    def forget(self, path: str) -> None:
        if self.refused and self.refused in path:
            raise DaemonError("the daemon does not answer")


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("too_large", "not done within 90 s"), ("refused", "the daemon does not answer")],
)
def test_a_model_that_cannot_be_measured_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, message: str
) -> None:
    cache = FakeCache(tmp_path, **{trouble: "googlenet"})
    for name in ("server", "shared"):
        monkeypatch.setattr(gpu_cold, name, lambda *_, **__: contextlib.nullcontext(cache))
    monkeypatch.setattr(gpu_cold, "let_settle", lambda path: path)
    run = make_run(dataclasses.replace(TRIAL, models=("googlenet", "tiny")))
    gpu_cold.measure_cold_starts(run)
    assert [each for each in run.findings.faults if message in each] == run.findings.faults != []
    assert {row.subject.split()[0] for row in run.findings.rows} == {"tiny"}
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_cannot_be_mapped_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = TRIAL.map_subject[0]

    class Mapper:
        """A server whose device has no room for the largest file."""

        def run(self, task: str, **arguments: Any) -> dict[str, Any]:
            if task == "outline":
                Path(arguments["path"]).touch()
                return {"size_bytes": arguments["size_bytes"]}
            if str(largest) in arguments["path"]:
                raise WorkerFailed(f"{task}: no room")
            return {"total_s": 0.1, "again_s": [0.1]}

        learn = run

    cache = FakeCache(tmp_path)
    cache.server = Mapper()
    monkeypatch.setattr(gpu_memory, "shared", lambda *_, **__: contextlib.nullcontext(cache))
    monkeypatch.setattr(gpu_memory, "let_settle", lambda path: path)
    run = Run(TRIAL, Clock(1000), tmp_path, "GPU-0")
    gpu_memory.measure_maps(run)
    assert run.findings.faults == ["map 34 MB, 40 tensors: open_image: no room"]
    assert len(run.findings.rows) == len(TRIAL.map_sizes)


# --- many processes -------------------------------------------------------------------------------

TASKS = """
import os, sys, time
from benchmarks.forking import serve
def add(*, a, b):
    return {"sum": a + b, "pid": os.getpid(), "has_colours": "colorsys" in sys.modules}
def use_colours():
    import colorsys
    return {}
def die():
    os.kill(os.getpid(), 11)
def fail():
    raise ValueError("on purpose")
def hang():
    time.sleep(60)
serve({f.__name__: f for f in (add, use_colours, die, fail, hang)}, int(sys.argv[3]))
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "forked_tasks.py").write_text(TASKS)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with server("forked_tasks", environment) as running:
        yield running


def test_each_order_has_a_process_of_its_own(tasks: Server) -> None:
    first, second = tasks.run("add", a=1, b=2), tasks.run("add", a=3, b=4)
    assert (first["sum"], second["sum"]) == (3, 7)
    assert first["pid"] != second["pid"]


def test_only_what_is_learned_is_imported_afterwards(tasks: Server) -> None:
    tasks.run("use_colours")
    assert not tasks.run("add", a=0, b=0)["has_colours"]
    tasks.learn("use_colours")
    assert tasks.run("add", a=0, b=0)["has_colours"]


@pytest.mark.parametrize(
    ("task", "message"),
    [("die", "status -11"), ("fail", "on purpose"), ("hang", "not done within 1 s")],
)
def test_a_task_that_goes_wrong_harms_no_later_one(tasks: Server, task: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        tasks.run(task, deadline_s=1.0)
    assert tasks.run("add", a=1, b=1)["sum"] == 2


# --- the time box ---------------------------------------------------------------------------------


class FakeTime:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def takes(self, seconds: float) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            self.now_s += seconds
            return {"at_s": self.now_s}

        return run


@pytest.mark.parametrize(("budget_s", "rounds"), [(100, 5), (11, 3), (4, 1), (0, 1)])
def test_no_round_is_begun_that_would_outlast_the_clock(budget_s: float, rounds: int) -> None:
    time = FakeTime()
    made = {"a": time.takes(1), "b": time.takes(2)}
    results = rounds_within(made, 5, Clock(budget_s, time))
    assert len(results["a"]) == len(results["b"]) == rounds


def test_what_there_is_is_kept_after_each_round() -> None:
    time, kept = FakeTime(), []
    rounds_within(
        {"a": time.takes(1)}, 3, Clock(100, time), keep=lambda r: kept.append(len(r["a"]))
    )
    assert kept == [1, 2, 3]


@pytest.mark.parametrize(
    ("of_later_s", "part_s"), [(0, 100), (30, 70), (70, 40), (1000, 40), (1000, 55)]
)
def test_a_model_takes_what_later_ones_leave_or_a_share(of_later_s: float, part_s: float) -> None:
    least_s = 55 if part_s == 55 else 20
    assert share_s(100, least_s, of_later_s=of_later_s) == part_s


def test_rounds_alternate() -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: order.append(name) or {}

    rounds_within({"a": note("a"), "b": note("b")}, 3, Clock(100))
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_free_memory_is_read_until_it_rests() -> None:
    readings = [5, 5, 7, 9, 9]
    answer = stable_free_bytes(
        "GPU-0", quiet_s=0.2, read=lambda _: readings.pop(0) if len(readings) > 1 else 9
    )
    assert answer == 9
    assert len(readings) == 1
