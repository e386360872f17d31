"""How much memory a worker uses, asked from inside.

On a processor, what is shared is what lies in the cache's segments; files that are mapped (program
libraries, prepared ONNX models) belong to the page cache and are not counted. On a GPU all is
counted as the worker's own, as the driver says it.
"""

from __future__ import annotations

import sys

from trims_shim.ensemble.messages import Memory

__all__ = ["memory_used"]

_STATUS = "/proc/self/status"


def memory_used(device: str, *, buffers_bytes: int) -> Memory:
    """The memory of this process on ``device``; the peak is since the last call.

    ``buffers_bytes``: of shared memory that is no weights. A GPU has to be used by nobody else
    meanwhile: what the driver needs there for this process counts, too.
    """
    if device.startswith("cuda") and (torch := sys.modules.get("torch")) is not None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return Memory(0, total_bytes - free_bytes - reserved + peak)
    with open(_STATUS, encoding="ascii", errors="replace") as file:
        rows = [line.split() for line in file]
    figures = {row[0]: int(row[1]) << 10 for row in rows if row[-1] == "kB"}
    own, shared = figures["RssAnon:"], figures["RssShmem:"]
    peak = figures["VmHWM:"] - figures["RssFile:"] - shared
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # forget the peak
    return Memory(max(0, shared - buffers_bytes), max(own, peak))
