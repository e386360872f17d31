"""ONNX models cut into stages: sessions of sub-graphs, whose weights are those of one file.

The graph that is cut is the one that onnxruntime has optimised, with the weights beside it, already
packed. So stages run the kernels of the whole model, and their results are bitwise its own. No
stage has weights of its own: all map the same file. It is the machine's prepared model where the
cache can have one (:mod:`trims_shim.patches.onnxruntime_warm`), shared with every other process;
else one in a temporary directory, which is deleted with the stages.

Only the CPU's provider, and the options that sessions have by default.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trims_shim import diagnostics
from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.staged.flow import NotJoinable, join
from trims_shim.batching.staged.model import StagedModel
from trims_shim.batching.staged.slicing.cutting import even_cuts
from trims_shim.batching.staged.slicing.onnx_graph import OnnxGraph, onnx_package
from trims_shim.batching.staged.slicing.onnx_observing import (
    Exactly,
    Observed,
    depends_on_others,
    is_equal,
    is_near,
    legal_cuts,
    named,
    observe,
    times_ns,
)
from trims_shim.checks import whole
from trims_shim.client.cache import cache
from trims_shim.errors import NotServed, StagingError, TrimsError
from trims_shim.memory import heap
from trims_shim.specs import PREPARED_MODEL

__all__ = ["TracedOnnx", "slice_onnx"]

_FATAL_ONLY = 4
"""The severity from which onnxruntime prints; errors are raised all the same."""
_FOLDER = "session.model_external_initializers_file_folder_path"


def slice_onnx(
    path: str | os.PathLike[str],
    n_stages: int,
    *,
    example: Any = None,
    intra_op_num_threads: int = 0,
    is_shared: bool = True,
) -> StagedModel:
    """An ONNX model as ``n_stages`` stages of even measured time; fewer if it has fewer borders.

    ``example``: a batch, as the first stage gets it: arrays by the names of inputs, or one array,
    or a tuple of them in the order of inputs. Its rows are repeated to make batches of two sizes.
    Without one, inputs are made up from the types and shapes that the model declares.
    ``intra_op_num_threads`` as of onnxruntime's options; each stage has threads of its own, which
    sleep while others work. ``is_shared``: use the machine's prepared model; for it the daemon is
    started if none runs and that is allowed. Else use a copy in a temporary directory.

    The last stage returns an array, or arrays by name if the model has several outputs. Results are
    bitwise those of the whole model for the same batch. Stages may be called from any thread.

    Blocks while the model is prepared, and runs it some times. Needs onnxruntime 1.21 and the
    package ``onnx``, which the extra ``onnx`` brings. Raises OSError for the file, ValueError for
    less than one stage or an example of other inputs, and StagingError for a model that onnxruntime
    does not optimise or run, whose batches have a fixed size, or whose rows affect each other.
    """
    n_stages = whole("n_stages", n_stages)
    traced = TracedOnnx(
        path, example=example, intra_op_num_threads=intra_op_num_threads, is_shared=is_shared
    )
    return traced.even(n_stages)


class TracedOnnx:
    """A model whose borders are known, to be cut several times; arguments of :func:`slice_onnx`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        example: Any = None,
        intra_op_num_threads: int = 0,
        is_shared: bool = True,
    ) -> None:
        os.stat(path)
        self._path = os.fspath(path)
        onnx_package()  # before the model is prepared, which may take a minute
        with heap.given_back(), _naming(self._path):
            self._source = _source(self._path, is_shared=is_shared)
            self._make_session = functools.partial(
                _session, folder=self._source.folder, threads=intra_op_num_threads
            )
            self._graph = OnnxGraph(self._source.path)
            self._observed = observe(self._graph, self._make_session, example)
            self.cuts = legal_cuts(self._graph, self._observed)
            self.times_ns = times_ns(self._graph, self._make_session, self._observed.feeds)

    def even(self, n_stages: int) -> StagedModel:
        """``n_stages`` stages of even measured time, or as many as there can be."""
        count = min(n_stages, len(self.cuts) + 1)
        return self.cut(even_cuts(self.times_ns, self.cuts, count))

    def cut(self, positions: Sequence[int]) -> StagedModel:
        """Cut at ``positions``, which are of :attr:`cuts`.

        Raises StagingError if the results of the stages are not those of the whole model, or other
        ones where batches are joined between stages.
        """
        with heap.given_back(), _naming(self._path):
            stages = _stages(
                self._graph, self._make_session, self._observed, positions, self._source
            )
            _check(stages, self._graph, self._observed)
            _check_joined(stages, self._graph, self._observed)
        return StagedModel(stages, name=Path(self._path).stem)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Let what is wrong with a model, or for it, say which model it is."""
    try:
        yield
    except StagingError as error:
        raise StagingError(f"{path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# --- the optimised model --------------------------------------------------------------------------


class _Source:
    """An optimised model with its weights beside it; given up when it is gone, with the stages."""

    def __init__(self, path: str, give_up: Callable[[], None]) -> None:
        self.path = path
        self.folder = os.path.dirname(path)
        self.finalizer = weakref.finalize(self, give_up)


def _source(path: str, *, is_shared: bool) -> _Source:
    from trims_shim.patches import onnxruntime_warm

    if not is_shared:
        return _own_source(path)
    try:
        prepared = onnxruntime_warm.prepare(path)
    except TrimsError as error:
        # No daemon, or one that cannot prepare this model: it is done here, for this process.
        diagnostics.fallback(error.reason, error, what=path)
        return _own_source(path)
    source = _Source(prepared.path, prepared.release)
    source.finalizer.atexit = False  # The daemon sees that the process has ended.
    return source


def _own_source(path: str) -> _Source:
    from trims_shim.daemon.preparer import optimising
    from trims_shim.patches.onnxruntime_recipe import default_recipe

    directory = tempfile.mkdtemp(prefix="trims-stages-")
    give_up = functools.partial(_delete, directory, os.getpid())
    source = _Source(os.path.join(directory, PREPARED_MODEL), give_up)
    sessions = optimising.Sessions(default_recipe(prepack=cache().config.ort_prepack))
    try:
        sessions.save(path, directory, is_packed=True)
        optimising.place(directory, source=path)
    except NotServed as error:
        raise StagingError(f"the model cannot be optimised: {error}") from error
    return source


def _delete(directory: str, pid: int) -> None:
    if pid == os.getpid():  # A forked child's stages are its parent's, too.
        shutil.rmtree(directory, ignore_errors=True)


def _session(content: bytes, *, folder: str, threads: int, profile: str = "") -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.intra_op_num_threads = threads
    # The graph is optimised already.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(_FOLDER, folder)
    if cache().config.ort_prepack == "off":
        options.add_session_config_entry("session.disable_prepacking", "1")
    # Else a stage's threads spin on while those of the next one work.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


# --- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """A session as a stage; arrays go from stage to stage by name."""

    session: Any
    given: Sequence[str]
    """What the stage gets; the session needs only some of it."""
    needed: Sequence[str]
    made: Sequence[str]
    wanted: Sequence[str]
    """What it returns: the values made, and those given that later stages need."""
    shared: frozenset[str]
    is_last: bool
    source: _Source = field(repr=False)
    """Keeps the files that the session has mapped."""

    def __call__(self, *batch: Any) -> Any:
        values = named(batch, self.given)
        if self.made:
            feeds = {name: values[name] for name in self.needed}
            values |= zip(self.made, self.session.run(self.made, feeds), strict=True)
        if not self.is_last:
            return {
                name: Shared(Exactly(values[name])) if name in self.shared else values[name]
                for name in self.wanted
            }
        if len(self.wanted) == 1:
            return values[self.wanted[0]]
        return {name: values[name] for name in self.wanted}


def _stages(
    graph: OnnxGraph,
    make_session: Callable[[bytes], Any],
    observed: Observed,
    positions: Sequence[int],
    source: _Source,
) -> list[_Stage]:
    seen = observed.values[0]
    stages = []
    given: Sequence[str] = graph.inputs
    for start, end in itertools.pairwise([0, *positions, len(graph.nodes)]):
        is_last = end == len(graph.nodes)
        wanted = graph.outputs if is_last else graph.crossing(end)
        made = [name for name in wanted if name not in given]
        needed = graph.needed(start, end, given)
        piece = graph.piece(start, end, {name: seen[name] for name in needed}, made)
        shared = frozenset(name for name in wanted if not is_last and not observed.is_batched(name))
        session = make_session(piece) if made else None
        stages.append(_Stage(session, given, needed, made, wanted, shared, is_last, source))
        given = wanted
    return stages


def _check(stages: Sequence[_Stage], graph: OnnxGraph, observed: Observed) -> None:
    """Raise StagingError unless the stages together return what the whole does, to the bit."""
    import numpy

    for expected in observed.values:
        value = _through(stages, {name: expected[name] for name in graph.inputs})
        for name, each in _outputs(graph, value).items():
            if not is_equal(numpy.asarray(each), numpy.asarray(expected[name])):
                raise StagingError(
                    f"output {name} of the stages is not that of the whole model; serve it whole"
                )


def _check_joined(stages: Sequence[_Stage], graph: OnnxGraph, observed: Observed) -> None:
    """Raise StagingError if batches that are one from the second stage on come to something else.

    One of them half as large, too: what rows may have in common (their largest number) is another
    one then.
    """
    one, *others = (
        {name: each[name] for name in graph.inputs} for each in (*observed.values, observed.feeds)
    )
    for tried in one, observed.halved(one):
        try:
            values = [stages[0](each) for each in (tried, *others)]
            expected = join([_through(stages[1:], each) for each in values])
            found = _through(stages[1:], join(values))
        except NotJoinable:  # Nor are they in service.
            continue
        # onnxruntime raises a RuntimeError or ValueError of its own for each kind of failure.
        except Exception as error:
            if tried is one:
                raise StagingError(f"joined batches cannot be run: {error}") from error
            continue  # It may not take such numbers.
        its = _outputs(graph, expected)
        for name, each in _outputs(graph, found).items():
            if not is_near(each, its[name]):
                raise depends_on_others(name)


def _through(stages: Sequence[_Stage], value: Any) -> Any:
    return functools.reduce(lambda value, stage: stage(value), stages, value)


def _outputs(graph: OnnxGraph, value: Any) -> dict[str, Any]:
    return value if len(graph.outputs) > 1 else {graph.outputs[0]: value}
