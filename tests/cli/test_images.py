"""``warm``, ``pin``, ``unpin``, ``evict`` and ``verify`` against a real daemon."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trims_shim.cli import images
from trims_shim.cli.devices import image_count
from trims_shim.cli.exits import Exit
from trims_shim.cli.main import main
from trims_shim.cli.status import ask
from trims_shim.client.cache import Cache
from trims_shim.daemon import file_systems
from trims_shim.errors import UnknownImage
from trims_shim.testing import FakeDaemon
from trims_shim.wire import admin
from trims_shim.wire.admin import TierCheck, VerifyImageReply

from .conftest import LIMIT_S, MODEL_BYTES, Trims


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Four models, one of them in a directory below, and something else."""
    (tmp_path / "below").mkdir()
    for name in ("a.safetensors", "b.pt", "below/c.bin", "d.pt2"):
        (tmp_path / name).write_bytes(os.urandom(MODEL_BYTES))
    (tmp_path / "README").write_text("no model")
    # The daemon does not trust the times of a file that was written a moment ago.
    time.sleep(file_systems._SETTLED_AFTER_NS / 1e9)
    return tmp_path


def test_warm_takes_files_patterns_and_directories(warmed: Trims, models: Path) -> None:
    words = (str(models / "a.safetensors"), str(models / "*.pt"), str(models))
    done = warmed("warm", "--json", *words)
    assert done.returncode == Exit.OK, done.stderr
    assert done.stderr == "", "no progress with --json"
    found = {Path(each["path"]).name: each for each in json.loads(done.stdout)}
    assert sorted(found) == ["a.safetensors", "b.pt", "c.bin", "d.pt2"]
    assert {each["outcome"] for each in found.values()} == {"loaded"}
    again = warmed("warm", *words)
    assert again.stderr.count("in the cache already") == 4
    assert "[4/4]" in again.stderr
    assert again.stdout == ""


def test_warm_says_what_will_not_be_served(warmed: Trims, tmp_path: Path, models: Path) -> None:
    entry = {"dtype": "U8", "shape": [MODEL_BYTES], "data_offsets": [0, MODEL_BYTES]}
    header = json.dumps({"weight": entry}).encode()
    good, small = tmp_path / "good.safetensors", tmp_path / "small.pt"
    good.write_bytes(len(header).to_bytes(8, "little") + header + bytes(MODEL_BYTES))
    small.write_bytes(b"PK" * 50)
    done = warmed("warm", str(models / "b.pt"), str(small), str(good))
    said = dict(zip(("no model", "small", "good"), done.stderr.splitlines(), strict=True))
    assert done.returncode == Exit.OK, "they can be opened all the same"
    assert "neither a zip of torch.save nor safetensors" in said["no model"]
    assert "smaller than TRIMS_MIN_BYTES (1.0 MiB)" in said["small"]
    assert ";" not in said["good"]


def test_the_command_that_pins_a_cold_file_can_be_run_as_it_is_said(
    warmed: Trims, tmp_path: Path
) -> None:
    cold = tmp_path / "my model.pt"
    cold.write_bytes(os.urandom(MODEL_BYTES))
    done = warmed("pin", str(cold))
    assert done.returncode == Exit.FAILED
    _, command, _ = done.stderr.split("`")
    assert shlex.split(command) == ["trims", "warm", "--pin", str(cold)]


