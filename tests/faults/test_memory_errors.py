"""No memory at some point of a load: the framework's own loader runs, and nothing is left open."""

from __future__ import annotations

import pytest
from harness import World

RUNNING_OUT = """
import gc, itertools, logging, sys, torch, safetensors.torch, safetensors.numpy
logging.getLogger('trims_shim').addHandler(logging.NullHandler())
PACKAGE = os.path.dirname(trims_shim.__file__)
OUTERMOST = {'__init__', '_maps_no_more', 'active', 'attempt'}  # or it fails before it has begun
OUTERMOST |= {'_is_plain_call', 'is_assigning', 'load', 'begin', 'end'}
OUTERMOST |= {'_open', 'from_file'}  # below safe_open, which torch built with CUDA has patched

def is_inner(frame):
    files = frame.f_code.co_filename, frame.f_back.f_code.co_filename
    return all(map(PACKAGE.__eq__, (file[:len(PACKAGE)] for file in files)))

def runs_out(work, at):
    "Whether `work` runs out of memory, at the given one of the points at which it could."
    points = itertools.count()
    has_run_out = []
    def run_out(frame, event, argument):
        if event == 'call' and is_inner(frame) and frame.f_code.co_name not in OUTERMOST:
            if next(points) == at:
                has_run_out.append(frame.f_code.co_name)
                raise MemoryError
    try:
        sys.setprofile(run_out)
        loaded = work()
    finally:
        sys.setprofile(None)
    assert loaded.keys() == weights.keys(), has_run_out
    assert all(torch.as_tensor(loaded[each]).equal(weights[each]) for each in weights), has_run_out
    return bool(has_run_out)

def into_module():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(512, 512))  # not filled: that is no load
    module.load_state_dict(source)
    return module.state_dict()

def held():
    "Segments and the like that are open."
    links = []
    for each in os.listdir('/proc/self/fd'):
        try: links.append(os.readlink('/proc/self/fd/' + each))
        except FileNotFoundError: pass  # that of the listing
    return [each for each in links if 'segment' in each or 'pagemap' in each]

weights = {'weight': torch.arange(512 * 512, dtype=torch.float32).view(512, 512)}
"""


@pytest.mark.parametrize(
    ("work", "least"),
    [
        ("torch.load(path + '.pt')", 60),
        ("torch.load(path + '.pt', mmap=True)", 60),
        ("safetensors.torch.load_file(path + '.safetensors')", 15),
        ("safetensors.numpy.load_file(path + '.safetensors')", 15),
        ("into_module()", 30),
    ],
)
def test_a_load_without_memory_is_the_frameworks(running: World, work: str, least: int) -> None:
    turns, left, is_collecting = running.run(
        RUNNING_OUT
        + f"""
path = {running.root!r} + '/model'
torch.save(weights, path + '.pt')
safetensors.torch.save_file(weights, path + '.safetensors')
source = torch.load(path + '.pt')
for turn in itertools.count():
    cache()._images.clear()
    if not runs_out(lambda: {work}, turn):
        break
del source
gc.collect()
say([turn, held(), gc.isenabled()])
""",
        enabled="1",
        min_bytes="1",
    )
    assert turns > least
    assert left == []
    assert is_collecting
    running.assert_account()
