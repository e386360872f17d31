"""An ensemble on a device: right answers, one copy of weights for two workers, measured memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gpu.conftest import GpuWorld

PROGRAM = """
import json, subprocess, sys
from functools import partial
import torch
from trims_shim.ensemble import Ensemble, Member, find_devices, measure, optimise, throughput

WIDTH = 2048

def load(path, device):
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
    layer.load_state_dict(torch.load(path, map_location=device), assign=True)
    run = torch.inference_mode()(layer.forward)
    return lambda batch: run(batch.to(device)).cpu()

def main(path, device):
    weight = torch.randn(WIDTH, WIDTH)
    torch.save({"weight": weight}, path)
    samples = torch.randn(200, WIDTH)
    members = [Member(name, partial(load, path)) for name in ("one", "other")]
    with Ensemble(members, devices=[device]) as ensemble:
        found = ensemble.predict(samples)
        error = float((found - samples @ weight.T).abs().max())
        print(json.dumps({"error": error, "found": [each.name for each in find_devices()]}))
        sys.stdout.flush()
        sys.stdin.readline()
    problem = measure(members[:1], samples[:4], devices=[device], batch_sizes=(8, 64), repeats=3)
    (footprint,) = problem.members["one"].footprints.values()
    print(json.dumps({
        "weights_bytes": footprint.weights_bytes,
        "worker_bytes": footprint.worker_bytes,
        "sample_bytes": footprint.sample_bytes,
        "samples_per_s": throughput(problem, optimise(problem, tries=10)),
    }))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_members_on_a_device_answer_and_share_its_weights(
    gpu_world: GpuWorld, torch_device: str, record: Callable[..., None]
) -> None:
    program, path = (Path(gpu_world.root, name) for name in ("program.py", "linear.pt"))
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, program, path, f"{torch_device}:0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=gpu_world.environment() | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        answered = json.loads(child.stdout.readline())
        leases = [each.leases for each in gpu_world.status().images if each.tier != "host"]
        child.stdin.write("\n")
        child.stdin.flush()
        measured = json.loads(child.stdout.readline())
        assert child.wait(60) == 0
    record("shared" if leases == [2] else "not shared", leases=leases, **answered, **measured)
    assert answered["error"] < 0.1  # of sums of 2048 products, perhaps in TF32
    assert answered["found"][0] == "cuda:0"
    assert leases == [2]
    assert measured["worker_bytes"] > 0
    assert measured["samples_per_s"] > 0
