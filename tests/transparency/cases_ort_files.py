"""Models with their weights in files of their own, ORT format, files that change or are missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx.external_data_helper import load_external_data_for_tensor
from onnx_models import save
from onnx_models import save_external as save_all_external

from .registry import Work, attempt, case, cases
from .sessions import made, model_file, opened, options, ran

# --- external data --------------------------------------------------------------------------------

_SMALL_BYTES = 100
"""Tensors that onnxruntime reads while it works out shapes have to be in the model itself."""


def save_external(sample: Any, location: str = "weights.bin", size_threshold: int = 0) -> Any:
    """A writer of a model with its weights outside."""
    return save_all_external(sample, location, size_threshold=max(size_threshold, _SMALL_BYTES))


@cases(
    {
        "beside": "weights.bin",
        "below": "data/deeper/weights.bin",
        "snowman": "\N{SNOWMAN}",
        "dotted": "./weights.bin",
        "long": "w" * 200,
        "hidden": ".weights",
    },
    served=True,
)
def external_data(work: Work, location: str) -> object:
    sample = made("transformer", seed=61)
    return opened(sample, work.file("model.onnx", save_external(sample, location)), options())


@case(served=True)
def external_data_in_part(work: Work) -> object:
    """Large weights outside, small ones inside."""
    sample = made("recogniser", seed=61)
    path = work.file("model.onnx", save_external(sample, size_threshold=2000))
    return opened(sample, path, options())


@case(served=True)
def external_data_in_many_files(work: Work) -> object:
    sample = made("branches", seed=61)

    def write(path: Path) -> None:
        onnx.save(
            onnx.ModelProto.FromString(sample.content),
            str(path),
            save_as_external_data=True,
            all_tensors_to_one_file=False,
            size_threshold=100,
        )

    return opened(sample, work.file("model.onnx", write), options())


@case(served=True)
def external_data_from_another_directory(work: Work) -> object:
    """Locations are relative to the model, not to where the process is."""
    sample = made("transformer", seed=61)
    path = work.file("model.onnx", save_external(sample))
    (work.directory / "elsewhere").mkdir(exist_ok=True)
    os.chdir(work.directory / "elsewhere")
    return [opened(sample, path, options()), opened(sample, "../model.onnx", options())]


def _linked_data(work: Work, sample: Any) -> Path:
    path = work.file("model.onnx", save_external(sample, "real.bin"))
    data = work.directory / "real.bin"
    if not data.is_symlink():
        data.rename(work.directory / "other.bin")
        data.symlink_to("other.bin")
    return path


def _linked_model(work: Work, sample: Any) -> Path:
    """Only the model is linked: its data are beside the link's target, not beside the link."""
    (work.directory / "real").mkdir(exist_ok=True)
    target = work.file("real/model.onnx", save_external(sample))
    return work.file("model.onnx", lambda path: path.symlink_to(target))


def _both_linked(work: Work, sample: Any) -> Path:
    """As a hub's cache has it: links to blobs with other names, beside each other."""
    (work.directory / "blobs").mkdir(exist_ok=True)
    (work.directory / "snapshot").mkdir(exist_ok=True)
    target = work.file("blobs/weights.onnx", save_external(sample, "weights.onnx_data"))
    work.file("snapshot/weights.onnx_data", lambda p: p.symlink_to("../blobs/weights.onnx_data"))
    assert target.exists()
    return work.file("snapshot/model.onnx", lambda path: path.symlink_to("../blobs/weights.onnx"))


def _hub_cache(work: Work, sample: Any) -> Path:
    """The same with a folder in the snapshot, and blobs that are named by their digests."""
    blobs, snapshot = work.directory / "blobs", work.directory / "snapshots" / "5c38" / "onnx"
    if not blobs.exists():
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        save_external(sample, "model.onnx_data")(blobs / "1f0e")
        (blobs / "model.onnx_data").rename(blobs / "77ab")
        (snapshot / "model.onnx").symlink_to("../../../blobs/1f0e")
        (snapshot / "model.onnx_data").symlink_to("../../../blobs/77ab")
    return snapshot / "model.onnx"


def _linked_directory(work: Work, sample: Any) -> Path:
    (work.directory / "real").mkdir(exist_ok=True)
    work.file("real/model.onnx", save_external(sample))
    return work.file("link", lambda path: path.symlink_to("real")) / "model.onnx"


def _hard_linked(work: Work, sample: Any) -> Path:
    path = work.file("first.onnx", save_external(sample))
    return work.file("model.onnx", lambda link: os.link(path, link))


