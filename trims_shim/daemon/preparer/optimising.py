"""Lets onnxruntime write an optimised model, and puts it into the form that is published.

Owns how sessions are created from a recipe (the original's, and one as a hit creates it), the
options for saving, and the two files: ``model.onnx`` and, with every initializer above a kilobyte
and what kernels packed of it, ``weights.bin``. :mod:`trims_shim.daemon.preparer.verifying` judges
the result.

onnxruntime is used through its binding, not through ``InferenceSession``, which falls back to other
providers by itself, prints, and may be patched. Only the preparer imports this module; its
onnxruntime is the client's.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import resource
from collections.abc import Iterator
from typing import Any

from trims_shim.errors import FormatError, NotServed
from trims_shim.formats.onnx_casts import casts_of, have_pairs
from trims_shim.formats.onnx_inputs import without_lost_inputs
from trims_shim.formats.onnx_metadata import with_metadata_order
from trims_shim.formats.onnx_order import in_running_order
from trims_shim.formats.onnx_relayout import Relayout, relayout
from trims_shim.formats.onnx_transposition import Transposition, with_transposed_weights
from trims_shim.specs import PREPARED_MODEL, PREPARED_WEIGHTS
from trims_shim.wire.messages import SessionRecipe

__all__ = [
    "Refusal",
    "Sessions",
    "disk_full",
    "mapped",
    "place",
    "refusing_full_disks",
]

_SAVED_MODEL = "saved.onnx"
_SAVED_WEIGHTS = "saved.bin"
_EXTERNAL_FROM_BYTES = 1024
"""onnxruntime's own default; smaller initializers are not worth an entry."""
_WRITE_BYTES = 64 << 20
_PACKING_ALIKE = frozenset({"x86_64"})
"""Processors on which a transpose was seen to be packed into the same bytes, by the same kernel.
Elsewhere it may be another kernel (KleidiAI on ARM), which would not find its bytes in the file."""
_FATAL_ONLY = 4
_MACHINE_ENTRIES = frozenset({"session.intra_op_thread_affinities"})
"""Must agree with the number of threads, and change no result."""
_OUT_OF_MEMORY = (
    "bad_alloc",
    "bad allocation",
    "Failed to allocate memory",
    "Cannot allocate memory",
)
_PASSING = (
    "NoSuchFile",
    "Too many open files",
    "Resource temporarily unavailable",
    "Input/output error",
    "No space left on device",
)
"""Texts in errors that say nothing about the model."""
_NO_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Refusal(NotServed):
    """A model stays with the original onnxruntime; ``is_lasting``: it would next time, too."""

    def __init__(self, reason: str, message: str = "", *, is_lasting: bool = True) -> None:
        super().__init__(reason, message)
        self.is_lasting = is_lasting


def disk_full(directory: str) -> Refusal:
    """The refusal of a model for which the disk of its directory has no room at the moment."""
    # The error that was caused by it (onnxruntime's has many lines) would say nothing more.
    store = os.path.dirname(directory)
    message = f"the disk of {store} has no room for it; free some, or run `trims evict`"
    return Refusal("disk_full", message, is_lasting=False)


@contextlib.contextmanager
def refusing_full_disks(directory: str) -> Iterator[None]:
    """Make :func:`disk_full` of an OSError in the block that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_DISK:
            raise disk_full(directory) from error
        raise


class Sessions:
    """Creates sessions of one recipe. Imports onnxruntime: raises whatever that raises."""

    def __init__(self, recipe: SessionRecipe) -> None:
        from onnxruntime.capi import onnxruntime_pybind11_state as binding

        self._binding: Any = binding
        self._recipe = recipe

    def original(self, path: str) -> Any:
        """A session as the client creates it. Raises Refusal (``invalid_model``), MemoryError."""
        with _refused("invalid_model"):
            return self._create(path, self._options(self._recipe.level))

    def prepared(self, directory: str) -> Any:
        """A session as a hit creates it. Raises Refusal (``does_not_reload``), MemoryError."""
        path = os.path.join(directory, PREPARED_MODEL)
        with _refused("does_not_reload"):
            return self._create(path, self._options("ORT_DISABLE_ALL"))

    def save(self, path: str, directory: str, *, is_packed: bool) -> None:
        """Write the optimised model to a directory, as :func:`place` takes it.

        ``is_packed``: with what kernels packed; onnxruntime before 1.21 ignores it. Raises Refusal
        (``not_saved``, ``disk_full``), MemoryError.
        """
        self._save(path, directory, self._recipe.level, is_packed=is_packed)

    def complete(self, directory: str) -> None:
        """Add what only a session of the placed files shows. Raises as :meth:`prepared`, OSError.

        A Refusal has changed no file.
        """

    def check_casts(self, directory: str) -> None:
        """Raise Refusal (``outputs_differ``) if a hit leaves out casts of the prepared model.

        Inputs that are made up may not show it: they may be refused, or take another branch.
        Raises as :meth:`save` as well.
        """
        path = os.path.join(directory, PREPARED_MODEL)
        with mapped(path) as model:
            casts = casts_of(model)
        if not have_pairs(casts):
            return
        try:
            self._save(path, directory, "ORT_DISABLE_ALL", is_packed=False)
            with mapped(os.path.join(directory, _SAVED_MODEL)) as model:
                kept = casts_of(model)
        finally:
            _remove_saved(directory)
        if kept != casts:
            message = "onnxruntime leaves out casts of the model that it saved"
            raise Refusal("outputs_differ", message)

    def _save(self, path: str, directory: str, level: str, *, is_packed: bool) -> None:
        options = self._options(level)
        options.optimized_model_filepath = os.path.join(directory, _SAVED_MODEL)
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", _SAVED_WEIGHTS)
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(_EXTERNAL_FROM_BYTES))
        if is_packed:
            options.add_session_config_entry(
                "session.save_external_prepacked_constant_initializers", "1"
            )
        with _refused("not_saved", directory):
            self._create(path, options)

    def _create(self, path: str, options: Any) -> Any:
        session = self._binding.InferenceSession(options, path, True, False)
        names, settings = [], []
        for name, *pairs in self._recipe.providers:
            names.append(name)
            settings.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
        session.initialize_session(names, settings, set(self._recipe.disabled_optimizers))
        return session

    def _options(self, level: str) -> Any:
        recipe = self._recipe
        options = self._binding.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        # Files and results do not depend on it, and the client creates its session meanwhile.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.graph_optimization_level = getattr(self._binding.GraphOptimizationLevel, level)
        options.use_deterministic_compute = recipe.is_deterministic
        for kind, dimension, value in recipe.free_dimensions:
            getattr(options, f"add_free_dimension_override_by_{kind}")(dimension, int(value))
        for key, value in recipe.entries:
            if key not in _MACHINE_ENTRIES:
                options.add_session_config_entry(key, value)
        if recipe.prepack == "off":
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options


@contextlib.contextmanager
def _refused(reason: str, directory: str = "") -> Iterator[None]:
    """Raise onnxruntime's errors, of many classes, as refusals; ``directory`` is written to."""
    try:
        yield
    except MemoryError:
        raise
    # Border: whatever onnxruntime has against this model, it stays with the original.
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(sign in text for sign in _OUT_OF_MEMORY):
            raise MemoryError(text) from error
        if directory and _is_full(directory):
            raise disk_full(directory) from error
        is_lasting = not any(sign in text for sign in _PASSING)
        raise Refusal(reason, text, is_lasting=is_lasting) from error


