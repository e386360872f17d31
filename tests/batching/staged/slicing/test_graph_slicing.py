"""Slicing a model: as many stages as asked for, of even time, that are the model bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trims_shim
from tests.batching.staged.slicing.networks import Encoder, UNet, join_and_take
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.slicing.block_slicing import slice_blocks
from trims_shim.batching.staged.slicing.examples import Example, are_identical
from trims_shim.batching.staged.slicing.graph_slicing import slice_model
from trims_shim.batching.staged.slicing.tracing import TracedModel
from trims_shim.errors import StagingError
from trims_shim.testing import FakeDaemon

IMAGE = torch.rand(2, 3, 8, 8)

Take = Callable[[Callable[[int], list[int]]], None]


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return TracedModel(UNet().eval(), IMAGE)


def convolutions(module: nn.Module) -> int:
    return sum("conv2d" in str(node.target) for node in module.graph.nodes)  # type: ignore[union-attr]


def test_stages_are_the_model() -> None:
    model = UNet().eval()
    staged = slice_model(model, IMAGE, 3)
    assert (len(staged), staged.name) == (3, "UNet")
    batch = torch.rand(5, 3, 8, 8)
    assert are_identical(staged(batch), Example(batch).call(model))


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Says how long operations take with a batch of a size."""

    def take(times: Callable[[int], list[int]]) -> None:
        def measure(self: TracedModel, rows: int | None = None, **_: Any) -> list[int]:
            return times(self.example.rows if rows is None else rows)

        monkeypatch.setattr(TracedModel, "measure", measure)

    return take


def test_stages_of_even_time(traced: TracedModel, take: Take) -> None:
    """By the times with the example."""
    names = traced.operations
    take(lambda size: [1000 if "conv2d" in name and size == 2 else 1 for name in names])
    staged = slice_model(traced.model, IMAGE, 2)
    assert [convolutions(stage.module) for stage in staged] == [2, 2]


def test_cut_where_the_preferred_batch_size_changes(traced: TracedModel, take: Take) -> None:
    """All but the first convolution gain from batches; the border is right behind that."""
    names = traced.operations
    first = next(number for number, name in enumerate(names) if "conv2d" in name)
    take(lambda size: [*[1] * first, 1000 * size, *[400] * (len(names) - first - 1)])
    staged = slice_model(traced.model, IMAGE)
    assert convolutions(next(iter(staged)).module) == 1
    assert len(staged) == 2


def test_four_stages_where_it_does_not(traced: TracedModel, take: Take) -> None:
    """Or only by what one measurement differs from another."""
    count = len(traced.operations)
    flat, steep = [10] * count, [20] * count
    times = {1: flat, 2: [*flat[::2], *steep[1::2]]}
    take(lambda size: times.get(size, [20 * size] * count))
    assert len(slice_model(traced.model, IMAGE)) == 4


def test_eight_stages_at_most(traced: TracedModel, take: Take) -> None:
    count = len(traced.operations)
    take(lambda size: [100 * size if number % 2 else 400 for number in range(count)])
    assert len(slice_model(traced.model, IMAGE)) == 8


def test_a_model_that_takes_another_way_with_more_rows() -> None:
    """More than anybody may want; they are not measured."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
            self.scales = nn.Parameter(torch.ones(32, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.layers(x) * self.scales[: x.shape[0]]
            return scaled.relu()

    assert len(slice_model(Table().eval(), torch.rand(4, 3))) > 1


def test_a_model_that_takes_another_way_with_one_row_more_is_refused() -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2 if x.shape[0] <= 4 else x * 3).relu()

    with pytest.raises(StagingError, match=r"with a batch of 5: .* <= 4"):
        slice_model(Table().eval(), torch.rand(4, 3), 2)


def test_no_stages() -> None:
    with pytest.raises(ValueError, match="n_stages is 0"):
        slice_model(UNet().eval(), IMAGE, 0)


class Compiled:
    """What a compiler makes of a stage: here, something that is as good as it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.module(*inputs)


def test_compiled_stages(traced: TracedModel) -> None:
    """Compiled, measured, cut again, compiled."""
    compiled: list[Compiled] = []

    def compiler(module: nn.Module) -> Compiled:
        compiled.append(Compiled(module))
        return compiled[-1]

    staged = slice_model(traced.model, IMAGE, 2, compiler=compiler)
    assert [stage.run for stage in staged] == compiled[2:]
    assert all(each.calls for each in compiled[:2])
    assert are_identical(staged(IMAGE), Example(IMAGE).call(traced.model))
    assert [each.calls for each in compiled[2:]] == [1, 1]


def test_torchs_compiler(traced: TracedModel) -> None:
    """That it takes the stages, and any size of batch; its code generator is left out here."""
    compiler = functools.partial(torch.compile, backend="eager", dynamic=True)
    stages = traced.stages([traced.cuts()[4].position])
    for stage in stages:
        stage.run = compiler(stage.module)
    for rows in (2, 5):
        batch = Example(IMAGE).with_rows(rows)
        assert are_identical(StagedModel(stages)(*batch.batch()), batch.call(traced.model))


def test_a_model_that_looks_whether_it_is_traced() -> None:
    class Sly(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            return y + 1 if torch.compiler.is_compiling() else y + 2

    with pytest.raises(StagingError, match="do not compute what it computes"):
        slice_model(Sly().eval(), torch.rand(2, 3), 2)


@pytest.mark.parametrize("slice_it", [slice_model, slice_blocks])
def test_a_model_that_writes_into_its_input_leaves_the_example_alone(slice_it: Any) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x.mul_(3).sub_(1))

    model, example = Scaling().eval(), torch.rand(2, 3)
    before = example.clone()
    staged = slice_it(model, example, 2)
    assert torch.equal(example, before)
    assert are_identical(staged(example.clone()), Example(before).call(model))


@pytest.fixture
def _patched() -> Iterator[None]:
    was_enabled = trims_shim.enabled()
    trims_shim.enable()
    yield
    if not was_enabled:
        trims_shim.disable()


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("slice_it", [slice_model, slice_blocks])
def test_weights_stay_in_the_shared_memory(slice_it: Any, tmp_path: Path) -> None:
    """A model that was loaded through the shim: its stages read the daemon's one copy."""
    path = str(tmp_path / "model.pt")
    torch.save(Encoder().eval(), path)
    ids = torch.randint(0, 50, (2, 5))
    with FakeDaemon(strict="1", min_bytes="1") as daemon:
        model = torch.load(path, weights_only=False)
        staged = slice_it(model, ids, 3)
        used = _used(staged)
        own = {each.data_ptr() for each in model.parameters()}
        assert used == own
        shared = _shared_ranges()
        assert all(any(pointer in each for each in shared) for pointer in used)
        results = join_and_take(staged, Example(ids), Example(ids[:1]))
        torch.testing.assert_close(results[0], Example(ids).call(model))
        assert daemon.reads(path) == 1
        del model
        assert daemon.leases == 1
        del staged, used


def _used(staged: Any) -> set[int]:
    """Where the weights are that the stages read; by torch's own account of what is run."""
    found: set[int] = set()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            found.update(each.data_ptr() for each in leaves if isinstance(each, nn.Parameter))
            return func(*args, **(kwargs or {}))

    with Watching():
        staged(torch.randint(0, 50, (2, 5)))
    return found


def _shared_ranges() -> list[range]:
    """The sealed segments that are mapped into this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            ranges.append(range(begin, end))
    return ranges


def test_an_example_that_is_a_slice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    assert len(slice_model(model, torch.rand(5, 9)[:, :4], 2).stages) == 2
