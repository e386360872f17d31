"""Variants of images, aligned and converted: made for the second that asks, shared from then on."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
from blake3 import blake3
from harness import World, content, open_path, wait_until

from trims_shim.client.arenas import Arena, Image
from trims_shim.client.cache import Cache
from trims_shim.errors import AccessDenied, DaemonUnavailable
from trims_shim.specs import PIECES_LIMIT, Conversion, Variant
from trims_shim.wire import messages

LEAD_BYTES = 56
LED = Variant(LEAD_BYTES)
SIZE_BYTES = 3 << 20


def opened(world: World, cache: Cache, name: str = "") -> Arena:
    return open_path(cache, name or world.file(1, SIZE_BYTES))


def until_aligned(cache: Cache, image: Image) -> Image:
    """Ask as loads do, until one gets it."""
    found: Image = wait_until(lambda: cache.variant(image, LED), "an aligned image")
    return found


def test_the_second_that_asks_has_it_loaded(running: World) -> None:
    cache = running.cache()
    arena = opened(running, cache)
    assert cache.variant(arena.image, LED) is None
    assert len(running.status().images) == 1, "one process alone pays no second image"
    image = until_aligned(cache, arena.image)
    whole = bytes(LEAD_BYTES) + content(1, SIZE_BYTES)
    assert bytes(memoryview(image.map().buffer)) == whole
    assert image.digest == blake3(whole).hexdigest()
    assert [each.size_bytes for each in running.status().images] == [len(whole), SIZE_BYTES]


def test_converted_numbers(running: World) -> None:
    """Behind zeros, too, as those of a safetensors file."""
    variant = Variant(6, Conversion("bfloat16", "float32"))
    cache, path = running.cache(), running.file(1, SIZE_BYTES)
    arena = opened(running, cache, path)
    image: Image = wait_until(lambda: cache.variant(arena.image, variant), "a converted image")
    whole = bytearray(12 + 2 * SIZE_BYTES)
    whole[14::4] = content(1, SIZE_BYTES)[0::2]
    whole[15::4] = content(1, SIZE_BYTES)[1::2]
    assert bytes(memoryview(image.map().buffer)) == whole
    assert image.digest == blake3(whole).hexdigest()
    (row,) = [each for each in running.status().images if each.digest == image.digest]
    assert list(row.names) == [f"{path} (float32)"]


def test_pieces_of_a_file(running: World) -> None:
    """As many as an offer can name; each client gets the image of just these."""
    pieces = tuple(range(1 << 20, 0, -(1 << 10)))
    variant = Variant(0, None, 2048, pieces)
    cache, path = running.cache(), running.file(1, SIZE_BYTES)
    arena = opened(running, cache, path)
    image: Image = wait_until(lambda: cache.variant(arena.image, variant), "a stacked image")
    whole = b"".join(content(1, SIZE_BYTES)[at : at + 2048] for at in pieces)
    assert len(pieces) == PIECES_LIMIT
    assert bytes(memoryview(image.map().buffer)) == whole
    assert image.digest == blake3(whole).hexdigest()
    other = running.cache()
    theirs = opened(running, other, path)
    found = other.variant(theirs.image, variant)
    assert found is not None
    assert found.digest == image.digest
    assert other.variant(theirs.image, variant._replace(pieces=pieces[:-1])) is None
    (row,) = [each for each in running.status().images if each.digest == image.digest]
    assert list(row.names) == [f"{path} (stacked)"]


def test_others_share_it_and_it_goes_with_its_users(running: World) -> None:
    path = running.file(1, SIZE_BYTES)
    first = running.cache()
    arena = opened(running, first, path)
    image = until_aligned(first, arena.image)
    assert first.variant(arena.image, LED) is image, "of one process once"
    other = running.cache()
    theirs = opened(running, other, path)
    misses = running.status().counters["open_miss"]
    assert other.variant(theirs.image, LED) is not None
    assert running.status().counters["open_miss"] == misses, "its identity is settled at once"
    (row,) = [each for each in running.status().images if each.digest == image.digest]
    assert list(row.names) == [f"{path} (aligned)"]
    del image, arena, theirs
    wait_until(lambda: sum(each.leases for each in running.status().images) == 0, "no lease")


def test_askers_during_the_load_wait_for_it(running: World) -> None:
    """Of eight that begin together, two copy and the others share."""
    path = running.file(1, 64 << 20)
    children = [
        running.spawn(
            f"arena = open_file({path!r})\nsay('ready')\nhear()\n"
            f"found = cache().variant(arena.image, Variant({LEAD_BYTES}))\n"
            "say(found is not None)\nhear()\n"
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.say(None)
    got = [child.hear() for child in children]
    assert got.count(True) >= 1, "the third joins the load of the second"
    assert sum(each.size_bytes > 64 << 20 for each in running.status().images) == 1
    for child in children:
        child.say(None)


@pytest.mark.parametrize(
    ("tier", "lead"),
    [("host", 1024), ("host", -1), ("GPU-00000000-0000-0000-0000-000000000001", 8)],
)
def test_leads_that_make_no_sense_are_refused(running: World, tier: str, lead: int) -> None:
    arena = opened(running, running.cache())
    connection = running.connection()
    try:
        with pytest.raises(AccessDenied, match=f"{lead} bytes before the file"):
            _request(connection, arena.image.descriptor, tier, lead)
    finally:
        connection.close()


def _request(connection: Any, descriptor: int, tier: str, lead: int) -> None:
    connection._send_handover(messages.FileOffer(1, tier, "m", Variant(lead)), descriptor)
    connection.request(messages.OpenImageRequest(1))


def test_without_room_bytes_are_copied(make_world: Any) -> None:
    world = make_world(host_bytes="4M")
    world.start()
    cache = world.cache()
    arena = opened(world, cache)
    for _ in range(3):
        assert cache.variant(arena.image, LED) is None
    assert len(world.status().images) == 1


def test_a_daemon_that_is_gone_is_not_started_for_it(running: World) -> None:
    cache = running.cache()
    arena = opened(running, cache)
    running.kill_daemon()
    with pytest.raises(DaemonUnavailable):
        cache.variant(arena.image, LED)
    with contextlib.suppress(FileNotFoundError):
        assert running.processes() == []


END_TO_END = """
import safetensors.torch as safetensors_torch
import torch
from safetensors.torch import load_file, save_file
path = {path!r}
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)])
if not os.path.exists(path):
    save_file(dict(model().state_dict()), path, metadata={{'n': 'x' * {padding}}})
