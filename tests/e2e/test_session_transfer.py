"""Sessions in files of their own: out of one process, into another, and refused where they are not this model's."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import ArchiveError, SessionExistsError, UnsupportedError
from tests.e2e.families import BLOCK, GREEDY, assert_same, occupied, small_config, tiny, tokens

NEW = GREEDY["max_new_tokens"] - 1


def turn(tiered: TieredKV, session: Any, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """One turn, compared with the plain model: the transcript after it, and how many tokens were computed."""
    before = tiered.stats()["tokens"]
    ours = session.generate(ids, **GREEDY)
    assert_same(ours, tiered.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY), "blockwise")
    tiered.check_integrity()
    return ours.sequences, tiered.stats()["tokens"] - before


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A conversation of another process, and its transcript."""
    model, path = tiny("llama"), tmp_path / "alice.kvs"
    with TieredKV(model, small_config(model, tmp_path / "first", prefix_cache=True)) as tiered:
        session = tiered.session("alice", ttl="7d")
        ids, _ = turn(tiered, session, tokens(300))
        assert session.info.bytes_per_tier["nvme"] > 0
        assert session.export(path) == path.stat().st_size > 300 * tiered.stats()["block_bytes"] // BLOCK
        turn(tiered, session, torch.cat([ids, tokens(20, 1)], dim=1))
    return path, ids


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("cpu_blocks", [4, 0])
def test_an_exported_session_goes_on_elsewhere(
    exported: tuple[Path, torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    prefix_cache: bool,
    cpu_blocks: int,
) -> None:
    path, ids = exported
    model = tiny("llama")
    config = small_config(model, tmp_path / "second", prefix_cache=prefix_cache, cpu_blocks=cpu_blocks)
    for _ in range(2):
        with TieredKV(model, config) as tiered:
            session = tiered.import_session(path, overwrite=True)
            assert session.name == "alice" and session.info.ttl_s == 7 * 86400
            assert session.token_ids == ids[0, :-1].tolist()
            more = torch.cat([ids, tokens(30, 2)], dim=1)
            for seed in range(3):
                more, computed = turn(tiered, session, more)
                assert computed == 31 + NEW, "but for the last token nothing of the past is computed"
                more = torch.cat([more, tokens(30, seed + 3)], dim=1)
            with pytest.raises(SessionExistsError, match="'alice' already"):
                tiered.import_session(path)
            other = tiered.import_session(path, "bob", overwrite=True)
            turn(tiered, other, torch.cat([ids, tokens(30, 9)], dim=1))
            assert {info.name for info in tiered.sessions()} == {"alice", "bob"}
    assert "are kept for a restart" not in caplog.text
    with TieredKV(model, config) as tiered:
        assert len(tiered.session("alice").token_ids) == more.shape[1] - 30 - 1


def test_async_twins_do_the_same_and_the_event_loop_goes_on(
    exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    path, ids = exported
    model = tiny("llama")

    async def both(tiered: TieredKV) -> int:
        ticks, done = 0, asyncio.Event()

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        session = await tiered.import_session_async(path)
        again = tmp_path / "again.kvs"
        assert await session.export_async(again) == again.stat().st_size
        done.set()
        await ticking
        return ticks

    with TieredKV(model, small_config(model, tmp_path / "second", prefix_cache=True)) as tiered:
        assert asyncio.run(both(tiered)) > 20
        again = tiered.import_session(tmp_path / "again.kvs", "again")
        turn(tiered, again, torch.cat([ids, tokens(30, 9)], dim=1))


def test_what_lies_behind_a_tail_is_not_exported(tmp_path: Path) -> None:
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path, prefix_cache=False)) as tiered:
        tiered.generate(tokens(80, 5), attention_mask=torch.ones(1, 80, dtype=torch.long), **GREEDY)  # leaves its KV
        session = tiered.session("short")
        session.generate(tokens(5), max_new_tokens=2)
        session.export(tmp_path / "a.kvs")
        shape = tiered._runtime.group.shape
    from kvtier.session_archive import ArchiveReader

    with ArchiveReader(tmp_path / "a.kvs") as reader:
        (block,) = reader.blocks()
        held = len(reader.header.token_ids)
    layers = torch.frombuffer(bytearray(block), dtype=torch.float32).view(
        shape.num_layers, 2, shape.kv_heads, BLOCK, -1
    )
    assert held == 6 and not layers[:, :, :, held:].any() and layers[:, :, :, :held].any(dim=-1).all()


def test_a_session_of_another_model_salt_or_shape_is_refused_by_name(
    exported: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    path, _ = exported
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    with TieredKV(model, small_config(model, tmp_path / "b", prefix_cache=True)) as tiered:
        with pytest.raises(ArchiveError, match="another model than this one"):
            tiered.import_session(path)
        assert tiered.sessions() == [] and occupied(tiered) == 0
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path / "c", prefix_cache=True)) as tiered:
        with pytest.raises(ArchiveError, match="another salt"):
            tiered.import_session(path, salt="mallory")
        with pytest.raises(ArchiveError, match="cannot be read"):
            tiered.import_session(tmp_path / "none.kvs")
    with TieredKV(model, small_config(model, tmp_path / "d", block_tokens=32)) as tiered:
        with pytest.raises(ArchiveError, match="block_tokens: 16"):
            tiered.import_session(path)
    other = tiny("qwen3")
    with TieredKV(other, small_config(other, tmp_path / "e")) as tiered, pytest.raises(ArchiveError):
        tiered.import_session(path)


def test_a_damaged_block_leaves_nothing_behind(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path, _ = exported
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path / "b", prefix_cache=True)) as tiered:
        with pytest.raises(ArchiveError, match=r"damaged|checksum"):
            tiered.import_session(path)
        assert tiered.sessions() == [] and occupied(tiered) == 0


def test_what_cannot_be_told_is_not_exported(tmp_path: Path) -> None:
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path, prefix_cache=True)) as tiered:
        session = tiered.session("new")
        with pytest.raises(UnsupportedError, match="holds nothing yet"):
            session.export(tmp_path / "a.kvs")
        handle = model.model.layers[0].register_forward_hook(lambda *args: args[2] * 1.01)
        try:
            session.generate(tokens(50), max_new_tokens=2)
        finally:
            handle.remove()
        with pytest.raises(UnsupportedError, match="hooks"):
            session.export(tmp_path / "a.kvs")
        assert not (tmp_path / "a.kvs").exists()


def test_a_session_in_use_is_not_exported_half_way(tmp_path: Path) -> None:
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path, prefix_cache=True)) as tiered:
        session, errors = tiered.session("busy"), []
        session.generate(tokens(50), max_new_tokens=2)

        def export(*_: Any) -> bool:
            thread = threading.Thread(target=lambda: errors.append(_error(session, tmp_path / "a.kvs")))
            thread.start()
            thread.join()
            return False

        session.generate(torch.cat([tokens(50), tokens(9, 3)], dim=1), max_new_tokens=1, stopping_criteria=[export])
        assert "another thread is generating" in errors[0] and not (tmp_path / "a.kvs").exists()


def _error(session: Any, path: Path) -> str:
    try:
        session.export(path)
    except UnsupportedError as error:
        return str(error)
    return ""
