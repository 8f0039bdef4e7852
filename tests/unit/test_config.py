"""The configuration: what is read, and that each mistake gives one error with path, value and mend."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.config import KVTierConfig, load_config
from kvtier.config_files import check_nvme_path, preset_names
from kvtier.errors import ConfigError
from kvtier.size import Size, SizeUnit
from kvtier.types import AttentionMode, Tier

GPU = {"budget": "1GiB"}


def with_nvme(**keys: Any) -> dict[str, Any]:
    return {"tiers": {"gpu": GPU, "nvme": {"budget": "1GiB", **keys}}}


# --- sizes


@pytest.mark.parametrize("value, num_bytes", [
    ("512MiB", 512 << 20), ("8GiB", 8 << 30), ("20GB", 20 * 10**9), ("1kB", 1000), ("1KB", 1000), ("1KiB", 1024),
    ("1.5 GiB", 3 << 29), (" 2TiB ", 2 << 40), ("4096", 4096), ("7B", 7), (4096, 4096), (0, 0),
    ("9007199254740993B", 2**53 + 1), (Size(5), 5),
])  # fmt: skip
def test_sizes_in_bytes(value: object, num_bytes: int) -> None:
    assert Size.parse(value).resolve(total_bytes=1) == num_bytes


def test_sizes_in_percent() -> None:
    assert Size.parse("30%") == Size(30.0, SizeUnit.PERCENT)
    assert Size.parse("12.5%").resolve(1000) == 125
    assert Size.parse("100%").resolve(7) == 7


@pytest.mark.parametrize("value", [
    True, False, None, -1, 1.0, float("nan"), float("inf"), "", "-1GiB", "+1GiB", "nan", "nan%", "1e9", "1,5GiB",
    "101%", "-1%", "GiB", "%", "8 Gb", "8gib", "8G", "1.5", "0x10", "1_000", "8GiB 4MiB", "٣GiB", [], {}, b"8GiB",
])  # fmt: skip
def test_what_is_not_a_size(value: object) -> None:
    with pytest.raises(ValueError):
        Size.parse(value)


@given(st.one_of(st.integers(0, 2**60).map(Size), st.integers(0, 100).map(lambda n: Size(float(n), SizeUnit.PERCENT))))
def test_sizes_print_as_they_are_read(size: Size) -> None:
    assert Size.parse(str(size)) == size


@pytest.mark.parametrize(("written", "shown"), [
    ("20GB", "20GB"), ("1TiB", "1TiB"), ("1.5TB", "1500GB"), ("1.5GiB", "1536MiB"), ("1000GiB", "1000GiB"),
    ("15625MiB", "15625MiB"), ("1KB", "1kB"), ("1024kB", "1000KiB"), ("1001", "1001B"), (0, "0B"),
])  # fmt: skip
def test_sizes_print_in_the_largest_unit_that_divides_them(written: str, shown: str) -> None:
    assert str(Size.parse(written)) == shown


# --- what is accepted


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name: str) -> None:
    config = load_config(name)
    assert all(config.tiers.budget(tier).resolve(0) > 0 for tier in Tier)


def test_the_presets_that_the_documents_name() -> None:
    assert preset_names() == ["chat", "laptop", "quickstart", "server-80gb", "workstation-24gb"]


def test_quickstart_cannot_hold_its_sessions_above_nvme() -> None:
    config = load_config("quickstart")
    kv_bytes = 4 * 1500 * 46_080
    assert config.tiers.budget(Tier.GPU).resolve(0) + config.tiers.budget(Tier.CPU).resolve(0) < kv_bytes / 2
    assert config.tiers.nvme is not None and config.tiers.nvme.path is None
    assert config.tiers.budget(Tier.NVME).resolve(0) > kv_bytes


def test_defaults() -> None:
    config = load_config(None)
    assert [str(config.tiers.budget(tier)) for tier in Tier] == ["60%", "25%", "10%"]
    assert (config.block_tokens, config.prefill_chunk, config.attention) == (256, 512, AttentionMode.BLOCKWISE)
    assert (config.io_threads, config.io_timeout_s, config.prefetch.depth) == (4, 60.0, 3)
    assert config.tiers.gpu.high == 0.95 and config.tiers.gpu.low == 0.85
    assert [config.eviction.policy(tier) for tier in Tier] == ["lru"] * 3


def test_absent_tiers_have_no_bytes() -> None:
    config = load_config({"tiers": {"gpu": GPU}})
    assert config.tiers.cpu is None and config.tiers.budget(Tier.CPU) == Size(0) == config.tiers.budget(Tier.NVME)
    assert load_config({"tiers": {"gpu": GPU, "cpu": {"budget": 0}}}).tiers.budget(Tier.CPU) == Size(0)


def test_a_config_passes_through_and_is_frozen() -> None:
    config = KVTierConfig(attention="gathered", tiers={"gpu": GPU})
    assert load_config(config) is config and config.attention is AttentionMode.GATHERED
    with pytest.raises(ValidationError):
        config.block_tokens = 16  # type: ignore[misc]


def test_a_config_survives_a_round_trip() -> None:
    config = load_config("laptop")
    assert load_config(config.model_dump(mode="json")) == config


def test_files_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "plain"):
        Path(name).write_text("block_tokens: 64\n")
        assert load_config(name).block_tokens == load_config(tmp_path / name).block_tokens == 64
    Path("laptop").mkdir()  # a preset's name wins over a folder that happens to be called so
    assert load_config("laptop").block_tokens == 256


def test_home_is_expanded_and_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given_path in ("~/kv/deep", "kv/deep", tmp_path / "kv" / "deep"):
        nvme = load_config(with_nvme(path=given_path)).tiers.nvme
        assert nvme is not None and nvme.path == tmp_path / "kv" / "deep"
    assert os.listdir(tmp_path) == []  # the check leaves nothing behind


# --- what is refused: (source, all of these words in the message)


@pytest.mark.parametrize("source, words", [
    ({"tiers": {"gpu": {"bugdet": "1GiB"}}}, ["tiers.gpu.bugdet", "did you mean budget"]),
    ({"tires": {}}, ["tires", "did you mean tiers", "prefill_chunk"]),
    ({"gpu": {"budget": "1GiB"}}, ["config: gpu: ", "did you mean tiers.gpu or eviction.gpu?", "eviction"]),
    ({"tiers": {"gpu": {"budget": 1, "policy": "lru"}}}, ["tiers.gpu.policy", "did you mean prefetch.policy?"]),
    ({"budget": "1GiB"}, ["did you mean tiers.gpu.budget or tiers.cpu.budget or tiers.nvme.budget?"]),
    ({"tiers": {"gpu": GPU, "nvme": {"budget": 1, "compresion": "none"}}}, ["tiers.nvme.compresion", "compression"]),
    ({"zzz": 1}, ["zzz", "Known keys"]),
    ({"block_tokens": 100}, ["block_tokens", "100", "multiple of 16"]),
    ({"block_tokens": 0}, ["block_tokens", "16 to 4096"]),
    ({"block_tokens": 8192}, ["block_tokens", "8192"]),
    ({"block_tokens": "256"}, ["block_tokens", "'256'"]),
    ({"prefill_chunk": 0}, ["prefill_chunk", "at least 1"]),
    ({"prefill_chunk": 1.0}, ["prefill_chunk", "1.0"]),
    ({"attention": "flash"}, ["attention", "'flash'", "blockwise or gathered"]),
    ({"tiers": {}}, ["tiers.gpu", "missing", "{budget: 1GiB}"]),
    ({"tiers": {"gpu": {}}}, ["tiers.gpu.budget", "missing", "512MiB"]),
    ({"tiers": {"gpu": None}}, ["tiers.gpu", "mapping"]),
    ({"tiers": [1]}, ["tiers", "mapping"]),
    ({"tiers": {"gpu": {"budget": "lots"}}}, ["tiers.gpu.budget", "'lots'", "512MiB"]),
    ({"tiers": {"gpu": {"budget": -1}}}, ["tiers.gpu.budget", "-1"]),
    ({"tiers": {"gpu": {"budget": "0%"}}}, ["tiers.gpu.budget", "more than 0"]),
    ({"tiers": {"gpu": {"budget": 1, "high": 0.5, "low": 0.5}}}, ["tiers.gpu", "low (0.5) must be below high (0.5)"]),
    ({"tiers": {"gpu": {"budget": 1, "high": 1.01}}}, ["tiers.gpu.high", "1.01"]),
    ({"tiers": {"gpu": {"budget": 1, "low": float("nan")}}}, ["tiers.gpu.low", "nan"]),
    (with_nvme(page_cache="1MiB"), ["tiers.nvme.page_cache", "at least 4MiB", "'1MiB'"]),
    (with_nvme(page_cache=0), ["tiers.nvme.page_cache", "at least 4MiB"]),
    (with_nvme(page_cache="0%"), ["tiers.nvme.page_cache", "at least 4MiB"]),
    (with_nvme(compression="lz4"), ["tiers.nvme.compression", "lz4", "none or zstd"]),
    (with_nvme(survives="fire"), ["tiers.nvme.survives", "'fire'", "kill or power_loss"]),
    (with_nvme(on_locked="wait"), ["tiers.nvme.on_locked", "'wait'", "error or subfolder"]),
    (with_nvme(namespace_ttl="2weeks"), ["tiers.nvme.namespace_ttl", "unknown unit 'weeks'", "s, min, h, d"]),
    (with_nvme(namespace_ttl=-1), ["tiers.nvme.namespace_ttl", "not a duration", "-1", "14d"]),
    (with_nvme(max_writes="2TB"), ["tiers.nvme.max_writes", "not a size in a time", "2TB/day"]),
    (with_nvme(max_writes="2TB/week"), ["tiers.nvme.max_writes", "unknown time 'week'"]),
    (with_nvme(max_writes="0/day"), ["tiers.nvme.max_writes", "more than 0"]),
    (with_nvme(io="fast"), ["tiers.nvme.io", "'fast'", "auto, mmap or direct"]),
    (with_nvme(path=""), ["tiers.nvme.path", "''"]),
    (with_nvme(path=3), ["tiers.nvme.path", "3"]),
    (with_nvme(path="a\0b"), ["tiers.nvme.path"]),
    (with_nvme(path="~no-such-user-here/kv"), ["tiers.nvme.path", "cannot be expanded"]),
    ({"eviction": {"gpu": "my policy"}}, ["eviction.gpu", "'my policy'", "module:Class"]),
    ({"eviction": {"cpu": "a:b:c"}}, ["eviction.cpu"]),
    ({"prefetch": {"depth": -1}}, ["prefetch.depth", "-1"]),
    ({"io_threads": 0}, ["io_threads", "1 to 64"]),
    ({"io_timeout_s": 0}, ["io_timeout_s", "more than 0"]),
    ({"io_timeout_s": float("inf")}, ["io_timeout_s"]),
    ({"io_timeout": 5}, ["io_timeout", "did you mean io_timeout_s"]),
    ({"prefill_chunk": True}, ["prefill_chunk", "on, off, yes and no"]),
    ({True: 1}, ["True", "not a word"]),
    ({"tiers": {"gpu": {3: 1}}}, ["tiers.gpu.3", "not a word"]),
    ("laptp", ["laptp", "did you mean laptop", "quickstart"]),
    ("", ["no preset"]),
    ("nope.yaml", ["nope.yaml", "No such file", "quickstart"]),
    (3, ["3", "preset"]),
])  # fmt: skip
def test_refused(source: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert [word for word in words if word not in message] == [], message
    assert "pydantic" not in message and caught.value.__cause__ is None


@pytest.mark.parametrize("text, words", [
    ("attention: on\n", ["attention", "on, off"]),
    ("tiers:\n  gpu: {budget: 1GiB}\n  gpu: {budget: 2GiB}\n", ["line 3, '  gpu:", "stands twice, first in line 2"]),
    ("block_tokens: 64\nblock_tokens: 64\n", ["line 2", "twice"]),
    ("tiers: [\n", ["line 1, 'tiers: ['", "Mend: close the bracket"]),
    ("tiers:\n\tgpu: 1\n", ["line 2, '\\tgpu: 1'", "Mend: indent with spaces"]),
    ("tiers: {gpu: {budget: 1GiB}\nio_threads: 2\n", ["line 2, 'io_", "line 1, 'tiers: {", "Mend: close"]),
    ("tiers: {gpu: {budget: 1GiB}}}\n", ["line 1, 'tiers:", "Mend: remove a bracket or brace"]),
    ("tiers:\n  gpu: {budget: \"1GiB}\n", ["line 2, '  gpu: {", "Mend: close the quotation mark"]),
    ("tiers:\n  gpu: {}\n cpu: {}\n", ["line 3, ' cpu: {}'", "Mend: indent the keys of one level"]),
    ("tiers\n  gpu: 1\n", ["line 2, '  gpu: 1'", "Mend: begin the line before"]),
    ("tiers:\n  gpu:{budget: 1GiB}\n", ["unknown key (write `gpu: `"]),
    ("io_threads: @4\n", ["line 1, 'io_threads: @4'", "Mend: put the value into quotes"]),
    ("io_threads: *four\n", ["line 1, 'io_threads: *four'", "Mend: put the value into quotes"]),
    ("io_threads: 2026-99-99\n", ["line 1, 'io_threads:", "month", "Mend: put the value into quotes"]),
    ("io_threads: 4\n---\nio_threads: 4\n", ["line 2, '---'", "Mend: keep one document"]),
    ("io_threads: 4\n# \x01\n", ["line 2, '# \\x01'", "Mend: remove it"]),
    ("? [a]\n: 1\n", ["line 1, '? [a]'", "Mend: write a plain word"]),
    (f"x: @{'y' * 500}\n", ["line 1, 'x: @yyy", "…'", "Mend: put"]),
    ("", ["is empty", "must be a mapping"]),
    ("# a remark\n", ["is empty", "must be a mapping"]),
    ("- 1\n", ["must be a mapping such as `tiers: {gpu: {budget: 1GiB}}`", "got [1]"]),
    ("laptop\n", ["must be a mapping", "got 'laptop'"]),
    ("x: &x {y: *x}\n", ["nested"]),
    ("[" * 20000, ["not YAML"]),
    ("x: !!python/object/apply:os.getcwd []\n", ["could not determine a constructor"]),
    ("block_tokens: 100\nprefill_chunk: 0\n", ["block_tokens", "prefill_chunk"]),
])  # fmt: skip
def test_refused_files_name_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert [word for word in ["bad.yaml", *words] if word not in str(caught.value)] == [], caught.value


def test_refused_paths_of_configs(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"io_threads: 4\n# caf\xe9\n")
    for source, why in (
        (tmp_path, "it is a folder"),
        (str(tmp_path), "it is a folder"),
        (tmp_path / "latin.yaml", "line 2, '# caf\ufffd': byte 0xe9 is not UTF-8"),
        (Path("/dev/null"), "it is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=rf"cannot be read \({re.escape(why)}.*Mend: give a YAML file"):
            load_config(source)


def test_a_config_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    file = tmp_path / "mine.yaml"
    file.write_text("io_threads: 4\n")
    monkeypatch.setattr(Path, "read_bytes", refused)  # root reads every file
    with pytest.raises(ConfigError, match=r"mine.yaml cannot be read \(Permission denied\)"):
        load_config(file)


def test_direct_construction_gives_the_same_errors() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.gpu\.bugdet.*did you mean budget"):
        KVTierConfig(tiers={"gpu": {"bugdet": "1GiB"}})
    with pytest.raises(ConfigError, match="block_tokens"):
        KVTierConfig(block_tokens=True)


def test_nvme_path_on_or_under_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "deeper"):
        with pytest.raises(ConfigError, match=r"tiers\.nvme\.path.*not a folder"):
            load_config(with_nvme(path=path))
        with pytest.raises(ConfigError):
            load_config(KVTierConfig(**with_nvme(path=path)))


def test_nvme_path_that_cannot_be_written() -> None:
    # /proc refuses new files even to root, for whom permission bits do not bind.
    with pytest.raises(ConfigError, match=r"tiers\.nvme\.path: /proc/kv cannot be written"):
        check_nvme_path(Path("/proc/kv"))
