"""Prepared ONNX models whose files, source or onnxruntime change. Promises: a session computes what
is in the model's file when it is made; damaged files are noticed, and made anew."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnx_models
import onnxruntime
import pytest
from harness import World, wait_until

from faults.prepared_worlds import (
    SESSIONS,
    Sessions,
    directory,
    entries,
    expected,
    model,
    prepare,
    rows,
    sessions,
    settled,
)
from trims_shim.daemon.preparer.installation import _build_id

# --- the model changes ----------------------------------------------------------------------------


def replaced(path: str, content: bytes) -> None:
    with open(path + ".new", "wb") as file:
        file.write(content)
    os.rename(path + ".new", path)


def rewritten(path: str, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)


def rewritten_with_old_times(path: str, content: bytes) -> None:
    before = os.stat(path)
    rewritten(path, content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def emptied_and_written(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


CHANGES = [replaced, rewritten, rewritten_with_old_times, emptied_and_written]


def test_a_model_that_changes(prepared_world: World) -> None:
    """Of two models that are both prepared, each session computes the one that is in the file."""
    world = prepared_world
    contents = [onnx_models.perceptron(seed).content for seed in (1, 2)]
    path, other = model(world, 1), model(world, 2)
    right = expected(world, path, other)
    prepare(world, path, other)
    client = sessions(world)
    for change in CHANGES:
        for number in (1, 0):
            change(path, contents[number])
            assert client.create(path)[0] == right[number], change.__name__
    computed = [right[number] for _ in CHANGES for number in (1, 0)]
    assert client.run() == computed
    os.utime(path)
    assert client.create(path)[0] == right[0]
    time.sleep(0.15)
    settled(world)
    assert client.create(path) == (right[0], True)
    os.rename(path, other)
    assert client.create(other)[0] == right[0]
    assert len(entries(world)) == 2


def test_external_data_that_change(prepared_world: World) -> None:
    """The model's own file stays the same; its weights are part of what it is."""
    world = prepared_world
    path = Path(world.root) / "external.onnx"
    onnx_models.save_external(onnx_models.perceptron(1))(path)
    other = Path(world.root) / "other" / "external.onnx"
    other.parent.mkdir()
    onnx_models.save_external(onnx_models.perceptron(2))(other)
    assert path.read_bytes() == other.read_bytes()
    right = expected(world, str(path), str(other))
    prepare(world, str(path), str(other))
    client = sessions(world)
    assert client.create(str(path)) == (right[0], True)
    assert client.create(str(other)) == (right[1], True)
    data = path.parent / "weights.bin"
    for number, source in ((1, other.parent / "weights.bin"), (0, None)):
        content = source.read_bytes() if source else _weights(1)
        data.write_bytes(content)
        assert client.create(str(path))[0] == right[number]
    shutil.copy(other.parent / "weights.bin", str(data) + ".new")
    os.rename(str(data) + ".new", data)
    assert client.create(str(path))[0] == right[1]
    data.unlink()
    client.child.say(["create", str(path)])
    assert client.child.wait() == 1
    assert "weights.bin" in client.child.errors()


def _weights(seed: int) -> bytes:
    """The data file of :func:`onnx_models.save_external`."""
    with tempfile.TemporaryDirectory() as folder:
        onnx_models.save_external(onnx_models.perceptron(seed))(Path(folder) / "model.onnx")
        return (Path(folder) / "weights.bin").read_bytes()


# --- onnxruntime changes --------------------------------------------------------------------------


