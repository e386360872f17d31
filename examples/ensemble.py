"""Two models that vote, each in a process of its own, with batch sizes that were measured.

    python examples/ensemble.py

It prints the batch sizes that suit this machine, and how often each class wins the vote.
"""

from functools import partial

import torch

from trims_shim.ensemble import Ensemble, Member, measure, optimise, throughput


def load(width, device):
    """Called in a worker: make the model for ``device``, return a function of a batch."""
    torch.manual_seed(width)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    ).to(device)

    @torch.inference_mode()
    def predict(samples):
        return model(samples.to(device)).softmax(1)

    return predict


if __name__ == "__main__":
    members = [Member(f"width {width}", partial(load, width)) for width in (64, 1024)]
    samples = torch.randn(1000, 256)

    problem = measure(members, samples[:8], devices=["cpu"], batch_sizes=(8, 64), progress=print)
    allocation = optimise(problem)
    print("batch sizes:", allocation.batch_sizes)
    print(f"estimated: {throughput(problem, allocation):.0f} samples/s")

    with Ensemble(
        members, devices=problem.devices, allocation=allocation, combine="vote"
    ) as ensemble:
        classes = ensemble.predict(samples)
        print("answer:", [int((classes == number).sum()) for number in range(10)])
