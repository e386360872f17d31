"""Loads that convert or stack weights, one per fresh process (:mod:`benchmarks.conversions`).

``python -m benchmarks.conversions_task TASK JSON FD``. Both sides run the same lines; with
``TRIMS_ENABLED=1`` the shim is imported first. A small model of the same kind is loaded before the
timed load, so that lazy imports of transformers are not timed on either side.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process_memory import anonymous_bytes
from benchmarks.tasks import main
from benchmarks.workers import shared_fraction, touch

__all__ = ["WAYS"]

Result = dict[str, Any]
WAYS: dict[str, Callable[[Any, str], Any]] = {
    "dtype=float32": lambda kind, path: kind.from_pretrained(path, dtype="float32"),
    "dtype=bfloat16": lambda kind, path: kind.from_pretrained(path, dtype="bfloat16"),
    "float()": lambda kind, path: kind.from_pretrained(path).float(),
    "half()": lambda kind, path: kind.from_pretrained(path).half(),
    "stacked": lambda kind, path: kind.from_pretrained(path),
}
"""How a model is loaded. transformers takes the dtype of the file where none is given."""


def _configured(kind: str, *, is_small: bool) -> tuple[Any, Any]:
    """The class of a kind of model, and a configuration."""
    import transformers

    if kind == "gpt2-medium":
        small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
        large = {"n_layer": 24, "n_embd": 1024, "n_head": 16}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        configuration = transformers.GPT2Config(**(small if is_small else large), **ends)
        return transformers.GPT2LMHeadModel, configuration
    sizes: dict[str, int] = {
        "vocab_size": 100 if is_small else 32000,
        "hidden_size": 64 if is_small else 1024,
        "intermediate_size": 64,
        "moe_intermediate_size": 64 if is_small else 512,
        "num_hidden_layers": 1 if is_small else 4,
        "num_attention_heads": 4 if is_small else 16,
        "num_key_value_heads": 4,
        "num_experts": 4 if is_small else 64,
        "num_experts_per_tok": 2,
        "head_dim": 16 if is_small else 64,
    }
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**sizes)


def make(*, kind: str, dtype: str, directory: str) -> Result:
    """Save a large and a small model with random weights, if they are not there yet."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for size in ("large", "small"):
        path = Path(directory) / size
        if not (path / "config.json").exists():
            model_class, configuration = _configured(kind, is_small=size == "small")
            torch.manual_seed(0)
            model = model_class(configuration).to(getattr(torch, dtype))
            model.save_pretrained(path)
    files = (Path(directory) / "large").glob("*.safetensors")
    return {"size_bytes": sum(each.stat().st_size for each in files)}


def load(*, kind: str, way: str, directory: str) -> Result:
    """Load, then read every page of all parameters."""
    import numpy  # noqa: F401
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    model_class = _configured(kind, is_small=True)[0]
    WAYS[way](model_class, os.path.join(directory, "small"))
    path = os.path.join(directory, "large")
    gc.collect()
    before = anonymous_bytes()
    start = time.perf_counter()
    model = WAYS[way](model_class, path)
    loaded = time.perf_counter()
    parameters = dict(model.named_parameters())
    checksum = touch(parameters)
    end = time.perf_counter()
    gc.collect()
    file = next(Path(path).glob("*.safetensors"))
    return {
        "load_s": loaded - start,
        "total_s": end - start,
        "private_bytes": anonymous_bytes() - before,
        "checksum": checksum,
        "shared": shared_fraction(parameters, str(file)),
    }


if __name__ == "__main__":
    main(make, load)