def test_another_build_of_onnxruntime_is_another_recipe(prepared_world: World) -> None:
    """As after an upgrade: nothing that another installation has made is used."""
    world = prepared_world
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    site = os.path.join(world.root, "site")
    package = os.path.dirname(onnxruntime.__file__)
    shutil.copytree(package, os.path.join(site, "onnxruntime"), ignore=_bulky)
    [native] = Path(site).glob("onnxruntime/capi/onnxruntime_pybind11_state*.so")
    _rebuild(native)
    world.variables["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
    client = sessions(world)
    assert client.create(path) == (right, False)
    assert settled(world) == {"ready": 2}
    assert client.create(path) == (right, True)
    builds = {json.loads(_manifest(world, key))["recipe"]["build"] for key in entries(world)}
    assert len(builds) == 2
    del world.variables["PYTHONPATH"]
    assert sessions(world).create(path) == (right, True)
    # Upgraded under a running process: it runs what it has loaded, and says so.
    _rebuild(native)
    assert client.create(path) == (right, True)
    other = model(world, 2)
    client.create(other)
    assert settled(world) == {"ready": 2, "other_onnxruntime": 1}


def _rebuild(library: Path) -> None:
    """Give a library another build ID, in its place, and nothing else."""
    build_id = bytes.fromhex(_build_id(str(library)))
    other = bytes([(build_id[0] + 1) % 256]) + build_id[1:]
    head = library.read_bytes()[:4096]
    with open(library, "r+b") as file:
        file.write(head.replace(build_id, other))
    assert _build_id(str(library)) == other.hex()


def _bulky(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("transformers", "quantization", "__pycache__")]


def _manifest(world: World, key: str) -> str:
    return Path(directory(world), key, "entry.json").read_text()


# --- the cache directory is damaged ---------------------------------------------------------------


def truncated(path: Path) -> None:
    _unlocked(path)
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    _unlocked(path)
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    _unlocked(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def flipped_with_old_times(path: Path) -> None:
    before = path.stat()
    flipped(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def removed(path: Path) -> None:
    path.unlink()


def linked(path: Path) -> None:
    moved = path.parents[2] / f"moved-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def copied(path: Path) -> None:
    """The same bytes, but not the file that was verified."""
    fresh = path.with_name("fresh")
    shutil.copy(path, fresh)
    os.rename(fresh, path)


def garbage(path: Path) -> None:
    path.unlink()
    path.write_bytes(b'{"layout": [[[[')


def _unlocked(path: Path) -> None:
    path.chmod(0o600)


DAMAGES = [
    truncated, emptied, flipped, flipped_with_old_times, removed, linked, a_directory, copied,
    garbage,
]  # fmt: skip


def _damage(world: World, name: str, damage: Callable[[Path], None]) -> None:
    [key] = entries(world)
    damage(Path(directory(world), key, name))


def _whole_again(world: World, client: Sessions, path: str, right: str) -> None:
    """The model is prepared anew, and then served."""
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)
    [key] = entries(world)
    wait_until(
        lambda: (
            sorted(os.listdir(Path(directory(world), key)))
            == ["entry.json", "model.onnx", "weights.bin"]
        ),
        "the files of the model",
    )


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_damaged_files_are_not_used(prepared_world: World, name: str) -> None:
    """Whatever happens to them while the daemon runs, the next session notices."""
    world = prepared_world
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    client = sessions(world)
    for damage in DAMAGES[name == "weights.bin" :: 2]:
        _damage(world, name, damage)
        assert client.create(path) == (right, False), damage.__name__
        _whole_again(world, client, path, right)
    assert set(client.fallbacks()) <= {"preparing"}


FOUND = {
    "model.onnx": [truncated, flipped_with_old_times],
    "weights.bin": [flipped_with_old_times, linked],
    "entry.json": [truncated, garbage, a_directory, removed],
}


@pytest.mark.parametrize("name", FOUND)
def test_damaged_files_are_not_taken_over(prepared_world: World, name: str) -> None:
    """A daemon that starts looks at what it finds."""
    world = prepared_world
    path = model(world)
    right = expected(world, path)[0]
    prepare(world, path)
    client = sessions(world)
    for damage in FOUND[name]:
        world.kill_daemon()
        _damage(world, name, damage)
        assert client.create(path) == (right, False), damage.__name__
        _whole_again(world, client, path, right)


def test_entry_json_of_another_model(prepared_world: World) -> None:
    """Two models whose descriptions were exchanged: neither is served as the other."""
    world = prepared_world
    paths = [model(world, 1), model(world, 2)]
    right = expected(world, *paths)
    prepare(world, *paths)
    world.kill_daemon()
    places = [Path(directory(world), key, "entry.json") for key in entries(world)]
    texts = [place.read_bytes() for place in places]
    for place, text in zip(places, reversed(texts), strict=True):
        place.unlink()
        place.write_bytes(text)
    client = sessions(world)
    for number, path in enumerate(paths):
        assert client.create(path) == (right[number], False)
    assert settled(world) == {"ready": 2}
    for number, path in enumerate(paths):
        assert client.create(path) == (right[number], True)


def test_exchanged_directories(prepared_world: World) -> None:
    """Each whole and sound, under the other's name."""
    world = prepared_world
    paths = [model(world, 1), model(world, 2)]
    right = expected(world, *paths)
    prepare(world, *paths)
    first, second = (Path(directory(world), key) for key in entries(world))
    client = sessions(world)
    for is_restarted in (False, True):
        if is_restarted:
            world.kill_daemon()
        first.rename(first.with_name("aside"))
        second.rename(first)
        first.with_name("aside").rename(second)
        for number, path in enumerate(paths):
            assert client.create(path) == (right[number], False)
        assert settled(world) == {"ready": 2}


_EXCHANGED_MEANWHILE = (
    SESSIONS
    + """
import os
import onnxruntime.capi.onnxruntime_inference_collection as collection
path, place, names = hear()
first, second = (os.path.join(place, name) for name in names)
class Binding:
    def __getattr__(self, name):
        return getattr(binding, name)
    def InferenceSession(self, options, model, *arguments):
        if model.startswith(place):
            os.rename(first, first + ".aside")
            os.rename(second, first)
            os.rename(first + ".aside", second)
        return binding.InferenceSession(options, model, *arguments)
binding, collection.C = collection.C, Binding()
say([bits(create(path)), counted()])
"""
)


def test_exchanged_while_a_session_is_made(prepared_world: World) -> None:
    """Found: it computed what the other model does."""
    world = prepared_world
    paths = [model(world, 1), model(world, 2)]
    right = expected(world, *paths)
    prepare(world, *paths)
    child = world.spawn(_EXCHANGED_MEANWHILE)
    child.say([paths[0], directory(world), entries(world)])
    assert child.hear() == [right[0], [0, {"prepared_changed": 1}]]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_whole_directory_goes(prepared_world: World, is_restarted: bool) -> None:
    """Removed, and a file in its place: sessions that run go on, others are the original's."""
    world = prepared_world
    path = model(world)
    prepare(world, path)
    client = sessions(world)
    right, is_served = client.create(path)
    assert is_served
    shutil.rmtree(directory(world))
    if is_restarted:
        world.kill_daemon()
    assert client.run() == [right]
    assert client.create(path) == (right, False)
    assert settled(world) == {"ready": 1}
    assert client.create(path) == (right, True)
    shutil.rmtree(world.settings["cache_dir"])
    Path(world.settings["cache_dir"]).write_text("in the way")
    if is_restarted:
        world.kill_daemon()
    assert client.create(path) == (right, False)
    wait_until(lambda: not any(row.state == "preparing" for row in rows(world)), "an end")
    assert client.create(path) == (right, False)
    assert client.run() == [right] * 5


def test_files_are_what_the_daemon_promises(prepared_world: World) -> None:
    """Read-only files of ours in a directory of ours; nothing else beside them."""
    world = prepared_world
    prepare(world, model(world))
    [key] = entries(world)
    place = Path(directory(world), key)
    assert place.stat().st_mode & 0o777 == 0o700
    assert {each.name: each.stat().st_mode & 0o777 for each in place.iterdir()} == dict.fromkeys(
        ["entry.json", "model.onnx", "weights.bin"], 0o400
    )
    assert os.stat(directory(world)).st_mode & 0o077 == 0


# --- what is mapped stays -------------------------------------------------------------------------


def test_sessions_map_the_prepared_files(prepared_world: World) -> None:
    """Shared, not copied; and they stay mapped and right when their names go."""
    world = prepared_world
    path = model(world, width=2048)
    prepare(world, path)
    [key] = entries(world)
    weights = str(Path(directory(world), key, "weights.bin"))
    child = world.spawn(
        SESSIONS + f"session = create({path!r})\n"
        "right = bits(session)\n"
        "say([sum(w in line for line in open('/proc/self/maps')) > 0 for w in hear()])\n"
        "hear()\n"
        "say([bits(session) == right, 'deleted' in open('/proc/self/maps').read()])\n"
    )
    child.say([weights])
    assert child.hear() == [True]
    shutil.rmtree(directory(world))
    child.say()
    assert child.hear() == [True, True]
