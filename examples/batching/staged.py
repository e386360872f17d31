"""A model in stages: new requests catch up with a running batch.

    python examples/batching/staged.py

Requests come one after the other, faster than the model answers one. With the whole model, requests
that come while a batch runs wait for its end. With stages they run the first stages while the batch
waits for them, and then go on with it, where that pays: on a busy machine it may not. The answers
are the same.

The second part has answers in pieces: a request that is finished leaves the loop between two steps,
and the next one takes its place.
"""

import time

import torch

from trims_shim.batching import Batcher
from trims_shim.batching.staged import Loop, StagedModel, Stepped

WIDTH, STAGES, REQUESTS = 512, 4, 24

torch.manual_seed(0)
torch.set_num_threads(1)


def block(layers: int) -> torch.nn.Module:
    """[batch, WIDTH] -> [batch, WIDTH]."""
    linear = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)]
    return torch.nn.Sequential(*linear).requires_grad_(False)


model = torch.nn.Sequential(*[block(12) for _ in range(STAGES)]).eval()
rows = torch.randn(REQUESTS, WIDTH)


def serve(batcher: Batcher) -> list[torch.Tensor]:
    """Answers to requests that come four times as fast as a lone one is answered."""
    gap_s = batcher.warm(rows[0]).latency_ns(1) / 1e9 / 4
    futures = []
    for row in rows:
        futures.append(batcher.submit(row))
        time.sleep(gap_s)
    return [future.result() for future in futures]


def compare() -> None:
    """The same requests with and without stages."""
    with Batcher(StagedModel(model), policy="load", max_batch_size=16) as staged:
        answers = serve(staged)
        staged.drain()
        found = staged.stage_stats()
    with torch.no_grad():
        is_same = all(
            torch.allclose(answer, model(row[None])[0], atol=1e-4)
            for answer, row in zip(answers, rows, strict=True)
        )
    print(f"same answers: {is_same}")
    print(f"{found.batches} batches; newcomers joined {found.stretches} times")
    for number, stage in enumerate(found.stages):
        print(f"  stage {number}: {stage.runs} runs, {stage.mean_batch_size:.1f} requests each")


def step(state: torch.Tensor) -> Stepped:
    """One step: a row that starts with n gives a piece in each of n steps. ``state``: [batch]."""
    return Stepped(state=state - 1, pieces=state, finished=(state <= 1).tolist())


def count_down() -> None:
    """Run a loop: each step is for all its rows, until each has its last piece."""
    with Batcher(StagedModel([lambda numbers: numbers, Loop(step)])) as batcher:
        long = batcher.submit(torch.tensor(5))
        print("pieces:", [int(piece) for piece in batcher.stream(torch.tensor(3))])
        print("an answer:", [int(piece) for piece in long.result()])


if __name__ == "__main__":
    compare()
    count_down()
