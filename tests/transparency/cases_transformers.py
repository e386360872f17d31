"""transformers: from_pretrained on a local folder with a tiny configuration and random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MixtralConfig,
    MixtralForCausalLM,
)

from .registry import Work, attempt, case, cases

# The names above are lazy in transformers: imported once here, not in each case's process.
transformers.utils.logging.disable_progress_bar()


def _configuration(tied: bool = True, words: int = 4096) -> Any:
    return GPT2Config(
        vocab_size=words,
        n_positions=64,
        n_embd=256,
        n_layer=2,
        n_head=4,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _saved(tied: bool = True, **options: Any) -> Any:
    def write(path: Path) -> None:
        torch.manual_seed(1)
        model = GPT2LMHeadModel(_configuration(tied))
        model.save_pretrained(path, **options)

    return write


def _as_bin(tied: bool = True) -> Any:
    def write(path: Path) -> None:
        torch.manual_seed(1)
        model = GPT2LMHeadModel(_configuration(tied))
        path.mkdir()
        model.config.save_pretrained(path)
        torch.save(model.state_dict(), path / "pytorch_model.bin")

    return write


def _observed(model: Any) -> object:
    with torch.no_grad():
        logits = model(torch.tensor([[1, 5, 9]])).logits
    tied = model.lm_head.weight is model.transformer.wte.weight
    return [dict(model.named_parameters()), dict(model.named_buffers()), logits, tied]


WRITERS = {
    "safetensors": _saved(),
    "safetensors_untied": _saved(tied=False),
    "safetensors_shards": _saved(max_shard_size="3MB"),
    "bin": _as_bin(),
    "bin_untied": _as_bin(tied=False),
}


@cases(WRITERS, served=True)
def from_pretrained(work: Work, write: Any) -> object:
    path = work.file("model", write)
    return _observed(GPT2LMHeadModel.from_pretrained(path))


@cases({"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16}, served=True)
def dtype(work: Work, kind: Any) -> object:
    path = work.file("model", _saved())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    return dict(model.named_parameters())


def _saved_in(dtype: torch.dtype) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        torch.manual_seed(1)
        GPT2LMHeadModel(_configuration(words=1 << 14)).to(dtype).save_pretrained(path)

    return save


CONVERTED: dict[str, tuple[torch.dtype, Callable[[Path], Any]]] = {
    "from_pretrained": (
        torch.bfloat16,
        lambda path: GPT2LMHeadModel.from_pretrained(path, dtype=torch.float32),
    ),
    "float": (torch.bfloat16, lambda path: GPT2LMHeadModel.from_pretrained(path).float()),
    "to": (torch.bfloat16, lambda path: GPT2LMHeadModel.from_pretrained(path).to(torch.float32)),
    "rounded": (
        torch.float32,
        lambda path: GPT2LMHeadModel.from_pretrained(path, dtype=torch.bfloat16),
    ),
    "half": (torch.float32, lambda path: GPT2LMHeadModel.from_pretrained(path).half()),
    "bfloat16": (torch.float16, lambda path: GPT2LMHeadModel.from_pretrained(path).bfloat16()),
}


@cases(CONVERTED, served=True)
def converted(work: Work, how: tuple[torch.dtype, Callable[[Path], Any]]) -> object:
    """From the third load on there is an image of the converted numbers."""
    saved, load = how
    path = work.file("model", _saved_in(saved))
    models = [load(path) for _ in range(4)]
    with torch.no_grad():
        models[2].transformer.wte.weight.zero_()
    return [_observed(model) for model in models]


def _saved_experts(path: Path) -> None:
    torch.manual_seed(1)
    MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=8,
        )
    ).bfloat16().save_pretrained(path)


@case(served=True)
def experts(work: Work) -> object:
    """From the third load on there are images of the stacked ones."""
    path = work.file("model", _saved_experts)
    models = [MixtralForCausalLM.from_pretrained(path) for _ in range(4)]
    with torch.no_grad():
        models[2].model.layers[0].mlp.experts.down_proj.zero_()
        logits = [model(torch.tensor([[1, 5, 9]])).logits for model in models]
    return [logits, [dict(model.named_parameters()) for model in models[1:3]]]


@case(served=True)
def with_information_on_keys(work: Work) -> object:
    path = work.file("model", _saved())
    model, information = GPT2Model.from_pretrained(path, output_loading_info=True)
    return [
        dict(model.named_parameters()),
        {key: sorted(map(str, value)) for key, value in information.items()},
    ]


@case(served=True)
def state_dict_of_loaded_model(work: Work) -> object:
    path = work.file("model", _saved())
    model = GPT2LMHeadModel.from_pretrained(path)
    other = GPT2LMHeadModel(_configuration())
    result = other.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    return [repr(result), _observed(other), _observed(model)]


@case(served=True)
def trained_and_saved_again(work: Work) -> object:
    path = work.file("model", _saved())
    model = GPT2LMHeadModel.from_pretrained(path).train(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[1, 5, 9]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained("again")
    again = GPT2LMHeadModel.from_pretrained("again")
    fresh = GPT2LMHeadModel.from_pretrained(path)
    size = Path("again/model.safetensors").stat().st_size
    return [size, _observed(again), _observed(fresh)]


@case(served=True)
def two_models_are_independent(work: Work) -> object:
    path = work.file("model", _saved())
    first, second = (GPT2LMHeadModel.from_pretrained(path) for _ in range(2))
    with torch.no_grad():
        first.transformer.h[0].attn.c_attn.weight.zero_()
    return [_observed(first), _observed(second)]


@case()
def folder_without_weights(work: Work) -> object:
    def write(path: Path) -> None:
        path.mkdir()
        _configuration().save_pretrained(path)

    path = work.file("model", write)
    wrong = work.file("wrong", _saved())
    save_file({"unknown": torch.zeros(1 << 20)}, wrong / "model.safetensors", {"format": "pt"})
    torch.manual_seed(0)
    return [
        attempt(GPT2LMHeadModel.from_pretrained, path),
        attempt(GPT2LMHeadModel.from_pretrained, "./no-such-folder"),
        type(attempt(GPT2LMHeadModel.from_pretrained, wrong)),
    ]
