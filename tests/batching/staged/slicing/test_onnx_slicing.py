"""The stages of an ONNX model are the whole model, to the bit, and share its weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import passes_in_child
from harness import PATIENCE_S

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from tests.harness import World, close_worlds  # noqa: E402
from tests.onnx_models import FLOAT, INT64, STRING, Graph, Sample, sample, save, save_external  # noqa: E402
from trims_shim import config  # noqa: E402
from trims_shim.batching import Batcher  # noqa: E402
from trims_shim.batching.staged.activations import Shared  # noqa: E402
from trims_shim.batching.staged.flow import NotJoinable, join, rows_of, take  # noqa: E402
from trims_shim.batching.staged.slicing.onnx_slicing import TracedOnnx, slice_onnx  # noqa: E402
from trims_shim.client import cache as caches  # noqa: E402
from trims_shim.client.cache import Cache  # noqa: E402
from trims_shim.errors import StagingError  # noqa: E402

KINDS = ("perceptron", "pictures", "transformer")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "model.onnx")


def whole(path: str, feeds: dict[str, Any]) -> list[Any]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feeds)
    return found


def bits(values: Any) -> list[bytes]:
    several = values if isinstance(values, list) else [values]
    return [each.tobytes() for each in several]


def layers(count: int, *, width: int = 64, batch: Any = "batch") -> Sample:
    """Products one after the other."""
    graph = Graph("layers")
    value = graph.input("x", [batch, width])
    for number in range(count):
        value = graph.node("MatMul", value, graph.weight(f"w{number}", width, width))
        value = graph.node("Relu", value)
    graph.output(value, [batch, width])
    feeds = {"x": np.random.RandomState(0).rand(5, width).astype(np.float32)}
    return Sample(graph.model(), (feeds,))


def pictures() -> Sample:
    """Convolutions, for which onnxruntime has layouts of its own."""
    graph = Graph("pictures")
    value = graph.input("x", ["batch", 3, 12, "width"])
    for number, (channels, count) in enumerate([(3, 16), (16, 32), (32, 32)]):
        kernel = graph.weight(f"kernel{number}", count, channels, 3, 3)
        bias = graph.weight(f"bias{number}", count)
        value = graph.node("Relu", graph.node("Conv", value, kernel, bias, pads=[1, 1, 1, 1]))
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value))
    graph.output(graph.node("MatMul", value, graph.weight("w", 32, 10)), ["batch", 10])
    state = np.random.RandomState(2)
    feeds = tuple(
        {"x": state.rand(rows, 3, 12, width).astype(np.float32)}
        for rows, width in [(4, 12), (1, 9)]
    )
    return Sample(graph.model(), feeds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("has_example", [False, True])
def test_stages_have_the_bits_of_the_whole(
    path: str, kind: str, stages: int, *, has_example: bool
) -> None:
    made = pictures() if kind == "pictures" else sample(kind)
    save(made)(Path(path))
    model = slice_onnx(path, stages, example=made.feeds[-1] if has_example else None)
    assert (len(model), model.name) == (stages, "model")
    for feeds in made.feeds:
        assert bits(model(feeds)) == bits(whole(path, feeds))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_two_batches_can_be_joined_at_every_border(path: str, kind: str) -> None:
    made = pictures() if kind == "pictures" else sample(kind)
    save(made)(Path(path))
    traced = TracedOnnx(path)
    for cut in traced.cuts:
        first, second = traced.cut([cut.position]).stages
        feeds = made.feeds[-1]
        twice = join([first(feeds), first(feeds)])
        rows = len(next(iter(feeds.values())))
        assert rows_of(twice) == 2 * rows
        expected = whole(path, feeds)[0]
        for part in (range(rows), range(rows, 2 * rows)):
            found = second(take(twice, part))
            assert found.tobytes() == expected.tobytes()
        np.testing.assert_allclose(second(twice)[rows:], expected, rtol=1e-5, atol=1e-6)


def test_several_outputs_are_arrays_by_name(path: str) -> None:
    graph = Graph("two")
    first = graph.node("Relu", graph.input("x", ["batch", 8]), outputs=["first"])
    second = graph.node("MatMul", first, graph.weight("w", 8, 8))
    graph.node("Relu", graph.node("MatMul", second, graph.weight("v", 8, 8)), outputs=["last"])
    for name in ("first", "last"):
        graph.output(name, ["batch", 8])
    feeds = {"x": np.random.RandomState(1).rand(3, 8).astype(np.float32)}
    save(Sample(graph.model(), (feeds,)))(Path(path))
    model = slice_onnx(path, 3)
    assert len(model) == 3
    found = model(feeds)
    assert list(found) == ["first", "last"]
    assert bits(list(found.values())) == bits(whole(path, feeds))


def test_external_data(path: str) -> None:
    made = sample("transformer")
    save_external(made, size_threshold=1024)(Path(path))
    assert (Path(path).parent / "weights.bin").exists()
    feeds = made.feeds[-1]
    assert bits(slice_onnx(path, 3)(feeds)) == bits(whole(path, feeds))


def test_weights_are_mapped_once(tmp_path: Path) -> None:
    """Those of all stages, and no memory has a copy of its own."""
    path = tmp_path / "layers.onnx"
    made = layers(8, width=512)
    save(made)(path)
    script = f"""
