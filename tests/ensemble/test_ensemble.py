"""Ensembles at work, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from harness import process_name

from tests.ensemble import members
from tests.ensemble.members import by, ensemble_of
from trims_shim.batching import Batcher
from trims_shim.ensemble import Allocation, Device, Ensemble, Member, channel, hosting
from trims_shim.ensemble.buffers import Buffers
from trims_shim.ensemble.ensemble import _dealt, _found
from trims_shim.ensemble.system import WorkerTraceback
from trims_shim.errors import EnsembleError, MemberFailed

PATIENCE_S = 60
ROWS = np.arange(600.0).reshape(300, 2)


def wait_until(is_true: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_running(pid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leak", "no_thread_left")
def test_members_answer_all_rows_in_order() -> None:
    with ensemble_of(by(members.times, 1.0), by(members.times, 3.0), workers=2) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)
        assert np.array_equal(ensemble.predict(ROWS[:1]), ROWS[:1] * 2)
        stats = ensemble.stats()
        pids = [worker.pid for worker in stats.workers]
        assert len(set(pids)) == 4
        assert {process_name(pid) for pid in pids} == {"trims-worker"}
        assert stats.samples == 301
        assert stats.batches == 2 * (16 + 16 + 6 + 1)  # of 128, 128, 44 rows, and 1
    assert not any(map(is_running, pids))


def test_tensors_come_back_as_tensors() -> None:
    with ensemble_of(members.row_sums) as ensemble:
        found = ensemble.predict(torch.from_numpy(ROWS).to(torch.bfloat16))
        assert found.dtype == torch.bfloat16
        assert found.shape == (300,)


def test_structures_and_lists() -> None:
    samples = {"a": np.arange(20), "b": torch.ones(20), "t": ["x"] * 20}
    with ensemble_of(members.fields, combine="none", segment_size=7) as ensemble:
        found = ensemble.predict(samples)["a"]
        assert found["sum"].tolist() == [value + 1 for value in range(20)]
        assert found["texts"] == ["X"] * 20


def test_a_member_that_writes_into_its_batch_spoils_nobody_elses() -> None:
    with ensemble_of(members.spoiling, by(members.times, 1.0), combine="none") as ensemble:
        for _ in range(3):
            found = ensemble.predict(ROWS)
            assert not found["a"].any()
            assert np.array_equal(found["b"], ROWS)


@pytest.mark.parametrize("kind", ["arrays", "tensors", "objects"])
def test_a_member_that_writes_into_things_of_a_list_spoils_nobody_elses(
    tmp_path: Path, kind: str
) -> None:
    samples: Any = [np.full(3, float(number)) for number in range(1, 5)]
    if kind == "tensors":
        samples = list(map(torch.from_numpy, samples))
    elif kind == "objects":
        (objects := np.empty(4, object))[:] = samples
        samples = objects
    mark = str(tmp_path / "spoiled")
    loads = by(members.spoiling_things, mark), by(members.waiting_for, mark)
    with ensemble_of(*loads, combine="none") as ensemble:
        found = ensemble.submit(samples).result(PATIENCE_S)
        assert [float(each.sum()) for each in found["a"]] == [0] * 4
        assert [float(each.sum()) for each in found["b"]] == [3, 6, 9, 12]


def test_batches_have_the_size_of_the_allocation() -> None:
    allocation = Allocation(((8, 160),))  # more than a segment has by default
    load = members.sizes
    with Ensemble(
        [Member("a", load), Member("b", load)],
        devices=["cpu"],
        allocation=allocation,
        combine="none",
    ) as ensemble:
        found = ensemble.predict(ROWS[:168])
        assert found["a"].tolist() == [8] * 168
        assert found["b"].tolist() == [160] * 160 + [8] * 8


def test_weights_and_votes() -> None:
    loads = [by(members.times, factor) for factor in (1.0, -1.0)]
    weighted = [Member("a", loads[0], weight=3.0), Member("b", loads[1])]
    with Ensemble(weighted, devices=["cpu"]) as ensemble:
        assert np.allclose(ensemble.predict(ROWS), ROWS / 2)
        assert ensemble.allocation == Allocation(((8, 8),))
    with Ensemble(weighted, devices=["cpu"], combine="vote") as ensemble:
        assert ensemble.predict(ROWS).tolist() == [1] * 300


def test_workers_run_where_they_should() -> None:
    core = min(os.sched_getaffinity(0))
    with ensemble_of(members.with_environment, devices=[f"cpu:{core}"], combine="none") as ensemble:
        threads = os.environ["OMP_NUM_THREADS"]  # the user's own setting is kept
        assert ensemble.predict(ROWS[:1])["a"] == [f"cpu [{core}] {threads}"]


def test_workers_have_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hosting._THREADS:
        monkeypatch.delenv(name, raising=False)
    core = min(os.sched_getaffinity(0))
    with ensemble_of(members.with_environment, devices=[f"cpu:{core}"], combine="none") as ensemble:
        assert ensemble.predict(ROWS[:1])["a"] == [f"cpu [{core}] 1"]
    with ensemble_of(members.with_environment, combine="none") as ensemble:
        threads = len(os.sched_getaffinity(0))
        assert ensemble.predict(ROWS[:1])["a"][0].endswith(f" {threads}")
    with ensemble_of(members.with_environment, workers=2, combine="none") as ensemble:
        assert ensemble.predict(ROWS[:1])["a"][0].endswith(" None"), "as libraries choose on GPUs"


def test_a_reserve_has_workers_only_if_an_allocation_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [Device("cuda:0", 1 << 40), Device("cpu", 1 << 40, is_reserve=True)]
    monkeypatch.setattr("trims_shim.ensemble.ensemble.find_devices", lambda: there)
    assert _found(None, None) == tuple(there[:1])
    assert _found(None, Allocation(((8,),))) == tuple(there[:1])
    assert _found(None, Allocation(((8,), (4,)))) == tuple(there)


def test_members_are_dealt_to_the_devices_in_turn_whatever_is_free_there() -> None:
    there = [Device("cuda:0", 10 << 30), Device("cuda:1", 80 << 30), Device("cpu:0", 0)]
    given = [Member(name, members.row_sums) for name in "abcde"]
    rows = _dealt(there, given).batch_sizes
    assert [sum(map(bool, row)) for row in rows] == [2, 2, 1]


def test_calls_from_many_threads_and_awaited() -> None:
    with ensemble_of(by(members.times, 2.0), workers=2, segment_size=16) as ensemble:
        found: dict[int, Any] = {}

        def call(number: int) -> None:
            found[number] = ensemble.predict(ROWS + number)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for number in range(8):
            assert np.array_equal(found[number], (ROWS + number) * 2)

        async def both() -> list[Any]:
            return await asyncio.gather(ensemble.aio(ROWS), ensemble.aio(ROWS + 1))

        one, other = asyncio.run(both())
        assert np.array_equal(one + 2, other)


def test_callers_wait_while_as_many_segments_are_under_way_as_may_be(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = by(members.waiting_for, str(go))
    with ensemble_of(waiting, segment_size=4, max_segments=2) as ensemble:
        first = ensemble.submit(ROWS[:8])
        second = threading.Thread(target=ensemble.submit, args=(ROWS[:4],))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert ensemble.stats().samples == 8
        assert not first.cancel()
        go.touch()
        second.join(PATIENCE_S)
        assert not second.is_alive()
        assert np.array_equal(first.result(PATIENCE_S), ROWS[:8])


def test_single_requests_through_a_batcher() -> None:
    loads = by(members.times, 1.0), by(members.times, 3.0)
    with ensemble_of(*loads) as ensemble, Batcher(ensemble.predict, slo_ms=60_000) as batcher:
        futures = [batcher.submit(row) for row in ROWS]
        found = [future.result(PATIENCE_S) for future in futures]
        assert np.array_equal(np.stack(found), ROWS * 2)
        assert ensemble.stats().batches < 2 * len(ROWS)


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_error_is_that_calls_alone() -> None:
    with ensemble_of(by(members.raising_at, 7.0), segment_size=8) as ensemble:
        bad, good = ensemble.submit(ROWS), ensemble.submit(ROWS + 1000)
        with pytest.raises(
            MemberFailed, match="member 'a' failed on 8 samples on cpu: KeyError: 'no 7'"
        ) as caught:
            bad.result(PATIENCE_S)
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        assert "raise_at" in str(caught.value.__cause__)
        assert np.array_equal(good.result(PATIENCE_S), ROWS + 1000)
        assert np.array_equal(ensemble.predict(ROWS + 1000), ROWS + 1000)


def test_an_error_without_a_text_is_the_calls_too() -> None:
    with ensemble_of(members.raising_untold) as ensemble:
        with pytest.raises(MemberFailed, match="failed on 4 samples on cpu: Untold: ") as caught:
            ensemble.predict(ROWS[:4])
        assert "raise_it" in str(caught.value.__cause__)
        assert not ensemble.stats().restarts


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (by(members.returning, np.zeros(3)), "returned 3 rows for a batch of 4 samples"),
        (by(members.returning, None), "a NoneType has no rows"),
        (members.stubborn, "cannot pickle"),
        (members.leaving_later, "failed on 4 samples on cpu: SystemExit: no licence"),
    ],
)
def test_results_that_are_none(load: Any, message: str) -> None:
    with ensemble_of(load) as ensemble, pytest.raises(MemberFailed, match=message):
        ensemble.predict(ROWS[:4])


def test_what_the_other_side_cannot_read_fails_the_call() -> None:
    with ensemble_of(members.foreign, combine="none") as ensemble:
        with pytest.raises(ValueError, match="it is of another process"):
            ensemble.submit(["foreign"]).result(PATIENCE_S)
        with pytest.raises(MemberFailed, match=r"failed on 1 samples .* it is of another process"):
            ensemble.submit([members.Foreign()]).result(PATIENCE_S)
        assert ensemble.submit(["fine"]).result(PATIENCE_S) == {"a": ["fine"]}


def test_an_answer_that_raises_stop_iteration_where_it_is_read() -> None:
    """Found: who awaited it waited for ever."""

    async def ask() -> Any:
        return await asyncio.wait_for(ensemble.aio([1]), PATIENCE_S)

    with (
        ensemble_of(members.ended, combine="none") as ensemble,
        pytest.raises(RuntimeError, match=r"unpickling an answer raised StopIteration\(\)"),
    ):
        asyncio.run(ask())


@pytest.mark.usefixtures("no_leak", "no_thread_left")
def test_an_answer_for_which_there_is_no_memory_fails_its_call_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_room(size_bytes: int) -> bytearray:
        if size_bytes >= ROWS.nbytes:
            raise MemoryError("no room")
        return bytearray(size_bytes)

    monkeypatch.setattr(channel, "bytearray", with_room, raising=False)
    with ensemble_of(by(members.times, 2.0), batch_size=len(ROWS), segment_size=len(ROWS)) as made:
        with pytest.raises(MemoryError, match="no room"):
            made.predict(ROWS)
        assert np.array_equal(made.predict(ROWS[:2]), ROWS[:2] * 2)
        assert made.stats().restarts == 0


@pytest.mark.usefixtures("no_leak")
def test_failed_calls_leave_no_memory_and_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    load = by(members.raising_at, 7.0)
    with ensemble_of(load, segment_size=8, max_segments=2) as ensemble:
        for _ in range(3):
            with pytest.raises(MemberFailed):
                answered(ensemble, ROWS[:8])
        (worker,) = ensemble.stats().workers
        wait_until(lambda: buffers_of(worker.pid) == 0)
        with monkeypatch.context() as patch:
            patch.setattr(Buffers, "filled", refused)
            for _ in range(3):
                with pytest.raises(OSError, match="no memory"):
                    answered(ensemble, ROWS)
        for _ in range(3):
            with pytest.raises(MemberFailed):
                answered(ensemble, ROWS)
        assert np.array_equal(answered(ensemble, ROWS[8:]), ROWS[8:])
    with pytest.raises(EnsembleError, match="closed"):
        ensemble.predict(ROWS)


def test_a_worker_that_had_no_part_of_a_failed_call_is_left_alone() -> None:
    with ensemble_of(by(members.raising_at, 7.0), workers=2) as ensemble:
        with pytest.raises(MemberFailed):
            ensemble.submit(ROWS[:8]).result(PATIENCE_S)
        assert np.array_equal(ensemble.predict(ROWS + 1000), ROWS + 1000)
        assert ensemble.stats().restarts == 0


def refused(*_: Any) -> None:
    raise OSError(errno.ENOMEM, "no memory")


def answered(ensemble: Ensemble, samples: Any) -> Any:
    """As ``predict``, but does not wait for ever."""
    found: Future[Any] = Future()

    def call() -> None:
        try:
            found.set_result(ensemble.predict(samples))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found.result(PATIENCE_S)


def buffers_of(pid: int | None) -> int:
    """How much shared memory of ensembles a process has."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It closes some meanwhile.
            found += "trims-ensemble" in os.readlink(each)
    return found


