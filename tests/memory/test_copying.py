"""A file taken apart onto a device and put together again: the bytes, the digest, nothing beside.

Both engines, on the emulated driver, whose copies from pinned memory run later, on the threads of
their streams. Promises: bytes go where the layout says and nowhere else; the digest is that of the
file; when a call has ended, however it ended, nothing of it runs, is held or touches memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import emulated_cuda as emulation
import pytest
import torch
from blake3 import blake3
from harness import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trims_shim.daemon import ingest
from trims_shim.errors import (
    CorruptFile,
    DriverFailure,
    FileChanged,
    MemoryFailure,
    ReadFailed,
    TrimsError,
)
from trims_shim.formats.device_layout import DeviceLayout, Placed
from trims_shim.memory import copying, copying_native
from trims_shim.memory.driver import Driver, driver, forget
from trims_shim.specs import AS_IS, Conversion, Span, Variant

CHUNK = 1 << 12
UNTOUCHED = 0xEE
GUARD_BYTES = 64
MakeFile = Callable[..., str]
needs_extension = pytest.mark.skipif(
    not copying_native.is_available(), reason="the extension was not built (no compiler)"
)
Piece = tuple[int, int, int]
"""Bytes of the file before a record, of the record, and of the device before it."""

properties = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
    deadline=None,
)
sizes = st.one_of(
    st.integers(0, 20),
    st.integers(0, 3 * CHUNK),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]),
)
pieces = st.lists(st.tuples(sizes, sizes, st.integers(0, 600)), min_size=1, max_size=12)


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and not copying_native.is_available():
        pytest.skip("the extension was not built (no compiler)")
    if request.param == "python":
        monkeypatch.setattr(copying_native, "extension", None)
    monkeypatch.setattr(copying, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(copying, "RING_CHUNKS", 8)
    monkeypatch.setattr(copying, "_REPORT_EVERY_BYTES", CHUNK)
    assert copying.engine() == request.param
    return str(request.param)


class Card:
    """Memory of the emulated device, with guards around it, and what this test holds there."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._blocks: list[tuple[int, int]] = []

    def allocate(self, size_bytes: int) -> int:
        with self.driver.context(0):
            block = self.driver.allocate(size_bytes + 2 * GUARD_BYTES)
        self._blocks.append((block, size_bytes + 2 * GUARD_BYTES))
        ctypes.memset(block, UNTOUCHED, size_bytes + 2 * GUARD_BYTES)
        return block + GUARD_BYTES

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def around(self, address: int, size_bytes: int) -> bytes:
        return self.read(address - GUARD_BYTES, size_bytes + 2 * GUARD_BYTES)

    def free(self) -> None:
        with self.driver.context(0):
            for block, _ in self._blocks:
                self.driver.free(block)
        self._blocks.clear()


Machine = Callable[..., contextlib.AbstractContextManager[Card]]


@pytest.fixture
def machine(
    emulated_cuda: emulation.Emulated, engine: str, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    """The device of a machine with settings of its own (``emulated_cuda.environment``).

    At the end nothing of a transfer may be left.
    """

    @contextlib.contextmanager
    def make(*, pinned_left: int = 0, **variables: object) -> Iterator[Card]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"TRIMS_TEST_CUDA_{name.upper()}", str(value))
            emulation.reset()
            forget()
            threads = tasks()
            card = Card(driver())
            yield card
            assert no_more_than(threads), "a thread is left"
            held = emulation.held()
            assert (held.pinned, held.streams, held.events) == (pinned_left, 0, 0)
            card.free()
        emulation.reset()
        forget()

    return make


@pytest.fixture
def card(machine: Machine) -> Iterator[Card]:
    with machine() as card:
        yield card


def tasks() -> set[str]:
    return {each.name for each in Path("/proc/self/task").iterdir()}


def no_more_than(threads: set[str]) -> bool:
    """The kernel may still list a thread that was joined: CPython unlocks before it ends."""
    return bool(wait_until(lambda: tasks() <= threads, "the end of all threads"))


