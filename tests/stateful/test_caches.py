"""Caches of several rows on tiers far too small for them, against plain caches: 2,000 random steps."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.errors import BlockLostError, CapacityError
from kvtier.hf import TieredCache
from tests.e2e.families import BLOCK, CHUNK, MODES, assert_close, mode_of, occupied, small_config, tiny, tokens
from tests.stateful.machine import Machine, run

MAX_ROWS = 16
MAX_COLUMNS = 150
NUM_EXAMPLES = int(os.environ.get("KVTIER_TEST_EXAMPLES", "40"))
NUM_STEPS = 50
LOWER: tuple[tuple[int, int | str], ...] = ((0, "32MiB"), (2, "32MiB"), (6, "32MiB"), (8, 0), (12, 0), (16, 0))
"""Blocks of the cpu tier, and the nvme tier's budget."""
PHASES = [Phase.generate] if "KVTIER_TEST_FAST" in os.environ else [Phase.generate, Phase.shrink]

indexes = st.integers(0, 1 << 16)
counts = st.one_of(st.just(1), st.integers(1, 2 * CHUNK + 5))


class Interrupted(Exception):
    """Raised in the middle of a step on purpose."""


@dataclass(eq=False)
class Chat:
    """One tiered cache, the plain one that it must equal, and what both hold."""

    ours: TieredCache
    plain: DynamicCache
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def forward(self, model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, chunk: int) -> torch.Tensor:
        whole = torch.cat([self.mask, mask], dim=1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, self.length :]
        parts = []
        for start in range(0, ids.shape[1], chunk):
            piece = slice(start, start + chunk)
            seen = whole[:, : self.length + min(start + chunk, ids.shape[1])]
            out = model(ids[:, piece], attention_mask=seen, position_ids=positions[:, piece], cache=cache)
            parts.append(out.logits)
        return torch.cat(parts, dim=1)


def descriptors() -> set[tuple[str, str]]:
    """The process's open files, with what each one is of."""
    folder = Path("/proc/self/fd")
    return {(each.name, os.readlink(each)) for each in folder.iterdir() if each.is_symlink()}


