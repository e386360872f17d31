"""``fetch``, and what ``warm``, ``evict`` and ``info`` do with remote models."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trims_shim import config
from trims_shim.cli import images
from trims_shim.cli.exits import Exit
from trims_shim.cli.fetch import FetchedUrl, evict_copies, fetch_all
from trims_shim.cli.main import main
from trims_shim.cli.progress import Progress
from trims_shim.errors import RemoteError
from trims_shim.remote import fetching

from .conftest import Trims

CONTENT = os.urandom(1 << 20)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a folder with two models, one of them in a folder below."""
    (tmp_path / "store" / "bert").mkdir(parents=True)
    (tmp_path / "store" / "vit.pt").write_bytes(CONTENT)
    (tmp_path / "store" / "bert" / "model.safetensors").write_bytes(CONTENT[::-1])
    return f"file://{tmp_path}/store"


def test_fetch_prints_paths_and_says_what_it_did(trims: Trims, store: str) -> None:
    done = trims("fetch", f"{store}/vit.pt", f"{store}/bert")
    assert done.returncode == Exit.OK, done.stderr
    file, folder = map(Path, done.stdout.splitlines())
    assert file.read_bytes() == CONTENT
    assert os.listdir(folder) == ["model.safetensors"]
    assert f"[1/2] {store}/vit.pt: downloaded, 1.0 MiB in " in done.stderr
    again = trims("fetch", f"{store}/vit.pt")
    assert "there already" in again.stderr
    assert not trims.sockets.exists(), "no daemon was started"


def test_fetch_goes_on_after_a_url_that_fails(trims: Trims, store: str) -> None:
    done = trims("fetch", "--json", f"{store}/none.pt", f"{store}/vit.pt", "s4://b/x")
    assert done.returncode == Exit.FAILED
    missing, good, unknown = json.loads(done.stdout)
    assert missing["error"] == "it is not there"
    assert (good["outcome"], good["size_bytes"], good["error"]) == ("downloaded", 1 << 20, "")
    assert unknown["error"].startswith("cannot be read: Protocol not known")
    assert len(done.stderr.splitlines()) == 2


def test_no_secret_of_a_url_is_repeated(trims: Trims) -> None:
    signed = "http://127.0.0.1:1/x/?X-Amz-Signature=secret"
    done = trims("fetch", "--json", signed, "no-store://me:secret@host/x")
    assert done.returncode == Exit.FAILED
    found = json.loads(done.stdout)
    urls = [each["url"] for each in found]
    assert urls == ["http://127.0.0.1:1/x/", "no-store://me@host/x"]
    assert not any(each["error"].startswith(each["url"]) for each in found), "it is said once"
    assert "secret" not in done.stdout + done.stderr


def test_warm_names_a_folder_without_models_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = "sftp://me:secret@host/x/"
    monkeypatch.setattr(images, "fetch_all", lambda *_, **__: [FetchedUrl(url, str(tmp_path))])
    assert main(["warm", url]) == Exit.FAILED
    assert capsys.readouterr().err == "trims warm: no model file in sftp://me@host/x/\n"


def test_fetch_with_a_digest(trims: Trims, store: str) -> None:
    digest = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    assert trims("fetch", f"{store}/vit.pt", "--digest", digest).returncode == Exit.OK
    wrong = trims("fetch", f"{store}/bert/model.safetensors", "--digest", digest)
    assert wrong.returncode == Exit.FAILED
    assert "its digest is sha256:" in wrong.stderr
    for words in (
        ("a/b.pt",),
        ("http://[::1/x",),
        (f"{store}/vit.pt", "--digest", "12"),
        ("x://a", "y://b", "--digest", digest),
    ):
        assert trims("fetch", *words).returncode == Exit.USAGE


def test_an_error_of_another_file_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example the directory of copies, or one of many files."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EFBIG, "File too large", "/cache/\x1bc/remote")

    monkeypatch.setattr(fetching, "fetch", fail)
    (failed,) = fetch_all(["s3://b/vit.pt"], is_quiet=True)
    assert failed.error == "File too large (/cache/\\x1bc/remote)"


