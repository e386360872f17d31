"""Measured problems have the memory and the latencies of their members; workers share weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from harness import World, close_worlds

from tests.ensemble import members
from tests.ensemble.members import by
from trims_shim.ensemble import (
    Allocation,
    Device,
    Ensemble,
    Footprint,
    Member,
    measure,
    measuring,
    optimise,
)
from trims_shim.ensemble.footprint import memory_used
from trims_shim.ensemble.measuring import _footprint
from trims_shim.ensemble.messages import Memory
from trims_shim.errors import MemberFailed

MB = 1 << 20
DEVICES = [Device("part-0", 1 << 40, kind="cpu"), Device("part-1", 1 << 40, kind="cpu")]


def test_members_are_measured_once_for_each_kind_of_device() -> None:
    given = [
        Member("light", by(members.working, 0.5, 0)),
        Member("heavy", by(members.working, 4.0, 4 * MB)),
    ]
    lines: list[str] = []
    problem = measure(
        given,
        np.ones((3, 2)),
        devices=DEVICES,
        batch_sizes=(16, 4),
        repeats=1,
        progress=lines.append,
    )
    assert lines == ["light on part-0", "heavy on part-0"]
    assert list(problem.members) == ["light", "heavy"]
    assert problem.batch_sizes == (16, 4)
    light, heavy = (each.latencies["cpu"] for each in problem.members.values())
    assert heavy.latency_ns(16) >= 16 * 4e6
    assert light.latency_ns(4) >= 4 * 0.5e6
    assert heavy.latency_ns(4) < heavy.latency_ns(10) < heavy.latency_ns(16)
    assert heavy.max_batch_size == 16
    footprints = [each.footprints["cpu"] for each in problem.members.values()]
    assert all(each.worker_bytes > 4 * MB for each in footprints)
    assert all(each.weights_bytes < MB for each in footprints)
    assert 3 * MB < footprints[1].sample_bytes < 8 * MB
    assert footprints[0].sample_bytes < MB
    assert optimise(problem, tries=200).is_complete


def test_on_a_gpu_too_the_peak_is_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, peaks = 10 * MB, [70 * MB]
    answers = {
        "mem_get_info": lambda device: (900 * MB, 1000 * MB),
        "memory_reserved": lambda device: reserved,
        "max_memory_reserved": lambda device: peaks[-1],
        "reset_peak_memory_stats": lambda device: peaks.append(reserved),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert memory_used("cuda:0", buffers_bytes=0) == Memory(0, 160 * MB)
    assert memory_used("cuda:0", buffers_bytes=0) == Memory(0, 100 * MB)


@pytest.mark.parametrize(
    ("sizes", "peaks", "worker_bytes", "sample_bytes"),
    [
        ((4, 16), (100, 148), 84, 4),
        ((4, 16), (100, 149), 80, 5),  # rather too much than too little
        ((4, 16), (8, 128), 0, 10),
        ((4, 16), (100, 90), 100, 0),
        ((4,), (100, 100), 100, 0),
        ((4,), (100, 120), 120, 0),
    ],
)
def test_footprints_are_lines(
    sizes: tuple[int, ...], peaks: tuple[int, int], worker_bytes: int, sample_bytes: int
) -> None:
    assert _footprint(7, sizes, peaks) == Footprint(7, worker_bytes, sample_bytes)


def test_what_the_first_batch_allocates_is_the_workers() -> None:
    given = [Member("a", by(members.allocating_once, 64 * MB))]
    problem = measure(given, np.ones((1, 2)), devices=DEVICES[:1], batch_sizes=(2, 16), repeats=1)
    footprint = problem.members["a"].footprints["cpu"]
    assert footprint.worker(2) > 64 * MB
    assert footprint.sample_bytes < MB


def test_what_loading_alone_needs_is_no_batchs() -> None:
    given = [Member("a", by(members.allocating_to_load, 512 * MB))]
    problem = measure(given, np.ones((1, 2)), devices=DEVICES[:1], batch_sizes=(2,), repeats=1)
    assert problem.members["a"].footprints["cpu"].worker(2) < 512 * MB


def test_each_size_is_measured_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[int], int]] = []

    def noted(run: object, sizes: Sequence[int], *, repeats: int, clock: object) -> dict[int, int]:
        asked.append((sizes, repeats))
        return dict.fromkeys(sizes, 1_000)

    monkeypatch.setattr(measuring, "measure_sizes", noted)
    given = [Member("a", members.row_sums)]
    samples, sizes = np.ones((1, 2)), (16, 2, 16)
    measure(given, samples, devices=DEVICES[:1], batch_sizes=sizes, repeats=7)
    assert asked == [([2, 16], 7)]


def test_what_cannot_be_is_said_before_anything_is_measured() -> None:
    lines: list[str] = []
    member = Member("a", members.row_sums)
    for given, devices, message in (
        ([member], DEVICES[:1] * 2, "given twice"),
        ([member, member], DEVICES[:1], "names of their own"),
        ([], DEVICES[:1], "needs a device, a member"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(given, np.ones((1, 2)), devices=devices, progress=lines.append)
    assert lines == []


def test_a_member_that_fails_is_named() -> None:
    with pytest.raises(MemberFailed, match="'a' failed on 2 samples on part-0: KeyError"):
        measure(
            [Member("a", by(members.raising_at, 1.0))],
            np.ones((1, 1)),
            devices=DEVICES[:1],
            batch_sizes=(2,),
        )
    with pytest.raises(ValueError, match="no samples to measure with"):
        measure([Member("a", members.row_sums)], np.ones((0, 1)), devices=DEVICES)


def test_a_worker_that_cannot_say_what_it_uses_is_not_waited_for(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MemberFailed, match="of member 'a' has ended before it said how much mem"):
        measure(
            [Member("a", members.silent_of_memory)],
            np.ones((1, 1)),
            devices=DEVICES[:1],
            batch_sizes=(2,),
        )
    assert "ended with status 1; it is started again" in caplog.text
    assert "FileNotFoundError: /proc/self/clear_refs" in capfd.readouterr().err


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Workers of this process's ensembles use this world's daemon."""
    world = World()
    for name, value in world.environment().items():
        if name.startswith("TRIMS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRIMS_ENABLED", "1")
    world.start()
    yield world
    close_worlds([world])


def test_workers_of_one_member_share_its_weights(world: World, tmp_path: object) -> None:
    path = f"{tmp_path}/linear.pt"
    weight = torch.arange(2048 * 1024, dtype=torch.float32).reshape(1024, 2048) / 1e6
    torch.save({"weight": weight}, path)
    member = Member("a", by(members.linear, path))
    samples = torch.ones(4, 2048)
    with Ensemble([member], devices=DEVICES, allocation=Allocation(((8,), (8,)))) as ensemble:
        assert torch.allclose(ensemble.predict(samples), samples @ weight.T, rtol=1e-4)
        images = world.status().images
        assert [image.leases for image in images] == [2]
    problem = measure([member], samples, devices=DEVICES[:1], batch_sizes=(4,), repeats=1)
    assert 8 * MB <= problem.members["a"].footprints["cpu"].weights_bytes < 12 * MB
