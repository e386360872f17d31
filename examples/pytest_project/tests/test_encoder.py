"""A test suite that loads a model in every test, as suites with independent tests do."""

import pytest
import torch
from encoder import DEPTH, WIDTH, WORDS, Encoder


def texts(batch: int, *, seed: int = 0) -> torch.Tensor:
    """Texts of sixteen random words."""
    return torch.randint(WORDS, (batch, 16), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_every_text_gets_a_vector(encoder: Encoder, batch: int) -> None:
    assert encoder(texts(batch)).shape == (batch, WIDTH)


@pytest.mark.parametrize("seed", range(4))
def test_output_is_bounded(encoder: Encoder, seed: int) -> None:
    assert encoder(texts(4, seed=seed)).abs().max() <= 1


@pytest.mark.parametrize("seed", range(4))
def test_output_is_repeatable(encoder: Encoder, seed: int) -> None:
    assert torch.equal(encoder(texts(1, seed=seed)), encoder(texts(1, seed=seed)))


@pytest.mark.parametrize("seed", range(4))
def test_order_of_words_does_not_matter(encoder: Encoder, seed: int) -> None:
    text = texts(1, seed=seed)
    torch.testing.assert_close(encoder(text), encoder(text.flip(1)))


@pytest.mark.parametrize("layer", range(DEPTH))
def test_every_layer_matters(encoder: Encoder, layer: int) -> None:
    """Overwrites weights: no other test may see it."""
    before = encoder(texts(1))
    with torch.no_grad():
        encoder.layers[layer].weight.zero_()
    assert not torch.equal(before, encoder(texts(1)))


def test_unused_words_do_not_matter(encoder: Encoder) -> None:
    """Overwrites the word vectors of all words that the text does not have."""
    text = texts(1)
    before = encoder(text)
    unused = torch.ones(WORDS, dtype=torch.bool)
    unused[text.flatten()] = False
    with torch.no_grad():
        encoder.words.weight[unused] = 0
    assert torch.equal(before, encoder(text))


def test_no_weight_was_left_at_zero(encoder: Encoder) -> None:
    """Runs after the tests above: would see what they wrote, if weights were shared for writing."""
    assert (encoder.words.weight[:: WORDS // 100] != 0).any(dim=1).all()
    assert all(layer.weight.count_nonzero() for layer in encoder.layers)
