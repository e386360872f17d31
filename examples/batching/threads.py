"""Many threads, one model: each thread asks for single answers, and requests form batches.

    python examples/batching/threads.py

The model is a perceptron whose batch of 16 takes little longer than a single row. Twenty threads
ask for one row each, again and again, first one after the other, then through a batcher with a
latency objective. The answers are the same. The program prints the outcome of the requests and the
rows in a batch.
"""

import threading
import time
from collections.abc import Callable

import torch

from trims_shim.batching import Batcher, batched

THREADS, ROUNDS, WIDTH = 20, 25, 1024

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]).eval()
rows = torch.randn(THREADS, WIDTH)


@torch.inference_mode()
def classify(batch: torch.Tensor) -> torch.Tensor:
    """[batch, WIDTH] -> [batch]."""
    return model(batch).argmax(dim=1)


def ask_from_threads(ask: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[int], float]:
    """The last answer for each thread's row, and requests per second."""
    answers = [-1] * THREADS

    def client(number: int) -> None:
        for _ in range(ROUNDS):
            answers[number] = int(ask(rows[number]))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(THREADS)]
    started_s = time.perf_counter()
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return answers, THREADS * ROUNDS / (time.perf_counter() - started_s)


def main() -> None:
    """Ask without a batcher and with one."""
    one_at_a_time = threading.Lock()

    def alone(row: torch.Tensor) -> torch.Tensor:
        with one_at_a_time:
            return classify(row[None])[0]

    plain, plain_rate = ask_from_threads(alone)
    together: Batcher = batched(slo_ms=2000, max_batch_size=THREADS)(classify)
    with together:
        answers, rate = ask_from_threads(together)
        stats = together.stats()
    print(f"same answers: {answers == plain}")
    print(f"answered {stats.answered} of {THREADS * ROUNDS}, {stats.violations} too late")
    print(f"{stats.mean_batch_size:.1f} rows for each batch")
    print(f"{plain_rate:.0f} requests per second one by one, {rate:.0f} batched")


if __name__ == "__main__":
    main()