LINKS = {
    function.__name__.strip("_"): function
    for function in (
        _linked_data,
        _linked_model,
        _both_linked,
        _hub_cache,
        _linked_directory,
        _hard_linked,
    )
}


@cases(LINKS)
def external_data_and_links(work: Work, link: Callable[[Work, Any], Path]) -> object:
    sample = made("transformer", seed=61)
    return attempt(opened, sample, link(work, sample), options())


@case()
def external_data_that_is_linked_to_from_outside(work: Work) -> object:
    """A model with the same content, and its data where they belong, is no stand-in for it."""
    sample = made("transformer", seed=62)
    for name in ("whole", "linked", "elsewhere"):
        (work.directory / name).mkdir(exist_ok=True)
    whole = work.file("whole/model.onnx", save_external(sample))
    work.file("elsewhere/weights.bin", lambda p: shutil.copy(whole.with_name("weights.bin"), p))
    work.file("linked/weights.bin", lambda p: p.symlink_to("../elsewhere/weights.bin"))
    linked = work.file("linked/model.onnx", lambda path: shutil.copy(whole, path))
    return [opened(sample, whole, options()), attempt(opened, sample, linked, options())]


@case(served=True)
def external_data_of_two_models(work: Work) -> object:
    """Two graphs over the weights of one file, of which one takes only a part."""
    sample = made("transformer", seed=61)
    work.file("weights.bin", lambda path: path.write_bytes(_weights_of(sample)))
    whole = work.file("whole.onnx", lambda p: p.write_bytes(_relocated(sample, "weights.bin")))
    part = onnx.ModelProto.FromString(whole.read_bytes())
    part.graph.name = "part"
    tensor = next(each for each in part.graph.initializer if each.external_data)
    load_external_data_for_tensor(tensor, str(work.directory))
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
    path = work.file("part.onnx", lambda path: path.write_bytes(part.SerializeToString()))
    return [opened(sample, whole, options()), opened(sample, path, options())]


_LARGE_BYTES = 500_000
"""With one such tensor outside there is only one that an error can be about."""


def _relocated(
    sample: Any, location: str, *, least_bytes: int = _SMALL_BYTES, **fields: str
) -> bytes:
    """The model with its weights at a location as written, whatever is there."""
    model = onnx.ModelProto.FromString(sample.content)
    offset = 0
    for tensor in _outside(model, least_bytes):
        size = len(tensor.raw_data)
        entries = {"location": location, "offset": str(offset), "length": str(size), **fields}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        offset += size
    return model.SerializeToString(deterministic=True)


def _weights_of(sample: Any, least_bytes: int = _SMALL_BYTES) -> bytes:
    return b"".join(tensor.raw_data for tensor in _outside(sample.model, least_bytes))


def _outside(model: onnx.ModelProto, least_bytes: int) -> list[onnx.TensorProto]:
    return [each for each in model.graph.initializer if len(each.raw_data) >= least_bytes]


@case(served=True)
def external_data_unaligned(work: Work) -> object:
    sample = made("transformer", seed=61)
    work.file("weights.bin", lambda path: path.write_bytes(_weights_of(sample) + b"more"))
    content = _relocated(sample, "weights.bin")
    return opened(sample, work.file("model.onnx", lambda p: p.write_bytes(content)), options())


@cases(
    {"location": (), "offset": ("offset",), "checksum": ("offset", "length", "checksum")},
    served=True,
)
def external_data_that_says_less_or_more(work: Work, keys: tuple[str, ...]) -> object:
    """A file for each tensor needs neither offset nor length; a checksum is not looked at."""
    sample = made("transformer", seed=61)
    model = onnx.ModelProto.FromString(sample.content)
    for number, tensor in enumerate(_outside(model, _SMALL_BYTES)):
        data, name = tensor.raw_data, f"{number}.bin"
        work.file(name, lambda path, data=data: path.write_bytes(data))
        known = {"offset": "0", "length": str(len(data)), "checksum": "0" * 40}
        tensor.external_data.add(key="location", value=name)
        for key in keys:
            tensor.external_data.add(key=key, value=known[key])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
    content = model.SerializeToString(deterministic=True)
    path = work.file("model.onnx", lambda path: path.write_bytes(content))
    return opened(sample, path, options())


