"""What is drawn is what transformers draws for that prompt alone, with that seed."""

from __future__ import annotations

import functools
import math
import signal
from random import Random
from typing import Any

import pytest
import torch
from harness import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.batching.staged.decoding.decoders import VOCABULARY, HandWritten
from tests.batching.staged.decoding.test_generating import Arrivals, decoder, prompt
from trims_shim.batching import Batcher
from trims_shim.batching.collating.padding import Pad
from trims_shim.batching.policies.window import Window
from trims_shim.batching.staged.decoding.generating import generation
from trims_shim.batching.staged.decoding.sampling import (
    Chance,
    Sampling,
    chance_of,
    chosen,
    processed,
)

MOST = 8
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.6},
]


def chance(seed: int, **asked: Any) -> Chance:
    found = chance_of({"seed": seed, **asked}, Sampling(), None)
    assert found is not None
    return found


# --- scores ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 20),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1),
)
def test_scores_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    """To the bit; also where some are equal."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    scores[0] = scores[0].round()
    expected = warpers.TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = warpers.TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(processed(scores, Sampling(temperature, top_k, top_p)), expected)


def test_a_token_is_always_left() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.5]])
    assert processed(scores, Sampling(1, 0, 1e-9)).isfinite().tolist() == [[False, True, False]]
    assert processed(scores, Sampling(1, 1, 1)).isfinite().tolist() == [[False, True, False]]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    scores = torch.tensor([[0.0, math.log(3)]]).repeat(2000, 1)
    drawn = chosen(scores, [chance(seed, temperature=1.0) for seed in range(2000)])
    assert 0.71 < drawn.float().mean() < 0.79  # 4 deviations around 3 / 4


def test_rows_draw_for_themselves() -> None:
    """Greedy ones draw nothing; one that is there twice, to fill the batch up, draws once."""
    scores = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    own, other = chance(3, temperature=1.0), chance(4, temperature=2.0, top_k=3)
    rows = chosen(scores[[0, 1, 2, 3, 3]], [None, own, None, other, other])
    alone = chance(3, temperature=1.0)
    assert rows[1] == chosen(scores[1:2], [alone])[0]
    assert rows[3] == rows[4] == chosen(scores[3:4], [chance(4, temperature=2.0, top_k=3)])[0]
    assert [rows[0], rows[2]] == scores[[0, 2]].argmax(-1).tolist()
    assert torch.equal(own.generator.get_state(), alone.generator.get_state())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1, "top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": 1, "top_p": 0}, "top_p is 0"),
        ({"temperature": 1, "top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": 3, "top_p": 0.5}, "asks for top_k, top_p, and for no temperature"),
    ],
)
def test_what_cannot_be_drawn_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chance_of(asked, Sampling(), None)


def test_what_is_not_asked_for_is_the_models() -> None:
    default = Sampling(0.5, 7, 0.9)
    found = chance_of({"top_k": 3}, default, None)
    assert found is not None
    assert found.sampling == Sampling(0.5, 3, 0.9)
    assert chance_of({"temperature": 0}, default, None) is None
    assert chance_of({"seed": 3}, Sampling(), None) is None
    with pytest.raises(ValueError, match="temperature is -1"):
        generation(decoder(), max_new_tokens=1, temperature=-1)


# --- answers --------------------------------------------------------------------------------------


def item(number: int) -> dict[str, Any]:
    return {"input_ids": prompt(number), "seed": number, **SETTINGS[number % len(SETTINGS)]}


def drawn_by_hand(number: int, count: int = MOST) -> list[int]:
    """Token by token, from scores of the model without a cache."""
    tokens, generator = prompt(number).tolist(), torch.Generator().manual_seed(number)
    asked = dict(SETTINGS[number % len(SETTINGS)])
    for _ in range(count):
        scores = _last_scores(decoder(), torch.tensor([tokens])).float()
        likely = processed(scores, Sampling(**asked)).softmax(-1)
        tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
    return tokens[len(prompt(number)) :]


def _last_scores(model: HandWritten, row: Tensor) -> Any:
    from trims_shim.batching.staged.decoding.key_values import NOTHING_SEEN, GrowingCache

    positions = torch.arange(row.shape[1])[None]
    with torch.inference_mode():
        mask = torch.ones_like(row, dtype=torch.bool)
        return model(row, positions, mask, GrowingCache(NOTHING_SEEN))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1 << 20), prefill_stages=st.sampled_from([1, 2]))
def test_any_arrivals_draw_what_each_draws_alone(seed: int, prefill_stages: int) -> None:
    model = generation(decoder(), max_new_tokens=MOST, prefill_stages=prefill_stages)
    randoms = Random(seed)
    arrivals = Arrivals(model, randoms, item)
    arrivals.run(randoms.sample(range(12), 6))
    assert arrivals.answers == {number: drawn_by_hand(number) for number in arrivals.answers}


def test_it_is_what_generate_draws() -> None:
    pytest.importorskip("transformers")
    from tests.batching.staged.decoding.test_transformers_decoder import model_of

    model = model_of("llama")
    staged = generation(model, max_new_tokens=MOST, eos_token_id=())
    arrivals = Arrivals(staged, Random(5), item)
    arrivals.run(list(range(6)))
    assert len(arrivals.answers) > 3
    for number, answer in arrivals.answers.items():
        torch.manual_seed(number)
        found = model.generate(
            prompt(number)[None],
            attention_mask=torch.ones_like(prompt(number))[None],
            max_new_tokens=MOST,
            do_sample=True,
            pad_token_id=0,
            eos_token_id=None,
            **({"top_k": 0, "top_p": 1.0} | SETTINGS[number % len(SETTINGS)]),
        )
        assert answer == found[0, len(prompt(number)) :].tolist()


@pytest.mark.parametrize("batch_sizes", [None, [3, 8]])
def test_requests_draw_what_each_draws_alone(batch_sizes: list[int] | None) -> None:
    model = generation(decoder(), max_new_tokens=MOST)
    with Batcher(model, collate="list", max_batch_size=8, batch_sizes=batch_sizes) as batcher:
        futures = {number: batcher.submit(item(number)) for number in range(10)}
        for number, future in futures.items():
            assert future.result(PATIENCE_S).tolist() == drawn_by_hand(number)
        with pytest.raises(ValueError, match="top_p is 7"):
            batcher({"input_ids": [1], "temperature": 1, "top_p": 7})


class Overflowing(HandWritten):
    """As one of few bits: its scores are no numbers for a token that is far behind."""

    def forward(self, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        is_far = positions[:, -1:] > 30
        return super().forward(tokens, positions, *rest).masked_fill(is_far, math.nan)


@pytest.mark.parametrize("batch_sizes", [None, [4]])
def test_who_cannot_be_drawn_for_fails_alone(batch_sizes: list[int] | None) -> None:
    """The others neither begin anew nor lose what they have heard."""
    model = generation(Overflowing(), max_new_tokens=MOST)
    wait = functools.partial(Window, wait_ms=1e6)
    with Batcher(
        model, collate="list", policy=wait, max_batch_size=3, batch_sizes=batch_sizes
    ) as batcher:
        stream = batcher.stream(item(1))
        other = batcher.submit(item(2))
        failing = batcher.submit({"input_ids": [1] * 28, "temperature": 1.0})
        assert torch.cat(list(stream)).tolist() == drawn_by_hand(1)
        assert other.result(PATIENCE_S).tolist() == drawn_by_hand(2)
        with pytest.raises(RuntimeError, match="nan"):
            failing.result(PATIENCE_S)
        batcher.drain(PATIENCE_S)
        assert batcher.stage_stats().failures == 0
        assert batcher.stats().failed == 1


def test_a_time_limit_within_a_draw_is_no_failure_of_its_row(
    time_limit: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawing(*args: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch, "multinomial", drawing)
    failed: dict[int, Exception] = {}
    with pytest.raises(time_limit):
        chosen(torch.zeros(1, VOCABULARY), [chance(1, temperature=1.0)], failed)
    assert not failed


def test_padded_prompts_draw_the_same() -> None:
    model = generation(decoder(), max_new_tokens=MOST)
    numbers = (1, 5, 9)  # of equal settings
    items = [item(number) for number in numbers]
    of_lists = model(Pad(0, fields=["input_ids"]).join(items))
    for each in items:
        each |= {name: torch.tensor(each[name]) for name in ("seed", "temperature", "top_k")}
    of_tensors = model(Pad(0, fields=["input_ids"]).join(items))
    for found in (of_lists, of_tensors):
        assert [each.tolist() for each in found] == [drawn_by_hand(each) for each in numbers]


def test_seeds_that_nobody_gives_are_torchs() -> None:
    model = generation(decoder(), max_new_tokens=MOST, temperature=3.0)
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model([prompt(3)])[0].tolist())
    assert answers[0] == answers[1] != answers[2]