class CacheMachine(Machine):
    """Every rule is something that a decoding loop, a generate mode, or a user who gives up does.

    No rule has a precondition: which caches there are depends on which calls found room, and that on how far moves in
    the background have come. Hypothesis must draw the same whatever came of it. A rule that needs a cache begins one.
    """

    totals: ClassVar[Counter[str]] = Counter()
    lower: ClassVar[tuple[int, int | str]]

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Chat] = []
        self.folder = tempfile.TemporaryDirectory()
        self.seed = 0
        self.threads, self.descriptors = set(threading.enumerate()), descriptors()

    @initialize(
        family=st.sampled_from(["llama", "qwen3", "gpt_neox"]),
        mode=st.sampled_from(MODES),
        gpu_slots=st.sampled_from([12, 14, 20]),
        policy=st.sampled_from(["lru", "mru", "recency"]),
        first=st.lists(st.tuples(st.integers(1, 2), counts), min_size=2, max_size=4),
    )
    def wrap(
        self,
        family: str,
        mode: str,
        gpu_slots: int,
        policy: str,
        first: list[tuple[int, int]],
    ) -> None:
        """On tiers that are soon full."""
        self.model = tiny(family)
        config = small_config(
            self.model, Path(self.folder.name), mode, gpu_slots=gpu_slots, cpu_blocks=self.lower[0], nvme=self.lower[1],
            eviction=dict.fromkeys(("gpu", "cpu", "nvme"), policy),
        )  # fmt: skip
        self.tiered = TieredKV(self.model, config)
        for rows, count in first:
            self.begin(rows, False, count + CHUNK)

    def new_ids(self, rows: int, count: int) -> torch.Tensor:
        self.seed += 1
        return tokens(rows * count, self.seed).view(rows, count)

    def num_rows(self) -> int:
        return sum(chat.rows for chat in self.chats)

    def pick(self, which: int, suits: Callable[[Chat], bool] = lambda chat: True) -> Chat:
        """One that suits; when none does, a new one, for which there is always room."""
        if not any(map(suits, self.chats)):
            self.chats = self.chats[-MAX_ROWS // 8 :]  # rows enough: the oldest go
            self.begin_chat(1 + which % 2, which % 4 < 2, 1 + which % CHUNK)
        good = list(filter(suits, self.chats))
        return good[which % len(good)]

    # -- tokens -----------------------------------------------------------------------------------------------------

    @rule(rows=st.integers(1, 4), same=st.booleans(), count=counts)
    def begin(self, rows: int, same: bool, count: int) -> None:
        """A new cache, of equal rows, as beams begin, or different ones; one that there is where rows are enough."""
        if self.num_rows() + rows <= MAX_ROWS:
            self.begin_chat(rows, same, count)
        else:
            self.go_on(0, count, [0] * 4, True)

    def begin_chat(self, rows: int, same: bool, count: int) -> None:
        empty = torch.zeros((rows, 0), dtype=torch.long)
        chat = Chat(self.tiered.new_cache(), DynamicCache(config=self.model.config), empty, empty)
        ids = self.new_ids(1, count).repeat(rows, 1) if same else self.new_ids(rows, count)
        self.append(chat, ids, torch.ones_like(ids))
        if chat.length:
            self.chats.append(chat)

    def has_room(self, chat: Chat, count: int) -> bool:
        """Whether all tiers together hold the batch, a copy of each tail and one block that is computed again."""
        slots = sum(tier["num_slots"] for tier in self.tiered.stats()["tiers"].values())
        return bool(chat.rows * (-(-(chat.length + count) // BLOCK) + 1) < slots)

    def check_no_room(self, chat: Chat, count: int) -> None:
        """A batch that is too large for all tiers is as it was, but for the caller's own chunks."""
        assert not self.has_room(chat, count)
        self.totals["no room"] += 1
        if chat.ours.get_seq_length() > chat.length:
            chat.ours.crop(chat.length - chat.ours.get_seq_length())

    def append(self, chat: Chat, ids: torch.Tensor, mask: torch.Tensor, chunk: int = 1 << 20) -> None:
        with torch.no_grad():
            try:
                ours = chat.forward(self.tiered, chat.ours, ids, mask, chunk)
            except CapacityError:
                self.check_no_room(chat, ids.shape[1])
                return
            plain = chat.forward(self.model, chat.plain, ids, mask, min(chunk, CHUNK))
        chat.ids, chat.mask = torch.cat([chat.ids, ids], dim=1), torch.cat([chat.mask, mask], dim=1)
        real = chat.mask.cumsum(1)[:, -ids.shape[1] :] > 0
        # With chunks of the caller's own, ours are cut again; bits are promised for whole chunks.
        assert_close(ours[real], plain[real], self.promise() if chunk > CHUNK else "blockwise")

    def promise(self) -> str:
        """After a recomputation gathered promises what blockwise does."""
        return "blockwise" if self.tiered.stats()["recomputed_blocks"] else mode_of(self.tiered)

    @rule(which=indexes, count=counts, pads=st.lists(st.integers(0, 40), min_size=4, max_size=4), left=st.booleans())
    def go_on(self, which: int, count: int, pads: list[int], left: bool) -> None:
        chat = self.pick(which)
        if chat.length + count > MAX_COLUMNS:
            return
        ids = self.new_ids(chat.rows, count)
        mask = torch.ones_like(ids)
        for row in range(chat.rows) if chat.rows > 1 else ():
            pad = min(pads[row], count)
            mask[row, slice(0, pad) if left else slice(count - pad, count)] = 0
        self.append(chat, ids, mask)

    @rule(which=indexes, count=counts, chunk=st.integers(1, 20))
    def go_on_in_chunks_of_its_own(self, which: int, count: int, chunk: int) -> None:
        chat = self.pick(which)
        if chat.length + count <= MAX_COLUMNS:
            ids = self.new_ids(chat.rows, count)
            self.append(chat, ids, torch.ones_like(ids), chunk)

    @rule(which=indexes, count=counts, new=st.integers(1, 5))
    def generate(self, which: int, count: int, new: int) -> None:
        chat = self.pick(which, lambda chat: bool(chat.mask.all()))
        if chat.length + count + new > MAX_COLUMNS:
            return
        ids = torch.cat([chat.ids, self.new_ids(chat.rows, count)], dim=1)
        how = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        mask = torch.ones_like(ids)
        try:
            ours = self.tiered.generate(ids, attention_mask=mask, cache=chat.ours, **how)
        except CapacityError:
            self.check_no_room(chat, count + new)
            return
        plain = self.model.generate(ids, attention_mask=mask, cache=chat.plain, prefill_chunk_size=CHUNK, **how)
        assert torch.equal(ours.sequences, plain.sequences)
        for one, other in zip(ours.logits, plain.logits, strict=True):
            assert_close(one, other, self.promise())
        chat.ids = ours.sequences[:, :-1]
        chat.mask = torch.ones_like(chat.ids)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @rule(which=indexes, back=st.integers(0, MAX_COLUMNS))
    def crop(self, which: int, back: int) -> None:
        chat = self.pick(which)
        back = min(back, chat.length)
        if back == chat.length:  # plain caches cannot hold nothing again
            return
        for cache in (chat.ours, chat.plain):
            cache.crop(-back)
        chat.ids, chat.mask = chat.ids[:, : chat.length - back], chat.mask[:, : chat.length - back]

    @rule(which=indexes, rows=st.lists(st.integers(0, 3), min_size=4, max_size=4))
    def reorder(self, which: int, rows: list[int]) -> None:
        chat = self.pick(which)
        self.select(chat, "reorder_cache", [row % chat.rows for row in rows[: chat.rows]])

    @rule(which=indexes, rows=st.sets(st.integers(0, 3), min_size=1))
    def keep_some(self, which: int, rows: set[int]) -> None:
        chat = self.pick(which)
        self.select(chat, "batch_select_indices", sorted({row % chat.rows for row in rows}))

    def select(self, chat: Chat, method: str, rows: list[int]) -> None:
        for cache in (chat.ours, chat.plain):
            getattr(cache, method)(torch.tensor(rows))
        chat.ids, chat.mask = chat.ids[rows], chat.mask[rows]

    @rule(which=indexes)
    def repeat(self, which: int) -> None:
        chat = self.pick(which, lambda chat: chat.rows <= 2)
        if self.num_rows() + chat.rows > MAX_ROWS:
            return
        for cache in (chat.ours, chat.plain):
            cache.batch_repeat_interleave(2)
        chat.ids, chat.mask = chat.ids.repeat_interleave(2, 0), chat.mask.repeat_interleave(2, 0)

    @rule(which=indexes)
    def fork(self, which: int) -> None:
        chat = self.pick(which)
        if self.num_rows() + chat.rows <= MAX_ROWS:
            self.chats.append(Chat(copy.deepcopy(chat.ours), copy.deepcopy(chat.plain), chat.ids, chat.mask))

    # -- the end, and what goes wrong ---------------------------------------------------------------------------------

    @rule(which=indexes, count=counts, layer=st.integers(0, 1), calls=st.integers(1, 3))
    def raise_in_a_layer(self, which: int, count: int, layer: int, calls: int) -> None:
        # No more columns than there is room to gather: without any the step would end before the hook is called.
        count, left = max(count, CHUNK * (calls - 1) + 1), [calls]
        chat = self.pick(which, lambda chat: chat.length + count <= MAX_COLUMNS)

        def hook(*_: Any) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Interrupted

        layers = self.model.gpt_neox.layers if hasattr(self.model, "gpt_neox") else self.model.model.layers
        before = chat.ours.stats()["tokens"], chat.ours.get_seq_length()
        handle = layers[layer].register_forward_hook(hook)
        ids = self.new_ids(chat.rows, count)
        try:
            # Under a hook nothing is dropped, and nothing that was is computed again.
            with torch.no_grad(), pytest.raises((Interrupted, CapacityError, BlockLostError)) as caught:
                chat.forward(self.tiered, chat.ours, ids, torch.ones_like(ids), 1 << 20)
        finally:
            handle.remove()
        dropped = self.tiered.stats()["dropped_blocks"]
        assert isinstance(caught.value, Interrupted) or dropped or "no tier takes" in str(caught.value)
        assert before == (chat.ours.stats()["tokens"], chat.ours.get_seq_length())

    @rule(which=indexes, reset=st.booleans())
    def close(self, which: int, reset: bool) -> None:
        chat = self.pick(which)
        self.chats.remove(chat)
        if reset:
            chat.ours.reset()
        del chat
        gc.collect(0)

    @invariant()
    def books_agree(self) -> None:
        self.totals["rules"] += 1
        if hasattr(self, "tiered"):
            self.tiered.check_integrity()
            for chat in self.chats:
                assert chat.ours.get_seq_length() == chat.length and chat.ours.batch_size == chat.rows
                assert chat.ours.stats()["tokens"] == int(chat.mask.sum())

    def check_end(self) -> None:
        if not hasattr(self, "tiered"):
            return
        self.chats.clear()
        gc.collect()
        assert occupied(self.tiered) == 0
        stats = self.tiered.stats()
        for name in ("steps", "steps_aborted", "nvme_sole_reads", "dropped_blocks", "recomputed_blocks"):
            self.totals[name] += stats[name]
        assert all(tier["used_slots"] == 0 for tier in stats["tiers"].values())
        self.tiered.close()
        assert set(threading.enumerate()) <= self.threads
        assert descriptors() <= self.descriptors

    def give_back(self) -> None:
        if hasattr(self, "tiered"):
            self.tiered.close()  # the examples to come wrap the same model
        self.folder.cleanup()


@pytest.mark.timeout(900)
def test_two_thousand_random_steps_equal_the_plain_caches() -> None:
    CacheMachine.totals.clear()
    # An equal share for all: Hypothesis varies few examples, and would spend most of them on one or two.
    for number, lower in enumerate(LOWER):
        run(
            type(f"CacheMachine{number}", (CacheMachine,), {"lower": lower}),
            settings(
                max_examples=-(-NUM_EXAMPLES // len(LOWER)),
                stateful_step_count=NUM_STEPS,
                deadline=None,
                # The same examples in each run of the tests; others for who asks for a number of them.
                derandomize="KVTIER_TEST_EXAMPLES" not in os.environ,
                phases=PHASES,
                suppress_health_check=list(HealthCheck),
            ),
        )
    totals = CacheMachine.totals
    # That it went where it should: rules that ran, steps of the model, blocks that had to come back from nvme.
    assert totals["rules"] >= NUM_EXAMPLES * NUM_STEPS * 0.8, totals
    assert totals["steps"] >= NUM_EXAMPLES * NUM_STEPS * 0.3, totals
    assert totals["steps_aborted"] > NUM_EXAMPLES, totals
    assert totals["nvme_sole_reads"] > 20 * NUM_EXAMPLES, totals
    assert totals["dropped_blocks"] > NUM_EXAMPLES and totals["recomputed_blocks"] > NUM_EXAMPLES / 2, totals
