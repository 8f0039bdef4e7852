"""Sequences that share prefixes while blocks are evicted, files are damaged and reads fail: exact, and nothing shared
ever changes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.errors import CapacityError
from kvtier.hf import TieredCache
from kvtier.prefix import Miss
from kvtier.stores.nvme import NvmeStore
from kvtier.testing import Fault, FaultyStore
from kvtier.types import BlockId, Slot, Tier
from tests.e2e.families import BLOCK, occupied, small_config, tiny, tokens

NUM_SEQUENCES = 16
NUM_ACTIONS = 25 * int(os.environ.get("KVTIER_TEST_EXAMPLES", "40"))
TOLERANCE = 1e-4
MAX_TOKENS = 9 * BLOCK
SALTS = ("", "alice")
PREFIX = tokens(5 * BLOCK + 3, 77)[0].tolist()


@dataclass
class Chat:
    """A cache, whose it is, and the ids that it was given."""

    cache: TieredCache
    salt: str
    ids: list[int]


class Plain:
    """What the plain model says after each prefix of a text, each text computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """After the last of them."""
        key = tuple(ids)
        if key not in self._known:
            cache = DynamicCache(config=self._model.config)
            out = self._model(torch.tensor([ids]), cache=cache).logits[0]
            for length in range(1, len(ids) + 1):
                self._known[key[:length]] = out[length - 1].clone()
        return self._known[key]


