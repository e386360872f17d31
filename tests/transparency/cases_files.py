"""Files that change: overwritten, replaced, deleted, moved, written by others while loaded."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from .payloads import saved, saved_bytes, state
from .registry import Work, attempt, case, cases


def _overwrite(path: Path) -> None:
    data = saved_bytes(state(start=1000))
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def _replace(path: Path) -> None:
    torch.save(state(start=1000), "next.pt")
    Path("next.pt").replace(path)


def _save_again(path: Path) -> None:
    torch.save(state(start=1000), path)


def _delete(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _scribble(path: Path) -> None:
    """Same size, same inode, and the times put back: only the content tells."""
    status = path.stat()
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(1 << 18)
        file.write(bytes(256))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.read_bytes() != data


def _move(path: Path) -> None:
    path.rename("moved.pt")


def _become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _lose_permission(path: Path) -> None:
    path.chmod(0)


def _touch(path: Path) -> None:
    os.utime(path, ns=(10**18, 10**18))


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"trailer" * 10)


CHANGES = {
    function.__name__.strip("_"): function
    for function in (
        *(_overwrite, _replace, _save_again, _delete, _truncate, _empty, _scribble, _move),
        *(_become_directory, _lose_permission, _touch, _grow),
    )
}


@cases(CHANGES, served=True)
def changed_after_load(work: Work, change: Callable[[Path], None]) -> object:
    """Loaded tensors keep the old values; the next load sees what the file is now."""
    gc.freeze()  # the libraries: to look through them takes longer than all else here
    path = work.fresh("model.pt", saved(state()))
    before = torch.load(path)
    untouched = torch.load(path)
    before["weight"].add_(1)
    change(path)
    after = [attempt(torch.load, path), attempt(torch.load, path, weights_only=False)]
    gc.collect()
    return [before, untouched, after, attempt(torch.load, path, map_location="cpu")]


@cases({"replace": _replace, "delete": _delete, "touch": _touch, "move": _move}, served=True)
def changed_after_mapped_load(work: Work, change: Callable[[Path], None]) -> object:
    """Only changes that leave the mapped inode's bytes alone; others are undefined in torch."""
    path = work.fresh("model.pt", saved(state()))
    before = torch.load(path, mmap=True)
    change(path)
    return [before, attempt(torch.load, path, mmap=True)]


@case(served=True)
def rewritten_many_times(work: Work) -> object:
    seen = []
    for number in range(8):
        path = work.fresh("model.pt", saved(state(start=number)))
        seen.append(torch.load(path))
        torch.save(state(start=number + 50), path)
        seen.append(torch.load(path))
    return [[loaded["bias"], loaded["bulk"][0, :3].clone()] for loaded in seen]


@case(served=True)
def two_files_of_equal_content(work: Work) -> object:
    first = work.file("one.pt", saved(state()))
    second = work.file("two.pt", lambda path: shutil.copyfile(first, path))
    loaded = [torch.load(first), torch.load(second)]
    loaded[0]["bulk"].zero_()
    return [loaded, torch.load(first), torch.load(second)]


@case(served=True)
def swapped_names(work: Work) -> object:
    first = work.fresh("one.pt", saved(state()))
    second = work.fresh("two.pt", saved(state(start=9)))
    before = [torch.load(first), torch.load(second)]
    first.rename("three.pt")
    second.rename(first)
    Path("three.pt").rename(second)
    return [before, torch.load(first), torch.load(second)]


@case(served=True)
def symbolic_link_changes_its_target(work: Work) -> object:
    work.fresh("one.pt", saved(state()))
    work.fresh("two.pt", saved(state(start=9)))
    link = work.fresh("link.pt", lambda path: path.symlink_to("one.pt"))
    before = torch.load(link)
    link.unlink()
    link.symlink_to("two.pt")
    after = torch.load(link)
    link.unlink()
    link.symlink_to("nowhere.pt")
    return [before, after, attempt(torch.load, link)]


@case()
def open_file_replaced_before_load(work: Work) -> object:
    path = work.fresh("model.pt", saved(state()))
    with path.open("rb") as file:
        _replace(path)
        return [torch.load(file), torch.load(path)]


@case()
def open_file_deleted_before_load(work: Work) -> object:
    path = work.fresh("model.pt", saved(state()))
    with path.open("rb") as file:
        path.unlink()
        return [torch.load(file), attempt(torch.load, path)]


@case(served=True)
def loading_does_not_touch_the_file(work: Work) -> object:
    path = work.fresh("model.pt", saved(state()))
    before = path.stat()
    torch.load(path)["bulk"].zero_()
    torch.load(path, mmap=True)["bulk"].zero_()
    after = path.stat()
    same = [before.st_mtime_ns == after.st_mtime_ns, before.st_ctime_ns == after.st_ctime_ns]
    return [same, sorted(os.listdir()), path.read_bytes()]


@case(served=True)
def read_only_file(work: Work) -> object:
    path = work.fresh("model.pt", saved(state()))
    path.chmod(0o444)
    loaded = torch.load(path)
    loaded["weight"].zero_()
    mapped = torch.load(path, mmap=True)
    mapped["weight"].fill_(1)
    return [loaded, mapped, torch.load(path)]
