"""Callers and the thread of an ensemble meet in orders that are rare; each is forced here."""

from __future__ import annotations

import errno
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ensemble import members
from tests.ensemble.members import by, ensemble_of
from tests.ensemble.test_ensemble import PATIENCE_S, ROWS, answered, is_running, wait_until
from trims_shim.ensemble.buffers import Buffers
from trims_shim.ensemble.system import System
from trims_shim.errors import EnsembleError, MemberFailed

# --- segments -------------------------------------------------------------------------------------


def test_rows_keep_their_order_whichever_worker_answers_first(tmp_path: Path) -> None:
    go = tmp_path / "go"
    load = by(members.waiting_at, 0.0, str(go))
    with ensemble_of(load, workers=2, segment_size=16, max_segments=3) as ensemble:
        future = ensemble.submit(ROWS[:48])
        segments = ensemble._system._segments
        # Of the first and the second segment, what the worker has that waits.
        wait_until(lambda: [each.missing for each in list(segments.values())] == [[8], [8]])
        go.touch()
        assert np.array_equal(future.result(PATIENCE_S), ROWS[:48])


def test_a_call_may_be_answered_before_all_of_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = System._add

    def add_and_wait(self: System, *arguments: Any) -> None:
        add(self, *arguments)
        wait_until(lambda: not self._segments)

    monkeypatch.setattr(System, "_add", add_and_wait)
    with ensemble_of(by(members.times, 2.0)) as ensemble:
        assert np.array_equal(answered(ensemble, ROWS), ROWS * 2)


def test_no_more_is_sent_of_a_call_that_has_failed() -> None:
    with ensemble_of(by(members.raising_at, 7.0), segment_size=8, max_segments=1) as ensemble:
        with pytest.raises(MemberFailed):
            answered(ensemble, ROWS)
        # There is room before it is told.
        assert ensemble.stats().samples <= 16


def test_what_waits_is_sent_though_all_batches_before_it_failed() -> None:
    with ensemble_of(by(members.raising_at, 7.0)) as ensemble:
        (worker,) = ensemble.stats().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            bad = [ensemble.submit(ROWS[:8]) for _ in range(2)]
            good = ensemble.submit(ROWS[8:16])
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        for each in bad:
            with pytest.raises(MemberFailed):
                each.result(PATIENCE_S)
        assert np.array_equal(good.result(PATIENCE_S), ROWS[8:16])


def test_a_segment_takes_room_while_it_is_copied_and_gives_it_back_if_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where another caller waits for that."""
    filled, begun, is_waited = Buffers.filled, list[None](), threading.Event()

    def fail_first(self: Buffers, parts: Any) -> Any:
        begun.append(None)
        if len(begun) > 1:
            is_waited.set()
            return filled(self, parts)
        assert is_waited.wait(PATIENCE_S)
        assert len(begun) == 1
        raise OSError(errno.ENOMEM, "no memory")

    with ensemble_of(by(members.times, 2.0), max_segments=1) as ensemble:
        changed = ensemble._system._changed
        wait = changed.wait

        def noted() -> bool:
            is_waited.set()
            return wait()

        monkeypatch.setattr(changed, "wait", noted)
        monkeypatch.setattr(Buffers, "filled", fail_first)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(answered, ensemble, ROWS[:8])
            wait_until(lambda: begun)
            second = pool.submit(answered, ensemble, ROWS[:8])
            with pytest.raises(OSError, match="no memory"):
                first.result(PATIENCE_S)
            assert np.array_equal(second.result(PATIENCE_S), ROWS[:8] * 2)


def test_a_signal_handler_waits_neither_for_room_nor_with_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled = Buffers.filled

    def handle_and_fill(self: Buffers, parts: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(EnsembleError, match="by a signal handler"):
            ensemble.submit(ROWS)
        return filled(self, parts)

    with ensemble_of(by(members.times, 2.0), max_segments=1) as ensemble:
        monkeypatch.setattr(Buffers, "filled", handle_and_fill)
        assert np.array_equal(answered(ensemble, ROWS[:8]), ROWS[:8] * 2)
        with ensemble._system._lock, pytest.raises(EnsembleError, match="by a signal handler"):
            ensemble.submit(ROWS)  # as in the middle of `stats()`


def test_segments_whose_results_cannot_be_joined_fail_their_call_alone() -> None:
    def combine(outputs: Any) -> Any:
        return {"first" if (outputs["a"] == 0).any() else "other": outputs["a"]}

    with ensemble_of(by(members.times, 1.0), combine=combine) as ensemble:
        with pytest.raises(ValueError, match="the parts of one batch are"):
            answered(ensemble, ROWS)
        assert np.array_equal(answered(ensemble, ROWS[1:9])["other"], ROWS[1:9])


@pytest.mark.parametrize("rule", ["failing", "none"])
def test_a_call_is_told_of_its_first_failure_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    """All of its segments fail: as they are combined, or as the ensemble is closed."""
    go = tmp_path / "go"

    def fail(outputs: Any) -> Any:
        raise KeyError("no rule")

    combine = fail if rule == "failing" else rule
    ensemble = ensemble_of(by(members.waiting_for, str(go)), combine=combine)
    future = ensemble.submit(ROWS)
    if rule == "failing":
        go.touch()
    ensemble.close(wait=rule == "failing")
    with pytest.raises(KeyError if rule == "failing" else EnsembleError):
        future.result(0)
    assert caplog.text == ""


# --- the thread, and the end ----------------------------------------------------------------------


def test_a_fault_of_the_thread_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    message = r"the ensemble has failed: ZeroDivisionError\(\)"
    with ensemble_of(by(members.times, 1.0)) as ensemble:
        monkeypatch.setattr(System, "_handle", fault)
        for _ in range(2):
            with pytest.raises(EnsembleError, match=message):
                answered(ensemble, ROWS)
    made: Future[Any] = Future()

    def make() -> None:
        try:
            made.set_result(ensemble_of(by(members.times, 1.0)))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    with pytest.raises(EnsembleError, match=message):
        made.result(PATIENCE_S)
    assert caplog.text.count("the ensemble stops") == 2


def test_a_callback_may_close_the_ensemble_if_it_does_not_wait(tmp_path: Path) -> None:
    go = tmp_path / "go"
    ensemble = ensemble_of(by(members.waiting_for, str(go)))
    (worker,) = ensemble.stats().workers
    closed = threading.Event()

    def close(_: object) -> None:
        ensemble.close(wait=False)
        closed.set()

    ensemble.submit(ROWS[:8]).add_done_callback(close)
    go.touch()
    assert closed.wait(PATIENCE_S)
    ensemble._system._thread.join(PATIENCE_S)
    assert not is_running(worker.pid)


# --- memory ---------------------------------------------------------------------------------------


def test_samples_are_no_weights() -> None:
    with ensemble_of(members.row_sums) as ensemble:
        ensemble.predict(np.ones((8, 1 << 18)))
        assert ensemble._system.memory_of(0).shared_bytes < 1 << 20


def test_a_worker_that_does_not_go_on_is_not_asked_for_ever() -> None:
    with ensemble_of(by(members.times, 1.0)) as ensemble:
        (worker,) = ensemble.stats().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(MemberFailed, match="'a' does not say how much memory it uses"):
                ensemble._system.memory_of(0, timeout_s=0.05)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        assert ensemble._system.memory_of(0).peak_bytes
