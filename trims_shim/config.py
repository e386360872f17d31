"""Settings: the one place that reads the environment and the configuration file.

Order, strongest first: argument, environment (``TRIMS_*``), file, default; every value remembers
its source. An unknown ``TRIMS_*`` variable, an unknown key in the file, an unclear boolean or a
value out of range is a ConfigError. Kept free of heavy imports: ``import trims_shim`` pays for it.
"""

from __future__ import annotations

import os
import sys
import zlib

from trims_shim.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, BinaryIO

__all__ = [
    "PACKAGE_DIRECTORY",
    "SETTINGS",
    "Config",
    "Setting",
    "ShareOrSize",
    "config_file",
    "current",
    "is_setting",
    "load",
    "load_toml",
    "load_usable",
    "parse_size",
    "platform_problem",
]

PATCHABLE_LIBRARIES = ("torch", "safetensors", "onnxruntime")
MEMORY_KINDS = ("auto", "memfd-huge", "tmpfs-huge", "tmpfs-huge-userns", "memfd")
EVICTIONS = ("lrfu", "lru", "lfu", "gdsf", "fifo", "never")
DEVICE_BACKENDS = ("vmm", "ipc", "off")
DEVICE_ACCESSES = ("shared", "private")
ORT_PREPACKS = ("share", "off")
PREPARE_PRIORITIES = ("low", "normal")
LOG_LEVELS = ("debug", "info", "warning", "error")
platform_problem = (
    "" if sys.platform == "linux" else f"the cache needs Linux, and this is {sys.platform!r}"
)
"""Why there is no cache on this system; empty if there is. Batching needs no cache."""
PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
"""The directory of this package; processes that it starts get it as part of their search path."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
# Not settings: read by the test suite, the benchmarks and the process that is being started.
_RESERVED = ("TRIMS_BATCHING_DATA", "TRIMS_BENCH_DIR", "TRIMS_TEST_", "TRIMS_AUTOSTARTED")


class Setting:
    """One setting: its variable is ``TRIMS_<NAME>``, its key in the file is ``name``."""

    __slots__ = ("default", "help", "is_daemons", "name", "parse")

    def __init__(
        self,
        name: str,
        default: str,
        parse: Callable[[str], Any],
        help: str,
        *,
        is_daemons: bool = False,
    ) -> None:
        self.name = name
        self.default = default
        self.parse = parse
        self.help = help
        self.is_daemons = is_daemons

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return _variable(self.name)


def _variable(name: str) -> str:
    return "TRIMS_" + name.upper()


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"{text!r} is not a boolean; use 1 or 0")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ConfigError(f"{text!r} is not one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _subset(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in names:
            if name not in allowed:
                raise ConfigError(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def _path_patterns(text: str) -> tuple[str, ...]:
    # NUL is in no text that is parsed; see Config.
    parts = (part.replace("\0", ":").strip() for part in text.replace(r"\:", "\0").split(":"))
    patterns = tuple(os.path.expanduser(part) for part in parts if part)
    for pattern in patterns:
        if pattern[0] not in "/*?[":
            raise ConfigError(f"{pattern!r} matches no absolute path; begin it with / or *")
    return patterns


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < 1e9:
        raise ConfigError(f"{text!r} seconds is out of range")
    return value


def _seconds_or_forever(text: str) -> float:
    return float("inf") if text.lower() == "forever" else _seconds(text)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 4 or int(text) > 1024:
        raise ConfigError(f"{text!r} is not a number from 0 to 1024")
    return int(text)


def parse_size(text: str) -> int:
    """Return the bytes in ``512``, ``64K``, ``1.5GiB`` or ``40%`` (of this process's memory)."""
    body = text.strip().upper()
    if body.endswith("%"):
        from trims_shim.memory.limits import memory_limit_bytes

        return int(memory_limit_bytes() * _share(body[:-1], text))
    for suffix in ("IB", "B"):
        if body.endswith(suffix):
            body = body[: -len(suffix)]
            break
    unit = body[-1:] if body[-1:] in _UNITS and not body[-1:].isdigit() else ""
    number = body[: len(body) - len(unit)]
    try:
        size = float(number)
    except ValueError:
        raise ConfigError(f"{text!r} is not a size; write for example 512M, 8GiB or 40%") from None
    if not 0 <= size * _UNITS[unit] < 1 << 62:
        raise ConfigError(f"{text!r} is out of range")
    return int(size * _UNITS[unit])


class ShareOrSize:
    """A size, or a share of a total that only the daemon knows, such as a device's memory."""

    __slots__ = ("share", "size_bytes")

    def __init__(self, *, size_bytes: int | None = None, share: float | None = None) -> None:
        """Give one of them, or both: then the smaller one counts."""
        self.size_bytes = size_bytes
        self.share = share

    def of(self, total_bytes: int) -> int:
        """Return the bytes; a share is of ``total_bytes``."""
        sizes = [] if self.size_bytes is None else [self.size_bytes]
        if self.share is not None:
            sizes.append(int(total_bytes * self.share))
        return min(sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShareOrSize):
            return NotImplemented
        return (self.size_bytes, self.share) == (other.size_bytes, other.share)

    def __hash__(self) -> int:
        return hash((self.size_bytes, self.share))


def _host_headroom(text: str) -> ShareOrSize | None:
    return None if text.strip().lower() == "auto" else _share_or_size(text)


def _device_headroom(text: str) -> ShareOrSize:
    if text.strip().lower() == "auto":
        # 1 GiB for a context, cuBLAS' workspaces and some activations. On a small device or MIG's
        # smallest instances that would leave nothing to share, hence 10%.
        return ShareOrSize(size_bytes=1 << 30, share=0.10)
    return _share_or_size(text)


def _share_or_size(text: str) -> ShareOrSize:
    body = text.strip()
    if body.endswith("%"):
        return ShareOrSize(share=_share(body[:-1], text))
    return ShareOrSize(size_bytes=parse_size(text))


def _share(number: str, text: str) -> float:
    try:
        percent = float(number)
    except ValueError:
        raise ConfigError(f"{text!r} is not a percentage") from None
    if not 0 <= percent <= 100:
        raise ConfigError(f"{text!r} is not between 0% and 100%")
    return percent / 100


SETTINGS = (
    Setting("enabled", "1", _boolean, "patch the libraries of this process"),
    Setting(
        "patches",
        ",".join(PATCHABLE_LIBRARIES),
        _subset(*PATCHABLE_LIBRARIES),
        "libraries to patch, separated by commas (torch also reads safetensors files into torch; "
        "safetensors also serves torch.load(mmap=True))",
    ),
    Setting(
        "elide_copies",
        "1",
        _boolean,
        "let load_state_dict take shared weights over instead of copying them",
    ),
    Setting(
        "min_bytes",
        "1M",
        parse_size,
        "smaller files (ONNX models: four times that) go to the framework's own loader",
    ),
    Setting(
        "exclude",
        "",
        _path_patterns,
        "files that go to the framework's own loader: patterns of absolute paths, as the shell's, "
        r"separated by colons (\: is one of a name); * matches / as well",
    ),
    Setting(
        "device",
        "1",
        _boolean,
        "serve loads to a CUDA device from shared device memory",
    ),
    Setting(
        "device_access",
        "shared",
        _choice(*DEVICE_ACCESSES),
        "what loads to a device get: shared (read-only) memory, or private copies of it",
    ),
    Setting(
        "ort_prepack",
        "share",
        _choice(*ORT_PREPACKS),
        "weights that onnxruntime packs: share them, or off (quicker to create, slower to run)",
    ),
    Setting(
        "ort_cuda",
        "0",
        _boolean,
        "serve onnxruntime's CUDA provider from shared device memory (see docs/onnxruntime.md)",
    ),
    Setting("strict", "0", _boolean, "raise when the cache fails instead of falling back (tests)"),
    Setting("autostart", "1", _boolean, "start the daemon when none runs"),
    Setting("socket_dir", "", str, "directory of the sockets; empty: see docs/daemon.md"),
    Setting("start_timeout", "10", _seconds, "seconds to wait for a starting daemon"),
    Setting("stall_timeout", "10", _seconds, "seconds without a sign of life before falling back"),
    Setting(
        "log",
        "warning",
        _choice(*LOG_LEVELS),
        "level of the logger trims_shim: debug, info, warning or error",
    ),
    Setting("log_file", "", str, "file that the log is appended to; empty: logging's own set-up"),
    Setting(
        "remote_bytes",
        "25%",
        _share_or_size,
        "byte budget of copies of remote models (%: of the file system they are on)",
    ),
    Setting(
        "host_bytes", "50%", parse_size, "byte budget of the host tier (of RAM)", is_daemons=True
    ),
    Setting(
        "host_headroom_bytes",
        "auto",
        _host_headroom,
        "memory that loads leave to programs (%: of RAM); auto: a part in 32, and as much again as "
        "the model takes, should a program write all its weights",
        is_daemons=True,
    ),
    Setting(
        "eviction",
        "lrfu",
        _choice(*EVICTIONS),
        "which unused image goes first when room is needed (docs/daemon.md); or never",
        is_daemons=True,
    ),
    Setting(
        "keep_unused",
        "forever",
        _seconds_or_forever,
        "seconds after which an image that nobody uses goes in any case; 0: at once",
        is_daemons=True,
    ),
    Setting(
        "memory_kind",
        "auto",
        _choice(*MEMORY_KINDS),
        "memory of host segments (kinds: docs/daemon.md); auto takes the best that works",
        is_daemons=True,
    ),
    Setting(
        "idle_exit",
        "600",
        _seconds,
        "seconds without a lease or request after which the daemon exits; 0: never",
        is_daemons=True,
    ),
    Setting(
        "ingest_threads",
        "0",
        _count,
        "threads that read one model file; 0: by the number of cores",
        is_daemons=True,
    ),
    Setting(
        "device_backend",
        "vmm",
        _choice(*DEVICE_BACKENDS),
        "how device memory is shared: vmm (read-only), ipc (legacy, see docs/gpu.md) or off",
        is_daemons=True,
    ),
    Setting(
        "device_bytes",
        "80%",
        _share_or_size,
        "byte budget of each device tier (%: of the most that others have left to it)",
        is_daemons=True,
    ),
    Setting(
        "device_headroom_bytes",
        "auto",
        _device_headroom,
        "device memory left to activations and other programs (%: of the device); auto: 1GiB, or "
        "10% of a device below 10GiB",
        is_daemons=True,
    ),
    Setting(
        "device_peers",
        "1",
        _boolean,
        "copy images from one device to another where the driver allows it",
        is_daemons=True,
    ),
    Setting(
        "uploader_idle",
        "30",
        _seconds,
        "seconds without an upload after which a device's uploader gives its context up",
        is_daemons=True,
    ),
    Setting(
        "cache_dir",
        "",
        str,
        "directory of prepared ONNX models, latency profiles and copies of remote models; empty: "
        "trims in the user's cache directory",
        is_daemons=True,
    ),
    Setting(
        "prepared_bytes",
        "10%",
        _share_or_size,
        "byte budget of prepared ONNX models (%: of the file system they are on)",
        is_daemons=True,
    ),
    Setting(
        "prepare_timeout",
        "900",
        _seconds,
        "seconds after which the preparation of an ONNX model is given up",
        is_daemons=True,
    ),
    Setting(
        "prepare_anyway_bytes",
        "20M",
        parse_size,
        "ONNX models with so many bytes of weights are prepared even if that makes nothing quicker",
        is_daemons=True,
    ),
    Setting(
        "prepare_priority",
        "low",
        _choice(*PREPARE_PRIORITIES),
        "share of the processor for preparing ONNX models: low (a tenth of others') or normal",
        is_daemons=True,
    ),
    Setting(
        "group",
        "",
        str,
        "group (name or number) that may use a machine-wide daemon; empty: this user only",
        is_daemons=True,
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class Config:
    """Values of all settings with their sources; read-only. ``config.min_bytes``, and so on."""

    __slots__ = ("_sources", "_texts", "_values", "cache_home", "runtime_dir", "temp_dir")

    def __init__(
        self,
        texts: Mapping[str, str],
        sources: Mapping[str, str],
        *,
        runtime_dir: str = "",
        temp_dir: str = "",
        cache_home: str = "",
    ) -> None:
        """Parse ``texts`` (by setting name); missing settings have their defaults.

        ``runtime_dir`` is ``$XDG_RUNTIME_DIR``, where sockets belong; ``temp_dir`` is ``$TMPDIR``;
        ``cache_home`` is the user's cache directory.
        """
        self.runtime_dir = runtime_dir
        self.temp_dir = temp_dir
        self.cache_home = cache_home
        self._texts = dict(texts)
        self._sources = dict(sources)
        self._values: dict[str, Any] = {}
        for name, text in texts.items():
            setting = _BY_NAME[name]
            try:
                if "\0" in text:  # the system calls take no such path or name
                    raise ConfigError(f"{text!r} has a NUL character")
                self._values[name] = setting.parse(text)
            except ConfigError as error:
                raise ConfigError(f"{self._place(setting)}: {error}; see `trims info`") from None

    def __getattr__(self, name: str) -> Any:
        # Names with an underscore are slots not set yet (copy, pickle), never settings.
        if name.startswith("_") or name not in _BY_NAME:
            raise AttributeError(name)
        # Defaults are parsed on demand: some inspect the machine, and a load needs few.
        if name not in self._values:
            self._values[name] = _BY_NAME[name].parse(_BY_NAME[name].default)
        return self._values[name]

    def _place(self, setting: Setting) -> str:
        """Where a value is to be mended."""
        source = self.source(setting.name)
        if source == "argument":
            return f"argument {setting.name}"
        is_of_file = os.sep in source
        return f"key {setting.name} in {source}" if is_of_file else setting.variable

    def source(self, name: str) -> str:
        """Return the source of a setting's value."""
        return self._sources.get(name, "default")

    def text(self, name: str) -> str:
        """Return the value of a setting as written."""
        return self._texts.get(name, _BY_NAME[name].default)

    def daemon_hash(self) -> str:
        """Return a hash of the settings that are read only when a daemon starts."""
        parts = [f"{each.name}={self.text(each.name)}" for each in SETTINGS if each.is_daemons]
        return f"{zlib.crc32(os.fsencode(';'.join(parts))):08x}"


def config_file(environment: Mapping[str, str]) -> str:
    """Return the path of this user's configuration file (it need not exist)."""
    return os.path.join(_base(environment, "XDG_CONFIG_HOME", ".config"), "trims", "trims.toml")


def _base(environment: Mapping[str, str], variable: str, default: str) -> str:
    """A base directory. By its specification, a relative one is ignored: it would be anybody's,
    and another one in the daemon."""
    base = environment.get(variable, "")
    return base if os.path.isabs(base) else os.path.join(_home(environment), default)


def _home(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME") or os.path.expanduser("~")
    # A user without a passwd entry has no home; "~" would be a directory in the current one.
    return os.sep if home == "~" else home


def is_setting(variable: str) -> bool:
    """Whether an environment variable is read as a setting, known or unknown."""
    return variable.startswith("TRIMS_") and not variable.startswith(_RESERVED)


_current: Config | None = None


def current() -> Config:
    """Return the settings of this process, read once; raises ConfigError as :func:`load`.

    Variables that a program sets later are for its children; unusable ones make no load fail.
    """
    global _current
    if _current is None:
        _current = load()
    return _current


def load(environment: Mapping[str, str] | None = None, **arguments: str) -> Config:
    """Return the settings in an environment, by default the current one of this process.

    Raises ConfigError, naming the variable or key.
    """
    env = os.environ if environment is None else environment
    texts: dict[str, str] = {}
    sources: dict[str, str] = {}
    path = config_file(env)
    for name, text in _read_file(path).items():
        texts[name], sources[name] = text, path
    for variable, text in env.items():
        if not is_setting(variable):
            continue
        name = variable[len("TRIMS_") :].lower()
        _check_known(name, f"environment variable {variable}")
        if text:
            texts[name], sources[name] = text, f"environment {variable}"
    for name, text in arguments.items():
        _check_known(name, f"argument {name}")
        texts[name], sources[name] = _as_text(name, text), "argument"
    return Config(
        texts,
        sources,
        runtime_dir=env.get("XDG_RUNTIME_DIR", ""),
        temp_dir=env.get("TMPDIR", ""),
        cache_home=_base(env, "XDG_CACHE_HOME", ".cache"),
    )


def load_usable(environment: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """Return the usable settings, and the problems of the others; for diagnosis."""
    env = os.environ if environment is None else environment
    usable = {name: text for name, text in env.items() if not is_setting(name)}
    problems = []
    try:
        load(usable)
    except ConfigError as error:
        problems.append(str(error))
        usable["XDG_CONFIG_HOME"] = os.devnull
    for variable in sorted(set(env) - set(usable)):
        try:
            load({**usable, variable: env[variable]})
        except ConfigError as error:
            problems.append(str(error))
        else:
            usable[variable] = env[variable]
    return load(usable), problems


def _read_file(path: str) -> dict[str, str]:
    # Nor if its directory may not be searched: after `su`, HOME may still be that of another user.
    if not os.path.exists(path):
        return {}
    try:
        # A pipe is opened when somebody writes to it, and some devices have no end.
        if not (os.path.isfile(path) or os.path.samefile(path, os.devnull)):
            raise OSError("it is no regular file")
        with open(path, "rb") as file:
            table = load_toml(file)
        for name, value in table.items():
            place = f"key {name} in {path}"
            _check_known(name, place)
            # Any text is a path or a name, that of a table too; a group may be a number.
            if _BY_NAME[name].parse is str and type(value) not in (str, int):
                raise ConfigError(f"{place}: {str(value)!r} is not text; see `trims info`")
        return {name: _as_text(name, value) for name, value in table.items()}
    # ValueError: TOMLDecodeError, UnicodeDecodeError, and integers of more digits than Python
    # converts; RecursionError: brackets without end.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def load_toml(file: BinaryIO) -> dict[str, Any]:
    """The table of a TOML file. Raises ValueError, and RecursionError for brackets without end.

    A byte order mark, as some editors write one, is ignored as TOML 1.1 has it.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(file.read().decode("utf-8-sig"))
    return table


def _as_text(name: str, value: object) -> str:
    """As in the environment; what is of another type than the setting becomes no value of it."""
    if isinstance(value, bool) and _BY_NAME[name].parse is _boolean:
        return "1" if value else "0"
    if isinstance(value, list) and name == "patches":
        return ",".join(map(str, value))
    if isinstance(value, list) and name == "exclude":
        return ":".join(str(item).replace(":", r"\:") for item in value)
    return str(value)


def _check_known(name: str, what: str) -> None:
    if name in _BY_NAME:
        return
    from trims_shim.suggestions import did_you_mean

    spell = _variable if what.startswith("environment") else str
    near = did_you_mean(name.lower().removeprefix("trims_"), _BY_NAME, spell=spell)
    hint = near or "; `trims info` lists all settings"
    raise ConfigError(f"{what} is not a setting of trims_shim{hint}")
