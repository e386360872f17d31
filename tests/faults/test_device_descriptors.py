"""Images of devices hold descriptors too, and more than one each: some are left for clients."""

from __future__ import annotations

import resource

from faults.device_worlds import GPU, MakeWorld, model, tiers, touch


def test_more_images_than_the_daemon_has_descriptors(make_device_world: MakeWorld) -> None:
    """Found: nobody was let in any more, although nobody used the images."""
    world = make_device_world()
    pid = world.start()
    # 24 are its own; on a busy machine connections that were closed count a little longer.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (72, 72))
    for seed in range(1, 30):
        touch(world, model(world, seed, (100_000,)))
    touch(world, model(world, 1, (100_000,)), "host")
    assert world.pid() == pid, world.log()
    found = tiers(world)
    assert len(found["host"]) + 2 * len(found[GPU]) <= 36
