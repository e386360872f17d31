"""transformers' models generate in shared steps what ``model.generate`` does for each alone."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.batching.staged.decoding.test_generating import Arrivals, prompt
from trims_shim.batching import Batcher
from trims_shim.batching.staged.decoding.generating import generation
from trims_shim.errors import StagingError

transformers = pytest.importorskip("transformers")

MOST = 8
SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


@functools.cache
def model_of(kind: str, attention: str = "sdpa") -> Any:
    """Random weights, in float64, so that no rounding decides between two tokens."""
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=23, n_positions=64, n_embd=16, n_layer=2, n_head=2, **NO_ENDS
        )
    elif kind == "llama":
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, **NO_ENDS)
    elif kind == "bloom":  # takes no positions
        config = transformers.BloomConfig(
            vocab_size=23, hidden_size=16, n_layer=2, n_head=2, **NO_ENDS
        )
    else:  # sliding windows, shorter than prompts and answers
        config = transformers.MistralConfig(
            **SIZES, num_key_value_heads=1, sliding_window=5, **NO_ENDS
        )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def generated(model: Any, tokens: Tensor, ends: list[int] | None = None) -> list[int]:
    """By itself."""
    found = model.generate(
        tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        max_new_tokens=MOST,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )
    answer: list[int] = found[0, len(tokens) :].tolist()
    return answer


@pytest.mark.parametrize(
    ("kind", "attention", "prefill_stages"),
    [
        ("gpt2", "sdpa", 1),
        ("gpt2", "eager", 2),
        ("llama", "sdpa", 3),
        ("llama", "eager", 1),
        ("mistral", "sdpa", 2),
        ("bloom", "eager", 2),
    ],
)
def test_any_arrivals_give_the_tokens_of_generate(
    kind: str, attention: str, prefill_stages: int
) -> None:
    model = model_of(kind, attention)
    ends = [3, 7, 11]
    staged = generation(
        model, max_new_tokens=MOST, eos_token_id=ends, prefill_stages=prefill_stages
    )
    expected = {number: generated(model, prompt(number), ends) for number in range(12)}
    assert len({len(each) for each in expected.values()}) > 2
    for seed in range(3):
        arrivals = Arrivals(staged, Random(seed))
        arrivals.run(list(range(12)))
        assert len(arrivals.answers) > 4
        assert arrivals.answers == {number: expected[number] for number in arrivals.answers}


def test_ends_are_those_of_the_generation_config() -> None:
    model = model_of("gpt2")
    first = generated(model, prompt(4))
    model.generation_config.eos_token_id = first[2]
    try:
        (answer,) = generation(model, max_new_tokens=MOST)([prompt(4)])
        (without,) = generation(model, max_new_tokens=MOST, eos_token_id=())([prompt(4)])
    finally:
        model.generation_config.eos_token_id = None
    assert answer.tolist() == first[: first.index(first[2]) + 1]
    assert without.tolist() == first


@pytest.mark.parametrize(
    ("name", "value", "is_heeded"),
    [
        ("repetition_penalty", 1.3, True),
        ("repetition_penalty", 1.0, False),
        ("encoder_repetition_penalty", 1.3, True),
        ("encoder_repetition_penalty", 1.0, False),
        ("encoder_no_repeat_ngram_size", 2, True),
        ("num_beams", 1, False),
        ("no_repeat_ngram_size", 1, True),
        ("no_repeat_ngram_size", 0, False),
        ("min_new_tokens", 1, True),
        ("forced_eos_token_id", 0, True),
        ("forced_eos_token_id", 1, True),
        ("watermarking_config", {"bias": 8.0}, True),
        ("stop_strings", ["."], True),
    ],
)
def test_what_else_the_generation_config_has_is_warned_of(
    name: str, value: Any, *, is_heeded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("gpt2")
    generation(model, max_new_tokens=MOST)
    assert not caplog.records
    before = getattr(model.generation_config, name)
    setattr(model.generation_config, name, value)
    try:
        generation(model, max_new_tokens=MOST)
    finally:
        setattr(model.generation_config, name, before)
    found = [
        record.getMessage().partition(f" has {name}={value}, which")[1] for record in caplog.records
    ]
    assert found == [f" has {name}={value}, which"] * is_heeded


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ],
)
def test_rotary_embeddings_that_suit_the_longest_row_limit_the_length(rope: dict[str, Any]) -> None:
    sizes = {**SIZES, "max_position_embeddings": 16 if rope["rope_type"] == "dynamic" else 64}
    config = transformers.LlamaConfig(
        **sizes, **NO_ENDS, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    items = [torch.arange(length) for length in (3, 9, 10)]
    with Batcher(generation(model, max_new_tokens=MOST), collate="list") as complete:
        short, fitting, long = [complete.submit(each) for each in items]
        assert short.result().tolist() == generated(model, items[0])
        assert fitting.result().tolist() == generated(model, items[1])
        with pytest.raises(ValueError, match="more than 16 together"):
            long.result()
        assert len(complete({"input_ids": items[2], "max_new_tokens": 7})) == 7


def test_rotary_embeddings_may_differ_between_types_of_layers() -> None:
    """The tightest of their limits is the model's."""
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="more than 64 together"):
        generation(model, max_new_tokens=3)([torch.zeros(63, dtype=torch.int64)])


