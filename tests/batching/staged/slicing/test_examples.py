"""Examples: how a model is called, and whether two of its outputs are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trims_shim.batching.staged import slice_blocks, slice_model
from trims_shim.batching.staged.slicing.examples import Example, are_identical, check_stages
from trims_shim.errors import StagingError

IDS = torch.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("example", "batch"),
    [
        (IDS, (IDS,)),
        ((IDS, IDS), (IDS, IDS)),
        ({"ids": IDS, "scale": 2}, ({"scale": 2, "other": None, "ids": IDS},)),
        (({"ids": IDS}, None), ({"ids": IDS}, None)),
    ],
)
def test_what_the_first_stage_is_called_with(example: Any, batch: Any) -> None:
    made = Example(example)
    assert made.rows == 3
    again = made.like(batch)
    assert are_identical((again.args, again.kwargs), (made.args, made.kwargs))
    assert are_identical(made.of_leaves(made.leaves()).batch(), made.batch())


def test_a_name_that_is_missing() -> None:
    with pytest.raises(TypeError, match="no 'ids'"):
        Example({"ids": IDS}).like(({"id": IDS},))


def test_a_value_that_the_model_would_not_get() -> None:
    """A mask that is left out silently makes other results."""
    with pytest.raises(TypeError, match="has 'mask', and the example had not"):
        Example({"ids": IDS}).like(({"ids": IDS, "mask": IDS},))


@pytest.mark.parametrize(("batch", "found"), [((IDS,), "Tensor"), ((IDS, 2), "Tensor, int")])
def test_what_is_no_mapping(batch: Any, found: str) -> None:
    with pytest.raises(
        TypeError, match=rf"is \({found}\), and has to be one mapping of 'ids', 'scale'"
    ):
        Example({"ids": IDS, "scale": 2}).like(batch)


@pytest.mark.parametrize("example", [(IDS, IDS[:1]), (torch.tensor(1.0),), {"a": 1}])
def test_tensors_without_a_common_batch(example: Any) -> None:
    with pytest.raises(StagingError, match="the batch as its first axis"):
        Example(example)


def test_other_sizes() -> None:
    example = Example((IDS, torch.tensor(2.0), "text"))
    larger = example.with_rows(5)
    assert larger.args[0].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert larger.args[1:] == (torch.tensor(2.0), "text")
    assert example.with_rows(1).rows == 1


@pytest.mark.parametrize("cut", [slice_model, slice_blocks])
def test_examples_without_rows(cut: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    with pytest.raises(StagingError, match="the example has no rows"):
        cut(model, torch.rand(0, 2), 2)


def test_identical_is_bit_for_bit() -> None:
    value = {"a": (torch.tensor([1.0, torch.nan]), 3)}
    assert are_identical(value, {"a": (torch.tensor([1.0, torch.nan]), 3)})
    assert not are_identical(value, {"a": (torch.tensor([1.0, 2.0]), 3)})
    assert not are_identical(value, {"a": (torch.tensor([1.0, torch.nan]), 4)})
    assert not are_identical(value, {"b": (torch.tensor([1.0, torch.nan]), 3)})
    assert not are_identical(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not are_identical(torch.zeros(2), torch.zeros(2, 1))
    assert are_identical(torch.zeros(2, dtype=torch.complex64), torch.zeros(2) * 0j)


def test_stages_that_compute_something_else() -> None:
    model = nn.Linear(2, 2)
    example = Example(torch.rand(2, 2))
    check_stages([model, nn.Identity()], model, example)
    with pytest.raises(StagingError, match="do not compute what it computes"):
        check_stages([model, lambda value: value + 1e-6], model, example)
    with pytest.raises(StagingError, match="batch of 3"):
        check_stages([model, lambda value: value * (1 + (len(value) > 2))], model, example)


@pytest.mark.parametrize(
    "last",
    [
        lambda x: x.numpy(),
        lambda x: {"one": x, "other": x.numpy()[::-1][::-1]},
        lambda x: x.argmax(1).numpy(),
        lambda x: x.argmax(1).numpy().astype(str),
        lambda x: x.to_sparse(),
        lambda x: torch.complex(x, x + 1).conj(),
        lambda x: torch.complex(x, x.where(x < x.amax(1, True), torch.nan)).conj().imag,
    ],
)
def test_outputs_that_are_no_plain_tensors(last: Callable[[torch.Tensor], Any]) -> None:
    class Arrays(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return last(torch.relu(x))

    def flipped(x: torch.Tensor) -> Any:
        return last(x.flip(1))

    example = Example(torch.rand(3, 2))
    check_stages([nn.ReLU(), last], Arrays(), example)
    with pytest.raises(StagingError, match="do not compute what it computes"):
        check_stages([nn.ReLU(), flipped], Arrays(), example)


def test_outputs_that_are_nested() -> None:
    def last(value: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([*value], layout=torch.jagged)

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(torch.relu(x))

    with pytest.raises(StagingError, match="returns nested tensors"):
        check_stages([nn.ReLU(), last], Nested(), Example(torch.rand(3, 2)))


def test_outputs_that_some_batches_lack() -> None:
    def last(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return value, value if len(value) == 1 or (value != value[0]).any() else None

    class Some(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return last(torch.relu(x))

    check_stages([nn.ReLU(), last], Some(), Example(torch.eye(3)))


def test_rows_that_depend_on_each_other() -> None:
    """As in one whole, so in stages, but for those who join."""
    stages = [nn.ReLU(), lambda value: value - value.mean(0)]
    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages(stages, nn.Sequential(nn.ReLU(), Centred()), Example(torch.rand(3, 2)))


def test_stages_that_take_what_the_whole_batch_has_for_that_of_each_row() -> None:
    """Alike in all rows of the example, and of rows of another size after a join."""

    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.abs().max()

    stages = [lambda x: (x / largest(x), x), lambda both: both[0] * largest(both[1])]
    example = Example(torch.rand(3, 4).clamp(max=0.9).index_fill(1, torch.tensor([2]), 1.0))
    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages(stages, lambda x: x / largest(x) * largest(x), example)


def test_rows_that_depend_on_their_places() -> None:
    def last(value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return value[0][value[1]]

    stages = [lambda value: (value, torch.arange(len(value))), last]
    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages(stages, nn.Identity(), Example(torch.rand(3, 2)))


@pytest.mark.parametrize(
    "last", [lambda x: (x, len(x)), lambda x: (x, (x > 0.5).nonzero()), lambda x: [*x]]
)
def test_outputs_that_are_of_the_whole_batch(last: Callable[[torch.Tensor], object]) -> None:
    """Its size, or a list of no known length: nobody's rows, and no floating-point numbers."""

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return last(torch.relu(x))

    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages([nn.ReLU(), last], Whole(), Example(torch.ones(3, 2)))


