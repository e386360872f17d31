"""The fake daemon behaves as the real one, as far as a user's test can see."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import onnx_models
import onnxruntime
import pytest
import safetensors.numpy
import torch
from harness import PATIENCE_S

import trims_shim
from trims_shim import diagnostics, patches
from trims_shim.client import cache as caches
from trims_shim.errors import (
    ConfigError,
    DaemonTimeout,
    DaemonUnavailable,
    FileChanged,
    NoSpace,
    NotServed,
    ReadFailed,
    UnknownImage,
    UnsupportedFormat,
)
from trims_shim.testing import FakeDaemon, Opened
from trims_shim.wire import admin

pytestmark = pytest.mark.usefixtures("no_leak")

MakeFile = Callable[..., str]
CONTENT = os.urandom(50_000)


@pytest.fixture(autouse=True)
def _warm_up() -> None:
    """What is opened once for the process (modules, random numbers) is no leak of a test."""
    with FakeDaemon():
        pass


@pytest.fixture
def path(make_file: MakeFile) -> str:
    return make_file(CONTENT)


def load(path: str) -> bytes:
    with trims_shim.open(path) as handle:
        return bytes(handle.buffer())


class TestLoads:
    def test_a_file_is_read_once(self, path: str) -> None:
        with FakeDaemon() as daemon:
            assert load(path) == load(path) == CONTENT
            assert [each.outcome for each in daemon.opened] == ["miss", "hit"]
            assert (daemon.reads(path), daemon.hits(path)) == (1, 1)
            assert daemon.reads("/another") == 0
            assert daemon.counters["open_miss"] == 1

    def test_names_that_are_no_text(self, path: str) -> None:
        odd = f"{path}\udce9"
        os.rename(path, odd)
        with FakeDaemon() as daemon:
            assert load(odd) == load(odd)
            assert (daemon.reads(odd), daemon.hits(odd)) == (1, 1)

    def test_relative_names(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(os.path.dirname(path))
        with FakeDaemon() as daemon:
            load(os.path.basename(path))
            assert daemon.reads(os.path.basename(path)) == daemon.reads(path) == 1

    def test_leases_last_as_long_as_views(self, path: str) -> None:
        with FakeDaemon() as daemon:
            handle = trims_shim.open(path)
            view = handle.buffer()
            handle.close()
            assert daemon.leases == 1
            assert daemon.images[0].leases == 1
            del view, handle
            assert daemon.leases == 0
            assert len(daemon.images) == 1

    def test_what_is_held_is_found_without_the_daemon(self, path: str) -> None:
        with FakeDaemon() as daemon, trims_shim.open(path):
            load(path)
            assert len(daemon.opened) == 1

    def test_a_rewritten_file_is_read_again(self, path: str) -> None:
        with FakeDaemon() as daemon:
            load(path)
            with open(path, "wb") as file:
                file.write(b"other")
            os.utime(path, ns=(1, 1))
            assert load(path) == b"other"
            assert daemon.reads(path) == 2

    def test_equal_files_share_an_image(self, make_file: MakeFile) -> None:
        first, second = make_file(CONTENT, "a"), make_file(CONTENT, "b")
        with FakeDaemon() as daemon:
            load(first)
            load(second)
            assert len(daemon.images) == 1
            assert {name for _, name in daemon.images[0].names} == {first, second}

    def test_what_was_loaded_outlives_the_block(self, path: str) -> None:
        with FakeDaemon():
            handle = trims_shim.open(path)
        assert bytes(handle.buffer()) == CONTENT

    def test_single_flight(self, path: str) -> None:
        results: list[bytes] = []
        with FakeDaemon() as daemon:
            threads = [
                threading.Thread(target=lambda: results.append(load(path))) for _ in range(8)
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join(PATIENCE_S)
            assert results == [CONTENT] * 8
            assert daemon.reads(path) == 1
            assert daemon.leases == 0

    def test_joining_a_load_is_a_hit(self, path: str) -> None:
        daemon = FakeDaemon()
        daemon.opened += [Opened(path, each, "") for each in ("miss", "joined", "hit", "joined")]
        assert (daemon.reads(path), daemon.hits(path)) == (1, 3)

    def test_no_thread_is_left(self, path: str) -> None:
        before = set(threading.enumerate())  # those of other tests may end
        with FakeDaemon():
            load(path)
            assert set(threading.enumerate()) <= before

    def test_the_budget(self, make_file: MakeFile) -> None:
        first, second = make_file(b"1" * 60_000, "1"), make_file(b"2" * 60_000, "2")
        with FakeDaemon(host_bytes="100K") as daemon:
            with trims_shim.open(first), pytest.raises(NoSpace):
                load(second)
            load(second)
            assert [each.names[0][1] for each in daemon.images] == [second]
            assert daemon.counters["images_evicted"] == 1

    def test_files_that_cannot_be_shared(self, make_file: MakeFile) -> None:
        with FakeDaemon(), pytest.raises(NotServed):
            load(make_file(b""))

    def test_settings(self) -> None:
        with pytest.raises(ConfigError):
            FakeDaemon(colour="red")


class TestFaults:
    def test_refuse(self, path: str) -> None:
        with FakeDaemon() as daemon:
            daemon.refuse(FileChanged("while reading"))
            daemon.refuse(ReadFailed("disk"), times=2)
            with pytest.raises(FileChanged, match="while reading"):
                load(path)
            for _ in range(2):
                with pytest.raises(ReadFailed, match="disk"):
                    load(path)
            assert load(path) == CONTENT
            assert daemon.counters["refused"] == 3

    def test_stall_takes_no_time(self, path: str) -> None:
        with FakeDaemon(stall_timeout="1000") as daemon:
            daemon.stall()
            daemon.stall(times=2)
            for _ in range(3):
                with pytest.raises(DaemonTimeout, match="1000 s"):
                    load(path)
            assert load(path) == CONTENT

    def test_go_away_and_come_back(self, path: str) -> None:
        with FakeDaemon() as daemon:
            held = trims_shim.open(path)
            daemon.go_away()
            assert bytes(held.buffer()) == CONTENT
            assert load(path) == CONTENT  # this process still holds it
            assert (daemon.images, daemon.leases, daemon.counters) == ([], 0, {})
            held.close()
            del held
            with pytest.raises(DaemonUnavailable):
                load(path)
            daemon.come_back()
            assert load(path) == CONTENT
            assert daemon.reads(path) == 2

    def test_coming_back_without_having_gone_keeps_all(self, path: str) -> None:
        with FakeDaemon() as daemon:
            load(path)
            daemon.come_back()
            assert len(daemon.images) == 1
            assert load(path) == CONTENT
            assert (daemon.reads(path), daemon.hits(path)) == (1, 1)

    def test_a_forked_child_finds_no_daemon(self, path: str) -> None:
        with FakeDaemon() as daemon:
            handle = trims_shim.open(path)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    same = bytes(handle.buffer()) == CONTENT
                    handle.close()
                    del handle
                    try:
                        load(path)
                    except DaemonUnavailable:
                        status = 0 if same else 2
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert daemon.leases == 1
            del handle


class TestRequests:
    def test_those_of_the_command_line(self, path: str) -> None:
        with FakeDaemon() as daemon:
            digest = trims_shim.warm(path, pin=True)
            ask = caches.cache().request
            status = ask(admin.GetStatusRequest())
            assert status.images[0].names == (path,)
            assert status.images[0].is_pinned
            assert status.clients[0].pid == os.getpid()
            assert status.clients[0].requests == status.counters["requests"] == 3
            verified = ask(admin.VerifyImageRequest(digest))
            assert verified.computed == verified.digest == digest
            with pytest.raises(NoSpace, match="pinned"):
                ask(admin.EvictImageRequest(path))
            ask(admin.PinImageRequest(path, is_pinned=False))
            assert ask(admin.EvictImageRequest(path)).digests == (digest,)
            assert daemon.images == []
            with pytest.raises(UnknownImage):
                ask(admin.EvictImageRequest(path))

    def test_it_has_the_settings_of_the_block(self) -> None:
        with FakeDaemon(host_bytes="64M"):
            daemon = trims_shim.info()["daemon"]
        assert (daemon["is_running"], daemon["has_same_settings"]) == (True, True)

    def test_counters_of_the_process_are_reported(self, path: str) -> None:
        diagnostics.take_unreported()
        with FakeDaemon() as daemon:
            load(path)
            server = daemon._server
            assert server is not None
        assert server.counters["client.open:miss"] == 1

    def test_any_number_of_counters_is_reported(self, path: str) -> None:
        diagnostics.take_unreported()
        names = [f"fallback:{number}{'é' * 30}" for number in range(100)] + ["é" * 99]
        with FakeDaemon() as daemon:
            load(path)
            for name in names:
                diagnostics.count(name)
            server = daemon._server
            assert server is not None
        assert [server.counters[f"client.{name}"] for name in names[:-1]] == [1] * 100
        assert server.counters[f"client.{'é' * 50}"] == 1

    def test_the_cache_before_is_put_back(self) -> None:
        before = caches._ours.get(os.geteuid())
        with FakeDaemon() as outer:
            inside = caches.cache()
            with FakeDaemon():
                assert caches.cache() is not inside
            assert caches.cache() is inside
            assert outer.images == []
        assert caches._ours.get(os.geteuid()) is before


class TestPatchedLibraries:
    """What users' tests are for: their code loads models as it always did."""

    @pytest.fixture(autouse=True)
    def _patched(self) -> Any:
        trims_shim.enable()
        yield
        trims_shim.disable()

    @pytest.fixture
    def model(self, tmp_path: Any) -> str:
        path = str(tmp_path / "model.pt")
        torch.save({"weight": torch.arange(10_000.0)}, path)
        return path

    def test_torch_load(self, model: str) -> None:
        with FakeDaemon(strict="1") as daemon:
            for _ in range(2):
                assert torch.load(model)["weight"][7] == 7
            assert (daemon.reads(model), daemon.hits(model)) == (1, 1)

    def test_a_model_goes_with_its_last_tensor(self, model: str) -> None:
        """At once, as without the shim: not when the garbage collector comes by."""
        with FakeDaemon(strict="1") as daemon:
            loaded = torch.load(model)
            assert daemon.leases == 1
            del loaded
            assert daemon.leases == 0

    def test_safetensors(self, tmp_path: Any) -> None:
        path = str(tmp_path / "model.safetensors")
        safetensors.numpy.save_file({"w": numpy.arange(1000.0)}, path)
        with FakeDaemon(strict="1") as daemon:
            assert safetensors.numpy.load_file(path)["w"][5] == 5
            assert daemon.reads(path) == 1

    @pytest.mark.parametrize("fault", ["refuse", "stall", "go_away"])
    def test_a_fault_costs_the_user_nothing(self, model: str, fault: str) -> None:
        with FakeDaemon() as daemon:
            if fault == "refuse":
                daemon.refuse(NoSpace("full"))
            elif fault == "stall":
                daemon.stall()
            else:
                daemon.go_away()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.load(model)["weight"][7] == 7
            assert daemon.opened == []
            assert sum(trims_shim.stats().fallbacks.values()) >= 1

    def test_a_fault_is_an_error_where_that_is_wanted(self, model: str) -> None:
        with FakeDaemon(strict="1") as daemon:
            daemon.refuse(NoSpace("full"))
            with pytest.raises(NoSpace):
                torch.load(model)