def test_an_error_of_the_url_does_not_name_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "https://b.example/vit.pt")

    monkeypatch.setattr(fetching, "fetch", fail)
    (failed,) = fetch_all(["https://b.example/vit.pt?signature=old"], is_quiet=True)
    assert failed.error == "Permission denied"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_an_error_is_said_once(is_quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (failed,) = fetch_all(["no-store://host/vit.pt"], is_quiet=is_quiet)
    begin = "trims:" if is_quiet else "[1/1]"
    said = f"{begin} no-store://host/vit.pt: {failed.error}\n"
    assert capsys.readouterr() == ("", said)


def test_warm_fetches_first(new_trims: Callable[[], Trims], store: str) -> None:
    trims = new_trims()
    done = trims("warm", f"{store}/vit.pt", f"{store}/bert/", "--json")
    assert done.returncode == Exit.OK, done.stderr
    assert [each["outcome"] for each in json.loads(done.stdout)] == ["loaded", "loaded"]
    failed = trims("warm", f"{store}/none.pt", f"{store}/vit.pt")
    assert failed.returncode == Exit.FAILED
    assert "none.pt: it is not there" in failed.stderr
    assert "in the cache already" in failed.stderr, "the other one is warmed all the same"


def test_evict_deletes_copies(trims: Trims, store: str) -> None:
    vit, bert = trims("fetch", f"{store}/vit.pt", f"{store}/bert").stdout.split()
    done = trims("evict", f"{store}/vit.pt")
    assert done.stdout == "evicted 1 remote model, 1.0 MiB\n"
    assert not os.path.exists(vit)
    assert os.path.exists(bert)
    assert "no copy of it" in trims("evict", f"{store}/vit.pt").stderr
    every = trims("evict", "--all", "--tier", "remote", "--json")
    assert json.loads(every.stdout) == {"copies": 1, "freed_bytes": 1 << 20}
    assert not os.path.exists(bert)
    assert trims("evict", "--all", "--tier", "remote").returncode == Exit.OK
    assert trims("evict", "bert.pt", "--tier", "remote").returncode == Exit.USAGE
    for command in ("evict", "warm"):
        assert "'http://' is no URL" in trims(command, "http://").stderr


@pytest.mark.parametrize("where", [("--tier", "host"), ("--device", "0")])
def test_evict_from_memory_deletes_no_copy(
    trims: Trims, store: str, where: tuple[str, str]
) -> None:
    """Found: a URL meant its copy, whatever the tier."""
    trims("fetch", f"{store}/vit.pt")
    done = trims("evict", f"{store}/vit.pt", *where)
    assert done.returncode == Exit.FAILED
    assert "name its local file" in done.stderr
    assert "evicted 1 remote model" in trims("evict", f"{store}/vit.pt").stdout


def test_evict_deletes_nothing_behind_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    precious = tmp_path / "home" / "photos"
    precious.mkdir(parents=True)
    (tmp_path / "remote").symlink_to(precious.parent)
    settings = config.load({"TRIMS_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)})
    monkeypatch.setattr(config, "_current", settings)
    with pytest.raises(RemoteError, match="is not a directory"):
        evict_copies("", as_json=False)
    assert precious.exists()


def test_evict_where_no_copy_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As in a container with a read-only root: there is nothing to delete, which is no failure."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    settings = config.load({"TRIMS_CACHE_DIR": str(tmp_path / "none"), "HOME": str(tmp_path)})
    monkeypatch.setattr(config, "_current", settings)
    assert evict_copies("", as_json=False) == Exit.OK
    assert capsys.readouterr().out == "evicted 0 remote models, 0 B\n"
    with pytest.raises(RemoteError, match="there is no copy of it"):
        evict_copies("s3://b/vit.pt", as_json=False)


def test_evict_where_nothing_can_be_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No advice of fetches: in another directory, there is nothing to delete."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root has all rights of the mode
    settings = config.load({"TRIMS_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)})
    monkeypatch.setattr(config, "_current", settings)
    directory = tmp_path / "remote"
    directory.mkdir(0o700)
    with pytest.raises(RemoteError) as caught:
        evict_copies("", as_json=False)
    message = f"no copy of a remote model can be deleted: {directory} cannot be written"
    assert str(caught.value) == message


def test_evict_leaves_what_is_in_use(trims: Trims, store: str) -> None:
    program = (
        "import subprocess, sys, trims_shim\n"
        f"path = trims_shim.fetch('{store}/vit.pt')\n"
        "command = [sys.executable, '-m', 'trims_shim', 'evict', '--all', '--tier', 'remote']\n"
        "print(subprocess.run(command, capture_output=True, text=True).stdout, end='')\n"
        "print(len(open(path, 'rb').read()))\n"
    )
    done = trims.python("-c", program)
    assert done.stdout == f"evicted 0 remote models, 0 B (1 in use)\n{1 << 20}\n", done.stderr


def test_info_says_how_much_copies_take(trims: Trims, store: str) -> None:
    trims("fetch", f"{store}/vit.pt")
    assert "copies     1, 1.0 MiB of 5.0 MiB" in trims("info", TRIMS_REMOTE_BYTES="5M").stdout
    remote = json.loads(trims("info", "--json").stdout)["remote"]
    assert (remote["copies"], remote["size_bytes"]) == (1, 1 << 20)


def test_a_program_is_served_from_a_copy(new_trims: Callable[[], Trims], tmp_path: Path) -> None:
    """What fetch returns is an ordinary file: the second load takes it from the cache."""
    trims = new_trims()
    program = (
        "import torch\n"
        f"torch.save({{'w': torch.arange(1 << 19)}}, '{tmp_path}/m.pt')\n"
        "import trims_shim\n"
        f"path = trims_shim.fetch('file://{tmp_path}/m.pt')\n"
        "one, two = torch.load(path), torch.load(path)\n"
        "assert torch.equal(one['w'], two['w'])\n"
        "assert trims_shim.stats().served == 2, trims_shim.stats()\n"
    )
    done = trims.python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_bar_fits_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich puts what does not fit on a second one."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with Progress([500 << 20] * 2, is_quiet=False) as progress:
        assert progress._bar is not None
        progress.begin("/models/" + 99 * "a" + ".safetensors")
        progress.end("loaded", error="", note="")
        progress.begin("/models/" + 99 * "b" + ".safetensors")
        for reason, said in (("being prepared", "safetensors, being"), ("by " * 11, "by by")):
            progress.wait(reason)
            lines = progress._bar.console.render_lines(progress._bar.get_renderable())
            assert len(lines) == 1
            shown = "".join(segment.text for segment in lines[0])
            assert said in shown
            assert "500.0/1,000.0 MiB" in shown
    told = capsys.readouterr().err
    assert f"[1/2] /models/{99 * 'a'}.safetensors: loaded, 500 MiB in" in told


def test_the_bar_moves_within_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is known only when the remote has answered."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress([0, 0], is_quiet=False) as progress:
        assert progress._bar is not None
        (task,) = progress._bar.tasks
        progress.begin("s3://models/vit.pt")
        progress.reach(30, 100)
        assert (task.completed, task.total) == (30, 100)
        progress.end("downloaded", error="", note="")
        progress.begin("s3://models/bert")
        progress.reach(50, 200)
        assert (task.completed, task.total) == (150, 300)
        progress.end("", error="not reachable", note="")