ODD: dict[str, dict[str, str]] = {
    "missing": {"location": "nothing.bin"},
    "empty_location": {"location": ""},
    "above": {"location": "../weights.bin"},
    "through": {"location": "x/../../weights.bin"},
    "absolute": {"location": "/etc/passwd"},
    "directory": {"location": "."},
    "itself": {"location": "model.onnx"},
    "null": {"location": "weights.bin\0more"},
    "memory_tag": {"location": "*/_ORT_MEM_ADDR_/*"},
    "negative_offset": {"location": "weights.bin", "offset": "-64"},
    "huge_offset": {"location": "weights.bin", "offset": str(1 << 62)},
    "text_offset": {"location": "weights.bin", "offset": "many"},
    "beyond_the_end": {"location": "weights.bin", "offset": "100000000"},
    "short_length": {"location": "weights.bin", "length": "4"},
    "huge_length": {"location": "weights.bin", "length": str(1 << 63)},
    "all_at_the_start": {"location": "weights.bin", "offset": "0"},
}


@cases(ODD)
def external_data_that_is_odd(work: Work, fields: dict[str, str]) -> object:
    sample = made(seed=61)
    data = _weights_of(sample, _LARGE_BYTES)
    work.file("weights.bin", lambda path: path.write_bytes(data))
    content = _relocated(sample, least_bytes=_LARGE_BYTES, **fields)
    path = work.file("model.onnx", lambda path: path.write_bytes(content))
    return attempt(opened, sample, path, options())


@cases(
    {
        "short": lambda data: data[:-5000],
        "empty": lambda data: b"",
        "long": lambda data: data * 2,
        "other": lambda data: data[::-1],
    }
)
def external_data_of_another_size(work: Work, change: Callable[[bytes], bytes]) -> object:
    sample = made(seed=61)
    data = change(_weights_of(sample, _LARGE_BYTES))
    work.file("weights.bin", lambda path: path.write_bytes(data))
    content = _relocated(sample, "weights.bin", least_bytes=_LARGE_BYTES)
    path = work.file("model.onnx", lambda path: path.write_bytes(content))
    return attempt(opened, sample, path, options())


@case()
def external_data_from_bytes(work: Work) -> object:
    """A model in memory has its data beside the process, or in a folder that is named."""
    sample = made(seed=61)
    (work.directory / "folder").mkdir(exist_ok=True)
    work.file("weights.bin", lambda path: path.write_bytes(_weights_of(sample)))
    work.file("folder/weights.bin", lambda p: p.write_bytes(_weights_of(made(seed=70))))
    content = _relocated(sample, "weights.bin")
    beside = attempt(opened, sample, content, options())
    given = options()
    key = "session.model_external_initializers_file_folder_path"
    given.add_session_config_entry(key, str(work.directory / "folder"))
    named = attempt(opened, sample, content, given)
    os.chdir("folder")
    return [beside, named, attempt(opened, sample, content, options())]


@case()
def external_data_changed(work: Work) -> object:
    """The model stays, its data do not: replaced, and gone."""
    sample, other = made(seed=61), made(seed=72)
    path = work.fresh("model.onnx", lambda path: path.write_bytes(_relocated(sample, "w.bin")))
    data = work.fresh("w.bin", lambda path: path.write_bytes(_weights_of(sample)))
    seen = [opened(sample, path, options())]
    new = work.fresh("new.bin", lambda path: path.write_bytes(_weights_of(other)))
    new.rename(data)
    seen.append(opened(sample, path, options()))
    data.unlink()
    return [*seen, attempt(opened, sample, path, options())]


# --- the model's file changes ---------------------------------------------------------------------


def _replace(path: Path, content: bytes) -> None:
    new = path.with_name("new.onnx")
    new.write_bytes(content)
    new.rename(path)


