"""A traced graph can be cut at every place it calls legal; what cannot be traced is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F

from tests.batching.staged.slicing.networks import Encoder, Recurrent, UNet, join_and_take
from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.flow import NotJoinable, join, rows_of, take
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.slicing import tracing
from trims_shim.batching.staged.slicing.examples import Example, are_identical
from trims_shim.batching.staged.slicing.tracing import TracedModel
from trims_shim.errors import StagingError

Forward = Callable[..., Any]


class Function(nn.Module):
    """A model of one function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4, 3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def trace(forward: Forward, example: Any = None) -> TracedModel:
    return TracedModel(Function(forward).eval(), torch.rand(4, 3) if example is None else example)


def check(traced: TracedModel, positions: list[int]) -> None:
    """Other batches, joined and taken apart at these borders, come to what the model makes."""
    model = StagedModel(traced.stages(positions))
    one, other = traced.example.with_rows(1), traced.example.with_rows(3)
    results = join_and_take(model, one, other)
    for batch, result in zip((one, other), results, strict=True):
        expected = batch.call(traced.model)
        for found, wanted in zip(_tensors(result), _tensors(expected), strict=True):
            torch.testing.assert_close(found, wanted)
        alone: Any = batch.batch()
        for number, stage in enumerate(model.stages):
            alone = stage(alone) if number else stage(*alone)
        assert are_identical(alone, expected)


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


WRITES = re.compile("autocast|set_grad|foreach")


