"""A web server of several workers: memory holds the weights once, and requests share batches.

    pip install fastapi uvicorn
    uvicorn --app-dir examples/batching --workers 2 fastapi_server:app
    curl "localhost:8000/classify?x=0.5&y=-1"
    curl localhost:8000/worker

Every worker loads the model, or a master does before it forks them (``gunicorn --preload``).
``import trims_shim`` is enough to share the weights. Requests of a worker share batches, whether
they come from coroutines or from plain functions, which FastAPI calls in threads. Nothing has to be
closed: a server answers its open requests before it ends.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from torch import nn

import trims_shim
from trims_shim.batching import batched
from trims_shim.errors import RequestDropped

CHECKPOINT = Path(tempfile.gettempdir()) / "trims-example-fastapi.pt"
WIDTH, CLASSES = 2048, 4

torch.set_num_threads(1)  # for each worker; and no threads of torch that a fork would lose


def build() -> nn.Module:
    """A perceptron of 17 MB that finds the class of a point in the plane."""
    layers = (nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).eval()


def make_checkpoint() -> None:
    """Write the checkpoint if it is not there: one of the workers, which start at the same time."""
    with CHECKPOINT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not CHECKPOINT.exists():
            torch.manual_seed(0)
            unfinished = CHECKPOINT.with_suffix(".unfinished")
            torch.save(build().state_dict(), unfinished)
            unfinished.replace(CHECKPOINT)


def load_model() -> nn.Module:
    """The model with its weights, without an initialisation that would be overwritten."""
    if not CHECKPOINT.exists():  # another user's is as good, whose lock is not for us
        make_checkpoint()
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(CHECKPOINT), assign=True)
    return model


model = load_model()
app = FastAPI()


@batched(slo_ms=1000, max_batch_size=32)
def classify(points: torch.Tensor) -> torch.Tensor:
    """[batch, 2] -> [batch]."""
    with torch.inference_mode():
        return model(points).argmax(dim=1)


@app.get("/classify")
async def classify_in_loop(x: float, y: float) -> dict[str, int]:
    """Answer from the event loop. FastAPI goes on if the client leaves; so does the request."""
    try:
        return {"class": int(await classify.aio(torch.tensor([x, y])))}
    except RequestDropped as error:  # too many requests for this objective
        raise HTTPException(503, str(error)) from error


@app.get("/classify-in-thread")
def classify_in_thread(x: float, y: float) -> dict[str, int]:
    """The same from a thread."""
    try:
        return {"class": int(classify(torch.tensor([x, y])))}
    except RequestDropped as error:
        raise HTTPException(503, str(error)) from error


@app.get("/worker")
async def worker() -> dict[str, Any]:
    """The counters of the worker that answers this."""
    return {
        "pid": os.getpid(),
        "loads from the cache": trims_shim.stats().served,
        "batches": classify.stats().batch_sizes,
    }
