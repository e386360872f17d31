"""Prompts in any form end at the same column, and padding is in front."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trims_shim.batching.collating.padding import Pad, Padded
from trims_shim.batching.staged.decoding.prompts import Prompts, prompts_of

ROWS = [[5, 6], [7], [1, 2, 3]]
FRONT = [[9, 5, 6], [9, 9, 7], [1, 2, 3]]
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
BEHIND = torch.tensor([[5, 6, 9], [7, 9, 9], [1, 2, 3]])


def batch_of(given: Any, most: int = 4) -> Prompts:
    return prompts_of(given, max_new_tokens=most, pad_token_id=9, device=None)


@pytest.mark.parametrize(
    "given",
    [
        ROWS,
        [torch.tensor(row) for row in ROWS],
        [{"input_ids": row} for row in ROWS],
        [{"input_ids": [*row, 9], "attention_mask": [1] * len(row) + [0]} for row in ROWS],
        Padded(BEHIND, MASK.bool(), [2, 1, 3]),
        {"input_ids": BEHIND, "attention_mask": MASK},
        {"input_ids": BEHIND.tolist(), "attention_mask": MASK.tolist()},
        {"input_ids": torch.tensor(FRONT), "attention_mask": torch.tensor(FRONT) != 9},
        Pad(9, multiple=8).join([torch.tensor(row) for row in ROWS]),
    ],
)
def test_padded_in_front(given: Any) -> None:
    found = batch_of(given)
    assert found.tokens.tolist() == FRONT
    assert found.lengths.tolist() == [2, 1, 3]
    assert found.budgets.tolist() == [4, 4, 4]
    assert found.tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([torch.tensor([[5, 6]])], ValueError, r"a tensor \[1, 2\].*give the row"),
        ([{"input_ids": [[5, 6]]}], ValueError, "give the row"),
        (Pad().join([torch.tensor([[5, 6]])]), ValueError, "give the row"),
        ([5], ValueError, "a row of token ids"),
        ([[5.0, 6.5]], TypeError, "whole numbers"),
        (["hello"], TypeError, "not text; a tokenizer"),
        (
            [{"input_ids": [5], "max_tokens": 3}],
            ValueError,
            "input_ids, .*, seed, and no 'max_tokens'; did you mean 'max_new_tokens'",
        ),
        ({"input_ids": BEHIND, "mask": MASK}, ValueError, "attention_mask, .* and no 'mask'"),
        (
            [{"input_ids": [5, 6], "attention_mask": [1]}],
            ValueError,
            r"attention_mask is \[1\], and input_ids is \[2\]",
        ),
        (
            {"input_ids": BEHIND, "attention_mask": MASK[:, :2]},
            ValueError,
            r"attention_mask is \[3, 2\], and input_ids is \[3, 3\]",
        ),
        ([{"input_ids": [5], "max_new_tokens": 2.5}], TypeError, "max_new_tokens is 2.5; .* whole"),
        (
            {"input_ids": BEHIND, "max_new_tokens": [2.5] * 3},
            TypeError,
            "max_new_tokens is .* whole",
        ),
        ([{"ids": [5]}], ValueError, r"has to have input_ids, and this one has \['ids'\]"),
    ],
)
def test_what_is_no_row_of_tokens(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_of(given)


def test_without_padding() -> None:
    found = batch_of(torch.tensor([[1, 2], [3, 4]]))
    assert (found.tokens.tolist(), found.lengths.tolist()) == ([[1, 2], [3, 4]], [2, 2])


@pytest.mark.parametrize(
    "given",
    [
        [{"input_ids": [1], "max_new_tokens": 2}, [2], {"input_ids": [3], "max_new_tokens": 9}],
        {"input_ids": torch.tensor([[1], [2], [3]]), "max_new_tokens": [2, 4, 9]},
        {"input_ids": torch.tensor([[1], [2], [3]]), "max_new_tokens": [[2], [4], [9]]},
    ],
)
def test_each_asks_for_as_many_as_there_may_be_or_fewer(given: Any) -> None:
    assert batch_of(given).budgets.tolist() == [2, 4, 4]


@pytest.mark.parametrize(
    "given",
    [
        [[]],
        [[1], {"input_ids": [1], "max_new_tokens": 0}],
        torch.zeros(2, 0, dtype=torch.int64),
        {"input_ids": BEHIND, "attention_mask": MASK * 0},
    ],
)
def test_nothing_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        batch_of(given)