def add_with_autocast(x: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x.add_(1)


def by_sign(x: torch.Tensor) -> torch.Tensor:
    """One way for the whole batch."""
    return torch.cond(x.mean() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def choose_by_mean(x: torch.Tensor) -> torch.Tensor:
    """One choice for all that it gets."""
    return torch.where(x.mean() > 0.8, x * 2, x * 3)


def until_large(x: torch.Tensor, *, by: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Doubled as often as one row, or what the body of the loop makes of it, tells."""
    count = torch.tensor(0.0)
    step = lambda i, x: (by(i, x), x * 2)  # noqa: E731 - as torch wants them
    return while_loop(lambda i, x: i < 4, step, (count, x + 0))[1]


def with_autocast(function: Forward) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(x)

    return forward


def add_with_gradients(x: torch.Tensor) -> None:
    with torch.enable_grad():
        x.add_(1)


def add_to_a_list(x: torch.Tensor) -> None:
    torch._foreach_add_([x], 1.0)


class TestEveryLegalCut:
    def every(self, traced: TracedModel, *, least: int) -> None:
        positions = [cut.position for cut in traced.cuts()]
        assert len(positions) >= least
        check(traced, positions)  # all at once, and each of a sample by itself
        for position in positions[::7]:
            check(traced, [position])

    def test_skips_and_operations_in_place(self) -> None:
        self.every(TracedModel(UNet().eval(), torch.rand(2, 3, 8, 8)), least=10)

    def test_any_number_of_arguments(self) -> None:
        class Sum(nn.Module):
            def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
                for each in others:
                    x = torch.relu(x + each)
                return x

        example = tuple(torch.rand(2, 3) for _ in range(3))
        self.every(TracedModel(Sum().eval(), example), least=3)

    def test_channels_last(self) -> None:
        x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
        model = UNet().to(memory_format=torch.channels_last).eval()
        self.every(TracedModel(model, x), least=10)

    def test_masks_and_lengths(self) -> None:
        ids = torch.randint(0, 50, (2, 7))
        mask = torch.ones(2, 7)
        mask[1, 4:] = 0
        traced = TracedModel(Encoder(2).eval(), {"ids": ids, "mask": mask}, varying=(1,))
        self.every(traced, least=15)
        short = Example({"ids": ids[:, :3], "mask": mask[:, :3]})
        stages = StagedModel(traced.stages([cut.position for cut in traced.cuts()[::5]]))
        assert are_identical(stages(*short.batch()), short.call(traced.model))

    def test_the_batch_as_second_axis(self) -> None:
        self.every(TracedModel(Recurrent().eval(), torch.rand(3, 5, 4)), least=2)


class TestWhatCrosses:
    def test_numbers_beside_what_is_written(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            y = torch.relu(x)
            y.add_(1)
            return torch.sigmoid(y) * length

        traced = TracedModel(Function(forward).eval(), torch.rand(4, 3), varying=(1,))
        positions = [cut.position for cut in traced.cuts()]
        assert len(positions) >= 3
        check(traced, positions)

    def test_what_has_no_batch_is_shared(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[1]) * 2.0
            return (x + 1) * places

        traced = trace(forward)
        last = traced.cuts()[-1].position
        value = traced.stages([last])[0](torch.rand(2, 3))
        assert rows_of(value) == 2
        assert any(isinstance(each, Shared) for each in value)
        check(traced, [last])

    def test_a_size_of_the_batch_never_crosses(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            y = torch.relu(x + 1)
            return (y.reshape(rows * 3) * rows / rows).reshape(rows, 3)

        traced = trace(forward)
        for cut in traced.cuts():
            value = traced.stages([cut.position])[0](torch.rand(2, 3))
            assert all(isinstance(each, torch.Tensor) for each in value)
            check(traced, [cut.position])
        last = traced.stages([traced.cuts()[-1].position])[0](torch.rand(2, 3))
        assert len(last) == 1  # nor does the input, to be counted
        # [rows * 3] has no batch as its first axis.
        assert len(traced.cuts()) < len(traced.operations) - 1

    @pytest.mark.parametrize("is_tensor", [False, True])
    def test_what_some_sizes_of_the_batch_change_never_crosses(self, is_tensor: bool) -> None:
        """Here each eighth row."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            full = (x.shape[0] + 7) // 8 * 8
            number = torch.full((), full) if is_tensor else full
            y = torch.relu(x + 1) * 2
            if is_tensor:
                return y * (number >= x.shape[0]) + 1
            return F.pad(y, (0, 0, 0, full - x.shape[0])).cumsum(1)[: x.shape[0]] + 1

        traced = trace(forward)
        assert traced.cuts()
        for cut in traced.cuts():
            first, last = traced.stages([cut.position])
            batches = [traced.example.with_rows(rows) for rows in (4, 5)]
            joined = last(join([first(*each.batch()) for each in batches]))
            expected = torch.cat([each.call(traced.model) for each in batches])
            torch.testing.assert_close(joined, expected)

    @pytest.mark.parametrize("chosen", [0, 4])
    @pytest.mark.parametrize("is_made", [False, True])
    def test_how_many_rows_are_chosen_is_never_anothers(self, chosen: int, is_made: bool) -> None:
        """Of the example none, or all: as many as it has rows."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            is_chosen = x[:, 0] > 0
            count = is_chosen.nonzero().shape[0]
            y = torch.relu(x + 3) * 2
            y[is_chosen] = torch.ones(count, 3) if is_made else (y[is_chosen] + 1) * 2
            return y + 1

        signs = torch.tensor([[1.0], [-1.0], [-1.0], [1.0], [1.0]])
        traced = trace(forward, torch.full((4, 3), 1.0 if chosen else -1.0))
        assert traced.cuts()
        for cut in traced.cuts():
            first, last = traced.stages([cut.position])
            batches = [Example(part.expand(-1, 3)) for part in signs.split([2, 3])]
            value = join([first(*each.copy().batch()) for each in batches])
            assert rows_of(value) == 5
            found = torch.cat([last(take(value, rows)) for rows in ([0, 1, 2], [3, 4])])
            expected = torch.cat([each.copy().call(traced.model) for each in batches])
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        "places",
        [
            lambda rows, at: (rows, at),
            lambda rows, at: (rows[:, None], at[:, None]),
            lambda rows, at: ((rows * 5 + at) // 5, at),  # depends on the data as well
        ],
    )
    def test_the_place_of_a_row_in_its_batch_never_crosses(
        self, places: Callable[[Any, Any], tuple[Any, Any]]
    ) -> None:
        class Picks(nn.Module):
            def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
                index = places(torch.arange(x.shape[0]), at)
                return torch.relu(x + 1)[index].reshape(-1, 3) * 2

        traced = TracedModel(Picks().eval(), (torch.rand(4, 5, 3), torch.tensor([0, 4, 1, 3])))
        assert traced.cuts()
        one, other = traced.example.with_rows(1), traced.example
        expected = torch.cat([one.call(traced.model), other.call(traced.model)])
        for cut in traced.cuts():
            first, last = traced.stages([cut.position])
            joined = last(join([first(*one.batch()), first(*other.batch())]))
            torch.testing.assert_close(joined, expected)

    def test_what_is_made_for_a_batch_of_its_size_is_made_again(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            first = torch.zeros(1, x.shape[0], 3)
            y = torch.relu(x + 1)
            return torch.cat([first, y[None]]).transpose(0, 1) * 2

        traced = trace(forward)
        relu = traced.operations.index("aten.relu.default")
        assert relu in {cut.position for cut in traced.cuts()}
        for cut in traced.cuts():
            check(traced, [cut.position])

    @pytest.mark.parametrize("is_written", [False, True])
    def test_a_length_that_a_shape_does_not_show_is_never_anothers(self, is_written: bool) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            if is_written:
                lengths = torch.ones(3)
                lengths[:2] = x.shape[1]
            else:
                lengths = torch.full((3,), x.shape[1] * 1.0)
            return torch.relu(x).sum(1) / lengths + 1

        traced = TracedModel(Function(forward).eval(), torch.rand(2, 5, 3), varying=(1,))
        joined = self.joined(traced, torch.rand(1, 4, 3), torch.rand(2, 7, 3))
        assert 0 < joined < len(traced.cuts())

    @pytest.mark.parametrize("is_written", [False, True])
    def test_a_number_of_the_inputs_is_never_anothers(self, is_written: bool) -> None:
        class Scaled(nn.Module):
            def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
                if is_written:
                    scales = torch.ones(3)
                    scales[1] = scale
                else:
                    scales = x.new_full((3,), scale.item())
                return torch.relu(x + 1) * scales + 1

        batches = (torch.rand(1, 3), torch.tensor(2.0)), (torch.rand(2, 3), torch.tensor(5.0))
        traced = TracedModel(Scaled().eval(), batches[1])
        assert self.joined(traced, *batches)

    def joined(self, traced: TracedModel, *batches: Any) -> int:
        """At how many cuts these can be joined; there they come to what the model makes."""
        runs = [Example(each) for each in batches]
        expected = torch.cat([run.call(traced.model) for run in runs])
        count = 0
        for cut in traced.cuts():
            first, second = traced.stages([cut.position])
            try:
                result = second(join([first(*run.batch()) for run in runs]))
            except NotJoinable:
                continue
            count += 1
            torch.testing.assert_close(result, expected)
        return count

    def test_no_cut_tears_a_memory_that_is_written_to(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y[:, :2]
            w = torch.exp(x)
            y.add_(1)
            return z.sum(1) + w.sum(1) + y.sum(1)

        traced = trace(forward)
        for cut in traced.cuts():
            check(traced, [cut.position])
        names = traced.operations
        legal = {cut.position for cut in traced.cuts()}
        assert not legal & set(
            range(names.index("aten.exp.default"), names.index("aten.add_.Tensor") + 1)
        )

    @pytest.mark.parametrize("is_copy_written", [False, True])
    def test_a_copy_of_what_is_written_to_is_not_made_again(self, is_copy_written: bool) -> None:
        """By reshape, which makes a view where it can."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x + 1)
            copy = y.T.reshape(-1)
            (copy.view(-1) if is_copy_written else y).add_(1)
            return (y * 2).relu() + copy.view(3, -1).T

        traced = trace(forward)
        assert traced.cuts()
        for cut in traced.cuts():
            check(traced, [cut.position])

    @pytest.mark.parametrize("write", [add_with_autocast, add_with_gradients, add_to_a_list])
    def test_no_cut_tears_a_memory_that_is_written_to_otherwise(self, write: Forward) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y[:, :2]
            w = torch.exp(x)
            write(y)
            return z.sum(1) + w.sum(1) + y.sum(1)

        traced = trace(forward)
        names, legal = traced.operations, [cut.position for cut in traced.cuts()]
        written = next(number for number, name in enumerate(names) if WRITES.search(name))
        assert not set(legal) & set(range(names.index("aten.exp.default"), written + 1))
        assert written + 2 in legal
        for position in legal:
            check(traced, [position])

    def test_no_cut_is_within_vmap(self) -> None:
        """Which a second batch, or another thread, would find begun."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.vmap(lambda row: torch.exp(row) * row.sum())(x * 2)
            return torch.relu(y).sum(1)

        traced = trace(forward)
        names, legal = traced.operations, [cut.position for cut in traced.cuts()]
        begin, end = (
            next(number for number, name in enumerate(names) if f"{way}_nesting" in name)
            for way in ("increment", "decrement")
        )
        assert {begin, end + 1} <= set(legal) <= {*range(begin + 1), *range(end + 1, len(names))}
        for position in legal:
            check(traced, [position])

    def test_writes_are_seen_in_inference_mode(self) -> None:
        with torch.inference_mode():
            self.test_no_cut_tears_a_memory_that_is_written_to_otherwise(add_with_autocast)

    def test_nothing_shared_crosses_that_is_written_to(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(x.shape[1])
            y = torch.exp(x)
            total.add_(1)
            return torch.relu(y) + total

        traced = trace(forward)
        names, legal = traced.operations, {cut.position for cut in traced.cuts()}
        add = names.index("aten.add_.Tensor")
        assert not legal & set(range(names.index("aten.exp.default"), add + 1))
        assert add + 1 in legal

    def test_what_a_join_would_lay_out_anew_does_not_cross(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x[:, :, None].expand(-1, -1, 2).contiguous().transpose(1, 2))
            z = torch.relu(y)  # laid out as y is, which the view below needs
            return z.transpose(1, 2).view(x.shape[0], 6)

        traced = trace(forward)
        for cut in traced.cuts():
            check(traced, [cut.position])
        relu = traced.operations.index("aten.relu.default")
        assert not {relu, relu + 1} & {cut.position for cut in traced.cuts()}

    def test_what_depends_on_the_data_of_others_does_not_cross(self) -> None:
        traced = trace(lambda self, x: torch.relu(x) * torch.exp(x.amax()))
        names = traced.operations
        after = names.index("aten.amax.default") + 1
        assert after not in {cut.position for cut in traced.cuts()}
        assert after - 1 in {cut.position for cut in traced.cuts()}

    @pytest.mark.parametrize("largest", [0, 1])
    def test_what_is_scaled_by_the_largest_of_the_batch_does_not_cross(self, largest: int) -> None:
        """What scales it back behind the border would find another one in a joined batch."""

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(x)
            return torch.exp(x / x.max()).log() * x.max()

        example = torch.ones(2, 3)
        example[largest] = 2
        traced = trace(forward, example)
        assert [traced.operations[cut.position] for cut in traced.cuts()] == ["aten.max.default"]

    def test_weights_are_the_models_own(self) -> None:
        traced = trace(lambda self, x: torch.relu(x * self.weight) * self.weight)
        stages = traced.stages([cut.position for cut in traced.cuts()])
        weights = [each for stage in stages for each in stage.module.parameters()]
        assert len(weights) == 2
        assert all(each is traced.model.weight for each in weights)

    def test_no_graph_of_gradients(self) -> None:
        traced = trace(lambda self, x: torch.relu(x * self.weight) * self.weight)
        value = StagedModel(traced.stages([traced.cuts()[0].position]))(torch.rand(2, 3))
        assert not value.requires_grad

    def test_an_input_of_another_kind(self) -> None:
        stages = StagedModel(trace(lambda self, x: torch.relu(x + 1)).stages([1]))
        of = r"traced with float32 \[batch, 3\] on cpu, and are called with "
        with pytest.raises(TypeError, match=of + r"float32 \[batch, 4\] on cpu"):
            stages(torch.rand(2, 4))
        with pytest.raises(TypeError, match=of + r"float64 \[batch, 3\] on cpu"):
            stages(torch.rand(2, 3, dtype=torch.float64))
        with pytest.raises(TypeError, match=of + r"\(float32 .*, float32 .*\)"):
            stages(torch.rand(2, 3), torch.rand(2, 3))
        with pytest.raises(TypeError, match=of + r"array\("):
            stages(numpy.ones((2, 3), numpy.float32))
        with pytest.raises(TypeError, match=of + r"\[\[0, 0, .*\.\.\.\]\]"):
            stages([[0] * 100])

    def test_an_input_of_more_axes_than_were_traced(self) -> None:
        # The size of the last axis is built in, and torch's guard looks at the second one.
        stages = StagedModel(trace(lambda self, x: torch.relu(x).sum(-1) / x.shape[-1]).stages([1]))
        with pytest.raises(TypeError, match=r"called with float32 \[batch, 3, 5\] on cpu"):
            stages(torch.rand(2, 3, 5))

    def test_an_axis_that_varies(self) -> None:
        traced = TracedModel(
            nn.Sequential(nn.ReLU(), nn.Tanh()).eval(), torch.rand(2, 3, 8, 8), varying=(1,)
        )
        stages = StagedModel(traced.stages([1]))
        assert stages(torch.rand(2, 9, 8, 8)).shape == (2, 9, 8, 8)
        with pytest.raises(TypeError, match=r"traced with float32 \[batch, any, 8, 8\] on cpu"):
            stages(torch.rand(2, 9, 8, 7))

    @pytest.fixture(params=["as it is", "as it was"])
    def _guarding(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """With torch's own check of sizes, if it makes one, and as it was before."""
        if request.param == "as it was":
            monkeypatch.setattr(tracing, "_makes_guards", lambda: False)

    @pytest.mark.usefixtures("_guarding")
    def test_a_size_with_which_the_model_takes_another_branch(self) -> None:
        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return (x * 2 if x.shape[1] > 8 else x * 3).relu()

        model = Function(forward).eval()
        stages = StagedModel(TracedModel(model, torch.rand(2, 12), varying=(1,)).stages([1]))
        assert torch.equal(stages(torch.ones(3, 9)), torch.full((3, 9), 2.0))
        because = r"varying=\(1,\) and sizes \[2, 12\], and do not hold for \[3, 8\].*slice_blocks"
        with pytest.raises(TypeError, match=because):
            stages(torch.ones(3, 8))

    @pytest.mark.usefixtures("_guarding")
    def test_a_batch_size_with_which_the_model_takes_another_branch(self) -> None:
        """Found: with torch 2.6 the outputs were those of the branch that was traced."""
        with pytest.raises(StagingError, match=r"do not hold for \[3, 3\]"):
            trace(lambda self, x: (x * 2 if x.shape[0] % 2 == 0 else x * 3).relu())

    @pytest.mark.usefixtures("_guarding")
    def test_another_branch_with_the_size_of_an_input_after_constants(self) -> None:
        class Scaled(nn.Module):
            def forward(self, mask: Any, by: float, x: torch.Tensor) -> torch.Tensor:
                return (x * 2 if x.shape[1] > 8 else x * by).relu()

        example = {"mask": None, "by": 3.0, "x": torch.rand(2, 12)}
        stages = StagedModel(TracedModel(Scaled().eval(), example, varying=(1,)).stages([1]))
        assert stages({**example, "x": torch.ones(3, 9)}).shape == (3, 9)
        with pytest.raises(TypeError, match="do not hold for"):
            stages({**example, "x": torch.ones(3, 8)})

    def test_a_size_of_one_with_which_the_model_does_something_else(self) -> None:
        """torch.export takes it that sizes which vary are not 1, and guards nothing there."""

        def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return (x if x.shape[1] == 1 else x * 2).relu()

        model = Function(forward).eval()
        stages = StagedModel(TracedModel(model, torch.rand(2, 12), varying=(1,)).stages([1]))
        assert torch.equal(stages(torch.ones(3, 2)), torch.full((3, 2), 2.0))
        with pytest.raises(TypeError, match=r"for \[3, 1\]: the model does something else"):
            stages(torch.ones(3, 1))

    def test_a_size_of_one_with_which_it_does_the_same_or_does_not_run(self) -> None:
        stages = StagedModel(
            TracedModel(nn.Tanh().eval(), torch.rand(2, 4), varying=(1,)).stages([])
        )
        assert stages(torch.rand(3, 1)).shape == (3, 1)
        model = nn.Sequential(nn.Conv1d(3, 3, 2), nn.Tanh()).eval()
        traced = TracedModel(model, torch.rand(2, 3, 8), varying=(2,))
        assert StagedModel(traced.stages([1]))(torch.rand(2, 3, 3)).shape == (2, 3, 2)


class TestWhatCannotBeCut:
    def test_an_axis_that_cannot_vary(self) -> None:
        class OverAxis1(nn.Module):
            def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                return (x.transpose(1, 2) @ torch.eye(7)).sum(1) + other.sum(1, keepdim=True)

        model, x = OverAxis1().eval(), torch.rand(2, 7, 4)
        with pytest.raises(StagingError, match=r"varying=\(1,\): size 7 of axis 1 is built in"):
            TracedModel(model, (x, torch.rand(2, 7)), varying=(1,))
        TracedModel(model, (x, torch.rand(2, 5)), varying=(1,))  # another kind of axis

    @pytest.mark.parametrize(
        ("forward", "message"),
        [
            (lambda self, x: x if x.sum() > 0 else -x, "no branch may depend on data"),
            (lambda self, x: x.view(4, -1) + 1, "batch size must be free"),
            (lambda self, x: x + self.count.add_(1), "changes its 'count'"),
            (lambda self, x: x + self.table[:1].add_(1), "changes its 'table'"),
            (lambda self, x: x + self.table.split(2)[0].add_(1)[0], "changes its 'table'"),
            (lambda self, x: x + (add_with_autocast(self.table) or 1), "changes its 'table'"),
            (lambda self, x: x + (add_with_gradients(self.table) or 1), "changes its 'table'"),
            (lambda self, x: x + (add_to_a_list(self.table) or 1), "changes its 'table'"),
            (lambda self, x: x + nn.Dropout().eval()(self.table).add_(1)[0], "changes its 'table'"),
            (with_autocast(nn.functional.dropout), r"dropout.* depends on chance"),
            (lambda self, x: x + torch.rand_like(x), r"rand_like.* depends on chance"),
            (lambda self, x: by_sign(torch.relu(x)) + 1, "cond branches on what is in the batch"),
            (with_autocast(by_sign), "cond branches on what is in the batch"),
            (
                lambda self, x: torch.cond(self.weight.sum() > 0, by_sign, torch.relu, (x,)),
                "cond branches on what is in the batch",
            ),
            (
                lambda self, x: torch.cond(x.shape[0] > 9, torch.relu, torch.exp, (x,)),
                "cond branches on what is in the batch",
            ),
            (
                lambda self, x: until_large(x, by=lambda i, x: i + x.amax()),
                "while_loop branches on what is in the batch",
            ),
            (
                lambda self, x: torch.where(x.mean() > 100, x, -x).relu(),
                "aten.where.self branches on what is in the batch",
            ),
            (
                with_autocast(lambda x: x.masked_fill(x.amax(0) > 100, 0.0)),
                "aten.masked_fill.Scalar branches on what is in the batch",
            ),
            (lambda self, x: x @ torch.ones(5, 5), "does not run with the example: .*5x5"),
            (lambda self, x: nn.functional.dropout(x), r"dropout.* depends on chance"),
        ],
    )
    def test_is_named(self, forward: Forward, message: str) -> None:
        with pytest.raises(StagingError, match=message):
            trace(forward)

    @pytest.mark.parametrize(
        "forward",
        [
            lambda self, x: torch.cond(self.weight.sum() > 0, torch.relu, torch.exp, (x + 1,)) * 2,
            lambda self, x: until_large(x, by=lambda i, x: i + 1) * 2,
            lambda self, x: map_rows(by_sign, torch.relu(x) - 0.5) * 2,
            lambda self, x: torch.where(self.weight.sum() > 0, x, -x).relu() * 2,
            lambda self, x: torch.where(x.mean(1, keepdim=True) > 0.5, x, -x).relu() * 2,
            lambda self, x: torch.vmap(choose_by_mean)(x * 2).relu(),
            lambda self, x: map_rows(choose_by_mean, x * 2).relu(),
        ],
    )
    def test_branches_that_are_nobody_elses(self, forward: Forward) -> None:
        traced = trace(forward, torch.rand(4, 3))
        assert traced.cuts()
        for cut in traced.cuts():
            check(traced, [cut.position])

    def test_arguments_that_forward_does_not_name(self) -> None:
        class Shifted(nn.Module):
            def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
                return torch.relu(x + others["shift"])

        example = {"x": torch.rand(2, 3), "shift": torch.rand(2, 3)}
        with pytest.raises(StagingError, match=r"Shifted cannot be traced.* has to name 'shift'"):
            TracedModel(Shifted().eval(), example)

    def test_batches_that_are_normalised_by_their_own_statistics(self) -> None:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)).eval()
        with pytest.raises(StagingError, match="its '1' has no running statistics"):
            TracedModel(model, torch.rand(4, 8))

    def test_train_mode(self) -> None:
        model = UNet().eval()
        model.deep.train()
        with pytest.raises(StagingError, match=r"its 'deep' is in train mode.*model\.eval\(\)"):
            TracedModel(model, torch.rand(2, 3, 8, 8))

    def test_what_is_no_module(self) -> None:
        with pytest.raises(StagingError, match=r"no torch\.nn\.Module"):
            TracedModel(torch.relu, torch.rand(2, 3))

    def test_a_compiled_model(self) -> None:
        compiled = torch.compile(UNet().eval(), backend="eager")
        with pytest.raises(StagingError, match="compiler="):
            TracedModel(compiled, torch.rand(2, 3, 8, 8))

    def test_constants_are_built_in(self) -> None:
        class Scaled(nn.Module):
            def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
                return torch.relu(x) * scale

        traced = TracedModel(Scaled().eval(), (torch.rand(1, 3), 3))
        model = StagedModel(traced.stages([traced.cuts()[0].position]))
        assert model(torch.ones(2, 3), 3).tolist() == [[3, 3, 3]] * 2
        with pytest.raises(
            TypeError, match=r"traced with \(.*, 3\), and are called with \(.*, 4\)"
        ):
            model(torch.ones(2, 3), 4)

    def test_what_a_model_keeps_of_a_call_is_no_tensor_of_the_trace(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            if getattr(self, "places", None) is None:
                self.places = torch.arange(x.shape[1])
            self.seen = self.kept["seen"] = torch.relu(x + self.places)
            return self.seen + 1

        model = Function(forward).eval()
        model.kept = {}  # type: ignore[assignment]
        traced = TracedModel(model, torch.rand(4, 3))
        for each in (model.places, model.seen, model.kept["seen"]):
            assert type(each) is torch.Tensor
        check(traced, [cut.position for cut in traced.cuts()])

    def test_a_trace_that_does_not_run(self) -> None:
        """A kernel lays out what it returns in another way than torch says."""

        @torch.library.custom_op("trims_tests::turned", mutates_args=())
        def turned(x: torch.Tensor) -> torch.Tensor:
            return x.T.contiguous().T

        turned.register_fake(torch.empty_like)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            y = turned(x)
            return y.view(-1) if y.is_contiguous() else y.reshape(-1)

        with pytest.raises(StagingError, match="the trace of Function does not run: view size"):
            trace(forward)

    def test_more_stages_than_places(self) -> None:
        traced = trace(lambda self, x: torch.relu(x))
        with pytest.raises(StagingError, match="stages at most, not 9"):
            traced.even(9, [1] * len(traced.operations))


def test_times_are_read_from_the_clock_that_is_given() -> None:
    traced = trace(lambda self, x: torch.relu(x + 1))
    ticks = iter(range(0, 10_000, 10))
    assert traced.measure(3, repeats=2, clock_ns=lambda: next(ticks)) == [10] * len(
        traced.operations
    )