@pytest.mark.parametrize("command", ["pin", "unpin", "verify"])
@pytest.mark.parametrize("suffix", [".pt", ".onnx"])
def test_a_url_names_no_image(warmed: Trims, command: str, suffix: str) -> None:
    """Found: it was taken for a path, below the current directory."""
    done = warmed(command, f"https://me:secret@models.example/a b{suffix}")
    assert done.returncode == Exit.FAILED
    assert "secret" not in done.stderr
    assert os.getcwd() not in done.stderr
    _, said, _ = done.stderr.split("`")
    assert shlex.split(said)[:2] == ["trims", "fetch"]


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_names_found_in_a_directory_steer_no_terminal(
    warmed: Trims, tmp_path: Path, more: tuple[str, ...]
) -> None:
    name = "\x1b[31mred\u202e\n"
    (tmp_path / f"{name}.pt").symlink_to("nowhere")
    (tmp_path / f"a{name}.pt").write_bytes(os.urandom(MODEL_BYTES))
    (tmp_path / f"{name}.d").mkdir()
    cold = tmp_path / f"{name}.d" / "cold"
    cold.touch()
    said = [
        warmed("warm", str(tmp_path), *more, TRIMS_EXCLUDE="*").stderr,
        warmed("warm", str(tmp_path / f"{name}.d"), *more).stderr,
        warmed("pin", str(cold)).stderr,
        warmed("run", str(tmp_path / name)).stderr,
    ]
    assert "No such file or directory" in said[0]
    assert "no model file in" in said[1]
    assert "is not in the cache" in said[2]
    assert "no such command" in said[3]
    for text in said:
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_warm_says_what_is_excluded(warmed: Trims, models: Path) -> None:
    done = warmed("warm", str(models / "b.pt"), TRIMS_EXCLUDE="*/b.pt")
    assert done.returncode == Exit.OK, "it is asked for all the same"
    assert "b.pt is excluded (TRIMS_EXCLUDE: */b.pt), so frameworks" in done.stderr


def test_warm_goes_on_after_a_file_that_fails(warmed: Trims, models: Path) -> None:
    done = warmed("warm", "/nonexistent/x.pt", str(models / "b.pt"), "--json")
    assert done.returncode == Exit.FAILED
    missing, good = json.loads(done.stdout)
    assert "No such file" in missing["error"]
    assert "No such file" in done.stderr
    assert good["digest"]


def test_warm_of_nothing_is_json_too(trims: Trims, tmp_path: Path) -> None:
    done = trims("warm", "--json", str(tmp_path))
    assert (done.returncode, json.loads(done.stdout)) == (Exit.FAILED, [])
    assert f"no model file in {tmp_path}" in done.stderr


def test_what_warm_says_of_a_failure_names_the_file_once(trims: Trims, model: Path) -> None:
    done = trims("warm", str(model), TRIMS_HOST_BYTES="4K")
    assert done.returncode == Exit.FAILED
    assert "do not fit the host tier" in done.stderr
    assert done.stderr.count(str(model)) == 1
    done = trims("warm", model.name, cwd=model.parent, TRIMS_HOST_BYTES="4K")
    assert "do not fit the host tier" in done.stderr
    assert done.stderr.count(model.name) == 1


def test_a_file_that_was_loaded_by_a_relative_path_has_its_full_name(
    new_trims: Callable[[], Trims], tmp_path: Path
) -> None:
    trims = new_trims()
    program = (
        "import trims_shim, torch\n"
        "from safetensors.torch import save_file\n"
        "from safetensors.numpy import load_file\n"
        "torch.save({'w': torch.rand(1 << 20)}, 'a.pt')\n"
        "save_file({'w': torch.rand(1 << 20)}, 'b.safetensors')\n"
        "torch.load('a.pt'); load_file('b.safetensors'); torch.load(open('a.pt', 'rb', 0))\n"
        "assert trims_shim.stats().served == 3\n"
    )
    done = trims.python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    images = json.loads(trims("ls", "--json").stdout)
    names = sorted(name for image in images for name in image["names"])
    assert names == [str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]
    assert trims("verify", "a.pt", cwd=tmp_path).returncode == Exit.OK
    assert trims("verify", "a.pt").returncode == Exit.FAILED, "another directory, another file"


