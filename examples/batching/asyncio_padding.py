"""Sentences of different lengths from an event loop: padded, with a mask.

    python examples/batching/asyncio_padding.py

A small encoder takes token numbers and a mask, as transformers' models do. Every task awaits the
vector of one sentence. Sentences of similar length share a batch, and short ones join long ones
where that is quicker. Padding does not change their vectors.
"""

import asyncio
import random

import torch

from trims_shim.batching import Pad, batched

SENTENCES, WORDS, WIDTH = 64, 1000, 64

torch.manual_seed(0)
embedding = torch.nn.Embedding(WORDS, WIDTH)
seen: list[tuple[int, ...]] = []


@batched(slo_ms=2000, max_batch_size=16, collate=Pad())
def encode(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """``input_ids``, ``attention_mask``: [batch, longest] -> [batch, WIDTH], means of words."""
    seen.append(tuple(batch["input_ids"].shape))
    mask = batch["attention_mask"].unsqueeze(2)
    with torch.inference_mode():
        return (embedding(batch["input_ids"]) * mask).sum(dim=1) / mask.sum(dim=1)


async def main() -> None:
    """Ask for all sentences at once."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 32) for _ in range(SENTENCES)]
    sentences = [torch.randint(0, WORDS, (length,)) for length in lengths]
    vectors = await asyncio.gather(*(encode.aio({"input_ids": each}) for each in sentences))
    with torch.inference_mode():
        alone = [embedding(each).mean(dim=0) for each in sentences]
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(vectors, alone, strict=True))
    print(f"same vectors as alone: {same}")
    print(f"{len(vectors)} sentences in {len(seen)} batches")
    print(f"shapes the model saw: {sorted(seen)}")
    await encode.aclose()


if __name__ == "__main__":
    asyncio.run(main())
