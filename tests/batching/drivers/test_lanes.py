"""Lanes: the CUDA lane keeps the processor at most one stage ahead.

Against stand-ins for torch's streams and events, which write down what is asked of them: the order
is what is tested here, not what a GPU does with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from trims_shim.batching.drivers.lanes import CpuLane, CudaLane, lane_of


class StandIn:
    """What the lane uses of torch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._events = 0
        self.cuda = SimpleNamespace(
            Stream=self._stream,
            Event=self._event,
            default_stream=lambda device: "default" if device == "cuda:0" else f"{device}'s",
            stream=self._in_stream,
        )

    def device(self, name: str) -> str:
        return name

    def _stream(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(
            device="cuda:1" if device == "cuda" else device,  # the current one of this thread
            wait_stream=lambda other: self.log.append(f"wait for the {other} stream"),
            synchronize=lambda: self.log.append("wait for all"),
        )

    def _event(self, *, blocking: bool) -> SimpleNamespace:
        assert blocking
        self._events += 1
        number = self._events
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"record {number}"),
            synchronize=lambda: self.log.append(f"wait for {number}"),
        )

    @contextlib.contextmanager
    def _in_stream(self, stream: object) -> Iterator[None]:
        self.log.append("in")
        yield
        self.log.append("out")


def test_the_processor_is_one_stage_ahead_and_no_more() -> None:
    torch = StandIn()
    lane = CudaLane("cuda:0", torch)
    with lane.enter():
        for stage in "ABC":
            torch.log.append(stage)
            lane.stage_done()
        lane.finish()
    assert torch.log == [
        "wait for the default stream",
        "in",
        *("A", "record 1"),
        *("B", "record 2", "wait for 1"),
        *("C", "record 3", "wait for 2"),
        "wait for all",
        "out",
    ]


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_a_gpu_that_cannot_be_used_is_named(kind: type[Exception]) -> None:
    def refuse(**_: object) -> None:
        raise kind("Torch not compiled with CUDA enabled")

    torch = StandIn()
    torch.cuda.Stream = refuse
    with pytest.raises(RuntimeError, match="cuda:3 cannot be used: Torch not compiled"):
        CudaLane("cuda:3", torch)


def test_a_new_batch_does_not_wait_for_an_event_of_the_one_before() -> None:
    torch = StandIn()
    lane = CudaLane("cuda:0", torch)
    for _ in range(2):
        with lane.enter():
            lane.stage_done()
    assert "wait for 1" not in torch.log


def test_a_lane_stays_on_the_device_that_was_current_when_it_was_made() -> None:
    torch, used = StandIn(), []
    lane = CudaLane("cuda", torch)
    with lane.enter():
        pass
    lane.finish(SimpleNamespace(is_cuda=True, record_stream=used.append))
    assert torch.log[0] == "wait for the cuda:1's stream"
    assert used == ["cuda:1's"]


@dataclass
class Output:
    scores: object
    name: str


def test_results_are_marked_as_used_by_those_who_get_them() -> None:
    torch, marked = StandIn(), []

    def tensor(name: str, *, is_cuda: bool = True) -> SimpleNamespace:
        record = lambda stream: marked.append((name, stream))  # noqa: E731
        return SimpleNamespace(is_cuda=is_cuda, record_stream=record)

    results = [tensor("a"), {"b": (tensor("b"), 3)}, Output(tensor("c"), "x"), None]
    CudaLane("cuda:0", torch).finish([*results, tensor("host", is_cuda=False)])
    assert marked == [("a", "default"), ("b", "default"), ("c", "default")]


def test_a_processor_has_nothing_to_wait_for() -> None:
    lane = lane_of("cpu")
    assert isinstance(lane, CpuLane)
    with lane.enter():
        lane.stage_done()
        lane.finish()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'cpu', 'cuda' or 'cuda:NUMBER'"):
        lane_of("tpu")
