"""``trims plan``: problems are read and refused, plans printed, and tried on arrivals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trims_shim.batching.profiles.profile_store import SavedProfile, save_profile
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main

CLUSTER = """
slo_ms = 300

[devices]
cpu = 4
gpu = 2

[families.classify]
demand_qps = 120

[families.classify.variants.small]
accuracy = 70
latency_ms.cpu = { 1 = 18, 4 = 55 }
latency_ms.gpu = { alpha = 0.4, beta = 3, max_batch_size = 64 }

[families.classify.variants.large]
accuracy = 78
latency_ms.gpu = { alpha = 2.5, beta = 9 }

[families.detect]
demand_qps = 20
slo_ms = 500

[families.detect.variants.only]
accuracy = 50
latency_ms.cpu = { 1 = 60, 4 = 200 }
"""
HERD = """
devices = 8
memory_gb = 16
groups = 2

[models.bert]
throughput_qps = 100
memory_gb = 10

[models.gpt2]
throughput_qps = 20
memory_gb = 12

[streams.search]
model = "bert"
rate_qps = 150

[streams.chat]
model = "gpt2"
rate_qps = 10
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == Exit.OK
    return json.loads(capsys.readouterr().out)


def test_a_placement_as_a_table(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "proteus", str(cluster)]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "FAMILY",
        "VARIANT",
        "DEVICE",
        "COUNT",
        "ACCURACY",
        "REQUESTS/S",
        "BUSY",
    ]
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["classify", "large", "gpu", "2"],
        ["detect", "only", "cpu", "4"],
    ]
    assert lines[-1] == "accuracy 74 (none is above 74), room for 1.5 times the demand"
    cluster.write_text(CLUSTER.replace("gpu = 2", "gpu = 2\ntpu = 3"))
    assert main(["plan", "proteus", str(cluster)]) == Exit.OK
    assert capsys.readouterr().out.endswith("the demand\nnot used: 3 x tpu\n")