@pytest.mark.usefixtures("no_leak")
def test_memory_that_is_too_small_for_later_calls_is_given_up() -> None:
    with ensemble_of(by(members.times, 2.0), max_segments=2) as ensemble:
        for columns in range(1000, 7000, 1000):
            rows = np.ones((8, columns))
            assert np.array_equal(ensemble.predict(rows), rows * 2)
        (worker,) = ensemble.stats().workers
        wait_until(lambda: buffers_of(worker.pid) == 2)


def test_outputs_that_cannot_be_combined_fail_the_call() -> None:
    with ensemble_of(by(members.times, 1.0), members.row_sums) as ensemble:
        with pytest.raises(ValueError, match=r"return \(4,\) and \(4, 2\)"):
            ensemble.predict(ROWS[:4])
        with pytest.raises(ValueError, match="members return"):
            ensemble.predict(ROWS)


@pytest.mark.parametrize(
    ("combine", "message"),
    [
        (lambda outputs: float(outputs["a"].sum()), "a float has no rows"),
        (lambda outputs: outputs["a"].sum(0), "`combine` returned 2 rows for the outputs of 128"),
    ],
)
def test_rules_have_to_return_a_row_for_each_sample(combine: Any, message: str) -> None:
    ensemble = ensemble_of(by(members.times, 1.0), combine=combine)
    with ensemble, pytest.raises(ValueError, match=message):
        ensemble.predict(ROWS)


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), CancelledError()])
def test_rules_may_raise_what_event_loops_take_for_their_own(error: BaseException) -> None:
    """Their futures refuse the first, and seem cancelled with the others."""

    def combine(outputs: Any) -> Any:
        raise error

    async def ask() -> Any:
        return await asyncio.wait_for(ensemble.aio(ROWS[:4]), PATIENCE_S)

    ensemble = ensemble_of(by(members.times, 1.0), combine=combine)
    with (
        ensemble,
        pytest.raises(RuntimeError, match=rf"`combine` raised {type(error).__name__}\(\)"),
    ):
        asyncio.run(ask())


