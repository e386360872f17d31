"""The files of an ONNX model as a client named them: what they are, and whether they stay so.

Owns the digests and identities of the model and its external files. Judges by the file's structure
(:mod:`trims_shim.formats.onnx`) whether the model can be prepared at all. onnxruntime opens the
files again, by path if there are external ones (it resolves their locations by the model's
directory), so identities are compared before and after, also those of symbolic links: they may lead
elsewhere for a while. Of a client in another container, it gets
copies, as nobody there need be trusted with what others are served.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import stat
from collections.abc import Iterator, Mapping

from trims_shim.daemon import ingest
from trims_shim.daemon.ingest import Meter
from trims_shim.daemon.prepared.externals import external_path, is_inside, links_to
from trims_shim.daemon.preparer.optimising import Refusal, refusing_full_disks
from trims_shim.errors import FileChanged, FormatError
from trims_shim.formats.onnx import OnnxModel, is_ort_format, read_model
from trims_shim.specs import Identity
from trims_shim.wire.duties import ExternalFile, SourceHashed

__all__ = ["ModelFiles"]

_EXTERNALS_LIMIT = 4096
"""Their names go into one message."""
_NOT_OFFERED = (
    "the client, which is in another container, did not offer it: it is not in the model's "
    "directory, or there are more than 16 such files, or the model is larger than 16 MB without "
    "them"
)
_DEPTH_LIMIT = 32
"""Directories in the name of a copy. Who deletes them, also in the daemon, needs a descriptor and a
call for each that is inside another."""
_COPIES = "source"
_COPY_BYTES = 1 << 20


class ModelFiles:
    """A model and its external files. The descriptors stay the caller's."""

    def __init__(
        self, descriptor: int, path: str, offered: Mapping[str, int] | None = None
    ) -> None:
        """``path`` is empty for a model without a name here.

        That is one that the client has in memory only, or one whose external files, by location,
        are ``offered``.
        """
        self._descriptor = descriptor
        self._path = path
        self._offered = offered
        status = os.fstat(descriptor)
        self._identity = Identity.from_stat(status)
        self._externals: tuple[ExternalFile, ...] = ()
        self._links: dict[str, tuple[Identity, ...]] = {}
        """The symbolic links to what is opened by its name, by that, before it was looked at."""
        self.digest = ""
        if not stat.S_ISREG(status.st_mode):
            raise Refusal("no_file", f"{path} is no regular file")
        if path:
            with _of_changed(path):
                self._links[path] = links_to(path)
        self.check_unchanged()

    @property
    def hashed(self) -> SourceHashed:
        """The digests of the files."""
        return SourceHashed(self.digest, self._externals)

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return self._identity.size_bytes + sum(each.identity.size_bytes for each in self._externals)

    @property
    def copied_bytes(self) -> int:
        """The size of what :meth:`loadable` has to copy."""
        return 0 if self._offered is None else self.size_bytes

    @contextlib.contextmanager
    def loadable(self, directory: str) -> Iterator[str]:
        """What onnxruntime opens: the very descriptor, unless it has to find files beside it.

        Of another container, it opens copies in ``directory``, which are gone after the block. So
        they have names, as external files are opened by name only, and no link out of the model's
        directory is followed. And they are what was hashed, whoever writes to the files meanwhile:
        by a mapping, that does not show in their identities. Raises OSError, FileChanged.
        """
        if self._offered is None:
            yield self._path if self._externals else f"/proc/self/fd/{self._descriptor}"
            return
        copies = os.path.join(directory, _COPIES)
        # By its digest: no location is another name of it.
        path = os.path.join(copies, f"{self.digest}.onnx")
        # "w.bin" and "./w.bin" are one file.
        files = {os.path.normpath(each.location): each for each in self._externals}
        try:
            with refusing_full_disks(directory):
                _copy(self._descriptor, path, self._identity.size_bytes, self.digest)
                for location, each in files.items():
                    source, copy = self._offered[each.location], external_path(path, location)
                    _copy(source, copy, each.identity.size_bytes, each.digest)
            yield path
        finally:
            shutil.rmtree(copies, ignore_errors=True)

    def hash(self) -> None:
        """Compute the model's digest. Raises FileChanged, ReadFailed."""
        size = self._identity.size_bytes
        self.digest = ingest.hash_file(self._descriptor, size, meter=Meter(), name=self._path)

    def look_inside(self) -> None:
        """Judge the model by its structure, and hash its external files.

        Raises Refusal, which is lasting if it is about the model alone.
        """
        with _mapped(self._descriptor, self._identity.size_bytes) as view:
            if is_ort_format(bytes(view[:8])) or self._path.endswith(".ort"):
                raise Refusal("ort_format", "models of the ORT format are prepared already")
            model = _read(view)
        if any(operator == "EPContext" for _, operator in model.operators):
            raise Refusal("ep_context", "it was compiled for an execution provider")
        if not model.locations:
            return
        if not self._path and self._offered is None:
            raise Refusal("external_data_of_bytes", "it has external data and no directory")
        if len(model.locations) > _EXTERNALS_LIMIT:
            raise Refusal("too_many_files", f"it has {len(model.locations)} external files")
        for location in model.locations:
            _check_location(location)
        find = self._hash_external if self._offered is None else self._hash_offered
        self._externals = tuple(map(find, model.locations))

    def check_unchanged(self) -> None:
        """Raises FileChanged unless all files are what they were in the beginning."""
        if Identity.from_stat(os.fstat(self._descriptor)) != self._identity:
            raise FileChanged(f"{self._path or 'the model'} changed while it was prepared")
        expected = [(each.path, each.identity) for each in self._externals]
        if self._path:
            expected.append((self._path, self._identity))
        for path, identity in expected:
            with _of_changed(path):
                found = Identity.from_stat(os.stat(path))
                links = links_to(path) if path in self._links else None
            if found != identity or links != self._links.get(path):
                raise FileChanged(f"{path} changed while it was prepared")

    def _hash_external(self, location: str) -> ExternalFile:
        path = external_path(self._path, location)
        try:
            self._links[path] = links_to(path)
            if not is_inside(self._path, location):
                message = f"{path} is linked to a file outside of the model's directory"
                raise Refusal("external_path", message, is_lasting=False)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise Refusal("external_missing", f"{path}: {error}", is_lasting=False) from error
        try:
            return _hashed(descriptor, location, path)
        finally:
            os.close(descriptor)

    def _hash_offered(self, location: str) -> ExternalFile:
        assert self._offered is not None
        if os.pardir in location.split("/"):
            # A copy has one name, and what is before the dots may be a link there.
            message = f"external data at {location!r:.200}, in another container"
            raise Refusal("external_path", message, is_lasting=False)
        if location.count("/") > _DEPTH_LIMIT:
            message = f"external data in more than {_DEPTH_LIMIT} directories: {location!r:.200}"
            raise Refusal("external_path", message, is_lasting=False)
        descriptor = self._offered.get(location)
        if descriptor is None:
            raise Refusal(
                "external_missing", f"{location!r:.200}: {_NOT_OFFERED}", is_lasting=False
            )
        return _hashed(descriptor, location, f"/proc/self/fd/{descriptor}")


