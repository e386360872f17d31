"""Every value comes from where it says, and what is unclear is refused."""

from __future__ import annotations

import ast
import copy
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim import config
from trims_shim.config import SETTINGS, Config, ShareOrSize, load, parse_size
from trims_shim.errors import ConfigError
from trims_shim.memory import limits

GIB = 1 << 30


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "trims").mkdir()
    return tmp_path


def write(home: Path, text: str) -> dict[str, str]:
    (home / "trims" / "trims.toml").write_text(text)
    return {"XDG_CONFIG_HOME": str(home)}


class TestSources:
    def test_defaults(self, home: Path) -> None:
        settings = load({"XDG_CONFIG_HOME": str(home)})
        for each in SETTINGS:
            assert settings.source(each.name) == "default"
            assert settings.text(each.name) == each.default
            assert getattr(settings, each.name) == each.parse(each.default)

    def test_the_order(self, home: Path) -> None:
        environment = write(home, 'min_bytes = "1K"\nhost_bytes = "2K"\nlog = "info"')
        environment |= {"TRIMS_HOST_BYTES": "3K", "TRIMS_LOG": "error"}
        settings = load(environment, log="debug")
        file = str(home / "trims" / "trims.toml")
        assert (settings.min_bytes, settings.source("min_bytes")) == (1 << 10, file)
        assert settings.host_bytes == 3 << 10
        assert settings.source("host_bytes") == "environment TRIMS_HOST_BYTES"
        assert (settings.log, settings.source("log")) == ("debug", "argument")
        assert settings.source("enabled") == "default"

    def test_arguments_of_python(self) -> None:
        settings = load({}, min_bytes=5, strict=True, patches=["torch"])  # type: ignore[arg-type]
        assert (settings.min_bytes, settings.strict, settings.patches) == (5, True, ("torch",))

    def test_an_empty_variable_is_not_set(self, home: Path) -> None:
        environment = write(home, 'log = "info"') | {"TRIMS_LOG": ""}
        assert load(environment).log == "info"

    def test_the_runtime_directory_is_remembered(self) -> None:
        assert load({"XDG_RUNTIME_DIR": "/run/x"}).runtime_dir == "/run/x"
        assert load({"TMPDIR": "/scratch"}).temp_dir == "/scratch"
        assert load({}).runtime_dir == ""

    def test_the_file_is_below_the_home_of_the_same_environment(self, tmp_path: Path) -> None:
        (tmp_path / ".config" / "trims").mkdir(parents=True)
        (tmp_path / ".config" / "trims" / "trims.toml").write_text("min_bytes = 7")
        assert load({"HOME": str(tmp_path)}).min_bytes == 7

    def test_empty_directories_of_the_desktop_are_not_set(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As their specification says; a relative path would be one in the current directory."""
        empty = {"HOME": "/home/x", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
        assert config.config_file(empty) == "/home/x/.config/trims/trims.toml"
        assert load(empty).cache_home == "/home/x/.cache"
        assert load({"HOME": "/home/x", "XDG_CACHE_HOME": "/cache"}).cache_home == "/cache"
        monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", "/home/y"))
        assert load({"HOME": ""}).cache_home == "/home/y/.cache"

    def test_nothing_is_read_or_kept_in_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: a relative base directory was anybody's; its specification has it ignored."""
        (tmp_path / "trims").mkdir()
        (tmp_path / "trims" / "trims.toml").write_text('log_file = "/home/x/.bashrc"')
        monkeypatch.chdir(tmp_path)
        settings = load({"HOME": "/home/x", "XDG_CONFIG_HOME": ".", "XDG_CACHE_HOME": "."})
        assert (settings.log_file, settings.cache_home) == ("", "/home/x/.cache")

    def test_a_user_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        assert load({}).cache_home == "/.cache"
        assert config.config_file({}) == "/.config/trims/trims.toml"

    def test_reserved_variables_are_not_settings(self) -> None:
        load({"TRIMS_TEST_ANYTHING": "1", "TRIMS_BENCH_DIR": "/x", "TRIMS_AUTOSTARTED": "1"})
        load({"TRIMS_BATCHING_DATA": "/x"})
        load({"OTHER_MIN_BYTES": "1", "trims_x": "1"})

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRIMS_MIN_BYTES", "77")
        assert load().min_bytes == 77


class TestUnknown:
    def test_a_variable_with_a_near_match(self) -> None:
        with pytest.raises(ConfigError, match=r"TRIMS_MIN_BITES .*did you mean TRIMS_MIN_BYTES"):
            load({"TRIMS_MIN_BITES": "1"})

    def test_a_variable_without_one(self) -> None:
        with pytest.raises(ConfigError, match=r"TRIMS_QQQQQQ .* `trims info` lists all"):
            load({"TRIMS_QQQQQQ": "1"})

    def test_a_key(self, home: Path) -> None:
        with pytest.raises(ConfigError, match=r"key mim_bytes in .*trims\.toml.*min_bytes"):
            load(write(home, "mim_bytes = 1"))

    def test_a_table(self, home: Path) -> None:
        with pytest.raises(ConfigError, match="key daemon"):
            load(write(home, "[daemon]\nhost_bytes = 1"))

    def test_an_argument(self) -> None:
        with pytest.raises(ConfigError, match="argument colour"):
            load({}, colour="red")

    def test_an_attribute(self) -> None:
        with pytest.raises(AttributeError, match="colour"):
            _ = load({}).colour


class TestFile:
    @pytest.mark.parametrize(
        "content",
        [
            b"min_bytes = ",
            b"= 1",
            b'log = "\xff\xfe"',
            b"x = " + b"[" * 20_000,
            b"log = 'info'\nlog = 'info'",
            b"min_bytes = 0x" + b"f" * 5_000,
        ],
        ids=["no value", "no key", "not UTF-8", "no end", "a key twice", "too many digits"],
    )
    def test_a_broken_file_is_a_config_error(self, home: Path, content: bytes) -> None:
        (home / "trims" / "trims.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"trims\.toml cannot be read"):
            load({"XDG_CONFIG_HOME": str(home)})

    def test_a_byte_order_mark_is_no_part_of_it(self, home: Path) -> None:
        (home / "trims" / "trims.toml").write_bytes(b"\xef\xbb\xbfmin_bytes = 4096\r\n")
        assert load({"XDG_CONFIG_HOME": str(home)}).min_bytes == 4096

    def test_a_directory_in_its_place(self, home: Path) -> None:
        (home / "trims" / "trims.toml").mkdir()
        with pytest.raises(ConfigError, match="cannot be read"):
            load({"XDG_CONFIG_HOME": str(home)})

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may search everywhere")
    def test_the_home_of_another_user_has_none(self, home: Path) -> None:
        (home / "trims" / "trims.toml").write_text("log = 'info'")
        (home / "trims").chmod(0)
        assert load({"XDG_CONFIG_HOME": str(home)}).source("log") == "default"
        (home / "trims").chmod(0o700)

    def test_a_pipe_in_its_place_is_not_waited_for(self, home: Path) -> None:
        os.mkfifo(home / "trims" / "trims.toml")
        with pytest.raises(ConfigError, match=r"trims\.toml cannot be read: it is no regular file"):
            load({"XDG_CONFIG_HOME": str(home)})

    def test_the_null_device_has_no_settings(self, home: Path) -> None:
        """A container's mount that hides the file of the image."""
        (home / "trims" / "trims.toml").symlink_to(os.devnull)
        assert load({"XDG_CONFIG_HOME": str(home)}).source("log") == "default"

    @pytest.mark.parametrize("name", ["socket_dir", "cache_dir", "log_file", "group", "exclude"])
    def test_a_nul_character(self, home: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"key {name} in .*'~a\\x00b' has a NUL character"):
            load(write(home, f'{name} = "~a\\u0000b"'))

    def test_types_of_toml(self, home: Path) -> None:
        settings = load(
            write(home, 'enabled = false\nmin_bytes = 5\nidle_exit = 1.5\npatches = ["torch"]')
        )
        assert settings.enabled is False
        assert settings.min_bytes == 5
        assert settings.idle_exit == 1.5
        assert settings.patches == ("torch",)

    def test_a_group_may_be_a_number(self, home: Path) -> None:
        assert load(write(home, "group = 100")).group == "100"

    @pytest.mark.parametrize(
        "text",
        [
            "enabled = 2",
            "enabled = [true]",
            "min_bytes = {a = 1}",
            "host_bytes = [1]",
            "host_bytes = true",
            "idle_exit = nan",
            "idle_exit = true",
            "socket_dir = {a = 1}",
            "cache_dir = true",
            'log_file = ["/tmp/log"]',
            "group = 1.5",
        ],
    )
    def test_values_out_of_range_and_of_other_types(self, home: Path, text: str) -> None:
        key = text.partition(" ")[0]
        with pytest.raises(ConfigError, match=rf"^key {key} in .*trims\.toml: ['\"]"):
            load(write(home, text))

    def test_a_variable_in_place_of_its_key(self, home: Path) -> None:
        for key in ("host_bytes", "log"):
            with pytest.raises(ConfigError, match=f"did you mean {key}"):
                load(write(home, f"TRIMS_{key.upper()} = '1G'"))


class TestParsers:
    @pytest.mark.parametrize("text", ["1", "true", "YES", "On"])
    def test_true(self, text: str) -> None:
        assert load({"TRIMS_STRICT": text}).strict is True

    @pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
    def test_false(self, text: str) -> None:
        assert load({"TRIMS_STRICT": text}).strict is False

    @pytest.mark.parametrize("text", ["2", "y", "t", "enabled", " 1", "-1", "none"])
    def test_no_boolean(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^TRIMS_STRICT: .*boolean"):
            load({"TRIMS_STRICT": text})

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("512", 512),
            ("64K", 64 << 10),
            ("64kb", 64 << 10),
            ("1.5GiB", 3 * GIB // 2),
            ("2 T", 2 << 40),
            (" 8M ", 8 << 20),
            ("7B", 7),
            ("1e3", 1000),
        ],
    )
    def test_sizes(self, text: str, expected: int) -> None:
        assert parse_size(text) == expected

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "G",
            "-1",
            "1X",
            "1GG",
            "nan",
            "inf",
            "99999999T",
            "%",
            "-1%",
            "101%",
            "nan%",
            "x%",
            "0x10",
        ],
    )
    def test_no_size(self, text: str) -> None:
        with pytest.raises(ConfigError):
            parse_size(text)

    def test_percentages_are_of_the_memory_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "memory_limit_bytes", lambda: 1000)
        assert [parse_size(text) for text in ("0%", "40%", "12.5 %", "100%")] == [0, 400, 125, 1000]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("80%", 800), ("0%", 0), ("12.5 %", 125), ("100%", 1000), ("512", 512), ("2K", 2048)],
    )
    def test_sizes_of_a_device(self, text: str, expected: int) -> None:
        """A share is of what is asked with; a size does not depend on it."""
        settings = load({"TRIMS_DEVICE_BYTES": text, "TRIMS_DEVICE_HEADROOM_BYTES": text})
        assert settings.device_bytes.of(1000) == expected
        assert settings.device_headroom_bytes.of(1000) == expected
        is_share = text.endswith("%")
        assert settings.device_bytes.of(2000) == (2 * expected if is_share else expected)

    def test_the_head_room_of_the_host(self) -> None:
        assert load({}).host_headroom_bytes is None
        assert load({}, host_headroom_bytes=" Auto ").host_headroom_bytes is None
        assert load({}, host_headroom_bytes="2G").host_headroom_bytes.of(1) == 2 << 30
        assert load({}, host_headroom_bytes="5%").host_headroom_bytes.of(1000) == 50

    @pytest.mark.parametrize(
        ("total", "expected"),
        [(1 << 30, (1 << 30) // 10), (5 << 30, (5 << 30) // 10), (80 << 30, 1 << 30)],
    )
    def test_the_head_room_suits_small_devices(self, total: int, expected: int) -> None:
        assert load({}).device_headroom_bytes.of(total) == expected
        assert load({}, device_headroom_bytes="AUTO ").device_headroom_bytes.of(total) == expected
        assert load({}, device_headroom_bytes="2G").device_headroom_bytes.of(total) == 2 << 30

    def test_a_share_of_a_device_is_not_one_of_the_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "memory_limit_bytes", lambda: pytest.fail("looked at RAM"))
        assert load({}, host_bytes="1G", device_bytes="40%").device_bytes.of(10) == 4

    @pytest.mark.parametrize("text", ["", "%", "101%", "-1%", "nan%", "1X", "-1", "99999999T"])
    def test_no_size_of_a_device(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^argument device_bytes: "):
            load({}, device_bytes=text)

    def test_sizes_of_a_device_are_values(self) -> None:
        assert ShareOrSize(size_bytes=5) == ShareOrSize(size_bytes=5)
        assert hash(ShareOrSize(share=0.5)) == hash(ShareOrSize(share=0.5))
        assert ShareOrSize(share=0.0) != ShareOrSize(size_bytes=0)
        assert ShareOrSize(size_bytes=5) != 5

    def test_backends_of_device_memory(self) -> None:
        for name in config.DEVICE_BACKENDS:
            assert load({"TRIMS_DEVICE_BACKEND": name.upper()}).device_backend == name
        with pytest.raises(ConfigError, match="not one of vmm, ipc, off"):
            load({"TRIMS_DEVICE_BACKEND": "1"})

    def test_device_memory_can_be_left_alone(self) -> None:
        assert load({}).device is True
        assert load({"TRIMS_DEVICE": "0"}).device is False

    @pytest.mark.parametrize(("text", "expected"), [("0", 0.0), ("1.5", 1.5), ("1e3", 1000.0)])
    def test_seconds(self, text: str, expected: float) -> None:
        assert load({"TRIMS_IDLE_EXIT": text}).idle_exit == expected

    def test_images_that_are_kept_for_ever(self) -> None:
        assert load({}).keep_unused == load({}, keep_unused="Forever").keep_unused == float("inf")
        assert load({}, keep_unused="0").keep_unused == 0

    @pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e9", "soon", "5s", "forever"])
    def test_no_seconds(self, text: str) -> None:
        with pytest.raises(ConfigError, match="TRIMS_IDLE_EXIT"):
            load({"TRIMS_IDLE_EXIT": text})

    @pytest.mark.parametrize("text", ["-1", "1025", "1.0", "", " 1", "²", "9" * 5000])
    def test_no_count(self, text: str) -> None:
        with pytest.raises(ConfigError):
            load({}, ingest_threads=text)

    def test_counts(self) -> None:
        assert load({}, ingest_threads="1024").ingest_threads == 1024

    def test_choices(self) -> None:
        assert load({"TRIMS_MEMORY_KIND": "MEMFD"}).memory_kind == "memfd"
        with pytest.raises(ConfigError, match="not one of auto, memfd-huge"):
            load({"TRIMS_MEMORY_KIND": "hugetlb"})

    def test_every_kind_of_memory_can_be_chosen(self) -> None:
        from trims_shim.specs import SegmentKind

        assert {"auto", *(kind.value for kind in SegmentKind)} == set(config.MEMORY_KINDS)

    def test_subsets(self) -> None:
        assert load({"TRIMS_PATCHES": " torch , safetensors,"}).patches == ("torch", "safetensors")
        assert load({}, patches="").patches == ()
        with pytest.raises(ConfigError, match="'jax' is not one of torch, safetensors"):
            load({"TRIMS_PATCHES": "torch,jax"})

    def test_patterns_of_paths(self, home: Path) -> None:
        assert load({}).exclude == ()
        found = load({"TRIMS_EXCLUDE": "/data/*: *.ckpt:~/x:"}).exclude
        assert found == ("/data/*", "*.ckpt", os.path.expanduser("~/x"))
        assert load({"TRIMS_EXCLUDE": "?data/*:[/]data/*"}).exclude == ("?data/*", "[/]data/*")
        listed = load(write(home, 'exclude = ["/a/*", "*.bin"]'))
        assert listed.exclude == ("/a/*", "*.bin")

    def test_patterns_with_colons(self, home: Path) -> None:
        """A list in the file needs no separator."""
        listed = load(write(home, 'exclude = ["/a:b", "/c:d/*", "*.bin"]'))
        assert listed.exclude == ("/a:b", "/c:d/*", "*.bin")
        shown = listed.text("exclude")
        assert load({"TRIMS_EXCLUDE": shown}).exclude == listed.exclude

    @pytest.mark.parametrize("text", ["model.pt", "/a:b/*", "./x"])
    def test_no_patterns_of_absolute_paths(self, text: str) -> None:
        with pytest.raises(ConfigError, match="begin it with / or"):
            load({"TRIMS_EXCLUDE": text})

    @given(st.sampled_from([each.name for each in SETTINGS]), st.text(max_size=12))
    def test_any_text_is_a_value_or_a_config_error(self, name: str, text: str) -> None:
        try:
            settings = load({"HOME": "/nowhere"}, **{name: text})
        except ConfigError as error:
            refusal = str(error)
        else:
            assert settings.text(name) == text
            return
        assert refusal.startswith(f"argument {name}: ")


class TestConfig:
    def test_the_hash_is_of_what_the_daemon_reads(self) -> None:
        before = load({}).daemon_hash()
        for each in SETTINGS:
            changed = {
                "group": "x",
                "exclude": "/x",
                "eviction": "fifo",
                "memory_kind": "memfd",
                "device_backend": "ipc",
                "device_access": "private",
                "ort_prepack": "off",
                "prepare_priority": "normal",
            }.get(each.name, "1")
            texts = {each.name: changed} if each.default != changed else {each.name: "0"}
            if each.name in ("patches", "log"):
                texts = {each.name: "torch" if each.name == "patches" else "error"}
            differs = Config(texts, {}).daemon_hash() != before
            assert differs is each.is_daemons, each.name

    def test_they_are_what_its_code_reads(self) -> None:
        daemon = Path(config.PACKAGE_DIRECTORY, "daemon")
        read = {
            node.attr
            for path in daemon.rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "settings")
        }
        assert read & {each.name for each in SETTINGS} == {
            each.name for each in SETTINGS if each.is_daemons
        }

    def test_a_group_that_is_not_utf8(self) -> None:
        assert load({"TRIMS_GROUP": "\udcff"}).daemon_hash()

    def test_copies(self) -> None:
        settings = load({"XDG_RUNTIME_DIR": "/r"}, min_bytes="5")
        assert copy.copy(settings).min_bytes == 5
        with pytest.raises(AttributeError):
            _ = Config.__new__(Config).min_bytes

    def test_settings_describe_themselves(self) -> None:
        names = [each.name for each in SETTINGS]
        assert len(set(names)) == len(names)
        assert all(each.help and not each.help.endswith(".") for each in SETTINGS)
        assert SETTINGS[0].variable == "TRIMS_ENABLED"