def test_the_batch_of_a_worker_that_died_is_answered_by_the_next_one(tmp_path: Path) -> None:
    load = by(members.dying_at, 7.0, str(tmp_path), 1)
    with ensemble_of(
        load, by(members.times, 3.0), restarts=math.inf, max_segments=math.inf
    ) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)
        assert ensemble.stats().restarts == 1
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("rows", [8, 300])
def test_another_worker_takes_over_where_none_is_started_again(tmp_path: Path, rows: int) -> None:
    """Also one that has nothing to do."""
    load = by(members.dying_at, 7.0, str(tmp_path), 1)
    with ensemble_of(load, workers=2, restarts=0) as ensemble:
        assert np.array_equal(answered(ensemble, ROWS[:rows]), ROWS[:rows])
        assert sorted(worker.pid is None for worker in ensemble.stats().workers) == [False, True]


def test_a_batch_that_kills_two_workers_is_given_up(tmp_path: Path) -> None:
    load = by(members.dying_at, 7.0, str(tmp_path), 100)
    with ensemble_of(load, segment_size=8) as ensemble:
        bad, good = ensemble.submit(ROWS[:8]), ensemble.submit(ROWS[8:40])
        with pytest.raises(MemberFailed, match="worker of member 'a' on cpu was ended by signal 9"):
            bad.result(PATIENCE_S)
        assert np.array_equal(good.result(PATIENCE_S), ROWS[8:40])
        assert len(list(tmp_path.iterdir())) == 2