x = torch.randn(64, 1024)
expected = model()(x)
shared = 0
deadline = time.monotonic() + 60
while not shared and time.monotonic() < deadline:
    loaded = model()
    with torch.no_grad():
        for each in loaded.parameters(): each.zero_()
    state = load_file(path)
    off = state['0.weight'].data_ptr() % 64
    loaded.load_state_dict(state)
    assert torch.equal(loaded(x), expected), 'other bits'
    shared = sum(not each.untyped_storage().resizable() for each in loaded.parameters())
state['0.weight'].zero_()
assert torch.equal(loaded(x), expected), 'the state dict reaches the model'
with torch.no_grad():
    loaded[0].weight.add_(1)
again = model()
again.load_state_dict(load_file(path))
assert torch.equal(again(x), expected), 'one model reaches another'
safetensors_torch.load_model(model_of_another := model(), path)
assert torch.equal(model_of_another(x), expected), 'load_model differs'
shared += sum(not each.untyped_storage().resizable() for each in model_of_another.parameters())
say([off, shared, {{each.data_ptr() % 64 for each in again.parameters()}} == {{0}}])
"""


def test_load_state_dict_of_an_unaligned_file_ends_without_a_copy(running: World) -> None:
    """With the bits of a copy, and as independent as one."""
    path = os.path.join(running.root, "model.safetensors")
    off, shared, are_aligned = running.run(END_TO_END.format(path=path, padding=1), timeout_s=120)
    if not off:  # the header happened to end on a border
        path = os.path.join(running.root, "other.safetensors")
        script = END_TO_END.format(path=path, padding=9)
        off, shared, are_aligned = running.run(script, timeout_s=120)
    assert off
    assert shared == 6, "of load_state_dict, and of load_model"
    assert are_aligned


WIDENING = """
import torch
from safetensors.torch import load_file, save_file
path, numbers = {path!r}, torch.{numbers}
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(5)])
narrow = {{name: value.to(numbers) for name, value in model().state_dict().items()}}
narrow['0.bias'][:4] = torch.tensor([float('nan'), float('-inf'), -0.0, 1e-7])
torch.save(narrow, path) if path.endswith('.pt') else save_file(narrow, path)
load = torch.load if path.endswith('.pt') else load_file
shared = 0
deadline = time.monotonic() + 60
while not shared and time.monotonic() < deadline:
    loaded = model()
    loaded.load_state_dict(load(path))
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32
        expected = narrow[name].float()
        assert torch.equal(value.view(torch.int32), expected.view(torch.int32)), name
    shared = sum(not each.untyped_storage().resizable() for each in loaded.parameters())
state = load(path)
state['0.weight'].zero_()
again = model()
again.load_state_dict(state)
assert not again[0].weight.any(), 'what was written is copied'
assert torch.equal(loaded[0].weight, narrow['0.weight'].float()), 'the state dict reaches the model'
say([shared, {{each.data_ptr() % 64 for each in loaded.parameters()}} == {{0}}])
"""


@pytest.mark.parametrize("numbers", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_load_state_dict_into_float32_ends_without_a_copy(
    running: World, name: str, numbers: str
) -> None:
    """With the bits of a copy, and as independent as one."""
    script = WIDENING.format(path=os.path.join(running.root, name), numbers=numbers)
    assert running.run(script, timeout_s=120) == [5, True]