def _is_full(directory: str) -> bool:
    """Whether a write there may just have failed for lack of space, or at the file size limit."""
    status = os.statvfs(directory)
    if status.f_bavail * status.f_frsize < _WRITE_BYTES:
        return True
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    with os.scandir(directory) as files:
        return limit != resource.RLIM_INFINITY and any(
            each.stat(follow_symlinks=False).st_size >= limit for each in files
        )


# --- files ----------------------------------------------------------------------------------------


def place(directory: str, *, source: str = "") -> None:
    """Replace what was saved in a directory by the published pair.

    ``source`` is the path of the original model: metadata get the order that they have there,
    inputs that have an initializer only there are removed, and sub-graphs that are listed as there
    stay so. Files of an earlier attempt are
    replaced. Raises Refusal (``not_relaid``, ``disk_full``).
    """
    saved, weights = (os.path.join(directory, name) for name in (_SAVED_MODEL, _SAVED_WEIGHTS))
    try:
        with refusing_full_disks(directory), mapped(saved) as model, mapped(weights) as data:
            result = relayout(model, data_size_bytes=len(data), location=PREPARED_WEIGHTS)
            content, transposed = _transposable(result.model)
            with mapped(source) as original:
                content = with_metadata_order(content, original)
                content = without_lost_inputs(content, original)
                content = in_running_order(content, original)
            with _created(os.path.join(directory, PREPARED_MODEL)) as target:
                _write(target, memoryview(content), 0)
            with _created(os.path.join(directory, PREPARED_WEIGHTS)) as target:
                _write_weights(target, result, data, transposed)
    except FormatError as error:
        if _is_full(directory):
            raise disk_full(directory) from error
        raise Refusal("not_relaid", f"onnxruntime saved it in an unknown form: {error}") from error
    finally:
        _remove_saved(directory)


def _remove_saved(directory: str) -> None:
    for name in (_SAVED_MODEL, _SAVED_WEIGHTS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))


def _transposable(model: bytes) -> tuple[bytes, tuple[Transposition, ...]]:
    if platform.machine() not in _PACKING_ALIKE:
        return model, ()
    return with_transposed_weights(model)


def _write_weights(
    target: int, result: Relayout, data: memoryview, transposed: tuple[Transposition, ...]
) -> None:
    turned = {each.offset_bytes: each for each in transposed}
    if result.size_bytes:
        # Without room for all of it nothing is written; the gaps between the copies are zero.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(target, 0, result.size_bytes)
        else:  # macOS, for models in stages
            os.ftruncate(target, result.size_bytes)
    for copy in result.copies:
        end = copy.source_offset + copy.size_bytes
        with data[copy.source_offset : end] as part:
            if matrix := turned.get(copy.target_offset):
                _write(target, _transposed(part, matrix), copy.target_offset)
            else:
                _write(target, part, copy.target_offset)


def _transposed(data: memoryview, matrix: Transposition) -> memoryview:
    import numpy as np

    elements = np.frombuffer(data, np.uint32).reshape(matrix.rows, matrix.columns)
    return memoryview(elements.T.tobytes())


def _write(target: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        with data[done : done + _WRITE_BYTES] as part:
            # From memory of our own: bytes written from a mapping of another file lie in the page
            # cache in small pieces, and every session that maps them is created a fifth more slowly
            # (ext4, Linux 6.18; docs/decisions/0008-prepared-onnx-models.md).
            done += os.pwrite(target, bytes(part), offset + done)


@contextlib.contextmanager
def _created(path: str) -> Iterator[int]:
    """A new file to write to. Its publisher syncs it to the disk."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o400)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def mapped(path: str) -> Iterator[memoryview]:
    """The content of a file of ours; empty if there is none."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        size = 0
    if not size:
        yield memoryview(b"")
        return
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        yield view