def test_without_workers_of_a_member_everything_fails(tmp_path: Path) -> None:
    load = by(members.dying_at, 7.0, str(tmp_path), 100)
    with ensemble_of(load, by(members.times, 1.0), restarts=0) as ensemble:
        with pytest.raises(MemberFailed, match=r"ended by signal 9 \(memory\?\)"):
            ensemble.predict(ROWS)
        with pytest.raises(MemberFailed, match="ended by signal 9"):
            ensemble.predict(ROWS[100:])
    with pytest.raises(MemberFailed, match="ended by signal 9"):
        ensemble.predict(ROWS[100:])


def test_a_member_that_cannot_be_loaded_again(tmp_path: Path) -> None:
    with ensemble_of(by(members.unloadable_again, str(tmp_path))) as ensemble:
        with pytest.raises(MemberFailed):
            ensemble.predict(ROWS)
        with pytest.raises(MemberFailed):
            ensemble.predict(ROWS[100:])
        assert ensemble.stats().restarts == 1, "it would fail again"


@pytest.mark.usefixtures("no_leak", "no_thread_left")
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (members.unloadable, "'b' could not be loaded on cpu: OSError: there are no weights"),
        (members.no_function, "returned a int, not a function of a batch"),
        (members.leaving, "'b' could not be loaded on cpu: SystemExit: no licence"),
    ],
)
def test_a_member_that_cannot_be_loaded(load: Any, message: str) -> None:
    with pytest.raises(MemberFailed, match=message):
        ensemble_of(by(members.times, 1.0), load)


