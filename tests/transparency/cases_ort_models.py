"""Every kind of model, by path and from bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import onnxruntime
from onnx_models import SAMPLES
from onnx_unusual import BROKEN

from .registry import Work, attempt, case, cases
from .sessions import described, made, model_file, opened, options, ran


@cases({kind: kind for kind in SAMPLES}, served=True)
def kinds(work: Work, kind: str) -> object:
    """By path, and from bytes with two threads."""
    sample = made(kind, seed=51)
    return [
        opened(sample, model_file(work, sample), options()),
        opened(sample, sample.content, options(intra_op_num_threads=2)),
    ]


@case(served=False, reason="random_seed")
def random_numbers(work: Work) -> object:
    """Nodes without a seed follow the library's, which one session after another draws from."""
    from onnx_models import Graph, save

    graph = Graph("unseeded", 51)
    graph.input("x", [2, 64])
    product = graph.node("MatMul", "x", graph.weight("w", 64, 64))
    noise = graph.node("RandomNormalLike", product)
    graph.node("Multinomial", noise, sample_size=5, outputs=["picked"])
    graph.node("Add", product, noise, outputs=["y"])
    graph.output("y", [2, 64])
    graph.output("picked", [2, 5], 6)
    path = work.file("model.onnx", save(graph.model()))
    feeds = made("metadata").feeds
    seen = []
    for _ in range(2):
        onnxruntime.set_seed(1234)
        session = onnxruntime.InferenceSession(path, options())
        other = onnxruntime.InferenceSession(path, options())
        seen.append([ran(session, feeds), ran(other, feeds), ran(session, feeds)])
    return seen


@cases(BROKEN)
def refused(work: Work, content: object) -> object:
    """By path and from bytes; what the library prints of its second attempt is compared, too."""
    path = work.file("model.onnx", lambda path: path.write_bytes(content()))  # type: ignore[operator]
    return [
        attempt(onnxruntime.InferenceSession, path, options()),
        attempt(onnxruntime.InferenceSession, path, options(), enable_fallback=0),
        attempt(onnxruntime.InferenceSession, path.read_bytes(), options()),
    ]


@case(served=True)
def refused_models_do_not_disturb_later_ones(work: Work) -> object:
    sample = made(seed=51)
    good = model_file(work, sample, "good.onnx")
    bad = work.file("bad.onnx", lambda path: path.write_bytes(sample.content[:-900]))
    return [
        attempt(onnxruntime.InferenceSession, bad, options()),
        opened(sample, good, options()),
        attempt(onnxruntime.InferenceSession, bad, options()),
        opened(sample, good, options()),
    ]


@case(served=True)
def verbose_log(work: Work) -> object:
    """What a verbose session writes is its own business; what it computes is not."""
    import os

    sample = made("recogniser", seed=51)
    path = model_file(work, sample)
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        session = onnxruntime.InferenceSession(path, options(log_severity_level=0))
        return [described(session), ran(session, sample.feeds)]
    finally:
        os.dup2(saved, 2)


@cases({"first_zero": "10", "first_kept": "01"}, served=True)
def denormal_numbers(work: Work, entries: str) -> object:
    """Only a program's first session sets what its thread makes of them in constants."""
    path = work.file("model.onnx", denormal_model())
    return [with_denormals(path, value) for value in entries]


@case(served=False, reason="config_entry")
def denormal_numbers_after_a_failure(work: Work) -> object:
    """A session that fails may have set it."""
    path = work.file("model.onnx", denormal_model())
    broken = work.file("broken.onnx", lambda path: path.write_bytes(b"no model" * 1000))
    return [attempt(with_denormals, broken, "0"), with_denormals(path, "1")]


def denormal_model() -> Callable[[Path], object]:
    """One with a constant that depends on what becomes of denormal numbers."""
    from onnx_models import Graph, save

    graph = Graph("denormal", 51)
    graph.input("x", [2, 64])
    tiny = [graph.constant(name, numpy.full(64, 1e-20, "float32")) for name in ("a", "b")]
    large = graph.constant("c", numpy.full(64, 1e20, "float32"))
    graph.node("Add", "x", graph.node("Mul", graph.node("Mul", *tiny), large), outputs=["y"])
    graph.output("y", [2, 64])
    return save(graph.model())


def with_denormals(path: Path, value: str) -> object:
    """What a session says that was made with this value of the option."""
    given = options()
    given.add_session_config_entry("session.set_denormal_as_zero", value)
    feeds = [{"x": numpy.zeros((2, 64), "float32")}]
    return ran(onnxruntime.InferenceSession(path, given), feeds)