class Ranked(nn.Module):
    """The place of each row among those of its batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.relu(x).sum(1)
        return (total[:, None] > total).sum(1)


class Largest(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).argmax(self.axis)


def test_integers_that_depend_on_other_rows() -> None:
    """But not those that floating-point numbers of a row decide on."""
    example = Example(torch.rand(4, 8, generator=torch.Generator().manual_seed(0)))
    check_stages([nn.ReLU(), Largest(1)], Largest(1), example)
    for model in (Ranked(), Largest(0)):
        with pytest.raises(StagingError, match=r"cannot be batched .* depends on the others"):
            check_stages([nn.ReLU(), model], model, example)


def test_little_of_others_in_a_row() -> None:
    """One more row hardly changes what is taken of all; other rows do."""

    class Leaning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + 0.2 * x.mean(0)

    model = Leaning()
    rows = torch.eye(4)
    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages([nn.Identity(), model], model, Example(rows))


class Chooses(nn.Module):
    """One of two answers, for the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.mean() > 0, x, x.cos())


@pytest.mark.parametrize("rows", [1, 4])
def test_a_choice_for_the_whole_batch(rows: int) -> None:
    """Though rows of the same signs would choose the same."""
    stages, example = [nn.Identity(), Chooses()], Example(torch.rand(rows, 8) + 0.1)
    with pytest.raises(StagingError, match="depends on the others in the batch"):
        check_stages(stages, Chooses(), example)
    check_stages(stages, Chooses(), example, tells_apart=True)


def test_a_model_that_takes_no_numbers_of_the_other_sign() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert bool((x > 0).all())
            return x.sqrt()

    check_stages([nn.Identity(), Root()], Root(), Example(torch.rand(3, 2) + 0.1))


def test_inputs_of_a_type_without_arithmetic() -> None:
    widened = [lambda x: x.float(), nn.ReLU()]
    example = Example(torch.rand(3, 2).to(torch.float8_e4m3fn))
    check_stages(widened, nn.Sequential(Widen(), nn.ReLU()), example)


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Pairs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


def test_models_that_take_no_row_alone() -> None:
    with pytest.raises(StagingError, match="Pairs does not run with a batch of 1: Expected more"):
        check_stages([nn.Identity(), Pairs()], Pairs(), Example(torch.rand(3, 2)))


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class LastStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous()[-1]


def test_what_crosses_may_begin_at_an_uneven_address() -> None:
    torch.manual_seed(0)
    layers = [LastStep(), nn.Linear(25, 25), nn.Linear(25, 12)]
    check_stages(layers, nn.Sequential(*layers), Example(torch.rand(3, 7, 25)))