def test_what_cannot_be_answered_is_said(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.write_text(CLUSTER.replace("demand_qps = 20", "demand_qps = 160"))
    assert main(["plan", "proteus", str(cluster)]) == Exit.OK
    assert "\ndetect: only 50% of the demand can be answered\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["proteus", "simulate", "herd"])
def test_names_do_not_steer_the_terminal(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Problems may come from elsewhere."""
    hostile = r'"\u001B]0;mine\u0007\nno row"'
    problem = HERD if command == "herd" else CLUSTER.replace("_qps = 20", "_qps = 160")
    for name in ("detect", "only", "search"):
        problem = problem.replace(name, hostile)
    problem = problem.replace("gpu = 2", f"gpu = 2\n{hostile} = 1")
    path = tmp_path / "problem.toml"
    path.write_text(problem)
    assert main(["plan", command, str(path)]) == Exit.OK
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_json_has_groups_and_what_they_are_worth(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "proteus", str(cluster), "--headroom", "1.1")
    assert found["headroom"] == pytest.approx(1.1)
    assert found["served"] == {"classify": pytest.approx(1), "detect": pytest.approx(1)}
    assert sum(each["planned_qps"] for each in found["groups"]) == pytest.approx(140)


def test_json_is_read_as_well_and_profiles_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = SavedProfile({1: 10e6, 4: 20e6}, max_batch_size=4)
    save_profile(tmp_path / "profile.json", saved)
    path = tmp_path / "cluster.json"
    variant = {"accuracy": 1, "latency_ms": {"gpu": "profile.json"}}
    family = {"demand_qps": 10, "slo_ms": 100, "variants": {"only": variant}}
    path.write_text(json.dumps({"devices": {"gpu": 1}, "families": {"f": family}}))
    (group,) = printed(capsys, "proteus", str(path))["groups"]
    assert group["max_batch_size"] == 4
    assert group["utilisation"] == pytest.approx(10 / 200)


@pytest.mark.parametrize("words", [[], ["--replan", "--period-s", "2"], ["--cv", "3"]])
def test_a_plan_is_tried_on_made_up_arrivals(
    words: list[str], cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "simulate", str(cluster), "--seconds", "8", *words)
    families = found["families"].values()
    assert sum(each["requests"] for each in families) == found["requests"] > 500
    violations = found["late"] + found["dropped"] + found["unanswered"]
    assert sum(each["violations"] for each in families) == violations
    assert found["violation_ratio"] < 0.1
    assert 70 < found["accuracy"] < 78
    assert (found["plans"] > 1) == ("--replan" in words)


def test_a_plan_is_tried_on_a_trace(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("".join(f"{10 * i}\n" for i in range(100)))
    words = ["plan", "simulate", str(cluster), "--trace", f"classify={trace}"]
    assert main(words) == Exit.OK
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [
        ["classify", "100", "0", "0.00%"],
        ["detect", "0", "0", "0.00%"],
        ["all", "100", "0", "0.00%"],
    ]


def test_a_family_that_no_device_can_answer_keeps_no_plan_from_others(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = CLUSTER.replace("{ 1 = 60, 4 = 200 }", "{ 1 = 600 }")
    cluster.write_text(slow.replace("demand_qps = 20", "demand_qps = 0"))
    (tmp_path / "trace.txt").write_text("".join(f"{i}\n" for i in range(5000)))
    words = ["--replan", "--trace", f"classify={tmp_path}/trace.txt"]
    assert printed(capsys, "simulate", str(cluster), *words)["loads"] > 0


def test_a_trace_of_what_no_device_runs(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.txt").write_text("0\n10\n")
    text = CLUSTER.replace("slo_ms = 300", "slo_ms = 1").replace("slo_ms = 500", "slo_ms = 1")
    cluster.write_text(re.sub("demand_qps = .*", "demand_qps = 0", text))
    words = ["plan", "simulate", str(cluster), "--trace", f"detect={tmp_path}/trace.txt"]
    assert main(words) == Exit.FAILED
    assert "no device runs any variant within its objective" in capsys.readouterr().err


def test_groups_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "herd.toml"
    path.write_text(HERD)
    assert main(["plan", "herd", str(path)]) == Exit.OK
    out = capsys.readouterr().out
    assert [line.split()[1:] for line in out.splitlines()[1:3]] == [
        ["5", "1.50", "bert", "search"],
        ["3", "0.50", "gpt2", "chat"],
    ]
    assert "A burst may be 3.333 times a stream's average; least slack of a group: 2.86" in out
    assert printed(capsys, "herd", str(path))["burst_tolerance"] == pytest.approx(10 / 3)
    assert printed(capsys, "herd", str(path), "--of-paper")["burst_tolerance"] == pytest.approx(4)


def test_a_group_that_its_demand_overloads_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "herd.toml"
    path.write_text(HERD.replace("rate_qps = 150", "rate_qps = 1500"))
    assert main(["plan", "herd", str(path)]) == Exit.OK
    out = capsys.readouterr().out
    assert re.findall("Group (.) has too few devices for its average demand\n", out) == ["1"]


def test_json_has_null_where_no_number_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "herd.toml"
    path.write_text(HERD.partition("[streams")[0] + "[streams]\n")
    assert main(["plan", "herd", str(path), "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"groups": [], "burst_tolerance": None, "slack": None}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slo_ms = 300", "slo_ms = 300\nslo = 1", "slo is not known; did you mean 'slo_ms'?"),
        ("slo_ms = 300", "slo_s = 0.3", "slo_s is not known; did you mean 'slo_ms'?"),
        ("demand_qps = 120", "demand_rps = 120", "demand_rps is not known; did you mean 'demand_"),
        ("slo_ms = 300", "", "families.classify.slo_ms is missing"),
        ("cpu = 4", "cpu = 1.5", "devices.cpu is 1.5; it has to be a whole number from 0 to 10000"),
        ("cpu = 4", "tpu = 4", "small on cpu: there is no such kind of device"),
        ("cpu = 4", f"cpu = 0x{'f' * 5000}", "devices.cpu is a number too long to show"),
        ("cpu = 4", 'cpu = "4"', "devices.cpu is '4'; it has to be a whole number"),
        ("demand_qps = 120", "demand_qps = true", "families.classify.demand_qps is True"),
        ("accuracy = 70", "", "families.classify.variants.small.accuracy is missing"),
        (
            "{ 1 = 18, 4 = 55 }",
            "{ }",
            "a profile needs the latency of at least one",
        ),
        ("{ 1 = 18, 4 = 55 }", "{ one = 18 }", "'one' is no batch size"),
        ("{ 1 = 18, 4 = 55 }", "{ 1 = 0 }", "a batch of 1 takes 0"),
        ("{ 1 = 18, 4 = 55 }", "7", "latency_ms.cpu is not a table"),
        ("{ 1 = 18, 4 = 55 }", '""', "latency_ms.cpu: this names no file of a profile"),
        ("{ 1 = 18, 4 = 55 }", '"no.json"', "no.json: No such file or directory"),
        ("{ 1 = 18, 4 = 55 }", '"no.json"', "small.latency_ms.cpu: /"),
        ("alpha = 0.4, beta = 3", "beta = 3", "latency_ms.gpu.alpha is missing"),
        ("alpha = 0.4, beta", "alfa = 0.4, beta", "alfa is not known; did you mean 'alpha'?"),
        ("alpha = 0.4, beta = 3", "alpha = 0, beta = 0", "latency_ms.gpu: a batch of 1 takes 0"),
        ("max_batch_size = 64", "max_batch_size = 0", "max_batch_size is 0"),
        ("max_batch_size = 64", "max_batch_size = 1_000_000", "max_batch_size is 1000000; it has"),
        ("cpu = 4", "cpu = 1000000000000", "devices.cpu is 1000000000000; it has to be a whole"),
        (
            "demand_qps = 120",
            "demand_qps = 1e300",
            "demand_qps is 1e+300; it has to be a number from 0 on, below 1e+15",
        ),
        ("[devices]", "[devices", "is not TOML"),
    ],
)
def test_a_bad_problem_names_the_entry(
    old: str, new: str, message: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in CLUSTER
    cluster.write_text(CLUSTER.replace(old, new))
    assert main(["plan", "proteus", str(cluster)]) == Exit.FAILED
    found = capsys.readouterr()
    assert not found.out
    assert found.err.startswith(f"trims: {cluster}")
    assert message in found.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "bert"', 'model = "bart"', "streams.search.model is 'bart'; there is no such"),
        ('model = "bert"', 'modell = "bert"', "streams.search.modell is not known; did you mean"),
        ('model = "bert"', "model = 1", "streams.search.model is 1; it has to be a text"),
        ("rate_qps = 150", "rate_qps = 0", "the rate_qps of 'search' is 0.0"),
        ("groups = 2", "groups = 0", "groups is 0"),
        ("memory_gb = 16", "memory_gb = 11", "'gpt2', which 'chat' asks for, needs more memory"),
        (
            "groups = 2",
            "groups = 1",
            "do not fit in the groups (at most 1), by memory or affinity: allow for",
        ),
    ],
)
def test_a_bad_herd_names_the_entry(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "herd.toml"
    path.write_text(HERD.replace(old, new))
    assert main(["plan", "herd", str(path)]) == Exit.FAILED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "nobody=x"], "--trace nobody=x: it is FAMILY=FILE, and there are classify"),
        (["--policy", "atuo"], "did you mean 'auto'?"),
        (["--seconds", "1e9"], "1.4e+11 requests in 1e+09 s are too many to simulate"),
    ],
)
def test_bad_words_are_wrong_usage(
    words: list[str], message: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "simulate", str(cluster), *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_bursts_that_do_not_end_are_too_many(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trims_shim.cli.plan._MOST_REQUESTS", 1000)
    words = ["--cv", "1e9", "--seconds", "1"]
    assert main(["plan", "simulate", str(cluster), *words]) == Exit.USAGE
    assert "1e+03 requests or more in 1 s are too many" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "herd", "/nowhere.toml"]) == Exit.FAILED
    assert capsys.readouterr().err == "trims: /nowhere.toml: No such file or directory\n"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "herd"],
        ["plan", "proteus"],
        ["plan", "ensemble"],
        ["batch", "simulate", "--profile"],
        ["batch", "simulate", "--line", "2,20", "--trace"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_read_is_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It can be opened: reading fails."""
    path = tmp_path / "memory.json"
    path.symlink_to("/proc/self/mem")
    assert main([*words, str(path)]) == Exit.FAILED
    assert capsys.readouterr().err == f"trims: {path}: Input/output error\n"