class Fire:
    """What is done at random, and what must hold after each."""

    def __init__(self, model: Any, folder: Path, seed: int) -> None:
        self.model, self.plain, self.rng = model, Plain(model), random.Random(seed)
        config = small_config(
            model, folder, prefix_cache=True, gpu_slots=8, cpu_blocks=6, nvme=1 << 20, prefill_chunk=32
        )
        self.tiered = TieredKV(model, config)
        self.runtime = self.tiered._runtime
        self.placement = self.runtime.placement
        self.chats: list[Chat] = []
        self.texts = [PREFIX, PREFIX[: 2 * BLOCK], PREFIX[: 3 * BLOCK + 1]]
        self.seen: dict[BlockId, torch.Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.faulty: FaultyStore | None = None
        self.runtime.interpose(Tier.NVME, self._wrap)
        self.recomputed = 0

    def _wrap(self, store: Any) -> Any:
        self.faulty = FaultyStore(store, self.rng.randrange(1000), {Fault.BIT_FLIP: 0.01, Fault.EIO: 0.004})
        return self.faulty

    # -- actions ------------------------------------------------------------------------------------------------------

    def act(self) -> None:
        names = ["begin"] * 4 + ["go_on"] * 5 + ["fork", "crop", "rows", "evict", "damage", "damage", "drop", "demote"]
        name = self.rng.choice(names if self.chats else ["begin"])
        with contextlib.suppress(CapacityError):
            getattr(self, name)()
        self.counts[name] += 1
        self.check()

    def begin(self) -> None:
        """A prompt that begins as others did: through generate, which looks it up."""
        if len(self.chats) >= NUM_SEQUENCES:
            self.drop()
        salt, text = self.rng.choice(SALTS), self.rng.choice(self.texts)
        ids = text[: self.rng.randint(1, len(text))] if self.rng.random() < 0.3 else list(text)
        ids += [self.rng.randint(1, 255) for _ in range(self.rng.randint(0, 5))]
        chat = Chat(self.tiered.new_cache(salt=salt), salt, [])
        self.chats.append(chat)
        self.generate(chat, ids)

    def go_on(self) -> None:
        """A further turn: the whole transcript, and a few tokens more."""
        chat = self.rng.choice(self.chats)
        if len(chat.ids) < MAX_TOKENS:
            self.generate(chat, chat.ids + [self.rng.randint(1, 255) for _ in range(self.rng.randint(1, BLOCK + 3))])

    def generate(self, chat: Chat, ids: list[int]) -> None:
        num_new = self.rng.randint(1, 3)
        given = torch.tensor([ids])
        out = self.tiered.generate(
            given, attention_mask=torch.ones_like(given), cache=chat.cache, max_new_tokens=num_new, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        whole = out.sequences[0].tolist()
        for step, logits in enumerate(out.logits):
            difference = (logits[0] - self.plain.logits(whole[: len(ids) + step])).abs().max().item()
            assert difference <= TOLERANCE, f"{len(ids)} tokens, step {step}: {difference}"
        self.counts["steps"] += len(out.logits)
        chat.ids = chat.cache.token_ids
        assert chat.ids == whole[:-1]
        if len(whole) < MAX_TOKENS and self.rng.random() < 0.3:
            self.texts = [*self.texts[:3], *self.texts[3:][-5:], whole]

    def fork(self) -> None:
        chat = self.rng.choice(self.chats)
        if len(self.chats) < NUM_SEQUENCES:
            self.chats.append(Chat(chat.cache.fork(), chat.salt, list(chat.ids)))

    def crop(self) -> None:
        chat = self.rng.choice(self.chats)
        remove = self.rng.randint(0, len(chat.ids))
        chat.cache.crop(-remove)
        chat.ids = chat.ids[: len(chat.ids) - remove]

    def rows(self) -> None:
        """Rows are repeated, go on apart by a token, are reordered, and one is kept."""
        chat = self.rng.choice(self.chats)
        if not chat.ids or len(chat.ids) >= MAX_TOKENS:
            return
        backup = chat.cache.fork()
        cache = chat.cache
        cache.batch_repeat_interleave(2)
        try:
            new = [self.rng.randint(1, 255) for _ in range(2)]
            with torch.no_grad():
                logits = self.tiered(torch.tensor([[each] for each in new]), cache=cache).logits
            for row, token in enumerate(new):
                difference = (logits[row, -1] - self.plain.logits([*chat.ids, token])).abs().max().item()
                assert difference <= TOLERANCE
            cache.reorder_cache(torch.tensor([1, 0]))
            keep = self.rng.randint(0, 1)
            cache.batch_select_indices(torch.tensor([keep]))
            chat.ids = [*chat.ids, new[1 - keep]]
            assert cache.token_ids == chat.ids
            self.counts["reordered"] += 1
        except CapacityError:
            chat.cache = backup

    def drop(self) -> None:
        chat = self.chats.pop(self.rng.randrange(len(self.chats)))
        chat.cache.reset()

    def evict(self) -> None:
        with self.runtime.turn:
            self.counts["evicted"] += self.placement.evict_cached(self.rng.choice(list(Tier)), self.rng.randint(1, 4))

    def demote(self) -> None:
        with self.runtime.turn:
            for tier in (Tier.CPU, Tier.GPU):
                self.placement.give_up(tier, self.rng.randint(1, 8))
            while self.placement.moves:
                self.placement.wait()

    def damage(self) -> None:
        """Bytes of a block in a segment file change on the disk."""
        store = self.runtime.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        with self.runtime.turn:
            residency = self.placement.residency
            while self.placement.moves:  # not what is just being written
                self.placement.wait()
            slots = sorted(c[Tier.NVME] for b in residency.blocks() if Tier.NVME in (c := residency[b].copies))
            if not slots:
                return
            slot = self.rng.choice(slots)
            segment, start = store._space.locate(slot)
            first = self.rng.randrange(store.shape.block_bytes - 1)
            count = self.rng.choice([1, store.shape.block_bytes - first])
            with segment.path.open("r+b") as file:
                file.seek(start + store._geometry.header_bytes + first)
                old = file.read(count)
                file.seek(-len(old), os.SEEK_CUR)
                file.write(bytes(byte ^ 0x5A for byte in old))

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Integrity; and what is indexed is as it was when it was first seen, but for what was recomputed."""
        self.tiered.check_integrity()
        num_recomputed = self.placement.metrics.recomputed_blocks
        may_differ = num_recomputed - self.recomputed
        self.recomputed = num_recomputed
        with self.runtime.turn:
            now = {}
            for block in self.placement.prefixes.blocks():
                held = self.read(block)
                if held is None:
                    continue
                now[block] = held
                before = self.seen.get(block)
                if before is not None and not torch.equal(before, held):
                    may_differ -= 1
                    assert may_differ >= 0, f"block {block} changed"
                    assert torch.allclose(before.view(torch.float32), held.view(torch.float32), atol=TOLERANCE, rtol=0)
                    self.counts["recomputed and close"] += 1
            self.counts["compared"] += len(now.keys() & self.seen.keys())
            live = set(self.placement.prefixes.blocks())
            self.seen = {block: held for block, held in (self.seen | now).items() if block in live}

    def read(self, block: BlockId) -> torch.Tensor | None:
        """The block's bytes as they lie on its fastest tier; None if they are damaged there, or on their way."""
        record = self.placement.residency[block]
        tier = record.fastest
        assert tier is not None
        out = torch.empty(self.runtime.group.shape.block_bytes, dtype=torch.uint8)
        try:
            self.runtime.stores[tier].read(Slot(record.copies[tier]), out)
        except OSError:
            assert tier is Tier.NVME
            self.counts["damaged"] += 1
            return None
        return out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_sixteen_sequences_on_one_prefix_stay_exact_and_share_nothing_that_changes(seed: int, tmp_path: Path) -> None:
    model = tiny("llama")
    fire = Fire(model, tmp_path, seed)
    with fire.tiered as tiered:
        for _ in range(NUM_ACTIONS // 2):
            fire.act()
        stats = tiered.stats()
        fire.chats.clear()
        gc.collect()
        tiered.stats()
        for block in fire.placement.prefixes.blocks():
            with fire.runtime.turn:
                fire.placement.settle(block)
                fire.placement.unindex(block, Miss.EVICTED)
        assert occupied(tiered) == 0
    print(fire.counts, stats["prefix_cache"], stats["recomputed_blocks"])
    scale = NUM_ACTIONS / 1000
    assert stats["recomputed_blocks"] > 20 * scale and fire.counts["recomputed and close"] > 5 * scale, fire.counts
    assert sum(stats["prefix_cache"]["reused_tokens"].values()) > 2000 * scale, stats["prefix_cache"]
    assert fire.counts["compared"] > 3000 * scale and fire.counts["damaged"] > 5 * scale, fire.counts
    assert stats["prefix_cache"]["misses"]["corrupt"] + stats["recomputed_blocks"] > 20 * scale
