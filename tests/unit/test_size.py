"""Sizes in messages: as a config takes them, and exactly."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config_files import preset_names, source_name
from kvtier.size import Size, size_and_bytes, size_words, speed_words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1000, "1000 bytes"),
        (1 << 30, "1GiB (1073741824 bytes)"),
        (20 * 10**9, "20GB (20000000000 bytes)"),
        (20 << 30, "20GiB (21474836480 bytes)"),
        (396072, "386.79KiB (396072 bytes)"),
        ((3 << 30) + 1, "3.01GiB (3221225473 bytes)"),
    ],
)
def test_sizes_in_messages(num_bytes: int, words: str) -> None:
    assert size_and_bytes(num_bytes) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (5 << 29, "2.5GiB"), (1_500_000, "1500kB"), (20 * 10**9, "20GB"), (1536 << 20, "1.5GiB"),
        (35832 << 10, "35MiB"), (-3 << 30, "-3GiB"), (1 << 40, "1TiB"), (900.4, "900 bytes"),
    ],
)  # fmt: skip
def test_sizes_for_people(num_bytes: float, words: str) -> None:
    assert size_words(num_bytes) == words


@given(st.integers(1024, 1 << 50))
def test_a_size_for_people_can_be_pasted_into_a_config(num_bytes: int) -> None:
    assert num_bytes <= Size.parse(size_words(num_bytes)).resolve(0) <= num_bytes * 1.011
    assert size_and_bytes(num_bytes) == f"{size_words(num_bytes)} ({num_bytes} bytes)"


def test_speeds_of_slow_disks_have_their_digits() -> None:
    assert [speed_words(rate) for rate in (2.5e9, 0.53e9, 12.34e6, 0)] == [
        "2.50 GB/s", "0.53 GB/s", "12.3 MB/s", "0 MB/s",
    ]  # fmt: skip


@given(st.integers(0, 1 << 50))
def test_a_minimum_copied_from_a_message_is_enough(num_bytes: int) -> None:
    words = size_and_bytes(num_bytes)
    if num_bytes >= 1024:
        found = re.fullmatch(r"(\S+) \((\d+) bytes\)", words)
        assert found is not None, words
        size, exactly = found.groups()
        assert int(exactly) == num_bytes and len(size) <= 10
        assert num_bytes <= Size.parse(size).resolve(0) <= num_bytes * 1.011


def test_a_config_is_named_as_its_own_errors_name_it() -> None:
    assert [source_name(name) for name in preset_names()] == [f"preset {name}" for name in preset_names()]
    assert source_name("a/my.yaml") == "a/my.yaml"
    assert source_name(None) == source_name({}) == ""
