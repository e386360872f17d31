"""Links between devices: proved once, never used again after damage, left alone after a failure.

The copies themselves are in test_device_loader.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from trims_shim.daemon.device.peer_copying import PeerCopies, PeerImage
from trims_shim.daemon.device.uploading import Uploader
from trims_shim.errors import DriverFailure, NoSpace, ReadFailed
from trims_shim.memory.device import DeviceAllocation, DeviceSegment
from trims_shim.wire import duties

HERE, NEAR, FAR = "GPU-here", "GPU-near", "GPU-far"
DIGEST = "d" * 64
MIB = 1 << 20


class FakeUploader:
    """Answers with ``digest``, or fails."""

    def __init__(self) -> None:
        self.digest = DIGEST
        self.failure: Exception | None = None
        self.hashed: list[bool] = []
        self.meanwhile: Callable[[], object] = list

    @contextlib.contextmanager
    def job(self) -> Iterator[FakeUploader]:
        yield self

    def copy(
        self,
        outline: int,
        source: tuple[int, ...],
        memory: DeviceAllocation,
        *,
        size_bytes: int,
        is_hashed: bool,
        on_progress: Callable[[int], None],
        is_numbers: bool,
    ) -> duties.UploadReply:
        assert (outline, source, size_bytes, is_numbers) == (9, (7,), 1000, False)
        self.hashed.append(is_hashed)
        meanwhile, self.meanwhile = self.meanwhile, list
        meanwhile()
        if self.failure is not None:
            raise self.failure
        on_progress(10)
        return duties.UploadReply(1, self.digest if is_hashed else "")


@pytest.fixture
def uploader() -> FakeUploader:
    return FakeUploader()


@pytest.fixture
def peers(uploader: FakeUploader) -> PeerCopies:
    return PeerCopies({NEAR: 0, FAR: 3}, cast(Uploader, uploader))


def copy(peers: PeerCopies, device: str = NEAR, *, allocations: Any = (2 * MIB,)) -> list[Any]:
    """What progress was reported."""
    segment = DeviceSegment(device, "vmm", (2 * MIB,), (7,), (), 9, 1000, "layout")
    progress: list[Any] = []
    memory = DeviceAllocation(HERE, allocations, (8,))
    peers.copy(PeerImage(DIGEST, segment), memory, progress.append)
    return progress


def test_only_peers_have_a_rank(peers: PeerCopies) -> None:
    assert [peers.rank(each) for each in (NEAR, FAR, HERE)] == [0, 3, None]


def test_the_first_copy_over_a_link_is_read_back(peers: PeerCopies, uploader: FakeUploader) -> None:
    assert copy(peers) == [1, 10]
    assert copy(peers) == [1, 10]
    copy(peers, FAR)
    assert uploader.hashed == [True, False, True]


def test_a_link_that_damages_is_never_used_again(
    peers: PeerCopies, uploader: FakeUploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader.digest = "e" * 64
    with pytest.raises(ReadFailed, match="arrives damaged"):
        copy(peers)
    later = time.monotonic() + 1e9
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert [peers.rank(each) for each in (NEAR, FAR)] == [None, 3]


@pytest.mark.parametrize("failure", [None, DriverFailure("cuMemMap failed")])
def test_a_copy_that_began_before_another_one_was_damaged(
    peers: PeerCopies,
    uploader: FakeUploader,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
) -> None:
    """Found: a failure let the link be used again after a minute; a success, without a check."""

    def damage() -> None:
        uploader.digest = "e" * 64
        with pytest.raises(ReadFailed, match="arrives damaged"):
            copy(peers)
        uploader.digest, uploader.failure = DIGEST, failure

    uploader.meanwhile = damage
    with contextlib.suppress(DriverFailure):
        copy(peers)
    uploader.failure = None
    copy(peers)  # One that was chosen before all this.
    assert uploader.hashed == [True, True, True]
    later = time.monotonic() + 1e9
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert peers.rank(NEAR) is None


def test_one_that_failed_is_left_alone_for_a_while(
    peers: PeerCopies, uploader: FakeUploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(peers)
    uploader.failure = DriverFailure("cuMemMap failed")
    with pytest.raises(DriverFailure, match="cuMemMap"):
        copy(peers)
    assert [peers.rank(each) for each in (NEAR, FAR)] == [None, 3]
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert peers.rank(NEAR) == 0


def test_a_lack_of_room_says_nothing_of_the_link(peers: PeerCopies, uploader: FakeUploader) -> None:
    uploader.failure = NoSpace("no room for a context")
    with pytest.raises(NoSpace):
        copy(peers)
    assert peers.rank(NEAR) == 0


def test_a_failure_proves_nothing(peers: PeerCopies, uploader: FakeUploader) -> None:
    uploader.failure = DriverFailure("cuMemMap failed")
    with pytest.raises(DriverFailure):
        copy(peers)
    uploader.failure = None
    copy(peers)
    assert uploader.hashed == [True, True]


def test_devices_that_cut_memory_up_differently(peers: PeerCopies, uploader: FakeUploader) -> None:
    with pytest.raises(DriverFailure, match="differently"):
        copy(peers, allocations=(4 * MIB,))
    assert uploader.hashed == []
