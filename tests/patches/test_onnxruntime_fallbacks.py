"""Sessions that onnxruntime makes by itself: after faults, and where the shim stays out of it.

The preparer is the real one; what stands in for the daemon is in :mod:`preparations`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as binding
import pytest
from forks import passes_in_child
from onnx_models import Sample, sample, save, save_external
from onnxruntime.capi import onnxruntime_inference_collection as collection
from ort_sessions import (
    CPU,
    break_model,
    complaint,
    described,
    hit,
    is_hit,
    new,
    outcomes,
    outputs,
    plain,
)
from preparations import Preparations, patched

from trims_shim import diagnostics
from trims_shim.errors import DaemonTimeout, NoSpace, NotServed, PatchError
from trims_shim.wire.messages import OpenPreparedReply

# --- faults ---------------------------------------------------------------------------------------


class TestFaults:
    def test_a_prepared_model_that_does_not_load(
        self, lenient: Preparations, path: str, made: Sample, caplog: pytest.LogCaptureFixture
    ) -> None:
        new(path)
        break_model(lenient)
        for _ in range(2):
            session = new(path)
            assert described(session) == described(plain(path))
            assert outputs(session, made) == outputs(plain(path), made)
        assert outcomes() == {"preparing": 1, "prepared_failed": 2}
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        assert "prepared_failed" in caplog.text

    def test_what_was_begun_is_gone_when_the_original_makes_the_session(
        self, lenient: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have failed for want of the very memory that it holds."""
        begun: list[weakref.ref[Any]] = []
        held: list[bool] = []

        class Compiled:
            """A session that is read, but for which there is no memory."""

            def initialize_session(self, *_: Any) -> None:
                raise MemoryError("bad_alloc")

        def create(options: Any, path: str, *arguments: Any) -> Any:
            if path.startswith(str(lenient.directory)):
                session = Compiled()
                begun.append(weakref.ref(session))
                return session
            held.append(any(each() is not None for each in begun))
            return compiled(options, path, *arguments)

        new(path)
        compiled = collection.C.InferenceSession
        monkeypatch.setattr(collection.C, "InferenceSession", create)
        session = new(path)
        assert (len(begun), held) == (1, [False])
        assert described(session)["inputs"]
        assert outcomes() == {"preparing": 1, "prepared_failed": 1}

    def test_strict_raises_it(
        self, preparations: Preparations, path: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        new(path)
        break_model(preparations)
        with pytest.raises(PatchError, match=r"model\.onnx"):
            new(path)
        assert "EP Error" not in capsys.readouterr().out

    def test_a_bug_of_ours(
        self, lenient: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("a bug")

        for name in ("model_of", "opened"):
            with monkeypatch.context() as context:
                context.setattr(f"trims_shim.patches.onnxruntime_models.{name}", fail)
                assert new(path).get_inputs()
        with monkeypatch.context() as context:
            context.setattr("trims_shim.patches.onnxruntime_records.clone", fail)
            new(path)
            assert new(path).get_inputs()
        assert outcomes() == {"internal_error": 2, "preparing": 1, "prepared_failed": 1}

    @pytest.mark.parametrize(
        "error", [DaemonTimeout("slow"), NoSpace("full"), NotServed("outputs_differ", "no")]
    )
    def test_what_the_daemon_has_against_it(
        self, lenient: Preparations, path: str, made: Sample, error: Exception
    ) -> None:
        lenient.answers = [error]
        assert outputs(new(path), made) == outputs(plain(path), made)
        assert outcomes() == {error.reason: 1}  # type: ignore[attr-defined]

    def test_strict_raises_what_the_daemon_has_against_it(
        self, preparations: Preparations, path: str
    ) -> None:
        preparations.answers = [NoSpace("full")]
        with pytest.raises(NoSpace, match="full"):
            new(path)

    def test_a_refusal_is_counted_under_its_reason_without_a_warning(
        self, preparations: Preparations, path: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        reply = OpenPreparedReply("refused", reason="outputs_differ", message="other bits in y")
        preparations.answers = [reply]
        new(path)
        assert outcomes() == {"outputs_differ": 1}
        assert not caplog.records

    def test_bytes_that_are_refused_are_not_offered(
        self, preparations: Preparations, made: Sample
    ) -> None:
        reply = OpenPreparedReply("refused", reason="outputs_differ", message="other bits in y")
        preparations.answers = [reply]
        new(made.content)
        assert outcomes() == {"outputs_differ": 1}
        assert len(preparations.requests) == 1

    def test_no_daemon_no_hashing(
        self, preparations: Preparations, made: Sample, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: bytes) -> str:
            raise AssertionError("hashed for nobody")

        monkeypatch.setattr("trims_shim.patches.onnxruntime_models.digest_of", fail)
        preparations.is_away = True
        assert outputs(new(made.content), made)
        assert outcomes() == {"daemon_unavailable": 1}

    @pytest.mark.parametrize("content", [b"", b"rubbish", b"\x08\x0a" * 600])
    def test_a_corrupt_model(
        self, preparations: Preparations, tmp_path: Path, content: bytes, capfd: Any
    ) -> None:
        path = tmp_path / "corrupt.onnx"
        path.write_bytes(content)
        for model in (str(path), content):
            expected = complaint(plain, model), capfd.readouterr().out
            for _ in range(2):
                assert (complaint(new, model), capfd.readouterr().out) == expected

    @pytest.mark.parametrize(
        ("model", "arguments"),
        [
            ("no such file.onnx", {}),
            ("a\0b.onnx", {}),
            ("\udcff.onnx", {}),
            ("", {}),
            (b"", {}),
            (None, {}),
            (bytearray(b"1234"), {}),
            (".", {}),
            ("{path}", {"sess_options": "nonsense"}),
            ("{path}", {"sess_options": {}}),
            ("{path}", {"providers": "CPUExecutionProvider"}),
            ("{path}", {"providers": [1]}),
            ("{path}", {"providers": [("CPUExecutionProvider", 1)]}),
            ("{path}", {"providers": CPU, "provider_options": [{}, {}]}),
            ("{path}", {"providers": [], "provider_options": [{}]}),
            ("{path}", {"providers": CPU, "provider_options": [1]}),
            ("{path}", {"disabled_optimizers": 5}),
            ("{path}", {"enable_fallback": 0, "providers": 5}),
        ],
        ids=str,
    )
    def test_wrong_arguments(
        self, preparations: Preparations, path: str, model: Any, arguments: Any, capfd: Any
    ) -> None:
        if model == "{path}":
            model = path
            new(path)
        expected = complaint(plain, model, **arguments), capfd.readouterr().out
        assert (complaint(new, model, **arguments), capfd.readouterr().out) == expected

    def test_missing_external_data(
        self, preparations: Preparations, tmp_path: Path, made: Sample
    ) -> None:
        path = tmp_path / "model.onnx"
        save_external(made)(path)
        (tmp_path / "weights.bin").unlink()
        expected = complaint(plain, str(path))
        assert complaint(new, str(path)) == complaint(new, str(path)) == expected


# --- what is left alone ---------------------------------------------------------------------------


class TestNotServed:
    @pytest.mark.parametrize(
        ("reason", "spoil"),
        [
            ("session_option", lambda o: o.set_load_cancellation_flag(False)),
            ("session_option", lambda o: o.add_provider("CPUExecutionProvider", {})),
            ("config_entry", lambda o: o.add_session_config_entry("ep.context_enable", "0")),
            ("config_entry", lambda o: o.add_session_config_entry("session.new_in_2099", "0")),
            ("session_option", lambda o: o.add_session_config_entry(b"custom", "1")),
            ("session_option", lambda o: o.add_session_config_entry("custom", b"1")),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Specified 'providers'")
    def test_options(self, preparations: Preparations, path: str, reason: str, spoil: Any) -> None:
        options = onnxruntime.SessionOptions()
        spoil(options)
        assert new(path, options).get_inputs()
        assert outcomes() == {reason: 1}
        assert not preparations.requests

    def test_saving_the_optimised_model(
        self, preparations: Preparations, path: str, tmp_path: Path
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        new(path, options)
        assert (tmp_path / "optimised.onnx").exists()
        assert outcomes() == {"session_option": 1}

    def test_initializers_from_outside(
        self, preparations: Preparations, tmp_path: Path, made: Sample
    ) -> None:
        options = onnxruntime.SessionOptions()
        other = np.full(10, 3, np.float32)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(other)
        options.add_external_initializers(["last_bias"], [value])
        path = tmp_path / "external.onnx"
        save_external(made)(path)
        new(str(path))
        assert outcomes() == {"preparing": 1}
        assert outputs(new(str(path), options), made) != outputs(plain(str(path)), made)
        assert outcomes() == {"preparing": 1, "session_option": 1}

    def test_a_custom_operator_library(self, preparations: Preparations, path: str) -> None:
        options = onnxruntime.SessionOptions()
        with pytest.raises(Exception, match="no_such_library"):
            options.register_custom_ops_library("/no_such_library.so")
        new(path, options)
        assert outcomes() == {"session_option": 1}

    def test_ort_format(self, preparations: Preparations, tmp_path: Path, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "model.ort")
        options.add_session_config_entry("session.save_model_format", "ORT")
        new(path, options)
        model = tmp_path / "model.ort"
        diagnostics.reset_after_fork()
        assert new(str(model)).get_inputs()
        assert new(model.read_bytes()).get_inputs()
        assert outcomes() == {"ort_format": 2}

    def test_options_in_the_model(self, preparations: Preparations, path: str) -> None:
        new(path, read_config_from_model=1)
        assert outcomes() == {"model_config": 1}

    def test_excluded_models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for _ in patched(tmp_path, monkeypatch, exclude=f"{tmp_path}/large*"):
            model = tmp_path / "large.onnx"
            save(sample("perceptron"))(model)
            monkeypatch.chdir(tmp_path)
            new("large.onnx")
            assert outcomes() == {"excluded": 1}
            save(sample("perceptron"))(tmp_path / "other.onnx")
            new("other.onnx")
            assert outcomes() == {"excluded": 1, "preparing": 1}

    def test_small_models(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for preparations in patched(tmp_path, monkeypatch, min_bytes="1M"):
            small = sample("recogniser")
            save(small)(tmp_path / "small.onnx")
            new(str(tmp_path / "small.onnx"))
            new(small.content)
            assert outcomes() == {"small_file": 2}
            large = sample("perceptron", 2)
            assert len(large.content) < 1 << 20
            external = tmp_path / "external.onnx"
            save_external(large)(external)
            with open(tmp_path / "weights.bin", "ab") as file:
                file.truncate(5 << 20)
            new(str(external))
            assert len(preparations.requests) == 1, "its weights are what counts"

    def test_an_iterator_of_optimizers_is_not_used_up(
        self, preparations: Preparations, path: str
    ) -> None:
        names = iter(["MatMulAddFusion"])
        new(path, disabled_optimizers=names)
        assert list(names) == []
        assert outcomes() == {"arguments": 1}

    def test_options_made_unseen(self, preparations: Preparations, path: str) -> None:
        options = collection.C.get_default_session_options()
        new(path, options)
        assert outcomes() == {"options_unknown": 1}

    def test_another_provider(
        self, preparations: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from trims_shim.patches import onnxruntime_recipe

        class Binding:
            get_build_info = binding.get_build_info
            get_available_providers = staticmethod(lambda: ["OtherExecutionProvider", *CPU])
            get_all_providers = get_available_providers

        monkeypatch.setattr(onnxruntime_recipe, "binding", Binding)
        new(path, providers=None)
        assert outcomes() == {"provider": 1}
        new(path)
        assert outcomes() == {"provider": 1, "preparing": 1}

    def test_disabled(self, preparations: Preparations, path: str) -> None:
        new(path)
        assert plain(path).get_inputs()
        assert len(preparations.requests) == 1


# --- packing --------------------------------------------------------------------------------------


class TestPrepackOff:
    @pytest.fixture
    def preparations(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Preparations]:
        yield from patched(tmp_path, monkeypatch, ort_prepack="off")

    def test_every_session_is_as_with_the_config_entry(
        self, preparations: Preparations, path: str, made: Sample
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_prepacking", "1")
        expected = plain(path, options)
        first = new(path)
        second = new(path)
        assert is_hit(second)
        assert preparations.requests[0].recipe.prepack == "off"
        assert outputs(first, made) == outputs(second, made) == outputs(expected, made)
        for session in (first, second):
            assert described(session) == described(plain(path))
            with pytest.raises(Exception, match="does not have"):
                session.get_session_options().get_session_config_entry("session.disable_prepacking")

    def test_also_where_there_is_no_daemon(
        self, preparations: Preparations, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = watched(monkeypatch)
        preparations.is_away = True
        mine = onnxruntime.SessionOptions()
        session = new(path, mine)
        assert seen == ["1"]
        assert session._sess_options_initial is mine
        with pytest.raises(Exception, match="does not have"):
            mine.get_session_config_entry("session.disable_prepacking")

    def test_a_program_that_says_itself_is_listened_to(
        self, preparations: Preparations, path: str
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_prepacking", "0")
        session = hit(path, options)
        assert preparations.requests[0].recipe.prepack == "share"
        shown = session.get_session_options()
        assert shown.get_session_config_entry("session.disable_prepacking") == "0"

    @pytest.mark.parametrize("kind", ["path", "bytes"])
    def test_also_models_that_are_too_small_to_be_served(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, made: Sample, kind: str
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_prepacking", "1")
        expected = outputs(plain(path, options), made)
        model = path if kind == "path" else made.content
        settings = {"ort_prepack": "off", "min_bytes": "1M"}
        for preparations in patched(tmp_path, monkeypatch, **settings):
            seen = watched(monkeypatch)
            assert outputs(new(model), made) == expected
            assert seen == ["1"]
            assert preparations.requests == []
            assert outcomes() == {"small_file": 1}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether packing is off in each session that is created from here on."""
    seen: list[str] = []
    create = collection.C.InferenceSession

    def watch(options: Any, *arguments: Any) -> Any:
        seen.append(options.get_session_config_entry("session.disable_prepacking"))
        return create(options, *arguments)

    monkeypatch.setattr(collection.C, "InferenceSession", watch)
    return seen


# --- processes ------------------------------------------------------------------------------------


class TestProcesses:
    def test_fork_with_a_live_session(
        self, preparations: Preparations, path: str, made: Sample
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = hit(path, options)
        expected = outputs(session, made)

        def work() -> bool:
            is_equal = outputs(session, made) == expected
            again = new(path, options)
            return is_equal and outputs(again, made) == expected and is_hit(again)

        assert passes_in_child(work)
        assert outputs(session, made) == expected
        assert len(preparations.leases) == 1

    def test_bytes_in_a_forked_child(
        self, preparations: Preparations, made: Sample, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hashing in the parent leaves nothing that a child would wait for."""
        from trims_shim.patches import onnxruntime_models

        monkeypatch.setattr(onnxruntime_models, "_THREADS_WORTH_BYTES", 1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        large = made.content
        first = hit(large, options)
        assert passes_in_child(lambda: outputs(new(large, options), made) == outputs(first, made))

    def test_the_end_of_a_process_with_live_sessions(self, path: str) -> None:
        code = f"""
            import trims_shim, onnxruntime
            session = onnxruntime.InferenceSession({path!r}, providers={CPU!r})
            session.loop = session
            options = onnxruntime.SessionOptions()
            onnxruntime.kept = [options, session.get_session_options()]
            print(sum(trims_shim.stats().fallbacks.values()), trims_shim.stats().fallbacks)
        """
        done = python(code, TRIMS_MIN_BYTES="1")
        assert done.stdout == "1 {'daemon_unavailable': 1}\n"
        assert done.stderr == ""

    def test_onnxruntime_imported_first(self, path: str) -> None:
        code = f"""
            import onnxruntime
            from onnxruntime import InferenceSession, SessionOptions
            old = SessionOptions()
            import trims_shim
            InferenceSession({path!r}, old, providers={CPU!r})
            InferenceSession({path!r}, SessionOptions(), providers={CPU!r})
            InferenceSession({path!r}, providers={CPU!r})
            print(trims_shim.stats().fallbacks)
        """
        done = python(code, TRIMS_MIN_BYTES="1")
        assert done.stdout == "{'options_unknown': 1, 'daemon_unavailable': 2}\n"


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