@contextlib.contextmanager
def _of_changed(path: str) -> Iterator[None]:
    """What was there a moment ago cannot be looked at: it has changed. Raises FileChanged."""
    try:
        yield
    except OSError as error:
        raise FileChanged(f"{path} changed while it was prepared: {error}") from error


def _hashed(descriptor: int, location: str, path: str) -> ExternalFile:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Refusal("external_missing", f"{path} is no regular file", is_lasting=False)
    digest = ingest.hash_file(descriptor, status.st_size, meter=Meter(), name=path)
    return ExternalFile(location, path, digest, Identity.from_stat(status))


def _copy(descriptor: int, path: str, size_bytes: int, digest: str) -> None:
    """Copy what was hashed. There is room for ``size_bytes``; the file may have grown since.

    Raises FileChanged, OSError.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    # Not opened once more: who could open it may have had other rights. Nor over another copy:
    # names may differ by their case only, which some directories ignore.
    with open(path, "x+b", buffering=0) as target:
        done = 0
        while data := os.pread(descriptor, min(_COPY_BYTES, size_bytes - done), done):
            done += target.write(data)
        if ingest.hash_file(target.fileno(), size_bytes, meter=Meter(), name=path) != digest:
            raise FileChanged("the model's files changed while they were copied")


def _read(view: memoryview) -> OnnxModel:
    try:
        return read_model(view)
    except FormatError as error:
        # Only the original knows whether it can load this, and which error to raise.
        raise Refusal("unknown_model", f"cannot be read as an ONNX model: {error}") from error


def _check_location(location: str) -> None:
    """Refuse data outside of the model's directory, because onnxruntime does."""
    inside = os.path.normpath(location)
    if not location or os.path.isabs(location) or inside.split("/")[0] == ".." or "\0" in location:
        raise Refusal("external_path", f"external data at {location!r:.200}")


@contextlib.contextmanager
def _mapped(descriptor: int, size_bytes: int) -> Iterator[memoryview]:
    if not size_bytes:
        yield memoryview(b"")
        return
    try:
        mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
    except ValueError as error:
        raise FileChanged("the model became shorter before it was read") from error
    # Closed with its last reference: an error's traceback may still refer to it.
    yield memoryview(mapping)
