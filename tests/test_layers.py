"""Imports point from right to left, and what is called pure is pure."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trims_shim

ROOT = Path(trims_shim.__file__).parent

# From left to right; a module may import from its own layer and those before it. The longest
# prefix that fits a module's name decides.
LAYERS = (
    (
        "_version",
        "errors",
        "checks",
        "specs",
        "config",
        "directories",
        "memory.limits",
        "naming",
        "outcomes",
        "printable",
        "replacing",
        "stack",
        "suggestions",
    ),
    ("children", "late_imports"),
    (
        "diagnostics",
        "wire.messages",
        "wire.admin",
        "wire.duties",
        "wire.codec",
        "formats",
        "daemon.store",
        "daemon.values",
        "daemon.eviction",
        "daemon.leases",
        "daemon.recent",
        "daemon.workers",
    ),
    ("daemon.prepared.values", "daemon.prepared.refusals"),
    ("daemon.prepared.store", "daemon.prepared.manifest"),
    ("batching.buckets", "batching.protocol", "batching.profiles.profile"),
    ("batching.ordering",),
    ("batching.rules",),
    ("batching.single", "batching.policies", "batching.simulator"),
    ("batching.staged.mechanism", "batching.staged.profiles.stage_profile"),
    ("batching.staged.profiles.diversity", "batching.staged.staged_rules"),
    ("batching.staged.policies",),
    ("batching.staged.scheduler",),
    ("planner", "ensemble.dispatch"),
    ("ensemble.allocation",),
    ("ensemble.estimate",),
    ("ensemble.search",),
    ("cluster.fleet",),
    ("cluster.routing",),
    ("memory", "wire.endpoint", "wire.frames", "wire.handover", "daemon.ingest", "client.session"),
    ("client.descriptors", "client.threads"),
    ("client.addresses", "client.arenas", "client.connection", "client.reaper", "client.spawn"),
    ("client.pool", "client.prepared"),
    ("client.device_arenas", "client.write_check"),
    ("daemon.clock", "daemon.descriptors", "daemon.logs", "daemon.offers"),
    ("daemon.connections",),
    ("daemon.background", "daemon.file_systems"),
    ("daemon.control", "daemon.sessions", "daemon.loader"),
    ("daemon.prepared.directory", "daemon.prepared.externals"),
    ("remote",),
    ("daemon.front",),
    ("daemon.waiting",),
    ("daemon.prepared.key", "daemon.prepared.files", "daemon.prepared.clients"),
    ("daemon.device.uploader", "daemon.device.uploading", "daemon.device.peer_copying"),
    ("daemon.device.account", "daemon.device.loader", "daemon.tiers"),
    ("daemon.preparer.installation", "daemon.preparer.recipes"),
    (
        "daemon.prepared.interpreters",
        "daemon.preparer.fingerprints",
        "daemon.preparer.probe_inputs",
    ),
    ("daemon.preparer.probing", "daemon.preparer.optimising"),
    ("daemon.preparer.model_files", "daemon.preparer.verifying", "daemon.preparer.cuda"),
    ("daemon.preparer.main", "daemon.prepared.preparing"),
    ("client.cache", "daemon.openings"),
    ("client.listing",),
    ("daemon.prepared.jobs",),
    ("daemon.events", "daemon.prepared.serving", "daemon.requests", "daemon.server"),
    ("daemon.main", "daemon.detached"),
    ("batching.collating", "batching.profiles", "batching.statistics", "batching.torch_settings"),
    ("batching.drivers",),
    ("batching.arguments",),
    (
        "batching.staged.activations",
        "batching.staged.comparing",
        "batching.staged.stage_statistics",
    ),
    ("batching.staged.flow", "batching.staged.whole"),
    ("batching.staged.model",),
    ("batching.staged.profiles",),
    ("batching.staged.drivers",),
    ("batching.staged.decoding", "batching.staged.slicing"),
    ("batching",),
    ("ensemble.channel", "ensemble.messages"),
    ("ensemble.buffers", "ensemble.combine", "ensemble.devices", "ensemble.footprint"),
    ("ensemble.payloads", "ensemble.problem_file"),
    ("ensemble.hosting", "ensemble.worker"),
    ("ensemble.crew",),
    ("ensemble.system",),
    ("ensemble.ensemble",),
    ("ensemble.measuring",),
    ("ensemble",),
    ("plan_files", "cluster.actor"),
    ("cluster",),
    ("patches",),
    ("batching.staged.slicing.onnx_slicing",),
    ("handles",),
    ("inspection", "api", "_activate"),
    ("", "cli", "__main__", "_bootstrap"),
    ("testing",),
)
# Known exceptions, each with its reason.
ALLOWED = {
    # The border of an import hook counts what went wrong; only when it does.
    ("_activate", "patches"),
}
PURE = (
    "specs",
    "batching.buckets",
    "batching.protocol",
    "batching.profiles.profile",
    "batching.ordering",
    "batching.rules",
    "batching.single",
    "batching.policies",
    "batching.simulator",
    "batching.staged.profiles.stage_profile",
    "batching.staged.profiles.diversity",
    "batching.staged.mechanism",
    "batching.staged.staged_rules",
    "batching.staged.policies",
    "batching.staged.scheduler",
    "errors",
    "printable",
    "suggestions",
    "wire.messages",
    "wire.admin",
    "wire.duties",
    "wire.codec",
    "formats",
    "daemon.store",
    "daemon.eviction",
    "daemon.leases",
    "daemon.recent",
    "daemon.prepared.values",
    "daemon.prepared.refusals",
    "daemon.prepared.store",
    "daemon.prepared.manifest",
    "client.session",
    "ensemble.allocation",
    "ensemble.dispatch",
    "ensemble.estimate",
    "ensemble.search",
    "planner",
    "remote.listing",
    "cluster.fleet",
    "cluster.routing",
)
IMPURE_MODULES = {
    "asyncio", "ctypes", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "queue", "random", "resource", "secrets", "select", "selectors", "signal", "socket",
    "subprocess", "tempfile", "threading", "time", "_thread",
}  # fmt: skip
HEAVY_MODULES = {
    "blake3", "cuda", "cupy", "fsspec", "highspy", "msgpack", "numpy", "onnxruntime", "ray",
    "rich",
    "safetensors", "torch", "transformers", "zmq",
}  # fmt: skip
# Where a heavy module is what the file is about; it is imported when that library is there.
MAY_IMPORT_HEAVY = {
    "wire.codec": {"msgpack"},
    "daemon.connections": {"zmq"},
    "daemon.control": {"zmq"},
    "daemon.events": {"zmq"},
    "daemon.server": {"zmq"},
    "daemon.ingest": {"blake3"},
    "daemon.prepared.files": {"blake3"},
    "daemon.prepared.key": {"blake3"},
    "ensemble.search": {"random"},  # a generator of a fixed seed
    "memory.copying": {"blake3"},
    "planner.programme": {"highspy", "os", "threading"},  # forks, Ctrl-C
}
MAY_PRINT = ("cli", "__main__", "_bootstrap")
MAY_READ_ENVIRONMENT = {
    "config": "the one place that reads it",
    "children": "hands it on to a child",
    "client.spawn": "hands it on to the daemon",
    "daemon.detached": "does not look through its starter's CUDA_VISIBLE_DEVICES",
    "daemon.logs": "asks whether it writes to the journal",
    "daemon.main": "tells the service manager, if one has started it",
    "daemon.prepared.preparing": "hands it on to the preparer",
    "daemon.device.uploading": "hands it on to the uploader",
    "ensemble.hosting": "hands it on to workers, with a number of threads",
    "inspection": "says where the configuration file is",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The trees of all modules; not at import, which every process of the suite does."""
    return {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def matches(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".") or prefix == ""


def layer_of(name: str) -> int:
    fitting = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if matches(name, prefix) and (prefix or name == "")
    ]
    assert fitting, f"{name} has no layer; add it to LAYERS"
    return max(fitting)[1]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """Absolute names of modules and members that are imported at run time."""
    for child in ast.iter_child_nodes(node):
        if is_for_types(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        if isinstance(child, ast.Import):
            yield from (each.name for each in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{each.name}" for each in child.names)
        yield from imports(child, inside_functions=inside_functions)


def ours(name: str) -> str | None:
    """The module of this package that is meant by an imported name."""
    if name.split(".")[0] != "trims_shim":
        return None
    inner = name.partition(".")[2]
    while inner not in sources():
        inner = inner.rpartition(".")[0]
    return inner


def test_imports_point_left() -> None:
    wrong = [
        f"{name} imports {target}, which is right of it"
        for name, tree in sources().items()
        for target in map(ours, imports(tree, inside_functions=True))
        # "trims_shim" itself is imported by everything that is inside it, and has the version.
        if target and (name, target) not in ALLOWED and layer_of(target) > layer_of(name)
    ]
    assert wrong == []


def test_pure_modules_have_no_way_out() -> None:
    pure = {
        name: tree for name, tree in sources().items() if any(matches(name, each) for each in PURE)
    }
    wrong = []
    for name, tree in pure.items():
        found = {each.split(".")[0] for each in imports(tree, inside_functions=True)}
        # The type of a stat result.
        allowed = {"os"} if name == "specs" else MAY_IMPORT_HEAVY.get(name, set())
        calls = {
            ast.unparse(each.func)
            for each in ast.walk(tree)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        }
        out = (found & (IMPURE_MODULES | HEAVY_MODULES)) - allowed
        out |= calls & {"open", "input", "__import__", "exec", "eval", "print"}
        wrong += [f"{name} uses {each}" for each in sorted(out)]
    assert wrong == []
    used = {
        ast.unparse(each) for each in ast.walk(pure["specs"]) if isinstance(each, ast.Attribute)
    }
    assert {each for each in used if each.startswith("os.")} == {"os.stat_result"}


def test_heavy_modules_are_imported_where_they_are_needed() -> None:
    """At the top of a file only in the patches of that library and behind the command line."""
    wrong = []
    for name, tree in sources().items():
        library = name.rpartition(".")[2].split("_")[0] if name.startswith("patches.") else ""
        allowed = MAY_IMPORT_HEAVY.get(name, set()) | {library}
        if name.startswith("patches."):
            allowed |= {"numpy", "torch", "safetensors"}  # they wait for the library's own import
        if name.startswith("cli."):
            allowed |= {"rich"}
        found = {each.split(".")[0] for each in imports(tree, inside_functions=False)}
        wrong += [f"{name} imports {each}" for each in sorted((found & HEAVY_MODULES) - allowed)]
    assert wrong == []


def test_only_config_reads_the_environment() -> None:
    words = {"environ", "environb", "getenv", "getenvb", "putenv"}
    wrong = []
    for name, tree in sources().items():
        if name in MAY_READ_ENVIRONMENT or name.startswith(("cli", "_bootstrap")):
            continue
        used = {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
        used |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        wrong += [f"{name} uses {each}" for each in sorted(used & words)]
    assert wrong == []


def test_nobody_prints_but_the_command_line() -> None:
    wrong = []
    for name, tree in sources().items():
        if any(matches(name, each) for each in MAY_PRINT):
            continue
        for each in ast.walk(tree):
            is_print = isinstance(each, ast.Name) and each.id == "print"
            is_stream = isinstance(each, ast.Attribute) and each.attr in ("stdout", "stderr")
            if is_print or (is_stream and ast.unparse(each).startswith("sys.")):
                wrong.append(f"{name}:{each.lineno} uses {ast.unparse(each)}")
    assert wrong == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = sorted(HEAVY_MODULES | {"logging", "asyncio", "ssl", "dataclasses"})
    code = (
        "import sys; before = set(sys.modules); import trims_shim\n"
        f"print(*sorted({{m.split('.')[0] for m in set(sys.modules) - before}} & set({heavy!r})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.split() == []