class TestSessions:
    """ONNX models, which the fake daemon has prepared in this process."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        path = tmp_path / "model.onnx"
        onnx_models.save(onnx_models.sample("perceptron"))(path)
        return str(path)

    @pytest.fixture(autouse=True)
    def _active(self) -> Iterator[None]:
        trims_shim.enable()
        token = patches.overridden.set(True)
        yield
        patches.overridden.reset(token)

    @pytest.fixture
    def _collected(self, no_leak: None) -> Iterator[None]:
        """What errors hold on to, in frames of their tracebacks, goes before leaks are counted."""
        yield
        gc.collect()

    def run(self, model: str | bytes) -> list[bytes]:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        feeds = onnx_models.sample("perceptron").feeds
        return [session.run(None, feed)[0].tobytes() for feed in feeds]

    def test_the_second_session_is_made_from_the_prepared_model(self, model: str) -> None:
        with FakeDaemon(strict="1") as daemon:
            served = trims_shim.stats().served
            with trims_shim.disabled():
                expected = self.run(model)
            assert [self.run(model), self.run(model)] == [expected] * 2
            assert [each.outcome for each in daemon.opened] == ["preparing", "hit"]
            assert (daemon.reads(model), daemon.hits(model)) == (0, 1)
            assert trims_shim.stats().served == served + 1
            assert [row.state for row in daemon.prepared] == ["ready"]
            assert daemon.prepared[0].names == (model,)
            gc.collect()
            assert daemon.leases == 0
            assert daemon.counters["prepared_hit"] == 1

    def test_bytes(self, model: str) -> None:
        content = Path(model).read_bytes()
        with FakeDaemon(strict="1") as daemon:
            assert self.run(content) == self.run(content)
            outcomes = [each.outcome for each in daemon.opened]
            assert outcomes == ["unknown", "preparing", "hit"]

    @pytest.mark.usefixtures("_collected")
    def test_a_model_that_cannot_be_prepared(self, tmp_path: Path) -> None:
        path = tmp_path / "rubbish.onnx"
        path.write_bytes(b"rubbish" * 1000)
        with FakeDaemon() as daemon:
            for _ in range(2):
                with pytest.raises(Exception, match="Protobuf parsing failed"):
                    onnxruntime.InferenceSession(str(path), enable_fallback=0)
            assert [each.outcome for each in daemon.opened] == ["preparing", "refused"]
            assert [(row.state, bool(row.reason)) for row in daemon.prepared] == [("refused", True)]

    def test_faults(self, model: str) -> None:
        with FakeDaemon() as daemon:
            expected = self.run(model)
            daemon.refuse(NoSpace("full"))
            assert self.run(model) == expected
            daemon.stall()
            assert self.run(model) == expected
            daemon.go_away()
            assert self.run(model) == expected
            daemon.come_back()
            assert self.run(model) == expected
            assert daemon.opened[-1].outcome == "preparing", "its models went with it"

    def test_warm(self, model: str) -> None:
        with FakeDaemon(strict="1") as daemon:
            key = trims_shim.warm(model)
            assert daemon.prepared[0].key == key
            assert trims_shim.warm(model) == key
            assert daemon.leases == 0
            self.run(model)
            assert [each.outcome for each in daemon.opened] == ["preparing", "hit", "hit", "hit"]

    @pytest.mark.usefixtures("_collected")
    def test_warm_where_it_cannot_be_done(self, tmp_path: Path, model: str) -> None:
        path = tmp_path / "rubbish.onnx"
        path.write_bytes(b"rubbish" * 1000)
        with FakeDaemon():
            with pytest.raises(NotServed):
                trims_shim.warm(path)
            with pytest.raises(FileNotFoundError):
                trims_shim.warm(tmp_path / "missing.onnx")
            with pytest.raises(UnsupportedFormat, match="pinned"):
                trims_shim.warm(model, pin=True)
            with pytest.raises(UnsupportedFormat, match="device"):
                trims_shim.warm(model, device="cuda")

    def test_nothing_is_left_on_the_disk(self, model: str) -> None:
        with FakeDaemon() as daemon:
            trims_shim.warm(model)
            assert daemon._server is not None
            directory = Path(daemon._server._directory)
            assert (directory / "prepared").is_dir()
        assert not directory.exists()


def test_only_what_a_daemon_answers_can_be_refused_with() -> None:
    with FakeDaemon() as daemon, pytest.raises(TypeError, match="'full' is no RequestRefused"):
        daemon.refuse("full")  # type: ignore[arg-type]


def test_a_daemon_is_not_entered_twice() -> None:
    before = caches.cache()
    with FakeDaemon() as daemon, pytest.raises(RuntimeError, match="entered already"), daemon:
        pass
    assert caches.cache() is before
    with daemon:
        assert daemon.images == []