import json, re, numpy as np
from trims_shim.batching.staged.slicing.onnx_slicing import slice_onnx
model = slice_onnx({str(path)!r}, 4, example=np.ones((2, 512), np.float32))
model(np.ones((2, 512), np.float32))
pieces = []
for line in open("/proc/self/maps"):
    if line.rstrip().endswith("weights.bin"):
        start, end, offset = re.match(r"(\\w+)-(\\w+) \\S+ (\\w+)", line).groups()
        pieces.append((int(offset, 16), int(end, 16) - int(start, 16)))
print(json.dumps([len(model), pieces]))
"""
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    count, pieces = json.loads(output.splitlines()[-1])
    assert count == 4
    total = sum(size for _, size in pieces)
    assert 8 * 512 * 512 * 4 <= total < 9 * 512 * 512 * 4, "each weight once, packed"
    assert len({offset for offset, _ in pieces}) == len(pieces)


@pytest.fixture
def _unpacked() -> Iterator[None]:
    before = caches.exchange(Cache(config.load({}, ort_prepack="off", autostart="0")))
    yield
    caches.exchange(before)


@pytest.mark.usefixtures("_unpacked")
def test_weights_are_not_packed_if_so_configured(path: str) -> None:
    made = layers(3)
    save(made)(Path(path))
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    expected = ort.InferenceSession(path, options).run(None, made.feeds[0])
    model = slice_onnx(path, 3, is_shared=False)
    assert bits(model(made.feeds[0])) == bits(expected)
    assert b"prepacked" not in Path(model.stages[0].source.path).read_bytes()


def test_temporary_files_go_with_the_stages(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no daemon is asked for others."""
    monkeypatch.setattr("trims_shim.patches.onnxruntime_warm.prepare", pytest.fail)
    save(layers(2))(Path(path))
    model = slice_onnx(path, 2, is_shared=False)
    folder = model.stages[0].source.folder
    assert sorted(os.listdir(folder)) == ["model.onnx", "weights.bin"]
    del model
    assert not os.path.exists(folder)


def test_a_forked_child_leaves_the_files_to_its_parent(path: str) -> None:
    """Found: they were deleted with the child's stages, and the parent could cut no others."""
    save(layers(2))(Path(path))
    traced = TracedOnnx(path, is_shared=False)

    def let_go() -> None:
        nonlocal traced
        del traced

    assert passes_in_child(let_go)
    assert len(traced.even(2)) == 2


# --- borders --------------------------------------------------------------------------------------


def test_there_may_be_fewer_borders_than_wanted(path: str) -> None:
    made = layers(2)
    save(made)(Path(path))
    model = slice_onnx(path, 20)
    assert 2 <= len(model) < 20
    assert bits(model(made.feeds[0])) == bits(whole(path, made.feeds[0]))


def test_a_line_of_nodes_may_be_cut_between_any_two_of_them(path: str) -> None:
    """And not before the first, which would be a stage of nothing."""
    save(layers(2))(Path(path))
    traced = TracedOnnx(path)
    assert [cut.position for cut in traced.cuts] == list(range(1, len(traced.times_ns)))
    assert len(traced.even(20)) == len(traced.times_ns)


