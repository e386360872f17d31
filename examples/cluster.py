"""Two variants of a model on a Ray cluster: as accurate as the demand allows.

    pip install "trims-shim[cluster]"
    python examples/cluster.py

Without a cluster Ray starts on this machine. At first few requests are planned for, and both
devices run the large variant. Then far more come, and a device changes to the small one. The actors
take the weights that their machine has in memory already.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from safetensors.numpy import load_file, save_file

from trims_shim.batching import LatencyProfile
from trims_shim.cluster import Service, deploy
from trims_shim.errors import QueueFull
from trims_shim.planner import Option, Problem

WIDTH = 512
DEPTHS = {"small": 2, "large": 24}


def save(variant: str, path: str) -> None:
    """Write the weights of a perceptron."""
    random = np.random.default_rng(0)
    layers = random.standard_normal((DEPTHS[variant], WIDTH, WIDTH), dtype=np.float32)
    save_file({f"layer{number}": layer for number, layer in enumerate(layers)}, path)


def loader(variant: str, path: str) -> Callable[[str], Callable]:
    """What an actor calls to load this variant, and then with batches."""

    def load(device: str) -> Callable:  # with torch, one would load onto this device
        layers = load_file(path).values()

        def classify(rows: np.ndarray) -> list[tuple[int, str]]:
            for layer in layers:
                rows = np.tanh(rows @ layer)
            return [(int(number), variant) for number in rows.argmax(axis=1)]

        return classify

    return load


def problem() -> Problem:
    """Two devices, of the kind that is a processor for Ray; the latencies are only said here."""
    options = [
        Option("classify", "small", "cpu", 70, LatencyProfile.linear(0.3, 3, max_batch_size=64)),
        Option("classify", "large", "cpu", 80, LatencyProfile.linear(3, 30, max_batch_size=64)),
    ]
    return Problem({"cpu": 2}, options, {"classify": 20})


def ask(service: Service, times: int) -> list[Future]:
    """So many requests at once."""
    return [
        service.submit("classify", np.ones(WIDTH, np.float32), deadline_ms=60_000)
        for _ in range(times)
    ]


def answers(futures: list[Future]) -> Counter[str]:
    """How many each variant answered; a full queue refuses what comes too soon."""
    accepted = (each for each in futures if not isinstance(each.exception(), QueueFull))
    return Counter(each.result()[1] for each in accepted)


def devices(service: Service) -> list[tuple[str, str]]:
    """Variants of the devices, and whether they are ready."""
    return [(each.variant, each.phase) for each in service.stats().devices]


def main() -> None:
    """Ask little, then much until a device has changed."""
    with tempfile.TemporaryDirectory() as directory:
        loaders = {}
        for variant in DEPTHS:
            path = os.path.join(directory, f"{variant}.safetensors")
            save(variant, path)
            loaders[variant] = loader(variant, path)
        with deploy(problem(), loaders, slo_ms=200, replan_s=1) as service:
            quiet = answers(ask(service, 20))
            print(f"few requests are answered by: {', '.join(quiet)}")
            futures: list[Future] = []
            until_s = time.monotonic() + 60
            while ("small", "ready") not in devices(service):
                assert time.monotonic() < until_s, "no device has changed"
                futures += ask(service, 50)
                time.sleep(0.1)
            busy = answers([*futures, *ask(service, 50)])
            print(f"many requests are answered by: {', '.join(sorted(busy))}")
            print(f"failed: {service.stats().families['classify'].failed}")


if __name__ == "__main__":
    main()
