"""Names from elsewhere never lead out of their folder, and every part of a version counts."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim.errors import ConfigError, RemoteError
from trims_shim.remote.listing import (
    Listing,
    RemoteFile,
    is_url,
    key_of,
    name_of,
    shown,
    without_queries,
)

FILE = RemoteFile("bert/model.bin", "s3://b/bert/model.bin", 10, "etag", True)


def listing(*names: str) -> Listing:
    return Listing(tuple(replace(FILE, name=name) for name in names))


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "a/../../x", "/etc/passwd", "", ".", "..", "a//b", "a/", "a/./b", "a\0b", "a/.."),
        *("a" * 256, "\u00e4" * 128, "a/" * 2000 + "b", "\ud800"),
    ],
)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(RemoteError, match="no name for a file"):
        listing("fine", name)


@pytest.mark.parametrize("names", [("a", "a/b"), ("x/a/b/c", "x/a/b"), ("a", "a")])
def test_names_that_collide_are_refused(names: tuple[str, ...]) -> None:
    for order in itertools.permutations(names):
        with pytest.raises(RemoteError, match=r"is a file and a folder|the same name"):
            listing(*order)


@given(st.lists(st.text("ab./\0", max_size=6), max_size=4))
def test_what_is_not_refused_is_below_the_folder_and_apart(names: list[str]) -> None:
    try:
        listing(*names)
    except RemoteError:
        return
    parts = [tuple(name.split("/")) for name in names]
    assert not {"", ".", ".."} & set(itertools.chain(*parts))
    for one, other in itertools.permutations(parts, 2):
        assert other[: len(one)] != one


def test_every_part_of_what_is_known_counts() -> None:
    version = Listing((FILE,)).version
    others = [
        replace(FILE, name="bert/other.bin"),
        replace(FILE, size_bytes=11),
        replace(FILE, size_bytes=None),
        replace(FILE, token="other"),
    ]
    assert len({version, *(Listing((each,)).version for each in others)}) == 5
    two = replace(FILE, name="bert/two.bin")
    assert Listing((FILE, two)).version == Listing((two, FILE)).version != version


def test_names_that_begin_alike_do_not_collide() -> None:
    assert len(listing("bert/model", "bert/model.bin").files) == 2


def test_names_may_be_as_long_as_the_file_system_lets_them() -> None:
    assert listing("a" * 255, "b/" * 1023 + "b1").files


def test_the_size_is_that_of_all_files_as_far_as_it_is_known() -> None:
    two, three = replace(FILE, name="bert/two"), replace(FILE, name="bert/three", size_bytes=None)
    assert Listing((FILE, two, three)).size_bytes == 20


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/models/vit.pt", "vit.pt"),
        ("s3://bucket/bert/", "bert"),
        ("s3://bucket", "bucket"),
        ("s3://bucket/a?b#c%20.pt", "a?b#c%20.pt"),
        ("s3://bucket/bert/model.pt?versionId=aB3._x", "model.pt"),
        ("az://box/model.pt?versionid=2026-11-27T02:52:39.1Z", "model.pt"),
        ("gs://bucket/model.pt#1795747955017771", "model.pt"),
        ("gs://bucket/model.pt?generation=1795747955017771", "model.pt"),
        ("gs://bucket/step#12", "step#12"),
        ("https://example.org/a%20b.pt?signature=x/y", "a b.pt"),
        ("https://example.org/", "example.org"),
        ("https://example.org/o/models%2Fvit.pt?alt=media", "vit.pt"),
        ("https://example.org/x/..%2f..%2fy", "y"),
        ("https://example.org/x/..%2f..", ".."),
        ("http://[::1]:8000/x/m.onnx", "m.onnx"),
        ("zip://inner.pt::https://example.org/x.zip", "inner.pt"),
        ("memory://a/b.safetensors", "b.safetensors"),
    ],
)
def test_local_names_are_the_last_part(url: str, name: str) -> None:
    assert name_of(url) == name


def test_urls_and_paths() -> None:
    assert is_url("s3://bucket/x")
    assert is_url("HTTPS://host/x")
    assert not is_url("/models/x.pt")
    assert is_url("s3://"), "that is no path"
    assert key_of("s3://a/b") != key_of("s3://a/c")
    assert key_of("abfs://container@account.example/x"), "that is no user"
    assert key_of("s3://a/\udcff") != key_of("s3://a/\udcfe"), "bytes that are no UTF-8"
    for text in ("models/x.pt", "s3://", "http://"):
        with pytest.raises(ConfigError, match="is no URL"):
            key_of(text)


@pytest.mark.parametrize(
    "signed",
    [
        "X-Amz-Algorithm=A&X-Amz-Credential={0}&X-Amz-Date={0}&X-Amz-Expires=9&X-Amz-Signature={0}",
        "X-Goog-Date={0}&X-Goog-SignedHeaders=host&X-Goog-Signature={0}",
        "AWSAccessKeyId={0}&Signature={0}&Expires={0}",
        "Policy={0}&Signature={0}&Key-Pair-Id={0}",
        "sv=2024-11-04&se={0}&st={0}&sr=b&sp=r&skoid={0}&skt={0}&sig={0}",
    ],
)
def test_however_it_is_signed_a_url_is_one_model(signed: str) -> None:
    url = f"https://a/b.pt?versionId=1&{signed}"
    assert key_of(url.format("one")) == key_of(url.format("other"))
    for other in ("https://a/c.pt?versionId=1&", "https://a/b.pt?versionId=2&", "https://c/b.pt?"):
        assert key_of(other + signed) != key_of(url)


def test_what_is_not_signed_has_words_that_sign_nothing() -> None:
    assert key_of("https://a/b.pt?policy=1&sv=1") != key_of("https://a/b.pt?policy=2&sv=1")


def test_a_long_name_takes_no_more_memory() -> None:
    """Its folders would be 10 GB of names."""
    with pytest.raises(RemoteError) as raised:
        listing("a/" * 100_000 + "b")
    assert len(str(raised.value)) < 3000


def test_many_long_names_take_no_more_memory() -> None:
    """A page may have 2000 of them."""
    names = [f"{number:03}/" + "a/" * 1021 + "b" for number in range(50)]
    tracemalloc.start()
    try:
        listing(*names)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 << 20, "their folders are 50 MB"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host/x",
        "HTTPS://me:secret@host/x",
        "http://internal.example:x@evil.example:80/x",
    ],
)
def test_a_url_has_no_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"netrc") as raised:
        key_of(url)
    assert "secret" not in str(raised.value)


def test_a_host_that_is_none() -> None:
    with pytest.raises(ConfigError, match="is no URL: Invalid IPv6") as raised:
        key_of("https://me:secret@[::1/x?X-Amz-Signature=secret")
    assert "secret" not in str(raised.value)


def test_messages_have_no_secrets() -> None:
    assert shown("https://me:pw@host:8/x/y.pt?X-Amz-Signature=s#z") == "https://host:8/x/y.pt"
    assert shown("HTTPS://host/x?X-Amz-Signature=s") == "HTTPS://host/x"
    assert shown("https://me:pw@[::1/x?s") == "https://[::1/x"
    assert shown("s3://bucket/x?y") == "s3://bucket/x?y"
    assert shown("sftp://me:pw@host/a:b@c") == "sftp://me@host/a:b@c"
    assert shown("ftp://me:p@ss:w@rd@host:21/x@y") == "ftp://me@host:21/x@y"
    assert shown("zip://x::sftp://me:pw@host:22/x") == "zip://x::sftp://me@host:22/x"
    assert shown("zip://x::https://me:pw@host/x.zip?sig=s") == "zip://x::https://host/x.zip"
    assert shown("zip://x?y::HTTP://h/x?s::t") == "zip://x?y::HTTP://h/x"
    assert shown("https://h/x::http://h?s") == "https://h/x::http://h"
    assert shown("abfs://c@a.example/x") == "abfs://c@a.example/x"


def test_what_is_no_url_is_named_without_its_signature() -> None:
    """A cache of fsspec's, before the URL of a web server."""
    url = "simplecache::https://me:secret@a.example/vit.pt?sig=secret"
    with pytest.raises(
        ConfigError, match=r"'simplecache::https://a\.example/vit\.pt' is no"
    ) as raised:
        key_of(url)
    assert "secret" not in str(raised.value)


def test_what_a_store_says_has_no_queries() -> None:
    said = "403, url='HTTPS://a.example/x?sig=secret' or http://b.example/y#secret (c?)"
    assert without_queries(said) == "403, url='HTTPS://a.example/x' or http://b.example/y (c?)"


def test_what_a_store_says_at_length_is_looked_at_once() -> None:
    """Found: 140 kB of beginnings of URLs took 19 seconds, with all threads waiting."""
    said = "http://" * 20_000
    begin_s = time.process_time()
    assert without_queries(said) == said
    assert time.process_time() - begin_s < 2
