"""Whoever shares a step, each prompt is continued as it would be alone."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from harness import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.batching.staged.decoding.decoders import (
    LONGEST,
    VOCABULARY,
    HandWritten,
    without_cache,
)
from trims_shim.batching import Batcher, batched
from trims_shim.batching.collating.collate import collate_of
from trims_shim.batching.collating.padding import Pad
from trims_shim.batching.policies.window import Window
from trims_shim.batching.staged.activations import EarlyExit
from trims_shim.batching.staged.decoding.generating import generation
from trims_shim.batching.staged.model import StagedModel
from trims_shim.errors import StagingError

ENDS = (3, 7)
MOST = 9


@functools.cache
def decoder() -> HandWritten:
    return HandWritten()


@functools.cache
def prompt(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (1 + number * 7 % 12,), generator=generator)


@functools.cache
def alone(number: int, count: int = MOST, ends: tuple[int, ...] = ENDS) -> list[int]:
    return without_cache(decoder(), prompt(number), count, ends)


class Arrivals:
    """Prompts that come and go at random, between any two steps of the others."""

    def __init__(
        self, model: StagedModel, randoms: Random, item: Callable[[int], Any] = prompt
    ) -> None:
        self._item = item
        self.answers: dict[int, list[int]] = {}
        self._model = model
        self._randoms = randoms
        self._state: Any = None
        self._rows: list[int] = []
        self._pieces: dict[int, list[Any]] = {}

    def run(self, numbers: list[int]) -> None:
        coming = list(numbers)
        while coming or self._rows:
            if coming and (not self._rows or self._randoms.random() < 0.4):
                count = self._randoms.randint(1, len(coming))
                self._enter(coming[:count])
                del coming[:count]
            else:
                self._step()
            if self._rows and self._randoms.random() < 0.1:
                self._keep([row for row in range(len(self._rows)) if self._randoms.random() < 0.8])

    def _enter(self, numbers: list[int]) -> None:
        value: Any = [self._item(number) for number in numbers]
        for stage in self._model.stages[:-1]:
            value = stage(value)
        if isinstance(value, EarlyExit):
            left = [n for n, is_last in zip(numbers, value.finished, strict=True) if is_last]
            for number, result in zip(left, value.results, strict=True):
                self.answers[number] = result.tolist()
            numbers = [number for number in numbers if number not in left]
            value = value.rest
        if numbers:
            self._pieces |= {number: [] for number in numbers}
            states = [self._state, value] if self._rows else [value]
            self._state = self._model.loop.join(states)
            self._rows += numbers

    def _step(self) -> None:
        stepped = self._model.loop(self._state)
        self._state = stepped.state
        for number, piece in zip(self._rows, stepped.pieces, strict=True):
            self._pieces[number].append(piece)
        for number, is_last in zip(self._rows, stepped.finished, strict=True):
            if is_last:
                self.answers[number] = self._model.loop.result(self._pieces[number]).tolist()
        self._keep([row for row, is_last in enumerate(stepped.finished) if not is_last])

    def _keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._state = self._model.loop.take(self._state, rows) if rows else None


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 20), prefill_stages=st.sampled_from([1, 1, 3]))
def test_any_arrivals_give_the_same_tokens(seed: int, prefill_stages: int) -> None:
    model = generation(
        decoder(), max_new_tokens=MOST, eos_token_id=ENDS, prefill_stages=prefill_stages
    )
    randoms = Random(seed)
    arrivals = Arrivals(model, randoms)
    arrivals.run(randoms.sample(range(40), randoms.randint(1, 12)))
    assert arrivals.answers == {number: alone(number) for number in arrivals.answers}


def test_the_prompts_of_this_test_end_in_every_way() -> None:
    """After the first token, later by an end, and by their number."""
    lengths = [len(alone(number)) for number in range(40)]
    assert 1 in lengths
    assert any(1 < each < MOST for each in lengths)
    assert any(each == MOST and alone(n)[-1] not in ENDS for n, each in enumerate(lengths))


def test_padding_goes_with_the_longest() -> None:
    model = generation(decoder(), max_new_tokens=MOST, eos_token_id=())
    prefill, loop = model.stages
    state = prefill([[1] * 3, [1] * 20, [1] * 5])
    assert state.past.length == 20
    shorter = loop.take(state, [0, 2])
    assert shorter.past.length == 5
    assert loop.join([shorter, loop.take(state, [1])]).past.length == 20
    assert loop.take(state, [0, 1, 2]) is state, "nothing is copied for nothing"


# --- behind a batcher -----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("prefill_stages", [1, 3])
@pytest.mark.parametrize("policy", ["dvabatch", "immediate"])
def test_requests_of_threads(devices: int, prefill_stages: int, policy: str) -> None:
    model = generation(
        decoder(), max_new_tokens=MOST, eos_token_id=ENDS, prefill_stages=prefill_stages
    )
    randoms = Random(prefill_stages)
    with Batcher(
        model, policy=policy, devices=devices, max_batch_size=5, collate="list"
    ) as batcher:
        futures = []
        for number in range(40):
            futures.append(batcher.submit(prompt(number)))
            if randoms.random() < 0.2:
                futures[randoms.randrange(len(futures))].cancel()
            time.sleep(randoms.random() / 1000)
        answers = {
            number: future.result(timeout=PATIENCE_S).tolist()
            for number, future in enumerate(futures)
            if not future.cancelled()
        }
    assert len(answers) > 20
    assert answers == {number: alone(number) for number in answers}


class Gated:
    """A decoder that waits in one of its calls."""

    def __init__(self, call: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._call = call
        self._count = 0

    def __call__(self, *arguments: Any) -> Tensor:
        self._count += 1
        if self._count == self._call:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        scores: Tensor = decoder()(*arguments)
        return scores


def test_who_comes_while_others_are_on_their_way_does_not_wait_for_their_end() -> None:
    gated = Gated(call=4)
    order: list[str] = []
    model = generation(gated, max_new_tokens=50)
    with Batcher(model, max_batch_size=4, collate="list", caller_runs=False) as batcher:
        long = batcher.submit({"input_ids": prompt(1), "max_new_tokens": 50})
        assert gated.reached.wait(PATIENCE_S)
        short = batcher.submit({"input_ids": prompt(2), "max_new_tokens": 4})
        long.add_done_callback(lambda _: order.append("long"))
        short.add_done_callback(lambda _: order.append("short"))
        gated.opened.set()
        assert long.result(PATIENCE_S).tolist() == without_cache(decoder(), prompt(1), 50)
        assert short.result(PATIENCE_S).tolist() == without_cache(decoder(), prompt(2), 4)
        batcher.drain(PATIENCE_S)
        stats = batcher.stage_stats()
    assert order == ["short", "long"]
    assert (stats.batches, stats.stretches) == (1, 1)
    assert stats.stages[-1].batch_sizes == {1: 46, 2: 3}


@pytest.mark.parametrize("number", range(6))
def test_streams_have_the_tokens_of_calls(number: int) -> None:
    model = generation(decoder(), max_new_tokens=MOST, eos_token_id=ENDS)
    with Batcher(model, max_batch_size=4, collate="list") as batcher:
        pieces = list(batcher.stream(prompt(number)))
        assert torch.cat(pieces).tolist() == batcher(prompt(number)).tolist() == alone(number)


def test_a_prompt_that_fails_fails_alone() -> None:
    model = generation(decoder(), max_new_tokens=MOST, eos_token_id=ENDS)
    with Batcher(model, max_batch_size=4, collate="list") as batcher:
        futures = [batcher.submit(prompt(number)) for number in range(8)]
        wrong = batcher.submit(torch.tensor([1, VOCABULARY]))
        empty = batcher.submit([])
        futures += [batcher.submit(prompt(number)) for number in range(8, 12)]
        with pytest.raises(IndexError):
            wrong.result(PATIENCE_S)
        with pytest.raises(ValueError, match="at least one token"):
            empty.result(PATIENCE_S)
        for number, future in enumerate(futures):
            assert future.result(PATIENCE_S).tolist() == alone(number)


class OneSize(HandWritten):
    """As one that was compiled, or captured."""

    def forward(self, tokens: Tensor, *arguments: Any) -> Tensor:
        assert len(tokens) == 4
        return super().forward(tokens, *arguments)


@pytest.mark.parametrize("sizes", [None, [4]])
def test_at_the_end_of_its_positions_a_sequence_fails_alone(sizes: list[int] | None) -> None:
    """The others neither begin anew nor lose what they have heard."""
    model = generation(decoder() if sizes is None else OneSize(), max_new_tokens=MOST)
    long = torch.ones(LONGEST - 3, dtype=torch.int64)
    drawn = {"input_ids": prompt(5), "temperature": 1.0, "seed": 7}
    (alone_drawn,) = generation(decoder(), max_new_tokens=MOST)([drawn])
    options = {"collate": "list", "policy": functools.partial(Window, wait_ms=1e6)}
    with Batcher(model, max_batch_size=3, batch_sizes=sizes, **options) as batcher:
        failing = batcher.submit(long)
        stream = batcher.stream(prompt(2))
        last = batcher.submit(drawn)
        assert torch.cat(list(stream)).tolist() == alone(2, MOST, ())
        assert last.result(PATIENCE_S).tolist() == alone_drawn.tolist()
        with pytest.raises(IndexError, match="out of range"):
            failing.result(PATIENCE_S)
        batcher.drain(PATIENCE_S)
        assert batcher.stage_stats().failures == 0
        assert batcher.stats().failed == 1


def test_a_step_that_fails_for_all_fails_with_its_own_error() -> None:
    model = generation(decoder(), max_new_tokens=MOST)
    with Batcher(model, collate="list") as batcher:
        tokens = batcher.stream(torch.ones(LONGEST - 3, dtype=torch.int64))
        assert [len(next(tokens)), len(next(tokens))] == [2, 1]
        with pytest.raises(IndexError, match="out of range"):
            list(tokens)


def test_a_function_with_its_stages() -> None:
    """The first batch of a key is generated by both and compared."""
    model = generation(decoder(), max_new_tokens=MOST, eos_token_id=ENDS)

    @batched(model=model, max_batch_size=4, collate="list")
    def generate(prompts: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(without_cache(decoder(), each, MOST, ENDS)) for each in prompts]

    for number in range(3):
        assert generate(prompt(number)).tolist() == alone(number)
    generate.close()


# --- how prompts are given ------------------------------------------------------------------------

MAPPINGS = [{"input_ids": prompt(n), "max_new_tokens": 2 + n} for n in range(5)]
PROMPTS = [prompt(n) for n in range(5)]


@pytest.mark.parametrize(
    ("items", "collate"),
    [
        (PROMPTS, "list"),
        ([each.tolist() for each in PROMPTS], "list"),
        (PROMPTS, Pad(VOCABULARY - 1)),
        (PROMPTS, Pad(buckets=(16,))),
        (PROMPTS, Pad(multiple=5)),
        ([each.tolist() for each in PROMPTS], Pad()),
        ([each.numpy() for each in PROMPTS], Pad()),
        ([{"input_ids": each} for each in PROMPTS], Pad({"input_ids": 1})),
        (
            [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in PROMPTS],
            "list",
        ),
    ],
)
def test_prompts_in_any_form(items: list[Any], collate: Any) -> None:
    model = generation(decoder(), max_new_tokens=MOST, eos_token_id=ENDS)
    batch = collate_of(collate).join(items)
    assert [each.tolist() for each in model(batch)] == [alone(n) for n in range(5)]


@pytest.mark.parametrize("collate", ["list", Pad()])
def test_a_prompt_may_ask_for_fewer(collate: Any) -> None:
    model = generation(decoder(), max_new_tokens=4, eos_token_id=ENDS)
    found = model(collate_of(collate).join(MAPPINGS))
    assert [each.tolist() for each in found] == [alone(n, min(2 + n, 4)) for n in range(5)]


def test_prompts_of_one_length_need_no_padding() -> None:
    model = generation(decoder(), max_new_tokens=3, eos_token_id=())
    prompts = torch.arange(12).reshape(4, 3)
    expected = [without_cache(decoder(), each, 3) for each in prompts]
    assert [each.tolist() for each in model(prompts)] == expected


@pytest.mark.parametrize("padded", [[[9, 9, 4, 5]], [[4, 5, 9, 9]], [[9, 4, 9, 5]]])
def test_padding_may_be_anywhere(padded: list[list[int]]) -> None:
    model = generation(decoder(), max_new_tokens=3, eos_token_id=())
    mask = [[int(token != 9) for token in row] for row in padded]
    found = model({"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)})
    assert found[0].tolist() == without_cache(decoder(), torch.tensor([4, 5]), 3)


@pytest.mark.parametrize("items", [[[]], [[1], []], [{"input_ids": [1], "max_new_tokens": 0}]])
def test_a_prompt_of_nothing_is_refused(items: list[Any]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generation(decoder(), max_new_tokens=3)(items)


@pytest.mark.parametrize("count", [1, 3])
def test_answers_belong_to_the_callers(count: int) -> None:
    """Not to the inference mode in which they were made."""
    answers = generation(decoder(), max_new_tokens=count)([prompt(0), prompt(1)])
    for answer in answers:
        assert not answer.is_inference()
        answer += 1


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "stages"), [(0, 1), (1, 0)])
def test_numbers_start_at_one(tokens: int, stages: int) -> None:
    with pytest.raises(ValueError, match="has to be 1 or more"):
        generation(decoder(), max_new_tokens=tokens, prefill_stages=stages)


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_tokens_are_whole_numbers(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 1.5; it has to be the number of a token"):
        generation(decoder(), max_new_tokens=3, **{name: 1.5})


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(StagingError, match=r"training mode; call its eval\(\)"):
        generation(HandWritten().train(), max_new_tokens=3)


def test_what_cannot_be_called_is_no_decoder() -> None:
    with pytest.raises(TypeError, match="not callable"):
        generation(object(), max_new_tokens=3)