def layout_of(chosen: list[Piece], tail: int) -> DeviceLayout:
    placed = []
    file_end = device_end = 0
    for gap, size, padding in chosen:
        placed.append(Placed(Span(file_end + gap, size), device_end + padding))
        file_end += gap + size
        device_end += padding + size
    return DeviceLayout(tuple(placed), device_end, file_end + tail)


def content_for(layout: DeviceLayout) -> bytes:
    return os.urandom(layout.file_bytes)


def expected_on_device(layout: DeviceLayout, content: bytes) -> bytes:
    image = bytearray([UNTOUCHED]) * layout.size_bytes
    for each in layout.placed:
        end = each.offset_bytes + each.source.size_bytes
        image[each.offset_bytes : end] = content[each.source.offset_bytes : each.source.end_bytes]
    guard = bytes([UNTOUCHED]) * GUARD_BYTES
    return guard + bytes(image) + guard


def expected_outline(layout: DeviceLayout, content: bytes) -> bytes:
    outline = bytearray(layout.file_bytes)
    for span in layout.outline():
        outline[span.offset_bytes : span.end_bytes] = content[span.offset_bytes : span.end_bytes]
    return bytes(outline)


@contextlib.contextmanager
def memfd(content: bytes | int) -> Iterator[int]:
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, content if isinstance(content, int) else len(content))
        if not isinstance(content, int) and content:
            os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def upload(
    source: int,
    layout: DeviceLayout,
    address: int,
    outline: int | None = None,
    *,
    device_index: int = 0,
    is_hashed: bool = True,
    on_progress: Callable[[int], None] = lambda _: None,
) -> str:
    return copying.upload(
        source,
        layout,
        address,
        outline,
        device_index=device_index,
        is_hashed=is_hashed,
        on_progress=on_progress,
        name="model",
    )


def download(outline: int, layout: DeviceLayout, address: int, target: int) -> str:
    return copying.download(
        outline,
        layout,
        address,
        target,
        device_index=0,
        on_progress=lambda _: None,
        name="model",
    )


MANY: list[Piece] = [(7, 3 * CHUNK, 0)] * 20
"""Sixty chunks and some: the ring goes round seven times."""


@properties
@given(pieces, sizes)
def test_there_and_back(card: Card, chosen: list[Piece], tail: int) -> None:
    """Any layout: tiny, empty and large records, with and without gaps, across chunks."""
    layout = layout_of(chosen, tail)
    content = content_for(layout)
    digest = blake3(content).hexdigest()
    address = card.allocate(layout.size_bytes)
    progress: list[int] = []
    with memfd(content) as source, memfd(layout.file_bytes) as outline:
        answer = upload(source, layout, address, outline, on_progress=progress.append)
        assert answer == digest
        assert card.around(address, layout.size_bytes) == expected_on_device(layout, content)
        assert read_all(outline) == expected_outline(layout, content)
        with memfd(layout.file_bytes) as target:
            assert download(outline, layout, address, target) == digest
            assert read_all(target) == content
    assert progress == sorted(set(progress))
    assert progress[-1:] == [layout.file_bytes][: layout.file_bytes]
    card.free()


def test_neither_hash_nor_outline(card: Card) -> None:
    layout = layout_of(MANY, 10)
    content = content_for(layout)
    address = card.allocate(layout.size_bytes)
    with memfd(content) as source:
        assert upload(source, layout, address, is_hashed=False) == ""
        assert os.lseek(source, 0, os.SEEK_CUR) == 0
    assert card.around(address, layout.size_bytes) == expected_on_device(layout, content)


