"""``warm``, ``status``, ``verify``, ``evict`` and ``stop`` with a device, by a real daemon and an
emulated driver."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until

from trims_shim.cli.exits import Exit

from .conftest import MODEL_BYTES, Trims


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One tensor."""
    entry = {"dtype": "U8", "shape": [MODEL_BYTES], "data_offsets": [0, MODEL_BYTES]}
    header = json.dumps({"weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(MODEL_BYTES))
    return path


@pytest.fixture
def on_devices(
    trims: Trims, make_emulated_environment: Callable[..., dict[str, str]]
) -> Iterator[Trims]:
    """Commands on a machine with two devices."""
    trims.environment.update(make_emulated_environment(devices=2))
    yield trims
    if trims.sockets.exists():
        trims("stop")


def devices(trims: Trims) -> list[dict[str, Any]]:
    """As ``info`` shows them."""
    found: list[dict[str, Any]] = json.loads(trims("info", "--json").stdout)["device"]["devices"]
    return found


def tiers(trims: Trims) -> list[str]:
    return [image["tier"] for image in json.loads(trims("ls", "--json").stdout)]


def test_the_life_of_an_image_on_a_device(on_devices: Trims, model: Path) -> None:
    trims = on_devices
    first, second = (each["id"] for each in devices(trims))
    (warmed,) = json.loads(trims("warm", "--json", "--device", "cuda:1", str(model)).stdout)
    assert (warmed["tier"], warmed["outcome"], warmed["error"]) == (second, "loaded", "")
    assert tiers(trims) == [second]
    status = trims("status").stdout
    assert f"{second}, vmm: 1 image, 0 leases" in status
    assert "2.0 MiB of 819 MiB resident (#)" in status
    assert first not in status, "nobody has asked for this one"
    assert trims("verify", "--all").stdout == f"{warmed['digest'][:12]} sound\n"
    # The number of a device is this shell's, its id is not.
    again = trims("warm", "--device", "0", str(model), CUDA_VISIBLE_DEVICES="1")
    assert "in the cache already" in again.stderr
    evicted = json.loads(trims("evict", "--json", "--device", second[:12], str(model)).stdout)
    assert evicted["digests"] == [warmed["digest"]]
    wait_until(lambda: tiers(trims) == ["host"], "it is kept in host memory", interval_s=0.1)
    assert trims("warm", "--device", "cuda:0", str(model)).returncode == Exit.OK
    assert sorted(tiers(trims)) == sorted([first, "host"])
    assert "1 image: 1 on host, 0 on" in trims("status").stdout
    digits = warmed["digest"][:12]
    both = trims("verify", str(model)).stdout
    assert both == f"{digits} sound on host\n{digits} sound on {first}\n"
    assert trims("verify", "--device", "cuda:0", str(model)).stdout == f"{digits} sound\n"
    assert trims("verify", "--all", "--device", "cuda:1").stdout == ""
    assert "evicted 1 image," in trims("evict", "--all", "--tier", "host").stdout
    assert tiers(trims) == [first]
    assert "held 1 image (2.0 MiB)" in trims("stop").stdout


def test_warm_where_device_memory_is_not_shared(on_devices: Trims, model: Path) -> None:
    done = on_devices("warm", "--device", "cuda:0", str(model), TRIMS_DEVICE_BACKEND="off")
    assert done.returncode == Exit.FAILED
    assert "TRIMS_DEVICE_BACKEND=off" in done.stderr


def test_warm_into_a_device_that_is_none(on_devices: Trims, model: Path) -> None:
    done = on_devices("warm", "--device", "cuda:2", str(model))
    assert done.returncode == Exit.FAILED
    assert "no CUDA device 2" in done.stderr
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    done = on_devices("warm", "--device", unknown, str(model))
    assert done.returncode == Exit.FAILED
    assert unknown in done.stderr
