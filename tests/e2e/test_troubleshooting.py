"""docs/troubleshooting.md has every error and every warning, in the words that the code really says."""

from __future__ import annotations

import ast
import errno
import inspect
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtier import TieredKV, errors
from kvtier.config import load_config
from kvtier.errors import KVTierError
from kvtier.session_archive import ArchiveReader
from kvtier.slots import SlotPool
from kvtier.stores.nvme import NvmeStore
from kvtier.testing.stores import random_block, read
from kvtier.types import BlockShape, Slot
from tests.e2e.families import small_config, tiny, tokens
from tests.small_tiers import build

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0].strip("# `"): part for part in re.split(r"\n(?=##+ )", PAGE)}
ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, KVTierError)]
EXAMPLES = re.compile(r"```text\n(.*?)```", re.DOTALL)
SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=16, key_dim=32, value_dim=32, element_bytes=4)


def masked(text: str) -> str:
    """Without what differs from run to run: numbers, checksums, white space."""
    return re.sub(r"\b[0-9a-f]{16}\b|\d+", "N", " ".join(text.split()))


# -- each error, provoked ----------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What a provocation works with."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def wrapped(self, **changes: Any) -> TieredKV:
        return TieredKV(tiny(), small_config(tiny(), self.folder, **changes))

    def store(self) -> NvmeStore:
        store = NvmeStore(SHAPE, 1 << 20, self.folder, persistent=False, reserve_free_frac=0.0)
        store.write(Slot(0), random_block(store, 0))
        return store

    def fail(self, function: str, error: int) -> None:
        def failing(*_: Any) -> None:
            raise OSError(error, os.strerror(error))

        self.monkeypatch.setattr(f"os.{function}", failing)


def unsupported(bench: Bench) -> None:
    with bench.wrapped() as tiered:
        tiered.generate(tokens(8), output_attentions=True)


def closed(bench: Bench) -> None:
    with bench.wrapped() as tiered:
        cache = tiered.new_cache()
        tiered(tokens(8), cache=cache)
    cache.fork()


def wrapped_twice(bench: Bench) -> None:
    with bench.wrapped():
        bench.wrapped()


def mismatch(bench: Bench) -> None:
    with bench.wrapped() as tiered:
        cache = tiered.new_cache()
        tiered.generate(tokens(40), cache=cache, max_new_tokens=2)
        tiered.generate(tokens(60, seed=5), cache=cache, max_new_tokens=2)


def folder_in_use(bench: Bench) -> None:
    config = small_config(tiny("qwen2"), bench.folder)
    with bench.wrapped():
        TieredKV(tiny("qwen2"), config)


def capacity(bench: Bench) -> None:
    with bench.wrapped(cpu_blocks=5, nvme=0) as tiered:
        tiered.generate(tokens(2000), max_new_tokens=2)


def lost(bench: Bench) -> None:
    with bench.wrapped(on_block_loss="raise") as tiered:
        cache = tiered.new_cache()
        out = tiered.generate(tokens(300), cache=cache, max_new_tokens=2)
        for path in Path(tiered.stats()["tiers"]["nvme"]["folder"]).glob("segment-*"):
            os.truncate(path, 0)
        tiered.generate(torch.cat([out, tokens(8)], dim=1), cache=cache, max_new_tokens=2)


def broken_disk(bench: Bench) -> None:
    store = bench.store()
    bench.fail("pwrite", errno.EIO)
    store.write(Slot(0), random_block(store, 0))


def flipped(bench: Bench) -> None:
    store = bench.store()
    with next(bench.folder.glob("segment-*")).open("r+b") as file:
        file.seek(2 * 4096)  # behind the superblock and the slot's header
        first = file.read(1)
        file.seek(2 * 4096)
        file.write(bytes([first[0] ^ 1]))
    read(store, 0)


def short(bench: Bench) -> None:
    store = bench.store()
    os.truncate(next(bench.folder.glob("segment-*")), 0)
    read(store, 0)


def full(bench: Bench) -> None:
    bench.fail("posix_fallocate", errno.ENOSPC)
    bench.store()


def foreign(bench: Bench) -> None:
    (bench.folder / "alice.kvsession").write_text("not one of ours, but as long as one\n")
    ArchiveReader(bench.folder / "alice.kvsession").open()


def hanging(bench: Bench) -> None:
    house = build(gpu=2)
    batch = house.manager.new_batch()
    house.append(batch, list(range(8)))
    house.engine.hanging = True
    house.append(batch, list(range(8)))


def same_name(bench: Bench) -> None:
    with bench.wrapped() as tiered:
        tiered.session("b")
        tiered.session("a").fork("b")


