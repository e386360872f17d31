"""Two models on one device: a slow one makes room for bursts of a quick one.

    python examples/batching/two_models.py

The slow model has sixteen stages; its batches can be given up between any two of them. Whenever it
runs, a burst of requests for the quick model comes that cannot wait for its end. With preemption
the burst is answered in time, and the slow batch runs again. Without preemption most of the burst
is too late. The answers are the same as without a batcher.
"""

import time

import torch

from trims_shim.batching.flex.batcher import FlexBatcher
from trims_shim.errors import RequestDropped

WIDTH, STAGES, BURSTS, BURST = 1024, 16, 10, 8

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)


def block(layers: int) -> torch.nn.Module:
    """[batch, WIDTH] -> [batch, WIDTH]."""
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


slow = torch.nn.Sequential(*[block(8) for _ in range(STAGES)]).requires_grad_(False)
quick = block(1).requires_grad_(False)
row = torch.randn(WIDTH)


def main(preemption_factor: float | None) -> None:
    """Send bursts while the slow model runs; print their outcome."""
    with FlexBatcher(
        {"slow": slow, "quick": [quick]},
        preemption_factor=preemption_factor,
        max_batch_size=BURST,
    ) as batcher:
        slow_ms = batcher.warm("slow", row).latency_ns(1) / 1e6
        quick_ms = batcher.warm("quick", row).latency_ns(BURST) / 1e6
        in_time, is_same = 0, True
        for _ in range(BURSTS):
            long = batcher.submit("slow", row, deadline_ms=100 * slow_ms)
            time.sleep(0.2 * slow_ms / 1e3)
            limit_ms = 0.6 * slow_ms + quick_ms
            began_s = time.perf_counter()
            for future in [
                batcher.submit("quick", row, deadline_ms=limit_ms) for _ in range(BURST)
            ]:
                try:
                    is_same &= torch.allclose(future.result(), quick(row), atol=1e-4)
                    in_time += time.perf_counter() - began_s <= limit_ms / 1e3
                except RequestDropped:
                    pass
            is_same &= torch.allclose(long.result(), slow(row), atol=1e-4)
        found = batcher.preemption_stats()
    print(f"preemption factor {preemption_factor}:")
    print(f"  same answers: {is_same}")
    print(f"  {in_time} of {BURSTS * BURST} quick requests in time")
    print(
        f"  {found.preemptions} batches given up, {found.stop_p50_ms:.1f} ms until one had stopped"
    )


if __name__ == "__main__":
    main(None)
    main(3.03)
