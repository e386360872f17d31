"""Generation on streams of a device, in a process of its own: a task for benchmarks.forking."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from benchmarks.forking import serve
from tests.batching.staged.decoding.decoders import VOCABULARY, HandWritten, without_cache
from trims_shim.batching import Batcher
from trims_shim.batching.staged import generation

__all__ = ["tokens"]

_ANSWER_DEADLINE_S = 60.0


def tokens(*, device: str, lanes: Sequence[str], count: int, prefill_stages: int) -> Any:
    """Numbers of prompts that were continued in another way than alone on the processor."""
    torch.set_num_threads(1)
    here, there = HandWritten(), HandWritten().to(device)
    model = generation(there, max_new_tokens=20, eos_token_id=(3,), prefill_stages=prefill_stages)
    randoms = Random(count)
    prompts = [
        [randoms.randrange(VOCABULARY) for _ in range(randoms.randint(1, 20))] for _ in range(count)
    ]
    with Batcher(model, max_batch_size=8, collate="list", devices=list(lanes)) as batcher:
        futures = []
        for prompt in prompts:
            futures.append(batcher.submit(prompt))
            if randoms.random() < 0.3:
                time.sleep(randoms.random() * 2e-3)
        found = [future.result(_ANSWER_DEADLINE_S) for future in futures]
        stats = batcher.stage_stats()
    expected = [without_cache(here, torch.tensor(prompt), 20, (3,)) for prompt in prompts]
    return {
        "wrong": [n for n, each in enumerate(found) if each.tolist() != expected[n]],
        "where": sorted({each.device.type for each in found}),
        "stretches": stats.stretches,
        "failures": stats.failures,
    }


if __name__ == "__main__":
    serve({"tokens": tokens}, int(sys.argv[3]))