PROVOKED: dict[type[KVTierError], Callable[[Bench], object]] = {
    errors.ConfigError: lambda bench: load_config({"tiers": {"gpu": {"bugdet": "1GiB"}}}),
    errors.BudgetError: lambda bench: TieredKV(tiny(), {"tiers": {"gpu": {"budget": 1000}}}),
    errors.UnsupportedError: unsupported,
    errors.UnsupportedModelError: lambda bench: TieredKV(nn.Linear(3, 3), "quickstart"),
    errors.ClosedError: closed,
    errors.AlreadyWrappedError: wrapped_twice,
    errors.SessionExistsError: same_name,
    errors.PromptMismatchError: mismatch,
    errors.FolderInUseError: folder_in_use,
    errors.CapacityError: capacity,
    errors.BlockLostError: lost,
    errors.StoreError: broken_disk,
    errors.ChecksumError: flipped,
    errors.ShortReadError: short,
    errors.NoSpaceError: full,
    errors.ArchiveError: foreign,
    errors.TransferTimeoutError: hanging,
    errors.IntegrityError: lambda bench: SlotPool(4).give_back(Slot(3)),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_has_a_section(error: type[KVTierError]) -> None:
    section = SECTIONS[error.__name__]
    assert error is KVTierError or error in PROVOKED, f"provoke {error.__name__} here"
    if error is not KVTierError:
        for part in ("**Afterwards:**", "**Mend:**"):
            assert part in section


@pytest.mark.parametrize("error", PROVOKED, ids=lambda error: error.__name__)
def test_the_message_quoted_is_the_one_raised(
    error: type[KVTierError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as caught, torch.no_grad():
        PROVOKED[error](Bench(tmp_path, monkeypatch))
    assert type(caught.value) is error
    raised = f"kvtier.errors.{error.__name__}: {caught.value}".replace(str(tmp_path), "/fast/disk")
    (quoted,) = EXAMPLES.findall(SECTIONS[error.__name__])
    beginning = masked(quoted).rstrip("…").rstrip()
    assert len(beginning) > len(f"kvtier.errors.{error.__name__}: ") + 20
    assert masked(raised).startswith(beginning), raised


# -- each warning ------------------------------------------------------------------------------------------------------


def logged() -> list[str]:
    """The template of every message that the library logs as a warning or worse."""
    found: list[str] = []
    for file in sorted((ROOT / "kvtier").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("logger", "_log", "logging")
                and node.func.attr in ("warning", "error", "exception", "critical")
            ):
                (template, *_) = node.args
                assert isinstance(template, ast.Constant), f"{file.name}: a template is one piece of text"
                found.append(template.value)
    return found


def pattern(template: str) -> str:
    parts = re.split(r"%[sdr]", template)
    return ".+".join(re.escape(part.replace("%%", "%")) for part in parts)


def test_every_warning_is_quoted_and_every_quote_is_a_warning() -> None:
    quotes = [line for block in EXAMPLES.findall(SECTIONS["Warnings in the log"]) for line in block.splitlines()]
    templates = logged()
    assert len(templates) > 10
    for template in templates:
        assert any(re.fullmatch(pattern(template), quote) for quote in quotes), f"not in the docs: {template}"
    for quote in quotes:
        assert any(re.fullmatch(pattern(template), quote) for template in templates), f"nobody says: {quote}"


# -- the advice --------------------------------------------------------------------------------------------------------


def test_the_example_for_ctrl_c_brings_the_cache_back(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", SECTIONS["Ctrl-C"], re.DOTALL)
    model, ids = tiny(), tokens(60)
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        first = tiered.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)
        held, ids = cache.get_seq_length(), torch.cat([first, tokens(5)], dim=1)
        handle = model.lm_head.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            exec(compile(example, "the example for Ctrl-C", "exec"), {"tiered": tiered, "cache": cache, "ids": ids})
        handle.remove()
        assert calls == 6 and cache.get_seq_length() == held
        again = tiered.generate(ids, cache=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(again, model.generate(ids, max_new_tokens=3, do_sample=False))


def test_a_lost_block_is_computed_anew_as_the_page_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    config = small_config(model, tmp_path, on_block_loss="raise")
    with caplog.at_level(logging.ERROR), TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        ids = torch.cat([tiered.generate(tokens(300), cache=cache, max_new_tokens=2), tokens(8)], dim=1)
        for path in Path(tiered.stats()["tiers"]["nvme"]["folder"]).glob("segment-*"):
            path.write_bytes(b"\0" * path.stat().st_size)
        with pytest.raises(errors.BlockLostError):
            tiered.generate(ids, cache=cache, max_new_tokens=2)
        assert "cache.reset()" in SECTIONS["BlockLostError"]
        cache.reset()
        assert tiered.generate(ids, cache=cache, max_new_tokens=2, do_sample=False).shape == (1, ids.shape[1] + 2)
