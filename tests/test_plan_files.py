"""What the files of plans say is what is planned for."""

from __future__ import annotations

from pathlib import Path

import pytest

from trims_shim.errors import FormatError
from trims_shim.plan_files import Herd, read_cluster, read_herd
from trims_shim.planner import HostedModel, Stream

CLUSTER = """
slo_ms = 300
devices = { gpu = 2, cpu = 0 }
[families.cats]
demand_qps = 120.5
[families.cats.variants.small]
accuracy = 70
latency_ms.cpu = { 1 = 18, 4 = 54 }
latency_ms.gpu = { alpha = 0.5, beta = 3, max_batch_size = 64 }
[families.dogs]
demand_qps = 20
slo_ms = 500
[families.dogs.variants.only]
accuracy = 50
latency_ms.gpu = { alpha = 2 }
"""
HERD = """
devices = 8
memory_gb = 16
groups = 2
[models.bert]
throughput_qps = 100
memory_gb = 10.5
affinity = "text"
[streams.search]
model = "bert"
rate_qps = 150
"""


def test_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    found = read_cluster(str(path))
    assert found.slo_ms == {"cats": 300, "dogs": 500}
    assert found.problem.devices == {"gpu": 2, "cpu": 0}
    assert found.problem.demand_qps == {"cats": 120.5, "dogs": 20}
    profiles = {each.name: each.profile for each in found.problem.options}
    assert {
        name: [profile.latency_ns(size) / 1e6 for size in (1, 4)]
        for name, profile in profiles.items()
    } == {"small on cpu": [18, 54], "small on gpu": [3.5, 5], "only on gpu": [2, 8]}
    largest = {name: profile.max_batch_size for name, profile in profiles.items()}
    assert largest == {"small on cpu": 4, "small on gpu": 64, "only on gpu": 32}


def test_a_herd(tmp_path: Path) -> None:
    path = tmp_path / "herd.toml"
    path.write_text(HERD)
    model = HostedModel(throughput_qps=100, memory_bytes=10_500_000_000, affinity="text")
    expected = Herd({"search": Stream("bert", 150)}, {"bert": model}, 8, 16_000_000_000, 2, None)
    assert read_herd(str(path)) == expected
    path.write_text(f"largest = 4\n{HERD}")
    assert read_herd(str(path)).largest == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("demand_qps = 20", "demand_qps = 20\ndemand = 3", "families.dogs.demand is not known"),
        ("demand_qps = 20", 'demand_qps = 20\n"a\\nb" = 3', r"families.dogs.a\\nb is not known$"),
        ("{ 1 = 18, 4", "{ 0 = 18, 4", "'0' is no batch size"),
        ("{ 1 = 18, 4", "{ 1 = 18, 65537", "'65537' is no batch size"),
        ("{ 1 = 18, 4", '{ 1 = 18, "\u0664"', "'\u0664' is no batch size"),
    ],
)
def test_what_is_no_cluster(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.replace(old, new))
    with pytest.raises(FormatError, match=message):
        read_cluster(str(path))


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Found: of JSON, the last one was taken."""
    path = tmp_path / "herd.json"
    path.write_text('{"devices": 8, "models": {"a": {}, "b": {}, "a": {}}}')
    with pytest.raises(FormatError, match="not JSON: a is there twice"):
        read_herd(str(path))
