"""A signal handler of the program raises in the middle of a load. Promise: whatever was already
received is let go of."""

from __future__ import annotations

from harness import World

from faults.prepared_worlds import model

INTERRUPTING = """
import gc, itertools, sys
from trims_shim.client.cache import cache

class Interrupt(BaseException): pass

def is_interrupted(work, at):
    "Whether `work` is interrupted at the given one of all points at which a handler may run."
    points = itertools.count()
    def interrupt(frame, event, argument):
        # At the start of a function of Python, and after a call of one of C.
        if event in ('call', 'c_return') and next(points) == at:
            raise Interrupt
    try:
        sys.setprofile(interrupt)
        result = work()  # kept: an interrupt of a finalizer is only printed
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False

def load(descriptor, path):
    "As a process that does not have the image yet."
    cache()._images.clear()
    return cache().open(descriptor, name=path, min_bytes=1)

def held():
    "Descriptors of segments."
    links = []
    for each in os.listdir('/proc/self/fd'):
        try: links.append(os.readlink('/proc/self/fd/' + each))
        except FileNotFoundError: pass  # that of the listing
    return [each for each in links if 'segment' in each]

def mapped():
    "Mappings of segments."
    with open('/proc/self/maps') as file:
        return [line.split()[0] for line in file if 'segment' in line]

def interrupt_everywhere(path):
    descriptor = os.open(path, os.O_RDONLY)
    for turn in itertools.count():
        load(descriptor, path)  # over a connection that is there, and has nothing unread
        if not is_interrupted(lambda: load(descriptor, path), turn):
            gc.collect()
            return turn
"""


def test_no_memory_is_lost_by_an_interrupt(running: World) -> None:
    turns, descriptors, mappings = running.run(
        INTERRUPTING
        + f"turns = interrupt_everywhere({running.file()!r})\n"
        + "say([turns, held(), mapped()])\n"
    )
    assert turns > 100
    assert descriptors == []
    assert mappings == []
    running.assert_account()


def test_no_descriptor_is_lost_by_an_interrupt_above_the_streams(running: World) -> None:
    turns, descriptors = running.run(
        INTERRUPTING
        + """
from trims_shim.client.descriptors import above_streams
def enter():
    with above_streams(): pass
before = len(os.listdir('/proc/self/fd'))
for turn in itertools.count():
    if not is_interrupted(enter, turn):
        say([turn, len(os.listdir('/proc/self/fd')) - before])
        break
"""
    )
    assert turns > 10
    assert descriptors == 0


def test_no_lease_of_a_prepared_model_is_lost_by_an_interrupt(prepared_world: World) -> None:
    turns, leases = prepared_world.run(
        INTERRUPTING
        + f"""
from trims_shim.patches.onnxruntime_warm import prepare
path = {model(prepared_world)!r}
prepare(path).release()
for turn in itertools.count():
    if not is_interrupted(lambda: prepare(path), turn):
        break
prepare(path).release()  # with what could not be sent before
say([turn, sum(each.leases for each in cache().request(admin.GetStatusRequest()).prepared)])
"""
    )
    assert turns > 100
    assert leases == 0
