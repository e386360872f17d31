"""Prompts of many threads, continued together: new prompts join between two tokens.

    python examples/batching/generation.py

A small GPT-2 (random weights) is a staged model: its first stage reads prompts, then each step adds
a token to every row. Threads come at different times and ask for answers of different lengths; a
short answer does not wait for a long one. One caller gets its tokens as they are made.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trims_shim.batching import Batcher
from trims_shim.batching.staged import generation

CALLERS, WORDS, LONGEST = 24, 500, 24

torch.manual_seed(0)
torch.set_num_threads(1)
config = GPT2Config(
    vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=2,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
model = GPT2LMHeadModel(config).eval().double()  # so that no rounding decides between two words
batcher = Batcher(generation(model, max_new_tokens=LONGEST), max_batch_size=8, collate="list")


def alone(prompt: torch.Tensor, count: int) -> list[int]:
    """The tokens that transformers itself generates."""
    found = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=count,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


def caller(number: int) -> tuple[torch.Tensor, int, list[int], float]:
    """A prompt, the number of tokens wanted, the tokens, and the milliseconds they took."""
    rng = random.Random(number)
    prompt = torch.randint(WORDS, (rng.randint(1, 20),))
    count = rng.choice((2, LONGEST))
    time.sleep(rng.random() / 50)
    began = time.perf_counter()
    answer = batcher({"input_ids": prompt, "max_new_tokens": count})
    return prompt, count, answer.tolist(), (time.perf_counter() - began) * 1e3


def main() -> None:
    """Run many callers, then one that streams."""
    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(caller, range(CALLERS)))
    same = all(found == alone(prompt, count) for prompt, count, found, _ in answers)
    print(f"same tokens as alone: {same}")
    for wanted in (2, LONGEST):
        slowest_ms = max(took_ms for _, count, _, took_ms in answers if count == wanted)
        print(f"slowest answer of {wanted} tokens: {slowest_ms:.0f} ms")
    steps = batcher.stage_stats().stages[-1].batch_sizes
    rows = sum(size * count for size, count in steps.items())
    print(f"{rows / sum(steps.values()):.1f} rows for each step, in {sum(steps.values())} steps")
    prompt = torch.tensor([1, 2, 3])
    pieces = list(batcher.stream({"input_ids": prompt}))
    is_same = torch.cat(pieces).tolist() == alone(prompt, LONGEST)
    print(f"streamed in {len(pieces)} pieces, the same: {is_same}")
    batcher.close()


if __name__ == "__main__":
    main()
