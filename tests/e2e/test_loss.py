"""No room on any tier, and files that no longer hold what was written: an error, never a wrong token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import BlockLostError, CapacityError
from kvtier.hf import TieredCache
from tests.e2e.families import BLOCK, GREEDY, MODES, assert_same, occupied, plain_turns, small_config, tiny, tokens


@pytest.mark.parametrize("mode", MODES)
def test_no_room_on_any_tier(mode: str, tmp_path: Path) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=2, prompt=64, max_new_tokens=8)
    brief = {**GREEDY, "max_new_tokens": 8}
    with TieredKV(model, small_config(model, tmp_path, mode, gpu_slots=5, cpu_blocks=5, nvme=0)) as tiered:
        cache, other = tiered.new_cache(), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **brief), turns[0][1], mode)
        tiered.generate(tokens(60, 5), cache=other, max_new_tokens=2)
        before = (cache.get_seq_length(), cache.token_ids, other.get_seq_length(), occupied(tiered))
        for ids in (torch.cat([turns[1][0], tokens(100)], dim=1), torch.cat([turns[1][0], tokens(2000)], dim=1)):
            with pytest.raises(CapacityError, match=r"no tier takes another block.*gpu .*cpu .*Raise"):
                tiered.generate(ids, cache=cache, **brief)
            tiered.check_integrity()
            assert before == (cache.get_seq_length(), cache.token_ids, other.get_seq_length(), occupied(tiered))
        del other
        assert_same(tiered.generate(turns[1][0], cache=cache, **brief), turns[1][1], mode)
        tiered.check_integrity()


def flip(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    for at in range(0, os.fstat(fd).st_size, 512):
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x40]), at)
    os.close(fd)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def restore(path: Path, content: bytes, damaged: bytes) -> None:
    """Undo the damage, page by page, where nothing was written since."""
    now = path.read_bytes().ljust(len(content), b"\0")
    damaged = damaged.ljust(len(content), b"\0")
    fd = os.open(path, os.O_RDWR)
    for at in range(0, len(content), 4096):
        page = slice(at, at + 4096)
        os.pwrite(fd, content[page] if now[page] == damaged[page] else now[page], at)
    os.close(fd)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", [flip, truncate])
def test_damaged_files_raise_if_the_config_says_so(damage: Callable[[Path], None], mode: str, tmp_path: Path) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=2)
    with TieredKV(model, small_config(model, tmp_path, mode, on_block_loss="raise")) as tiered:
        cache: TieredCache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert tiered.stats()["tiers"]["nvme"]["only_copy_bytes"] > 0
        # With no move under way: none is to write between the reading of the files and their damage.
        before = (cache.get_seq_length(), cache.token_ids, occupied(tiered))
        folder = Path(tiered.stats()["tiers"]["nvme"]["folder"])
        files = {path: path.read_bytes() for path in folder.glob("segment-*")}
        assert files
        for path in files:
            damage(path)
        damaged = {path: path.read_bytes() for path in files}
        for _ in range(2):
            with pytest.raises(BlockLostError, match="cannot be read from nvme"):
                tiered.generate(turns[1][0], cache=cache, **GREEDY)
            tiered.check_integrity()
            assert before == (cache.get_seq_length(), cache.token_ids, occupied(tiered))
        # Another conversation does not mind, wherever its blocks go.
        short = tokens(2 * BLOCK, 5)
        assert torch.equal(tiered.generate(short, max_new_tokens=3), model.generate(short, max_new_tokens=3))
        for path, content in files.items():
            restore(path, content, damaged[path])
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