def _rewrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def _rewrite_with_old_times(path: Path, content: bytes) -> None:
    status = path.stat()
    _rewrite(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@cases({"replaced": _replace, "rewritten": _rewrite, "times_kept": _rewrite_with_old_times})
def model_changed(work: Work, change: Callable[[Path, bytes], None]) -> object:
    """Each session has what is in the file when it is made; earlier ones keep what they have."""
    samples = [made(seed=61), made(seed=74)]
    path = work.fresh("model.onnx", save(samples[0]))
    feeds, sessions = samples[0].feeds, []
    for number in (0, 1, 0, 1):
        change(path, samples[number].content)
        sessions.append(onnxruntime.InferenceSession(path, options()))
    return [ran(session, feeds) for session in sessions]


@case()
def model_touched_and_moved(work: Work) -> object:
    sample = made(seed=61)
    path = work.fresh("model.onnx", save(sample))
    (work.directory / "moved.onnx").unlink(missing_ok=True)
    seen = [opened(sample, path, options())]
    os.utime(path)
    seen.append(opened(sample, path, options()))
    moved = path.rename(work.directory / "moved.onnx")
    return [*seen, attempt(opened, sample, path, options()), opened(sample, moved, options())]


@case()
def model_deleted_while_in_use(work: Work) -> object:
    sample = made(seed=61)
    path = work.fresh("model.onnx", save_external(sample))
    session = onnxruntime.InferenceSession(path, options())
    path.unlink()
    (work.directory / "weights.bin").unlink()
    again = attempt(onnxruntime.InferenceSession, path, options())
    # set_providers makes the session anew, from a file that is gone.
    results = ran(session, sample.feeds)
    return [results, again, attempt(session.set_providers, ["CPUExecutionProvider"])]


@cases(
    {
        "missing": "no-such.onnx",
        "below_a_file": "model.onnx/model.onnx",
        "directory": ".",
        "root": "/",
        "null_device": "/dev/null",
        "too_long": "m" * 300,
        "loop": "loop",
    },
    served=False,
)
def no_file(work: Work, name: str) -> object:
    model_file(work, made(seed=61))
    work.file("target", lambda path: path.write_text(""))
    if name == "loop" and not os.path.lexists("loop"):
        os.symlink("loop", "loop")
    return [
        attempt(onnxruntime.InferenceSession, name, options()),
        attempt(onnxruntime.InferenceSession, name, options(), enable_fallback=0),
        attempt(onnxruntime.InferenceSession, Path(name)),
    ]


@case()
def unreadable(work: Work) -> object:
    """Root reads it all the same; either way both sides must agree."""
    sample = made(seed=61)
    path = work.fresh("model.onnx", save(sample))
    path.chmod(0)
    return attempt(opened, sample, path, options())


@case(served=True)
def read_only(work: Work) -> object:
    sample = made("transformer", seed=61)
    path = work.file("folder/model.onnx", _read_only(sample))
    return opened(sample, path, options())


def _read_only(sample: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir()
        save_external(sample)(path)
        for each in path.parent.iterdir():
            each.chmod(0o400)
        path.parent.chmod(0o500)

    return write


# --- ORT format -----------------------------------------------------------------------------------


def _in_ort_format(sample: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        given = options(optimized_model_filepath=str(path), log_severity_level=3)
        given.add_session_config_entry("session.save_model_format", "ORT")
        onnxruntime.InferenceSession(sample.content, given)

    return write


@cases({"suffix": "model.ort", "magic_only": "model.onnx"}, served=False)
def ort_format(work: Work, name: str) -> object:
    sample = made("recogniser", seed=61)
    path = work.file("model.ort", _in_ort_format(sample))
    if name != path.name:
        path = work.file(name, lambda copy: shutil.copy(path, copy))
    return [
        attempt(opened, sample, path, options()),
        attempt(opened, sample, path.read_bytes(), options()),
    ]


ORT_ENTRIES = {
    "format": {"session.load_model_format": "ORT"},
    "bytes_directly": {"session.use_ort_model_bytes_directly": "1"},
    "initializers": {
        "session.use_ort_model_bytes_directly": "1",
        "session.use_ort_model_bytes_for_initializers": "1",
    },
    "mapped": {"session.use_memory_mapped_ort_model": "1"},
}


@cases(ORT_ENTRIES, served=False)
def ort_format_with_entries(work: Work, entries: dict[str, str]) -> object:
    sample = made("recogniser", seed=61)
    path = work.file("model.ort", _in_ort_format(sample))
    given = options()
    for key, value in entries.items():
        given.add_session_config_entry(key, value)
    seen = [attempt(opened, sample, path, given)]
    # From bytes that are used in place, two runs of onnxruntime itself do not agree.
    if "session.use_ort_model_bytes_for_initializers" not in entries:
        seen.append(attempt(opened, sample, path.read_bytes(), given))
    return seen


@case()
def an_onnx_model_named_ort(work: Work) -> object:
    sample = made(seed=61)
    return attempt(opened, sample, model_file(work, sample, "model.ort"), options())


@case(served=True)
def a_model_that_onnxruntime_optimised(work: Work) -> object:
    """What the library wrote earlier, with its weights and packed weights outside."""
    sample = made("transformer", seed=61)

    def write(path: Path) -> None:
        given = options(optimized_model_filepath=str(path), log_severity_level=3)
        for key, value in (
            ("session.optimized_model_external_initializers_file_name", "weights.bin"),
            ("session.optimized_model_external_initializers_min_size_in_bytes", "100"),
        ):
            given.add_session_config_entry(key, value)
        onnxruntime.InferenceSession(sample.content, given)

    return opened(sample, work.file("model.onnx", write), options())