def test_names_do_not_steer_a_terminal(warmed: Trims, tmp_path: Path) -> None:
    path = tmp_path / "a\nb\x1b[31m\udcff.pt"
    path.write_bytes(os.urandom(MODEL_BYTES))
    for done in (warmed("warm", os.fsdecode(path)), warmed("ls"), warmed("status"), warmed("top")):
        assert done.returncode == Exit.OK, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "top" in done.args or r"a\nb\x1b[31m\udcff.pt" in done.stdout + done.stderr
    assert warmed("evict", os.fsdecode(path)).returncode == Exit.OK


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"])  # as of LC_ALL=C
def test_names_that_the_encoding_of_the_terminal_does_not_have(
    warmed: Trims, tmp_path: Path, encoding: str
) -> None:
    path = tmp_path / "modèle.pt"
    path.write_bytes(os.urandom(MODEL_BYTES))
    for words in (["warm", str(path)], ["ls"], ["status"], ["top"], ["evict", str(path)]):
        done = warmed(*words, PYTHONIOENCODING=encoding)
        assert (done.returncode, "Traceback" in done.stderr) == (Exit.OK, False), done.stderr
        assert words[0] in ("top", "evict") or r"mod\xe8le.pt" in done.stdout + done.stderr


def test_warm_of_a_pipe_does_not_wait_for_a_writer(warmed: Trims, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    done = warmed("warm", str(tmp_path))
    assert done.returncode == Exit.FAILED
    assert "pipe.pt: is not a regular file" in done.stderr


def test_warm_of_nothing(warmed: Trims, tmp_path: Path) -> None:
    done = warmed("warm", str(tmp_path))
    assert done.returncode == Exit.FAILED
    assert "no model file" in done.stderr
    done = warmed("warm", "")
    assert (done.returncode, done.stderr) == (Exit.FAILED, "trims warm: no model file in ''\n")


def test_warm_of_a_directory_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, scandir = tmp_path / "locked", os.scandir
    for name in ("a.pt", "locked/b.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if path == str(locked):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(images._files(str(tmp_path))) == [str(tmp_path / "a.pt"), str(locked)]


def test_warm_of_a_directory_without_models_beside_others(
    warmed: Trims, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    done = warmed("warm", str(model), str(tmp_path / "empty"))
    assert done.returncode == Exit.FAILED
    assert f"no model file in {tmp_path / 'empty'}" in done.stderr
    assert "in the cache already" in done.stderr


def test_pinned_image_stays_until_unpinned(warmed: Trims, models: Path) -> None:
    path = models / "a.safetensors"
    (image,) = json.loads(warmed("warm", "--pin", "--json", str(path)).stdout)
    refused = warmed("evict", str(path))
    assert refused.returncode == Exit.FAILED
    assert "is pinned" in refused.stderr
    done = warmed("unpin", "a.safetensors", "--json", cwd=models)
    assert json.loads(done.stdout) == {"digest": image["digest"], "is_pinned": False}
    assert "is pinned" in warmed("pin", image["digest"][:12]).stdout
    assert "is no longer pinned" in warmed("unpin", str(path)).stdout
    evicted = json.loads(warmed("evict", "--json", str(path)).stdout)
    assert evicted["digests"] == [image["digest"]]
    assert evicted["freed_bytes"] >= MODEL_BYTES
    unknown = warmed("pin", str(path))
    assert unknown.returncode == Exit.FAILED
    assert f"`trims warm --pin {path}`" in unknown.stderr
    assert "`trims ls`" in warmed("unpin", str(path)).stderr


def test_earlier_versions_that_are_pinned(warmed: Trims, tmp_path: Path) -> None:
    """A path also means a version that only its pin keeps."""
    path = tmp_path / "m.bin"
    path.write_bytes(os.urandom(2**20))
    (old,) = json.loads(warmed("warm", "--pin", "--json", str(path)).stdout)
    path.write_bytes(os.urandom(2**20))
    (new,) = json.loads(warmed("warm", "--json", str(path)).stdout)
    assert new["digest"] != old["digest"]
    assert "unpin" not in old["note"] + new["note"]
    unpinned = json.loads(warmed("unpin", "--json", str(path)).stdout)
    assert unpinned == {"digest": old["digest"], "is_pinned": False}

    warmed("pin", old["digest"])
    (new,) = json.loads(warmed("warm", "--pin", "--json", str(path)).stdout)
    assert new["note"].endswith(f"`trims unpin {old['digest'][:12]}` frees an earlier version")
    for digest in (new["digest"], old["digest"], new["digest"]):
        assert json.loads(warmed("unpin", "--json", str(path)).stdout)["digest"] == digest


def test_an_earlier_version_is_told_of_a_relative_path_too(warmed: Trims, tmp_path: Path) -> None:
    """Found: it was looked for by the path as it was written, and images have absolute ones."""
    path = tmp_path / "m.bin"
    path.write_bytes(os.urandom(2**20))
    (old,) = json.loads(warmed("warm", "--pin", "--json", path.name, cwd=tmp_path).stdout)
    path.write_bytes(os.urandom(2**20))
    (new,) = json.loads(warmed("warm", "--pin", "--json", path.name, cwd=tmp_path).stdout)
    assert new["note"].endswith(f"`trims unpin {old['digest'][:12]}` frees an earlier version")
    for digest in (new["digest"], old["digest"]):
        warmed("unpin", digest)


def test_an_earlier_version_that_another_file_has_is_told_so(warmed: Trims, tmp_path: Path) -> None:
    """Found: what was advised took the other file's pin away."""
    path, release = tmp_path / "current.bin", tmp_path / "1.bin"
    release.write_bytes(os.urandom(2**20))
    path.write_bytes(release.read_bytes())
    (old, _) = json.loads(warmed("warm", "--pin", "--json", str(path), str(release)).stdout)
    path.write_bytes(os.urandom(2**20))
    (new,) = json.loads(warmed("warm", "--pin", "--json", str(path)).stdout)
    advice = f"`trims unpin {old['digest'][:12]}` frees an earlier version"
    assert new["note"].endswith(f"{advice}, which was loaded from {release}, too")
    for digest in (new["digest"], old["digest"]):
        warmed("unpin", digest)


def test_pin_of_an_onnx_model(warmed: Trims, tmp_path: Path) -> None:
    """Found: it advised `trims warm --pin`, which refuses these."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"a model")
    done = warmed("pin", str(path))
    assert done.returncode == Exit.FAILED
    assert done.stderr == f"trims: {path}: prepared ONNX models are not pinned\n"


def test_verify(warmed: Trims, model: Path) -> None:
    assert warmed("verify", str(model)).stdout.endswith(" sound\n")
    replies = json.loads(warmed("verify", "--all", "--json").stdout)
    assert replies
    assert all(reply["is_sound"] for reply in replies)


def test_verify_at_one_tier(warmed: Trims, model: Path) -> None:
    assert warmed("verify", "--tier", "host", str(model)).stdout.endswith(" sound\n")
    assert warmed("verify", "--all", "--tier", "host").stdout.endswith(" sound\n")
    elsewhere = warmed("verify", "--tier", "GPU-8f6c", str(model))
    assert elsewhere.returncode == Exit.FAILED
    assert "GPU-8f6c" in elsewhere.stderr
    assert warmed("verify", "--tier", "host", "--device", "0", "--all").returncode == Exit.USAGE


def test_verify_of_damaged_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sealed memory cannot be damaged from here, so the daemon's answer is made up."""
    found = (("host", "a" * 64), ("GPU-1", "b" * 64), ("GPU-2", "", "no"))
    reply = VerifyImageReply("a" * 64, "b" * 64, tuple(TierCheck(*each) for each in found))
    monkeypatch.setattr(Cache, "request", lambda *_: reply)
    assert main(["verify", "aaaaaaaa"]) == Exit.FAILED
    host, first, second = capsys.readouterr().out.splitlines()
    assert host == "a" * 12 + " sound on host"
    assert first.startswith("a" * 12 + " DAMAGED on GPU-1: its bytes now hash to bbbb")
    assert second == "a" * 12 + " NOT CHECKED on GPU-2: no"
    assert main(["verify", "aaaaaaaa", "--json"]) == Exit.FAILED
    assert json.loads(capsys.readouterr().out)[0]["is_sound"] is False


def test_more_images_than_a_reply_has_room_for(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that it does not name were not checked, and passed for sound."""
    monkeypatch.setattr(admin, "IMAGES_IN_REPLY", 2)
    with FakeDaemon() as daemon:
        for name in ("a.safetensors", "b.pt", "d.pt2"):
            assert main(["warm", str(models / name)]) == Exit.OK
        assert len(daemon.images) == 3
        capsys.readouterr()
        assert main(["verify", "--all"]) == Exit.OK
        assert capsys.readouterr().out.count("sound") == 3
        assert main(["ls", "--json"]) == Exit.OK
        listed = json.loads(capsys.readouterr().out)
        last_first = ["d.pt2", "b.pt", "a.safetensors"]
        assert [Path(each["names"][0]).name for each in listed] == last_first
        assert image_count(ask()) == "2 images or more"


def test_verify_of_an_image_that_goes_meanwhile(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error only where that one was asked for."""
    request = Cache.request

    def gone(self: Cache, message: object) -> object:
        if isinstance(message, admin.VerifyImageRequest):
            raise UnknownImage("it is gone")
        return request(self, message)

    with FakeDaemon():
        assert main(["warm", str(models / "b.pt")]) == Exit.OK
        monkeypatch.setattr(Cache, "request", gone)
        capsys.readouterr()
        assert main(["verify", "--all"]) == Exit.OK
        assert capsys.readouterr() == ("", "")
        assert main(["verify", str(models / "b.pt")]) == Exit.FAILED
        assert "it is gone" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["(float32)", "(aligned) (bfloat16)"])
def test_a_variant_has_the_full_name_of_its_file(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: only the file itself could be named as it is called in its directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pt").touch()
    assert images._name_of(f"a.pt {variant}") == str(tmp_path / f"a.pt {variant}")
    assert images._name_of(f"gone.pt {variant}") == f"gone.pt {variant}"


def test_evict_all_leaves_the_pinned(warmed: Trims, models: Path) -> None:
    (pinned,) = json.loads(warmed("warm", "--pin", "--json", str(models / "b.pt")).stdout)
    warmed("warm", str(models / "d.pt2"))
    said = warmed("evict", str(models / "d.pt2")).stdout
    assert said.startswith("evicted 1 image, ")
    assert "in use" not in said, "of others nothing is said"
    assert "prepared" not in said
    assert warmed("evict", "--all").stdout.endswith("(1 image pinned or in use)\n")
    left = json.loads(warmed("ls", "--json").stdout)
    assert [image["digest"] for image in left] == [pinned["digest"]]
    warmed("unpin", pinned["digest"])
    said = warmed("evict", "--all").stdout
    assert "evicted 1 image," in said
    assert "in use" not in said
    assert json.loads(warmed("ls", "--json").stdout) == []


def test_evict_of_an_empty_name(warmed: Trims, model: Path) -> None:
    """As of a variable that is not set; found: everything was dropped."""
    warmed("warm", str(model))
    done = warmed("evict", "")
    assert done.returncode == Exit.FAILED
    assert "`trims evict --all`" in done.stderr
    assert str(model) in warmed("ls").stdout


def test_warm_goes_on_where_nobody_reads_what_it_says(warmed: Trims, models: Path) -> None:
    """Found: it ended with success after the first file that it could not tell of."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trims_shim", "warm", str(models)],
            env=warmed.environment,
            stderr=writer,
            timeout=LIMIT_S,
        )
    finally:
        os.close(writer)
    assert done.returncode == Exit.OK
    listed = warmed("ls").stdout
    assert all(str(models / name) in listed for name in ("a.safetensors", "b.pt", "below/c.bin"))