def test_load_functions_have_to_be_found_by_workers() -> None:
    with pytest.raises(EnsembleError, match=r"'a' cannot be sent to a worker .*functools\.partial"):
        ensemble_of(lambda device: None)


def test_samples_have_to_be_there() -> None:
    with ensemble_of(by(members.times, 1.0)) as ensemble:
        with pytest.raises(ValueError, match="no samples"):
            ensemble.predict(ROWS[:0])
        with pytest.raises(ValueError, match="has no rows"):
            ensemble.predict("text")


MEMBERS = [Member("a", members.row_sums), Member("b", members.row_sums)]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "needs a member"),
        (["a"], {}, "a member is 'a'; give a Member"),
        (MEMBERS[:1] * 2, {}, "names of their own: a, a"),
        (
            [Member("a", members.row_sums, weight=-1.0)],
            {},
            "the weight of 'a' is -1.0; it has to be 0 or more",
        ),
        (
            [Member("a", members.row_sums, weight=cast(Any, "1"))],
            {},
            "the weight of 'a' is '1'; it has to be a number",
        ),
        ([Member("a", members.row_sums)], {"devices": []}, "devices is empty; name one"),
        ([Member("a", members.row_sums, weight=0.0)], {}, "all members have a weight of 0"),
        (
            [Member(name, members.row_sums, weight=1e308) for name in "ab"],
            {},
            "too large for a sum",
        ),
        (MEMBERS, {"segment_size": 0}, "segment_size is 0; it has to be 1 or more"),
        (MEMBERS, {"segment_size": "3"}, "segment_size is '3'; it has to be a whole number"),
        (MEMBERS, {"max_segments": 0}, "max_segments is 0; it has to be 1 or more"),
        (MEMBERS, {"restarts": -1}, "restarts is -1; it has to be 0 or more"),
        (MEMBERS, {"restarts": None}, "restarts is None; it has to be a whole number"),
        (MEMBERS, {"combine": "median"}, "'median'"),
        (MEMBERS, {"allocation": Allocation(((8,),))}, "a row for each of 1 devices"),
        (MEMBERS, {"allocation": Allocation(((8, 8), (8, 8)))}, "a row for each of 1 devices"),
        (MEMBERS, {"allocation": Allocation(((8, 0),))}, "member 'b' has no worker"),
        (MEMBERS, {"allocation": Allocation(((8, -1),))}, "a batch size of the allocation is -1"),
        (
            MEMBERS,
            {"allocation": Allocation(((8, 2.5),))},  # type: ignore[arg-type]
            "a batch size of the allocation is 2.5; it has to be a whole number",
        ),
        (MEMBERS, {"allocation": ((8, 8),)}, "such as Allocation"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    given: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Ensemble(given, **{"devices": ["cpu"], **options})


# --- the end --------------------------------------------------------------------------------------


def test_closing_waits_for_calls_under_way(tmp_path: Path) -> None:
    go = tmp_path / "go"
    ensemble = ensemble_of(by(members.waiting_for, str(go)))
    future = ensemble.submit(ROWS[:8])
    closing = threading.Thread(target=ensemble.close)
    closing.start()
    wait_until(lambda: ensemble._system._error is not None)
    closing.join(0.2)
    assert closing.is_alive()
    with pytest.raises(EnsembleError, match="closed"):
        ensemble.predict(ROWS)
    go.touch()
    closing.join(PATIENCE_S)
    assert np.array_equal(future.result(0), ROWS[:8])
    ensemble.close()


def test_closing_without_waiting_fails_calls_under_way(tmp_path: Path) -> None:
    ensemble = ensemble_of(by(members.waiting_for, str(tmp_path / "never")))
    future = ensemble.submit(ROWS[:8])
    (worker,) = ensemble.stats().workers
    with pytest.raises(ZeroDivisionError), ensemble:
        1 / 0  # noqa: B018
    with pytest.raises(EnsembleError, match="closed"):
        future.result(0)
    wait_until(lambda: not is_running(worker.pid))


def test_a_forgotten_ensemble_ends() -> None:
    ensemble = ensemble_of(by(members.times, 1.0))
    (worker,) = ensemble.stats().workers
    del ensemble
    wait_until(lambda: not is_running(worker.pid))


def test_in_a_forked_child_it_is_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended, ended = hosting.WorkerProcess._has_ended, list[bool]()

    def noted(process: hosting.WorkerProcess, patience_s: float) -> bool:
        ended.append(has_ended(process, patience_s))
        return ended[-1]

    monkeypatch.setattr(hosting.WorkerProcess, "_has_ended", noted)
    with ensemble_of(by(members.times, 2.0)) as ensemble:
        (worker,) = ensemble.stats().workers
        pid = os.fork()
        if pid == 0:
            try:
                ensemble.predict(ROWS)
            except EnsembleError as error:
                ensemble.close()
                os._exit(17 if "parent" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)
        # A child that lives on does not keep workers from seeing their program's end.
        ready, proceed = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(proceed)
            os.read(ready, 1)
            os._exit(0)
        os.close(ready)
    assert ended == [True], "it was not killed"
    assert not is_running(worker.pid)
    os.close(proceed)
    os.waitpid(pid, 0)


PROGRAM = """
import os, signal, sys, time
import numpy as np
from trims_shim.ensemble import Ensemble, Member

def load(device):
    {load}

def main():
    with Ensemble([Member("a", load)], devices=["cpu"]) as ensemble:
        print(ensemble.predict(np.ones(3)).tolist(), flush=True)
        print(ensemble.stats().workers[0].pid, flush=True)
        {then}

{guard}
"""


def program(
    tmp_path: Path,
    *,
    load: str = "return lambda batch: batch * 2",
    then: str = "pass",
    guard: str = "if __name__ == '__main__': main()",
) -> Any:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(load=load, then=then, guard=guard))
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def test_load_functions_of_the_main_program(tmp_path: Path) -> None:
    out, errors = program(tmp_path).communicate(timeout=PATIENCE_S)
    assert out.splitlines()[0] == "[2.0, 2.0, 2.0]"
    assert errors == ""