def test_queries_that_are_scaled_by_their_columns_limit_the_length() -> None:
    sizes = {**SIZES, "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2}
    scaled = {"floor_scale": 13, "attn_scale": 5.0, "num_key_value_heads": 1}
    torch.manual_seed(1)
    short, fitting, long = (torch.arange(length) for length in (3, 5, 6))
    for layers in ([1, 0], [1, 1]):  # rotary embeddings in each layer, or not in the last
        config = transformers.Llama4TextConfig(**sizes, **scaled, **NO_ENDS, no_rope_layers=layers)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        staged = generation(model, max_new_tokens=MOST)
        answers = [each.tolist() for each in staged([short, fitting])]
        assert answers == [generated(model, short), generated(model, fitting)]
        if all(layers):
            staged([long])
        else:
            with pytest.raises(ValueError, match="more than 12 together"):
                staged([long])


def test_a_window_that_only_the_models_own_cache_keeps_limits_the_length() -> None:
    config = transformers.MoshiConfig(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        sliding_window=16,
        pad_token_id=0,
    )
    model = transformers.MoshiForCausalLM(config).double().eval()
    items = [torch.arange(length) for length in (3, 9, 10)]
    with Batcher(generation(model, max_new_tokens=MOST), collate="list") as complete:
        fitting, long = complete.submit(items[1]), complete.submit(items[2])
        assert fitting.result().tolist() == generated(model, items[1])
        with pytest.raises(ValueError, match="more than 16 together"):
            long.result()


@pytest.mark.parametrize("kind", ["Bert", "RemBert"])
def test_prompts_are_not_read_in_parts_where_tokens_attend_to_later_ones(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")
    is_encoder, is_decoder = (
        transformers.AutoModelForCausalLM.from_config(config(**SIZES, is_decoder=flag)).eval()
        for flag in (False, True)
    )
    generation(is_decoder, max_new_tokens=2, prefill_stages=2)
    generation(is_encoder, max_new_tokens=2)
    with pytest.raises(StagingError, match="attend to later ones"):
        generation(is_encoder, max_new_tokens=2, prefill_stages=2)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("Gemma3Text", {"use_bidirectional_attention": True}), ("Llama", {"is_causal": False})],
)
def test_nor_where_a_configuration_lets_them(kind: str, asked: dict[str, Any]) -> None:
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **NO_ENDS, **asked, head_dim=8, num_key_value_heads=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    (answer,) = generation(model, max_new_tokens=MOST)([prompt(5)])
    assert answer.tolist() == generated(model, prompt(5))
    with pytest.raises(StagingError, match="attend to later ones"):
        generation(model, max_new_tokens=MOST, prefill_stages=2)


def test_weights_are_the_models_own() -> None:
    model = model_of("llama")
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    staged = generation(model, max_new_tokens=2)
    staged([prompt(1)])
    assert staged.name == "LlamaForCausalLM"
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before


def small(kind: str) -> Any:
    config = {
        "t5": lambda: transformers.T5Config(
            vocab_size=23, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16
        ),
        "mamba": lambda: transformers.MambaConfig(
            vocab_size=23, hidden_size=16, num_hidden_layers=1
        ),
        "lfm2": lambda: transformers.Lfm2Config(
            **SIZES, num_key_value_heads=1, layer_types=["conv", "full_attention"]
        ),
        "bart": lambda: transformers.BartConfig(
            vocab_size=23, d_model=16, decoder_layers=1, decoder_attention_heads=2
        ),
        "xlnet": lambda: transformers.XLNetConfig(
            vocab_size=23, d_model=16, n_layer=1, n_head=2, d_inner=16
        ),
        "git": lambda: transformers.GitConfig(
            **SIZES,
            vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        "gemma": lambda: transformers.GemmaConfig(
            **SIZES, num_key_value_heads=1, head_dim=8, use_bidirectional_attention=True
        ),
        "xlm": lambda: transformers.XLMConfig(vocab_size=23, emb_dim=16, n_layers=1, n_heads=2),
    }[kind]()
    kinds = (
        transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    )
    return kinds.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "is an encoder-decoder"),
        ("mamba", "keeps a state instead of the keys and values"),
        ("lfm2", "keeps a state instead of the keys and values"),
        ("xlnet", "takes no `past_key_values`"),
        ("xlm", "takes no `past_key_values`"),
        ("bart", "takes no `position_ids`"),
        ("gemma", "only where nothing is padded"),
        ("git", "by the columns of an image"),
    ],
)
def test_models_without_a_cache_of_tokens_are_refused(kind: str, message: str) -> None:
    with pytest.raises(StagingError, match=message):
        generation(small(kind), max_new_tokens=3)


def test_a_model_that_reads_its_own_cache_is_refused() -> None:
    pytest.importorskip("transformers.models.dory")
    parts = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
    sizes = {**SIZES, **parts, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.AutoConfig.for_model("dory", **sizes, **NO_ENDS)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    (answer,) = generation(model, max_new_tokens=MOST)([prompt(5)])  # each loop writes
    assert answer.tolist() == generated(model, prompt(5))
    model.config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(StagingError, match="from its own cache"):
        generation(model, max_new_tokens=MOST)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(StagingError, match="in training mode"):
        generation(small("mamba").train(), max_new_tokens=3)