def test_what_depends_on_other_rows_does_not_cross(path: str) -> None:
    """The largest of a batch is the same for repeated rows, and another one for other rows."""
    graph = Graph("largest")
    x = graph.input("x", ["batch", 8])
    largest = graph.node("ReduceMax", x, keepdims=0, noop_with_empty_axes=0)
    value = graph.node("MatMul", x, graph.weight("w", 8, 8))
    value = graph.node("Relu", graph.node("Relu", value))
    value = graph.node("Div", graph.node("Mul", value, largest), largest)
    graph.output(value, ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    one_row = np.ones((1, 8), np.float32)
    traced = TracedOnnx(path, example=one_row)
    names = [traced.cut([cut.position]).stages[0].wanted for cut in traced.cuts]
    assert names
    assert not [each for each in names if largest in each]


def test_the_place_of_a_row_in_its_batch_does_not_cross(path: str) -> None:
    """As it picks rows of others after a join."""
    graph = Graph("picks")
    x = graph.input("x", ["batch", 5, 8])
    at = graph.input("at", ["batch"], INT64)
    count = graph.node("Gather", graph.node("Shape", x), graph.constant("first", np.int64(0)))
    bounds = graph.constant("begin", np.int64(0)), count, graph.constant("step", np.int64(1))
    last = graph.constant("last", np.array([1], np.int64))
    places = [graph.node("Unsqueeze", each, last) for each in (graph.node("Range", *bounds), at)]
    index = graph.node("Concat", *places, axis=1)
    value = graph.node("Relu", graph.node("MatMul", x, graph.weight("w", 8, 8)))
    graph.output(graph.node("GatherND", value, index), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    rows = np.random.RandomState(0).rand(4, 5, 8).astype(np.float32)
    one = {"x": rows[:1], "at": np.array([2])}
    other = {"x": rows[1:], "at": np.array([4, 0, 1])}
    expected = np.concatenate([whole(path, each)[0] for each in (one, other)])
    traced = TracedOnnx(path)
    assert traced.cuts
    for cut in traced.cuts:
        first, second = traced.cut([cut.position]).stages
        np.testing.assert_allclose(second(join([first(one), first(other)])), expected, rtol=1e-5)


def test_answers_that_depend_on_other_rows_are_refused(path: str) -> None:
    graph = Graph("shares")
    value = graph.node("MatMul", graph.input("x", ["batch", 8]), graph.weight("w", 8, 8))
    graph.output(graph.node("Softmax", value, axis=0), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    with pytest.raises(StagingError, match="of a row depends on the others"):
        slice_onnx(path, 2)


def test_a_choice_for_the_whole_batch_is_refused(path: str) -> None:
    """Though rows of the same signs would choose the same."""
    graph = Graph("chooses")
    x = graph.input("x", ["batch", 8])
    value = graph.node("MatMul", x, graph.weight("w", 8, 8))
    mean = graph.node("ReduceMean", x, keepdims=0)
    is_positive = graph.node("Greater", mean, graph.constant("zero", np.float32(0)))
    value = graph.node("Where", is_positive, value, graph.node("Neg", value))
    graph.output(graph.node("MatMul", value, graph.weight("v", 8, 8)), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    rows = np.random.RandomState(0).rand(4, 8).astype(np.float32)
    with pytest.raises(StagingError, match="of a row depends on the others"):
        slice_onnx(path, 2, example=rows)


def takes_few(graph: Graph) -> str:
    """Experts of which each takes the first three rows that are for it, as many as are tried."""
    value = graph.node("Relu", graph.node("MatMul", "x", graph.weight("w", 8, 8)))
    expert = graph.node(
        "ArgMax", graph.node("MatMul", value, graph.weight("e", 8, 2)), keepdims=0, axis=1
    )
    two, ends = graph.constant("two", np.int64(2)), graph.constant("ends", np.float32([0, 1]))
    chosen = graph.node("OneHot", expert, two, ends)
    place = graph.node("CumSum", chosen, graph.constant("rows", np.int64(0)))
    is_taken = graph.node("LessOrEqual", place, graph.constant("most", np.float32(3)))
    taken = graph.node("Mul", chosen, graph.node("Cast", is_taken, to=FLOAT))
    experts = graph.constant("experts", [1])
    value = graph.node("Mul", value, graph.node("ReduceSum", taken, experts, keepdims=1))
    return graph.node("Relu", graph.node("MatMul", value, graph.weight("v", 8, 8)))


def scales_back(graph: Graph) -> str:
    """By the largest of the batch, once as a root: the border between has what is scaled."""
    value = graph.node("Div", "x", graph.node("ReduceMax", graph.node("Abs", "x"), keepdims=1))
    for name in ("w", "v"):
        value = graph.node("Relu", graph.node("MatMul", value, graph.weight(name, 8, 8)))
    square = graph.node("ReduceMax", graph.node("Mul", "x", "x"), keepdims=1)
    return graph.node("Mul", value, graph.node("Sqrt", square))


@pytest.mark.parametrize("answer", [takes_few, scales_back])
def test_joined_batches_that_are_answered_otherwise_are_refused(
    path: str, answer: Callable[[Graph], str]
) -> None:
    """Found: they were served, as rows were looked at in batches of two and three only."""
    graph = Graph("joined")
    graph.input("x", ["batch", 8])
    graph.output(answer(graph), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    rows = np.random.RandomState(0).rand(3, 8).astype(np.float32)
    with pytest.raises(StagingError, match="of a row depends on the others"):
        slice_onnx(path, 3, example=rows)


@pytest.mark.parametrize("is_ranked", [False, True])
def test_integers_that_depend_on_other_rows_are_refused(path: str, *, is_ranked: bool) -> None:
    """The place of a row among those of its batch; but not the index of a row's largest number."""
    graph = Graph("integers")
    value = graph.node("MatMul", graph.input("x", ["batch", 8]), graph.weight("w", 8, 8))
    value = graph.node("Relu", value)
    first, second = (graph.constant(f"axis {each}", [each]) for each in (0, 1))
    total = graph.node("ReduceSum", value, second, keepdims=0)
    places = [graph.node("Unsqueeze", total, axis) for axis in (first, second)]
    larger = graph.node("Cast", graph.node("Greater", *places), to=INT64)
    rank = graph.node("ReduceSum", larger, first, keepdims=0)
    largest = graph.node("ArgMax", value, axis=1, keepdims=0)
    graph.output(rank if is_ranked else largest, ["batch"], INT64)
    save(Sample(graph.model(), ()))(Path(path))
    if not is_ranked:
        assert len(slice_onnx(path, 2)) == 2
        return
    with pytest.raises(StagingError, match="of a row depends on the others"):
        slice_onnx(path, 2)


def differs_alone(graph: Graph, x: str, value: str) -> str:
    several = graph.node("Greater", graph.node("Shape", x, end=1), graph.constant("one", [1]))
    return graph.node("Add", value, graph.node("Cast", several, to=FLOAT))


def takes_no_row_alone(graph: Graph, x: str, value: str) -> str:
    second = graph.node("Gather", value, graph.constant("at", [1]))
    nothing = graph.node("Mul", second, graph.constant("zero", np.zeros(1, np.float32)))
    return graph.node("Add", value, nothing)


def depends_on_chance(graph: Graph, x: str, value: str) -> str:
    """Little, and by a seed, with which the first runs of all sessions agree."""
    noise = graph.node("RandomUniformLike", value, low=1.0, high=1.01, seed=3.0)
    return graph.node("Mul", value, noise)


@pytest.mark.parametrize(
    ("last", "refused"),
    [
        (differs_alone, "another one where the row is the whole batch"),
        (takes_no_row_alone, "cannot be run with a batch of one row: .*out of"),
        (depends_on_chance, "depends on chance"),
    ],
)
def test_models_that_are_refused(
    path: str, last: Callable[[Graph, str, str], str], refused: str
) -> None:
    graph = Graph("refused")
    x = graph.input("x", ["batch", 8])
    value = graph.node("Relu", graph.node("MatMul", x, graph.weight("w", 8, 8)))
    graph.output(last(graph, x, value), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    with pytest.raises(StagingError, match=refused):
        slice_onnx(path, 2)


def test_texts_of_rows_are_answers(path: str) -> None:
    graph = Graph("names")
    x, names = graph.input("x", ["batch", 8]), graph.input("names", ["batch"], STRING)
    value = graph.node("Relu", graph.node("MatMul", x, graph.weight("w", 8, 8)))
    graph.output(value, ["batch", 8])
    graph.output(graph.node("Identity", names, outputs=["same"]), ["batch"], STRING)
    save(Sample(graph.model(), ()))(Path(path))
    batch = np.ones((3, 8), np.float32), np.array(["a", "b", "c"], object)
    answers = slice_onnx(path, 2, example=batch)(*batch)
    assert list(answers["same"]) == ["a", "b", "c"]


def test_what_depends_on_shapes_only_crosses_as_shared(path: str) -> None:
    graph = Graph("positions")
    ids = graph.input("ids", ["batch", "sequence"], INT64)
    shape = graph.node("Shape", ids, start=1)
    end = graph.node("Squeeze", shape)
    zero, one = graph.constant("zero", np.array(0)), graph.constant("one", np.array(1))
    positions = graph.node("Range", zero, end, one)
    words = graph.node("Gather", graph.weight("words", 30, 16), ids)
    words = graph.node("MatMul", words, graph.weight("w", 16, 16))
    places = graph.node("Gather", graph.weight("places", 64, 16), positions)
    graph.output(graph.node("Add", words, places), ["batch", "sequence", 16])
    save(Sample(graph.model(), ()))(Path(path))
    traced = TracedOnnx(path)
    shared = set()
    for cut in traced.cuts:
        value = traced.cut([cut.position]).stages[0](np.zeros((2, 5), np.int64))
        shared |= {name for name, each in value.items() if isinstance(each, Shared)}
        assert rows_of(value) == 2
    assert shared
    assert ids not in shared
    other = traced.even(3)(np.ones((3, 7), np.int64))
    assert bits(other) == bits(whole(path, {"ids": np.ones((3, 7), np.int64)}))


def test_what_some_sizes_of_the_batch_change_never_crosses(path: str) -> None:
    """Here each eighth row."""
    graph = Graph("eights")
    x = graph.input("x", ["batch", 8])
    nothing, eight = (graph.constant(f"of {each}", np.array([each])) for each in (0, 8))
    rows = graph.node("Shape", x, end=1)
    eights = graph.node("Div", graph.node("Add", rows, graph.constant("7", np.array([7]))), eight)
    full = graph.node("Mul", eights, eight)
    y = graph.node("MatMul", x, graph.weight("w", 8, 8))
    y = graph.node("MatMul", graph.node("Relu", y), graph.weight("v", 8, 8))
    rows = graph.node("Shape", y, end=1)
    behind = graph.node("Sub", full, rows)
    pads = graph.node("Concat", nothing, nothing, behind, nothing, axis=0)
    y = graph.node("CumSum", graph.node("Pad", y, pads), graph.constant("axis", np.array(1)))
    y = graph.node("Relu", graph.node("Slice", y, nothing, rows, nothing))
    graph.output(graph.node("MatMul", y, graph.weight("u", 8, 8)), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    traced = TracedOnnx(path)
    one, other = np.random.RandomState(0).rand(2, 5, 8).astype(np.float32)
    expected = np.concatenate([whole(path, {"x": each})[0] for each in (one, other)])
    assert traced.cuts
    for cut in traced.cuts:
        first, last = traced.cut([cut.position]).stages
        found = last(join([first(one), first(other)]))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("axes", [0, 1])
def test_a_length_that_a_shape_does_not_show_is_never_anothers(path: str, axes: int) -> None:
    graph = Graph("means")
    x = graph.input("x", ["batch", "tokens", 8])
    tokens = graph.node("Cast", graph.node("Shape", x, start=1, end=2), to=FLOAT)
    length = tokens if axes else graph.node("Squeeze", tokens)
    total = graph.node("ReduceSum", x, graph.constant("second", np.array([1])), keepdims=0)
    value = graph.node("Relu", graph.node("MatMul", total, graph.weight("w", 8, 8)))
    graph.output(graph.node("Div", value, length), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    traced = TracedOnnx(path)
    state = np.random.RandomState(0)
    one, same, other = (state.rand(2, count, 8).astype(np.float32) for count in (4, 4, 7))
    counts = {True: 0, False: 0}
    for cut in traced.cuts:
        first, second = traced.cut([cut.position]).stages
        for another in (same, other):
            try:
                found = second(join([first(one), first(another)]))
            except NotJoinable:
                assert another is other
                continue
            counts[another is same] += 1
            expected = [whole(path, {"x": each})[0] for each in (one, another)]
            np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5)
    assert counts == {True: len(traced.cuts), False: 0}


def nonzero(graph: Graph, flags: str, x: str) -> str:
    return graph.node("NonZero", graph.node("Cast", flags, to=FLOAT))


def compressed(graph: Graph, flags: str, x: str) -> str:
    return graph.node("Compress", flags, flags, axis=0)


def unique(graph: Graph, flags: str, x: str) -> str:
    return graph.node("Unique", graph.node("Mul", graph.node("Cast", flags, to=FLOAT), x))


def sliced(graph: Graph, flags: str, x: str) -> str:
    end = graph.node("ReduceSum", graph.node("Cast", flags, to=INT64))
    return graph.node("Slice", flags, "at 0", end)


@pytest.mark.parametrize("found", [nonzero, compressed, unique, sliced])
def test_how_many_rows_have_something_is_never_anothers(
    path: str, found: Callable[[Graph, str, str], str]
) -> None:
    """It is a shape, but one that depends on contents. No row of the example has it."""
    graph = Graph("counts")
    x = graph.input("x", ["batch", 8])
    graph.constant("at 0", np.array([0]))
    one = graph.constant("one", np.array(1))
    counts = []
    for limit in (100, 101):
        bound = graph.constant(f"over {limit}", np.float32(limit))
        largest = graph.node("ReduceMax", x, graph.constant(f"axis {limit}", [1]), keepdims=0)
        some = found(graph, graph.node("Greater", largest, bound), largest)
        count = graph.node("Size", graph.node("Identity", some))
        counts.append(graph.node("Cast", graph.node("Add", count, one), to=FLOAT))
    value = graph.node("Relu", graph.node("MatMul", x, graph.weight("w", 8, 8)))
    graph.output(graph.node("Mul", value, graph.node("Div", *counts)), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    batches = np.random.RandomState(0).rand(2, 2, 8).astype(np.float32)
    traced = TracedOnnx(path, example=batches[0])
    batches[:, 1, 0] = 200, 300
    expected = [whole(path, {"x": each})[0] for each in batches]
    assert traced.cuts
    for cut in traced.cuts:
        first, second = traced.cut([cut.position]).stages
        joined = second(join([first(each) for each in batches]))
        np.testing.assert_allclose(joined, np.concatenate(expected), rtol=1e-5)


def test_answers_without_rows_are_refused(path: str) -> None:
    save(sample("recogniser"))(Path(path))  # [steps, batch, letters]
    refused = rf"^{re.escape(path)}: .*not the first axis of output y"
    with pytest.raises(StagingError, match=refused):
        slice_onnx(path, 2)


def test_batches_of_one_size_are_refused(path: str) -> None:
    save(layers(2, batch=2))(Path(path))
    with pytest.raises(StagingError, match="the size of their batches is fixed"):
        slice_onnx(path, 2)
    with pytest.raises(StagingError, match="dynamic batch axis"):
        slice_onnx(path, 2, example=np.zeros((2, 64), np.float32))


@pytest.mark.parametrize("x", [np.float32(1), np.ones((0, 64), np.float32)])
def test_examples_without_rows_are_refused(path: str, x: Any) -> None:
    save(layers(2))(Path(path))
    with pytest.raises(StagingError, match="the example has no rows for x; give a batch"):
        slice_onnx(path, 2, example=x)


@pytest.mark.parametrize("shape", [[], [3], None])
def test_inputs_without_a_batch_axis_may_be_in_an_example(path: str, shape: Any) -> None:
    """Also such as are declared to be of any shape."""
    graph = Graph("scaled")
    x, scale = graph.input("x", ["batch", 8] if shape == [] else None), "scale"
    graph.input(scale, shape)
    total = graph.node("ReduceSum", scale, keepdims=0)
    value = graph.node("MatMul", graph.node("Mul", x, total), graph.weight("w", 8, 8))
    graph.output(graph.node("Relu", value), ["batch", 8])
    save(Sample(graph.model(), ()))(Path(path))
    feeds = {"x": np.ones((5, 8), np.float32), "scale": np.full(shape or (), 2, np.float32)}
    model = slice_onnx(path, 2, example={**feeds, "x": feeds["x"][:2]})
    assert len(model) == 2
    assert bits(model(feeds)) == bits(whole(path, feeds))


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT8E5M2", "FLOAT8E4M3FN", "INT4"])
def test_values_of_types_that_numpy_lacks_do_not_cross(path: str, kind: str) -> None:
    """They cross no border, and the model is cut elsewhere."""
    number = getattr(onnx.TensorProto, kind)
    graph = Graph("rounded")
    value = graph.node("MatMul", graph.input("x", ["batch", 8]), graph.weight("w", 8, 8))
    value = graph.node("Cast", graph.node("Cast", value, to=number), to=FLOAT)
    value = graph.node("MatMul", value, graph.weight("v", 8, 8))
    graph.output(value, ["batch", 8])
    feeds = {"x": np.random.RandomState(1).rand(3, 8).astype(np.float32)}
    save(Sample(graph.model(), (feeds,)))(Path(path))
    traced = TracedOnnx(path)
    assert 0 < len(traced.cuts) < len(traced.times_ns) - 1
    for cut in traced.cuts:
        assert bits(traced.cut([cut.position])(feeds)) == bits(whole(path, feeds))


def test_answers_of_types_that_numpy_lacks_are_refused(path: str) -> None:
    graph = Graph("rounded")
    value = graph.node("Relu", graph.input("x", ["batch", 8]))
    value = graph.node("Cast", value, to=onnx.TensorProto.BFLOAT16)
    graph.output(value, ["batch", 8], onnx.TensorProto.BFLOAT16)
    save(Sample(graph.model(), ()))(Path(path))
    with pytest.raises(StagingError, match="is no array of a type that numpy has"):
        slice_onnx(path, 2)


def test_without_the_package_it_says_what_to_install(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is prepared, and by the name of an extra that there is."""
    Path(path).write_bytes(b"no model")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(StagingError, match=r"pip install 'trims-shim\[onnx\]'"):
        slice_onnx(path, 2)
    project = Path(__file__).parents[4] / "pyproject.toml"
    assert re.search(r'^onnx = \[.*"onnx>=', project.read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_it_needs_both_packages(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StagingError, match=rf"pip install 'trims-shim\[onnx\]'.*{package}"):
        slice_onnx(__file__, 2)


def test_what_is_no_model_is_refused(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        slice_onnx(path, 2)
    Path(path).write_bytes(b"no model")
    with pytest.raises(StagingError, match=rf"^{re.escape(path)}: .*cannot be optimised"):
        slice_onnx(path, 2)
    with pytest.raises(ValueError, match="n_stages is 0"):
        slice_onnx(path, 0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (({"x": 1, "y": 2},), "takes x, ids, not x, y"),
        ((1, 2, 3), "takes x, ids, not 3 arguments"),
    ],
)
def test_other_arguments_are_refused(path: str, batch: tuple[Any, ...], message: str) -> None:
    save(sample("perceptron"))(Path(path))
    with pytest.raises(ValueError, match=message):
        slice_onnx(path, 2)(*batch)
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}: the model {message}"):
        slice_onnx(path, 2, example=batch)


# --- in use ---------------------------------------------------------------------------------------


def test_behind_a_batcher(path: str) -> None:
    made = layers(4)
    save(made)(Path(path))
    model = slice_onnx(path, 3)
    rows = np.random.RandomState(1).rand(20, 64).astype(np.float32)
    with Batcher(model, max_batch_size=4) as batcher:
        futures = [batcher.submit(row) for row in rows]
        found = [future.result(timeout=PATIENCE_S) for future in futures]
    np.testing.assert_allclose(found, whole(path, {"x": rows})[0], rtol=1e-5)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    close_worlds([world])


@pytest.mark.slow
def test_processes_share_the_machines_prepared_model(world: World) -> None:
    path = os.path.join(world.root, "model.onnx")
    made = layers(4, width=1024)
    save(made)(Path(path))
    world.start()
    script = f"""
import numpy as np
from trims_shim.batching.staged.slicing.onnx_slicing import slice_onnx
model = slice_onnx({path!r}, 3)
files = {{line.split()[5] for line in open("/proc/self/maps") if "weights.bin" in line}}
result = model(np.full((2, 1024), 0.5, np.float32))
say([sorted(files), result.tobytes().hex()])
"""
    (first, result), (second, other) = world.run(script), world.run(script)
    assert first == second
    assert first[0].startswith(os.path.join(world.settings["cache_dir"], "prepared"))
    assert result == other
    expected = whole(path, {"x": np.full((2, 1024), 0.5, np.float32)})
    assert bytes.fromhex(result) == expected[0].tobytes()