def test_a_program_without_a_guard_is_told_so(tmp_path: Path) -> None:
    child = program(tmp_path, guard="main()")
    out, errors = child.communicate(timeout=PATIENCE_S)
    assert out == ""
    assert child.returncode == 1
    assert "make it under `if __name__ == '__main__':`" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_program(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, then="time.sleep(60)") as child:
        assert child.stdout.readline()
        worker = int(child.stdout.readline())
        assert is_running(worker)
        child.send_signal(number)
        child.wait(PATIENCE_S)
        wait_until(lambda: not is_running(worker))


def test_a_worker_whose_model_is_never_loaded_ends_with_its_program(tmp_path: Path) -> None:
    with program(tmp_path, load="print(os.getpid(), flush=True); signal.pause()") as child:
        worker = int(child.stdout.readline())
        child.kill()
        child.wait(PATIENCE_S)
        try:
            wait_until(lambda: not is_running(worker))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def test_ctrl_c_is_for_the_program_alone() -> None:
    with ensemble_of(by(members.times, 2.0)) as ensemble:
        (worker,) = ensemble.stats().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
        assert np.array_equal(ensemble.predict(ROWS), ROWS * 2)
        assert ensemble.stats().restarts == 0


# --- what callbacks may do ------------------------------------------------------------------------