def test_past_the_page_cache(
    card: Card, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks by a second descriptor; the rest, and what it cannot read, by the first."""
    layout = layout_of(MANY, 5)
    content = content_for(layout)
    path = make_file(content)
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"the temporary directory has no O_DIRECT: {error}")
    source = os.open(path, os.O_RDONLY)
    monkeypatch.setattr(copying, "opened_directly", lambda *_: contextlib.nullcontext(direct))
    address = card.allocate(layout.size_bytes)
    try:
        for _ in range(2):
            assert upload(source, layout, address) == blake3(content).hexdigest()
            assert card.around(address, layout.size_bytes) == expected_on_device(layout, content)
            # Reads at offsets that are no multiple of a block are refused.
            monkeypatch.setattr(copying, "CHUNK_BYTES", CHUNK + 1)
        for size in (9 * CHUNK + 5, 3):
            os.truncate(path, size)
            with pytest.raises(FileChanged):
                upload(source, layout, address)
    finally:
        os.close(source)
        os.close(direct)


def test_only_the_files_own_bytes_are_read_past_the_page_cache(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are put where such reads are refused. Which descriptor was read is told by zeros."""
    content = b"x" * CHUNK
    with open(make_file(content), "rb") as file, memfd(CHUNK) as direct:
        monkeypatch.setattr(copying, "opened_directly", lambda *_: contextlib.nullcontext(direct))
        for variant, expected in ((AS_IS, bytes(CHUNK)), (Variant(8), bytes(8) + content)):
            memory = bytearray(variant.size_bytes(CHUNK))
            copying.fill(
                file.fileno(),
                memoryview(memory),
                threads=1,
                on_progress=lambda done: None,
                variant=variant,
            )
            assert memory == expected


def test_thousands_of_tiny_records(card: Card) -> None:
    layout = layout_of([(number % 3, 1, number % 5) for number in range(5000)], 1)
    content = content_for(layout)
    address = card.allocate(layout.size_bytes)
    with memfd(content) as source, memfd(layout.file_bytes) as outline:
        assert upload(source, layout, address, outline) == blake3(content).hexdigest()
        assert read_all(outline) == expected_outline(layout, content)
    assert card.around(address, layout.size_bytes) == expected_on_device(layout, content)


def test_beyond_four_gib(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of the file and of the record do not fit 32 bits."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 4 << 20)
    layout = layout_of([(5 << 30, 300_000, 0)], 1000)
    ending = os.urandom(301_000)
    address = card.allocate(layout.size_bytes)
    with memfd(layout.file_bytes) as source:
        os.pwrite(source, ending, 5 << 30)
        # Without an outline: it would get five gigabytes of zeros.
        upload(source, layout, address, is_hashed=False)
    image = ending[:300_000]
    guard = bytes([UNTOUCHED]) * GUARD_BYTES
    assert card.around(address, layout.size_bytes) == guard + image + guard


@pytest.mark.parametrize("delay_ms", [1, 3])
def test_buffers_wait_for_their_copies(machine: Machine, delay_ms: int) -> None:
    """Copies are slower than reads: a buffer that is used again too early would show."""
    layout = layout_of(MANY, 0)
    content = content_for(layout)
    with machine(copy_delay_ms=delay_ms) as slow, memfd(content) as source:
        address = slow.allocate(layout.size_bytes)
        assert upload(source, layout, address) == blake3(content).hexdigest()
        assert slow.around(address, layout.size_bytes) == expected_on_device(layout, content)


def test_buffers_wait_for_the_hash(card: Card) -> None:
    """The caller is slower than everything: what it was handed must not change meanwhile."""
    layout = layout_of(MANY, 0)
    content = content_for(layout)
    address = card.allocate(layout.size_bytes)
    with memfd(content) as source, memfd(layout.file_bytes) as outline:
        digest = upload(source, layout, address, outline, on_progress=lambda _: time.sleep(0.003))
        assert digest == blake3(content).hexdigest()
        with memfd(layout.file_bytes) as target:
            assert download(outline, layout, address, target) == digest


@pytest.mark.parametrize("there", [0, 1, CHUNK, 5 * CHUNK + 7])
def test_a_file_that_became_shorter(card: Card, there: int) -> None:
    layout = layout_of(MANY, 0)
    address = card.allocate(layout.size_bytes)
    with memfd(os.urandom(there)) as source:
        with pytest.raises(FileChanged, match="model became shorter"):
            upload(source, layout, address)
        with memfd(layout.file_bytes) as target, pytest.raises(FileChanged):
            download(source, layout, address, target)


def test_a_file_that_cannot_be_read(card: Card) -> None:
    layout = layout_of(MANY, 0)
    address = card.allocate(layout.size_bytes)
    for path, message in (("/", "Is a directory"), ("/proc/self/mem", "Input/output error")):
        source = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(ReadFailed, match=f"model: .*{message}"):
                upload(source, layout, address)
        finally:
            os.close(source)


def test_an_outline_or_target_that_cannot_be_written(card: Card, make_file: MakeFile) -> None:
    layout = layout_of(MANY, 0)
    content = content_for(layout)
    address = card.allocate(layout.size_bytes)
    read_only = os.open(make_file(content), os.O_RDONLY)
    try:
        with memfd(content) as source, pytest.raises(MemoryFailure, match="model: its memory"):
            upload(source, layout, address, read_only)
        with memfd(content) as outline, pytest.raises(MemoryFailure, match="model: its memory"):
            download(outline, layout, address, read_only)
    finally:
        os.close(read_only)


OVERLAPPING = [
    [Placed(Span(0, 10), 0), Placed(Span(9, 10), 10)],
    [Placed(Span(0, 10), 0), Placed(Span(10, 10), 9)],
    [Placed(Span(10, 10), 0), Placed(Span(0, 10), 10)],
    [Placed(Span(91, 10), 0)],
    [Placed(Span(0, 10), 41)],
]


@pytest.mark.parametrize("placed", OVERLAPPING)
def test_a_layout_that_contradicts_itself(card: Card, placed: list[Placed]) -> None:
    layout = DeviceLayout(tuple(placed), 50, 100)
    address = card.allocate(50)
    with memfd(os.urandom(100)) as source:
        with pytest.raises(CorruptFile, match="model"):
            upload(source, layout, address)
        with pytest.raises(CorruptFile):
            download(source, layout, address, source)
    assert set(card.around(address, 50)) == {UNTOUCHED}


FAILING = [
    "cuStreamCreate:2",
    "cuMemcpyHtoDAsync:1",
    "cuMemcpyHtoDAsync:20",
]


@pytest.mark.parametrize("call", FAILING)
def test_a_call_of_the_driver_fails(machine: Machine, call: str) -> None:
    layout = layout_of(MANY, 0)
    name = call.partition(":")[0]
    with machine(fail=call) as failing, memfd(content_for(layout)) as source:
        address = failing.allocate(layout.size_bytes)
        with pytest.raises(DriverFailure, match=f"{name}.*CUDA_ERROR_UNKNOWN") as caught:
            upload(source, layout, address)
        assert caught.value.result == "CUDA_ERROR_UNKNOWN"


def test_copies_that_cannot_be_waited_for(machine: Machine) -> None:
    """The buffers are not freed: nobody knows whether the device still reads them."""
    layout = layout_of(MANY, 0)
    failing = machine(fail="cuStreamSynchronize:1+", copy_delay_ms=1, pinned_left=1)
    with failing as card, memfd(content_for(layout)) as source:
        address = card.allocate(layout.size_bytes)
        with pytest.raises(DriverFailure, match="cuStreamSynchronize"):
            upload(source, layout, address)
        time.sleep(0.1)


def test_a_download_fails(machine: Machine) -> None:
    layout = layout_of(MANY, 0)
    with machine(fail="cuMemcpyDtoHAsync:7") as failing:
        address = failing.allocate(layout.size_bytes)
        with (
            memfd(layout.file_bytes) as outline,
            memfd(layout.file_bytes) as target,
            pytest.raises(DriverFailure, match="cuMemcpyDtoHAsync"),
        ):
            download(outline, layout, address, target)


def test_memory_that_cannot_be_pinned(machine: Machine) -> None:
    """Plain buffers then; the copies wait, and are right."""
    layout = layout_of(MANY, 3)
    content = content_for(layout)
    with machine(fail="cuMemHostAlloc", copy_delay_ms=1) as poor:
        address = poor.allocate(layout.size_bytes)
        with memfd(content) as source, memfd(layout.file_bytes) as outline:
            assert upload(source, layout, address, outline) == blake3(content).hexdigest()
            assert poor.around(address, layout.size_bytes) == expected_on_device(layout, content)
            with memfd(layout.file_bytes) as target:
                download(outline, layout, address, target)
                assert read_all(target) == content


def test_no_such_device(card: Card) -> None:
    layout = layout_of(MANY, 0)
    with memfd(content_for(layout)) as source, pytest.raises(DriverFailure, match="cuDeviceGet"):
        upload(source, layout, card.allocate(layout.size_bytes), device_index=7)


class Unwelcome(Exception):
    pass


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_callback_that_raises(machine: Machine, is_pinned: bool) -> None:
    """Cancels; nothing is written any more, though copies were on their way."""
    layout = layout_of(MANY, 0)

    def refuse(done_bytes: int) -> None:
        if done_bytes >= 6 * CHUNK:
            raise Unwelcome

    fail = "" if is_pinned else "cuMemHostAlloc"
    with machine(copy_delay_ms=5, fail=fail) as slow:
        address = slow.allocate(layout.size_bytes)
        threads = tasks()
        with memfd(content_for(layout)) as source, memfd(layout.file_bytes) as outline:
            with pytest.raises(Unwelcome):
                upload(source, layout, address, outline, on_progress=refuse)
            assert no_more_than(threads)
            after = slow.around(address, layout.size_bytes), read_all(outline)
            time.sleep(0.1)
            assert (slow.around(address, layout.size_bytes), read_all(outline)) == after
        assert after[0].count(bytes([UNTOUCHED]) * CHUNK) > 10, "it had ended before"


def test_an_interrupt_of_the_user(machine: Machine) -> None:
    """Ctrl-C while the main thread waits for a chunk: at once, and nothing is left."""
    layout = layout_of(MANY, 0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with machine(copy_delay_ms=150) as slow:
            address = slow.allocate(layout.size_bytes)
            armed: list[int] = []

            def interrupt_soon(done_bytes: int) -> None:
                if not armed:
                    armed.append(done_bytes)
                    signal.setitimer(signal.ITIMER_REAL, 0.1)

            with memfd(content_for(layout)) as source, pytest.raises(KeyboardInterrupt):
                upload(source, layout, address, on_progress=interrupt_soon)
            # What is on the streams is waited for, up to a ring of copies.
            after = slow.around(address, layout.size_bytes)
            assert after.count(bytes([UNTOUCHED]) * CHUNK) > 10, "it had ended before"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_two_at_once(card: Card) -> None:
    layout = layout_of(MANY, 5)
    results: list[tuple[str, bytes]] = []

    def work(content: bytes, address: int) -> None:
        with memfd(content) as source:
            digest = upload(source, layout, address)
        results.append((digest, card.around(address, layout.size_bytes)))

    contents = [content_for(layout) for _ in range(2)]
    works = [
        threading.Thread(target=work, args=(each, card.allocate(layout.size_bytes)))
        for each in contents
    ]
    for each in works:
        each.start()
    for each in works:
        each.join(60)
    expected = [(blake3(c).hexdigest(), expected_on_device(layout, c)) for c in contents]
    assert sorted(results) == sorted(expected)


def test_buffers_that_are_kept(machine: Machine, engine: str) -> None:
    """From one transfer to the next, of any size, until the block ends; not on an error."""
    large, small = layout_of(MANY, 0), layout_of([(0, 10, 0)], 0)
    with machine() as card:
        address = card.allocate(large.size_bytes)
        with copying.kept_buffers():
            for layout in (small, large, small):
                content = content_for(layout)
                with memfd(content) as source, memfd(layout.file_bytes) as outline:
                    digest = upload(source, layout, address, outline)
                    assert digest == blake3(content).hexdigest()
                    with memfd(layout.file_bytes) as target:
                        assert download(outline, layout, address, target) == digest
                assert emulation.held().pinned == (1 if engine == "native" else 0)
            with memfd(b"short") as source, pytest.raises(FileChanged):
                upload(source, large, address)
            assert emulation.held().pinned == (1 if engine == "native" else 0)
        assert emulation.held().pinned == 0


def test_buffers_that_are_kept_and_lost(machine: Machine) -> None:
    layout = layout_of(MANY, 0)
    failing = machine(fail="cuStreamSynchronize:1+", pinned_left=1)
    with failing as card, copying.kept_buffers(), memfd(content_for(layout)) as source:
        address = card.allocate(layout.size_bytes)
        with pytest.raises(DriverFailure, match="cuStreamSynchronize"):
            upload(source, layout, address)


def test_an_error_does_not_keep_the_memory(card: Card) -> None:
    """The traceback (held by a log) has no view of a buffer that is gone."""
    layout = layout_of(MANY, 0)
    caught: TrimsError | None = None
    with memfd(b"short") as source:
        try:
            upload(source, layout, card.allocate(layout.size_bytes))
        except TrimsError as error:
            caught = error
    assert caught is not None
    trace = caught.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, memoryview):
                with pytest.raises(ValueError, match="released"):
                    value.tobytes()
        trace = trace.tb_next


@pytest.mark.parametrize("lead", [0, 1, 56])
def test_a_file_behind_zeros(make_file: MakeFile, lead: int) -> None:
    """The digest is of all of it."""
    content = os.urandom(2 * copying.CHUNK_BYTES + 12345)
    memory = bytearray(lead + len(content))
    path = make_file(content)
    with open(path, "rb") as file:
        digest = copying.fill(
            file.fileno(),
            memoryview(memory),
            threads=2,
            on_progress=lambda done: None,
            variant=Variant(lead),
        )
    assert memory == bytes(lead) + content
    assert digest == blake3(memory).hexdigest()


@pytest.mark.parametrize(
    ("piece_bytes", "pieces"),
    [(1, (0,)), (1000, (1000, 0, 5, 5)), (3 * copying.CHUNK_BYTES + 7, (9, 0))],
)
def test_pieces_of_a_file(make_file: MakeFile, piece_bytes: int, pieces: tuple[int, ...]) -> None:
    """One behind the other, whatever the chunks are; also those that are only hashed."""
    variant, content = Variant(0, None, piece_bytes, pieces), os.urandom(piece_bytes + 1000)
    memory = bytearray(variant.size_bytes(len(content)))
    done: list[int] = []
    meter = ingest.Meter()
    with open(make_file(content), "rb") as file:
        digest = copying.fill(
            file.fileno(), memoryview(memory), threads=2, on_progress=done.append, variant=variant
        )
        hashed = ingest.hash_file(file.fileno(), len(content), meter=meter, variant=variant)
    expected = b"".join(content[at : at + piece_bytes] for at in pieces)
    assert memory == expected
    assert digest == hashed == blake3(expected).hexdigest()
    assert done[-1] == meter.done_bytes == len(expected)


def test_a_file_that_became_shorter_than_its_pieces(make_file: MakeFile) -> None:
    memory = bytearray(20)
    with open(make_file(b"0123456789"), "rb") as file, pytest.raises(FileChanged, match="shorter"):
        copying.fill(
            file.fileno(),
            memoryview(memory),
            threads=2,
            on_progress=lambda done: None,
            variant=Variant(0, None, 10, (0, 3)),
        )


WIDENING = Conversion("float16", "float32")
NUMBERS = ("float32", "float16", "bfloat16")
CONVERSIONS = [Conversion(*each) for each in itertools.permutations(NUMBERS, 2)]
to_others = pytest.mark.parametrize("conversion", CONVERSIONS, ids="-".join)


def torchs(content: bytes, conversion: Conversion) -> bytes:
    """What torch makes of the whole numbers in ``content``."""
    source, target = (getattr(torch, each) for each in conversion)
    whole = len(content) // source.itemsize * source.itemsize
    numbers = torch.frombuffer(bytearray(content), dtype=source, count=whole // source.itemsize)
    return numbers.to(target).view(torch.uint8).numpy().tobytes()


@needs_extension
@pytest.mark.parametrize("size", [4, 7, 4096, 2 * copying.CHUNK_BYTES, 2 * copying.CHUNK_BYTES + 7])
@pytest.mark.parametrize("lead", [0, 8])
@to_others
def test_converted_numbers_of_a_file(
    make_file: MakeFile, size: int, lead: int, conversion: Conversion
) -> None:
    """The bits of torch, and a digest of all of it; also of one that is only hashed. No NaNs."""
    variant, content = Variant(lead, conversion), bytes(each % 0x7C for each in os.urandom(size))
    memory = bytearray(variant.size_bytes(size))
    done: list[int] = []
    with open(make_file(content), "rb") as file:
        digest = copying.fill(
            file.fileno(), memoryview(memory), threads=2, on_progress=done.append, variant=variant
        )
        meter = ingest.Meter()
        hashed = ingest.hash_file(file.fileno(), size, meter=meter, variant=variant)
    before = bytes(lead * conversion.target_bytes // conversion.source_bytes)
    expected = before + torchs(content, conversion)
    assert memory == expected
    assert digest == hashed == blake3(expected).hexdigest()
    assert done[-1] == meter.done_bytes == len(expected) - len(before)


@needs_extension
@to_others
def test_converted_pieces_of_a_file(make_file: MakeFile, conversion: Conversion) -> None:
    """Longer ones than are converted at a time, and shorter ones."""
    content = bytes(each % 0x7C for each in os.urandom(1 << 20))
    for piece_bytes, pieces in (((1 << 19) + 4, (4, 0, 64)), (4, tuple(range(4000, 0, -4)))):
        variant = Variant(0, conversion, piece_bytes, pieces)
        memory = bytearray(variant.size_bytes(len(content)))
        with open(make_file(content), "rb") as file:
            copying.fill(
                file.fileno(),
                memoryview(memory),
                threads=2,
                on_progress=lambda done: None,
                variant=variant,
            )
        together = b"".join(content[at : at + piece_bytes] for at in pieces)
        assert memory == torchs(together, conversion)


def numbers_of(conversion: Conversion) -> torch.Tensor:
    """All numbers of 16 bits; of 32, those around every border of rounding, and random ones."""
    if conversion.source_bytes == 2:
        bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        return bits.view(getattr(torch, conversion.source))
    ends = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    borders = (torch.arange(65536)[:, None] << 16 | ends).flatten()
    bits = torch.cat([borders, torch.randint(1 << 32, (1 << 20,))])
    return bits.to(torch.int32).view(torch.float32)


@needs_extension
@to_others
def test_every_number_is_converted_as_torch_does_it(conversion: Conversion) -> None:
    """Several at once, and the last ones singly. Not all bits of NaNs: torch has two ways."""
    numbers = numbers_of(conversion)
    part = memoryview(numbers.view(torch.uint8).numpy())
    dtype = getattr(torch, conversion.target)
    for count in (len(numbers), len(numbers) - 1, 1):
        found = torch.empty(count, dtype=dtype)
        copying_native.convert(part, memoryview(found.view(torch.uint8).numpy()), conversion)
        expected = numbers[:count].to(dtype)
        is_number = ~expected.isnan()
        assert torch.equal(found.isnan(), ~is_number)
        kind = torch.int32 if conversion.target_bytes == 4 else torch.int16
        bits = [each.view(kind)[is_number] for each in (found, expected)]
        assert torch.equal(*bits)


@needs_extension
def test_a_file_that_became_shorter_is_not_converted(make_file: MakeFile) -> None:
    memory = bytearray(4096)
    with open(make_file(b"12"), "rb") as file, pytest.raises(FileChanged, match="shorter"):
        copying.fill(
            file.fileno(),
            memoryview(memory),
            threads=1,
            on_progress=lambda done: None,
            variant=Variant(0, WIDENING),
        )


@needs_extension
@pytest.mark.parametrize(
    ("source", "conversion", "size"),
    [(b"123", WIDENING, 8), (b"1234567", Conversion("float32", "float16"), 4)],
)
def test_no_number_is_read_beyond_the_end(source: bytes, conversion: Conversion, size: int) -> None:
    with pytest.raises(ValueError, match="shorter"):
        copying_native.convert(memoryview(source), memoryview(bytearray(size)), conversion)


@needs_extension
@pytest.mark.parametrize("conversion", [("float32", "float64"), ("x", "float32"), ("float32",) * 2])
def test_no_such_conversion(conversion: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"no such number|nothing to convert"):
        copying_native.convert(memoryview(b""), memoryview(bytearray(8)), Conversion(*conversion))


def test_default_threads() -> None:
    assert 1 <= copying.default_threads() <= 4