def test_a_callback_that_calls_the_ensemble_is_told_so(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with ensemble_of(by(members.waiting_for, str(go))) as ensemble:
        caught: list[BaseException] = []
        told = threading.Event()

        def call_again(_: Any) -> None:
            try:
                ensemble.predict(ROWS)
            except EnsembleError as error:
                caught.append(error)
            told.set()

        # Answered at once, the callback would run in this thread.
        ensemble.submit(ROWS[:8]).add_done_callback(call_again)
        go.touch()
        assert told.wait(PATIENCE_S)
        assert "from its own thread" in str(caught[0])
        assert np.array_equal(ensemble.predict(ROWS), ROWS)


def test_a_callback_that_wants_to_exit_is_no_other_calls_end(tmp_path: Path) -> None:
    def leave(future: Future[Any]) -> None:
        raise SystemExit

    go = tmp_path / "go"
    ensemble = ensemble_of(by(members.waiting_for, str(go)), segment_size=8)
    first, second = ensemble.submit(ROWS[:8]), ensemble.submit(ROWS[:8])
    first.add_done_callback(leave)
    go.touch()
    assert np.array_equal(first.result(PATIENCE_S), ROWS[:8])
    assert np.array_equal(second.result(PATIENCE_S), ROWS[:8])
    go.unlink()
    left = [ensemble.submit(ROWS[:8]) for _ in range(2)]
    for future in left:
        future.add_done_callback(leave)
    (worker,) = ensemble.stats().workers
    ensemble.close(wait=False)
    assert all(isinstance(future.exception(0), EnsembleError) for future in left)
    assert not is_running(worker.pid)


def test_whoever_waits_for_a_failed_call_may_use_another_thread_that_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ensemble_of(by(members.raising_at, 7.0)) as ensemble:
        tell, may_tell = ensemble._system._tell_failures, threading.Event()
        found: list[Any] = []
        told = threading.Event()

        def call_elsewhere(_: Any) -> None:
            thread = threading.Thread(target=lambda: found.append(ensemble.stats()))
            thread.start()
            thread.join(PATIENCE_S)
            told.set()

        monkeypatch.setattr(
            ensemble._system, "_tell_failures", lambda: may_tell.wait(PATIENCE_S) and tell()
        )
        ensemble.submit(ROWS[:8]).add_done_callback(call_elsewhere)
        may_tell.set()
        assert told.wait(PATIENCE_S)
        assert found


def test_a_worker_that_dies_while_the_ensemble_closes_is_replaced(tmp_path: Path) -> None:
    load = by(members.dying_at, 599.0, str(tmp_path), 1)
    ensemble = ensemble_of(load)
    future = ensemble.submit(ROWS)
    ensemble.close()
    assert np.array_equal(future.result(0), ROWS)


def test_samples_of_failed_calls_are_not_mixed_with_others() -> None:
    """Members that are behind still read them."""
    slow = by(members.working, 1.0, 0)
    with ensemble_of(by(members.raising_at, 7.0), slow, segment_size=64) as ensemble:
        for turn in range(5):
            bad = ensemble.submit(ROWS[:64])
            good = ensemble.submit(ROWS[:64] + 1000 * turn + 1000)
            with pytest.raises(MemberFailed):
                bad.result(PATIENCE_S)
            assert np.array_equal(good.result(PATIENCE_S), ROWS[:64] + 1000 * turn + 1000.5)


def test_a_worker_that_dies_while_it_loads_is_started_again_or_ends_the_start(
    tmp_path: Path,
) -> None:
    load = by(members.dying_while_it_loads, str(tmp_path), 1)
    with ensemble_of(load) as ensemble:
        assert np.array_equal(ensemble.predict(ROWS), ROWS)
    (tmp_path / "0").unlink()
    with pytest.raises(MemberFailed, match="ended by signal 9"):
        ensemble_of(load, workers=2, restarts=0)


def test_an_ensemble_is_made_when_all_are_ready_also_those_that_were_started_again(
    tmp_path: Path,
) -> None:
    made: list[Ensemble] = []
    last = tmp_path / "last"
    loads = (
        by(members.dying_when_ready, str(tmp_path)),
        by(members.loading_after, str(tmp_path / "second"), str(last)),
    )
    making = threading.Thread(target=lambda: made.append(ensemble_of(*loads)), daemon=True)
    making.start()
    wait_until(last.exists)
    making.join(0.3)
    assert making.is_alive()
    (tmp_path / "go").touch()
    making.join(PATIENCE_S)
    with made[0] as ensemble:
        assert ensemble.stats().restarts == 1
        assert np.array_equal(ensemble.predict(ROWS), ROWS)
