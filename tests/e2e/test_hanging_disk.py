"""A disk that hangs: the right tokens from the tiers that work, no late byte in other memory, and the disk again."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from kvtier import TieredKV
from kvtier.errors import BlockLostError, CapacityError, IntegrityError, StoreError
from kvtier.hf import TieredCache
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slab import SlabStore
from kvtier.testing import FaultyStore
from kvtier.types import BlockId, Move, Slot, SlotLabel, Tier
from tests.e2e.families import FAMILIES, GREEDY, MODES, assert_same, plain_turns, small_config, tiny, tiny_from, tokens
from tests.e2e.test_recompute import recomputed

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.3
ROOMY: dict[str, Any] = {"gpu_slots": 8, "cpu_blocks": 40, "io_timeout_s": TIMEOUT_S}
"""Tiers on which three turns fit without nvme, and of which half goes there all the same."""
# After a recomputation gathered promises what blockwise does.
CLOSE = "blockwise"


@functools.cache
def deep() -> Any:
    """Eight layers: then a small gpu tier has a ring of more than two slices, as those of real models have."""
    config, values = FAMILIES["llama"]
    return tiny_from(config, **{**values, "num_hidden_layers": 8})


@functools.cache
def turns_of(num_turns: int = 3) -> list[Any]:
    return plain_turns(deep(), turns=num_turns)


def config_of(folder: Path, mode: str, **values: Any) -> dict[str, Any]:
    config = small_config(deep(), folder, mode, **{**ROOMY, **values})
    if "cpu" in config["tiers"]:
        config["tiers"]["cpu"] |= {"high": 0.2, "low": 0.1}
    return config


class HangingStore(FaultyStore):
    """Reads, writes or both hang while they are told to, until `release`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, seed=1, hang_s=60.0)
        self.reads_hang: Callable[[Slot], bool] = lambda slot: False
        self.writes_hang: Callable[[Slot], bool] = lambda slot: False
        self.num_hung = 0

    def _hang(self, does: Callable[[Slot], bool], slot: Slot) -> None:
        if does(slot):
            self.num_hung += 1
            self._released.wait(self.hang_s)

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self._hang(self.writes_hang, slot)
        super().write(slot, block, label)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self._hang(self.reads_hang, slot)
        super().read(slot, out)

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self._hang(self.reads_hang, slot)
        super().read_slice(slot, layer, out)

    def release(self) -> None:
        self.reads_hang = self.writes_hang = lambda slot: False
        super().release()


def interposed(tiered: TieredKV) -> HangingStore:
    stores: list[HangingStore] = []

    def wrap(inner: Any) -> HangingStore:
        stores.append(HangingStore(inner))
        return stores[0]

    tiered._runtime.interpose(Tier.NVME, wrap)
    return stores[0]


def everything(slot: Slot) -> bool:
    return True


def reads(store: HangingStore) -> None:
    store.reads_hang = everything


def writes(store: HangingStore) -> None:
    store.writes_hang = everything


def both(store: HangingStore) -> None:
    store.reads_hang = store.writes_hang = everything


def state(tiered: TieredKV) -> str:
    return str(tiered.stats()["tiers"]["nvme"]["state"])


def until_it_hangs(tiered: TieredKV, books_agree: bool = True) -> None:
    """The deadline of what hangs has passed; a write that nobody waits for may be too young just now."""
    while state(tiered) != "hanging":
        time.sleep(0.001)
    if books_agree:
        tiered.check_integrity()
    else:
        with pytest.raises(IntegrityError, match="held for other moves"):
            tiered.check_integrity()


def answers_again(tiered: TieredKV, store: HangingStore) -> None:
    """What hung ends, and the tier is told so."""
    store.release()
    while state(tiered) == "hanging":
        time.sleep(0.001)
    tiered.check_integrity()
    placement = tiered._runtime.placement
    assert not placement.hung.moves and not placement.hung._held and not placement.hung._orphans


def content(tiered: TieredKV) -> dict[tuple[Tier, BlockId], bytes]:
    """The bytes of every copy in memory."""
    runtime, found = tiered._runtime, {}
    for block in runtime.placement.residency.blocks():
        for tier, slot in runtime.placement.residency[block].copies.items():
            store = runtime.stores[tier]
            if isinstance(store, SlabStore):
                found[tier, block] = store.block(slot).numpy().tobytes()
    return found


def on_nvme_alone(tiered: TieredKV, cache: TieredCache) -> list[BlockId]:
    residency = tiered._runtime.placement.residency
    blocks = dict.fromkeys(block for table in cache.state.batch.tables for block in table.blocks)
    return [block for block in blocks if residency[block].fastest is Tier.NVME]


# -- goes on -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begin", [reads, writes, both])
def test_three_turns_while_the_disk_hangs_and_one_when_it_answers(
    begin: Callable[[HangingStore], None], mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, turns = deep(), turns_of(4)
    with TieredKV(model, config_of(tmp_path, mode)) as tiered, caplog.at_level(logging.INFO, "kvtier"):
        ring = tiered._runtime.executor.ring
        assert ring is not None and ring._spare
        store, cache = interposed(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert on_nvme_alone(tiered, cache)
        num_steps = 0

        def begin_in_the_middle(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                begin(store)
            return scores

        how = {**GREEDY, "logits_processor": LogitsProcessorList([begin_in_the_middle])}  # a hook would refuse the mend
        assert_same(tiered.generate(turns[1][0], cache=cache, **how), turns[1][1], CLOSE)
        tiered.check_integrity()
        assert_same(tiered.generate(turns[2][0], cache=cache, **GREEDY), turns[2][1], CLOSE)
        assert store.num_hung > 0
        until_it_hangs(tiered)
        tiered.check_integrity()
        (warning,) = [r for r in caplog.records if "the nvme tier hangs" in r.getMessage()]
        assert warning.levelno == logging.WARNING and f"io_timeout_s ({TIMEOUT_S} s)" in warning.getMessage()
        before, written = content(tiered), tiered.stats()["bytes_moved"]
        answers_again(tiered, store)
        after = content(tiered)
        same = before.keys() & after.keys()
        assert same and all(before[each] == after[each] for each in same)
        assert len([r for r in caplog.records if "the nvme tier answers again" in r.getMessage()]) == 1
        assert_same(tiered.generate(turns[3][0], cache=cache, **GREEDY), turns[3][1], CLOSE)
        now = tiered.stats()["bytes_moved"]
        assert now["gpu_to_nvme"] + now["cpu_to_nvme"] > written["gpu_to_nvme"] + written["cpu_to_nvme"]
        tiered.check_integrity()
    assert not [r for r in caplog.records if "still hang" in r.getMessage()]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["deep", "gemma3", "granitemoehybrid"])
def test_one_read_hangs(family: str, mode: str, tmp_path: Path) -> None:
    if family == "deep":
        model, turns, config = deep(), turns_of(), config_of(tmp_path, mode)
    else:  # a ring of two slices: one is left
        model = tiny(family)
        turns, config = plain_turns(model), small_config(model, tmp_path, mode, **ROOMY)
        config["tiers"]["cpu"] |= {"high": 0.2, "low": 0.1}
    with TieredKV(model, config) as tiered:
        store, cache = interposed(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        store.reads_hang = lambda slot: store.num_hung == 0
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
        assert store.num_hung == 1 and recomputed(tiered) > 0
        tiered.check_integrity()
        answers_again(tiered, store)
        assert_same(tiered.generate(turns[2][0], cache=cache, **GREEDY), turns[2][1], CLOSE)
        tiered.check_integrity()


# -- does not go on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_that_does_not_fit_without_the_disk_is_refused_until_it_answers(
    mode: str, tmp_path: Path
) -> None:
    model, turns = deep(), turns_of()
    with TieredKV(model, config_of(tmp_path, mode, gpu_slots=6, cpu_blocks=4)) as tiered:
        store, cache = interposed(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert len(on_nvme_alone(tiered, cache)) > 4
        both(store)
        before = cache.get_seq_length(), cache.token_ids
        for _ in range(2):
            with pytest.raises(
                (CapacityError, BlockLostError), match=r"the nvme tier hangs: .* longer than io_timeout"
            ):
                tiered.generate(turns[1][0], cache=cache, **GREEDY)
            tiered.check_integrity()
            assert tiered._runtime.placement.residency_pins(Tier.GPU) == 0
            cache.crop(before[0] - cache.get_seq_length())  # chunks for which there was room
            assert (cache.get_seq_length(), cache.token_ids) == before
        answers_again(tiered, store)
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
        tiered.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_on_block_loss_raise_says_that_the_deadline_passed(mode: str, tmp_path: Path) -> None:
    model, turns = deep(), turns_of()
    with TieredKV(model, config_of(tmp_path, mode, on_block_loss="raise")) as tiered:
        store, cache = interposed(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        reads(store)
        before = cache.get_seq_length(), cache.token_ids
        alone = set(on_nvme_alone(tiered, cache))
        for _ in range(3):
            with pytest.raises(BlockLostError, match=r"cannot be read from nvme: .*longer than io_timeout_s") as lost:
                tiered.generate(turns[1][0], cache=cache, **GREEDY)
            assert lost.value.blocks and set(lost.value.blocks) <= alone
            assert (cache.get_seq_length(), cache.token_ids) == before
            tiered.check_integrity()
        assert recomputed(tiered) == 0
        answers_again(tiered, store)
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
        tiered.check_integrity()


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_while_a_step_waits_for_the_deadline(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, turns = deep(), turns_of()
    with TieredKV(model, config_of(tmp_path, mode)) as tiered:
        ring = tiered._runtime.executor.ring
        assert ring is not None
        store, cache = interposed(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        before = cache.get_seq_length(), cache.token_ids
        reads(store)
        pass_deadline = ring._reads.pass_deadline

        def interrupt(late: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)  # it came during the wait that ends here
            pass_deadline(late)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ring._reads, "pass_deadline", interrupt)
            tiered.generate(turns[1][0], cache=cache, **GREEDY)
        assert (cache.get_seq_length(), cache.token_ids) == before
        assert state(tiered) == "hanging" and tiered._runtime.placement.residency_pins(Tier.GPU) == 0
        tiered.check_integrity()
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
        answers_again(tiered, store)
        assert_same(tiered.generate(turns[2][0], cache=cache, **GREEDY), turns[2][1], CLOSE)


# -- slots that something which hangs reads or writes ------------------------------------------------------------------


def demoted(tiered: TieredKV, num_blocks: int, is_held: bool = True) -> list[Move]:
    """Start to demote that many blocks of the gpu tier, wait for the deadline of those that hang, and name these."""
    runtime = tiered._runtime
    with runtime.turn:
        assert runtime.placement.give_up(Tier.GPU, num_blocks) == num_blocks
    until_it_hangs(tiered, is_held)
    return list(runtime.placement.hung.moves.values())


def slot_bytes(tiered: TieredKV, tier: Tier, slot: Slot) -> bytes:
    store = tiered._runtime.stores[tier]
    assert isinstance(store, SlabStore)
    return store.block(slot).numpy().tobytes()


@pytest.mark.parametrize("is_held", [True, False])
def test_the_source_of_a_write_that_hangs_is_not_given_to_another(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the hold, a valid label stands over another conversation's bytes: what the other case shows."""
    if not is_held:
        monkeypatch.setattr("kvtier.hung_moves.slots_of", lambda move: set())
    model = deep()
    with TieredKV(model, config_of(tmp_path, "blockwise", cpu_blocks=0, gpu_slots=8, on_block_loss="raise")) as tiered:
        store, cache = interposed(tiered), tiered.new_cache()
        tiered._runtime.placement.label_slot = None  # written with their labels, as with survives: power_loss
        num_slots = tiered.stats()["tiers"]["gpu"]["num_slots"]
        tiered.generate(tokens(100), cache=cache, max_new_tokens=2)
        writes(store)
        moves = demoted(tiered, 4, is_held)  # 2 threads; the others never begin
        assert len(moves) == 2 and all(move.label is not None for move in moves)
        held = {move.move_id: slot_bytes(tiered, Tier.GPU, move.source_slot) for move in moves}
        del cache  # the slots have no block left
        other, num_tokens = tiered.new_cache(), (num_slots - len(moves)) * 16
        out = tiered.generate(tokens(num_tokens - 3, 7), cache=other, max_new_tokens=3)
        assert torch.equal(out, model.generate(tokens(num_tokens - 3, 7), max_new_tokens=3))
        if is_held:
            tiered.check_integrity()
            assert tiered.stats()["tiers"]["gpu"]["used_slots"] == num_slots
            with pytest.raises(CapacityError, match="the nvme tier hangs"):
                tiered.generate(tokens(20, 8), max_new_tokens=2)
        with tiered._runtime.turn:
            for table in other.state.batch.tables:
                in_use = {tiered._runtime.placement.residency[block].copies[Tier.GPU] for block in table.blocks}
        assert in_use.isdisjoint(move.source_slot for move in moves) is is_held
        answers_again(tiered, store)
        nvme = tiered._runtime.stores[Tier.NVME]
        assert isinstance(nvme, NvmeStore)
        wrong = 0
        for move in moves:
            assert move.label is not None
            slot = nvme.find(move.label)  # what a later process would find
            assert slot is not None
            found = torch.empty(nvme.shape.block_bytes, dtype=torch.uint8)
            nvme.read(slot, found)
            wrong += found.numpy().tobytes() != held[move.move_id]
        assert (wrong > 0) is not is_held


@pytest.mark.parametrize("mode", MODES)
def test_a_tail_whose_write_hangs_is_copied_before_it_grows(mode: str, tmp_path: Path) -> None:
    model, ids = deep(), tokens(24)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    with TieredKV(model, config_of(tmp_path, mode, cpu_blocks=0)) as tiered:
        store, cache = interposed(tiered), tiered.new_cache()
        with torch.no_grad():
            tiered(ids[:, :20], cache=cache)
        writes(store)
        (tail,) = [block for table in cache.state.batch.tables for block in table.blocks if block == table.tail]
        moves = demoted(tiered, 2)  # a full block and a tail
        (move,) = [move for move in moves if move.block == tail]
        before = slot_bytes(tiered, Tier.GPU, move.source_slot)
        out = tiered.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)
        assert torch.equal(out, expected)
        assert slot_bytes(tiered, Tier.GPU, move.source_slot) == before
        tiered.check_integrity()
        answers_again(tiered, store)


@pytest.mark.parametrize("mode", MODES)
def test_a_tail_whose_read_hangs_is_recomputed(mode: str, tmp_path: Path) -> None:
    model, turns = deep(), turns_of()
    with TieredKV(model, config_of(tmp_path, mode)) as tiered:
        store, cache, runtime = interposed(tiered), tiered.new_cache(), tiered._runtime
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        for fork in (False, True):  # one that is promoted, and one that is copied
            other = cache.fork() if fork else None
            (table,) = cache.state.batch.tables
            assert table.tail is not None
            for tier in (Tier.GPU, Tier.CPU):
                for _ in range(2 * 50):
                    with runtime.turn:
                        runtime.placement.give_up(tier, 100)
                        while runtime.placement.moves:
                            runtime.placement.wait()
            assert runtime.placement.residency[table.tail].fastest is Tier.NVME
            store.reads_hang = everything
            num_recomputed = recomputed(tiered)
            ids, expected = turns[1 + fork]
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, CLOSE)
            assert recomputed(tiered) > num_recomputed
            until_it_hangs(tiered)
            tiered.check_integrity()
            answers_again(tiered, store)
            store._released.clear()
            if other is not None:
                assert other.get_seq_length() < cache.get_seq_length()
        tiered.check_integrity()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_while_reads_and_writes_hang_leaves_the_folder_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, turns = deep(), turns_of()
    tiered = TieredKV(model, config_of(tmp_path, "blockwise"))
    store, cache = interposed(tiered), tiered.new_cache()
    assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
    both(store)
    assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
    until_it_hangs(tiered)
    folder = Path(tiered.stats()["tiers"]["nvme"]["folder"])
    files = {path.name for path in folder.iterdir()}
    tiered.close()
    assert [r for r in caplog.records if "still hang: the nvme folder" in r.getMessage()]
    assert files == {path.name for path in folder.iterdir()}
    assert torch.equal(model.generate(turns[0][0], **GREEDY).sequences, turns[0][1].sequences)  # unwrapped all the same
    store.release()


EXIT = """
    import atexit, os, sys, threading
    from pathlib import Path

    def links():
        paths = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return {os.readlink(path) for path in paths if os.path.islink(path)}

    @atexit.register  # the first one: it runs last
    def descriptors_are_open():
        # A call that hangs goes on with its number, which must not be another file's by then.
        print("segments open:", any("segment-" in link for link in links()), flush=True)

    import torch
    torch.set_num_threads(1)
    from kvtier import TieredKV
    from tests.e2e.test_hanging_disk import config_of, deep
    from tests.e2e.families import tokens
    from tests.older_transformers import teach_plain_models

    teach_plain_models()
    model = deep()
    tiered = TieredKV(model, config_of(Path(sys.argv[1]), "blockwise"))
    cache = tiered.new_cache()
    out = tiered.generate(tokens(300), cache=cache, max_new_tokens=4, do_sample=False)
    for_ever, num_hung = threading.Event(), 0

    def hang(*_):
        global num_hung
        num_hung += 1
        for_ever.wait()

    for name in ("preadv", "pwritev", "pwrite"):
        setattr(os, name, hang)
    longer = torch.cat([out, tokens(40, 1)], dim=1)
    again = tiered.generate(longer, cache=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, model.generate(longer, max_new_tokens=4, do_sample=False))
    assert num_hung and tiered.stats()["tiers"]["nvme"]["state"] == "hanging"
    print("hung", num_hung, flush=True)
"""


def test_the_interpreter_exits_while_calls_hang_for_ever(tmp_path: Path) -> None:
    """Without `close()`, and with threads that no signal and no release gets back."""
    command = [sys.executable, "-c", textwrap.dedent(EXIT), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and done.stdout.startswith("hung"), done.stdout + done.stderr
    assert done.stdout.endswith("segments open: True\n"), done.stdout
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "nvme" / "kv").glob("segment-*"))


def test_a_disk_that_hangs_while_a_prompt_is_looked_up_is_a_miss_and_holds_nobody(tmp_path: Path) -> None:
    """Headers are read to know whether a block of an earlier process is the one: by whoever has the turn."""
    ids = tokens(200)
    config = config_of(tmp_path, "blockwise", prefix_cache=True)
    with TieredKV(deep(), config) as first:
        expected = first.generate(ids, **GREEDY)
    hangs = threading.Event()
    with TieredKV(deep(), config) as tiered:
        store = tiered._runtime.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        read = store._headers.read
        calls: list[int] = []

        def hanging(*args: Any) -> Any:
            calls.append(1)
            hangs.wait()  # for ever, were nobody to end it
            return read(*args)

        store._headers.read = hanging  # type: ignore[method-assign]
        try:
            assert_same(tiered.generate(ids, **GREEDY), expected, CLOSE)
            assert_same(tiered.generate(ids, salt="other", **GREEDY), expected, CLOSE)
            assert len(calls) == 1, "nothing is begun while the tier hangs"
        finally:
            hangs.set()
        store._headers.read = read  # type: ignore[method-assign]
        tiered.check_integrity()
        assert_same(tiered.generate(ids, **GREEDY), expected, CLOSE)


@pytest.mark.parametrize("what", ["save", "erase", "delete"])
def test_a_disk_that_hangs_while_a_session_is_kept_or_deleted_holds_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    ids, config = tokens(200), config_of(tmp_path, "blockwise", prefix_cache=True)
    hangs = threading.Event()
    with TieredKV(deep(), config) as tiered:
        store = tiered._runtime.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        session = tiered.session("alice")
        first = session.generate(ids, **GREEDY)
        owner: Any = store if what == "erase" else store.sessions
        act, calls = getattr(owner, what), []

        def hanging(*args: Any) -> Any:
            calls.append(1)
            hangs.wait()  # for ever, were nobody to end it
            return act(*args)

        setattr(owner, what, hanging)
        try:
            if what == "save":
                more = torch.cat([first.sequences, tokens(30, 1)], dim=1)
                expected = tiered.model.generate(more, **GREEDY)
                assert_same(session.generate(more, **GREEDY), expected, CLOSE)
                assert "session 'alice' is not kept: " in caplog.text
            else:
                with pytest.raises(StoreError, match="hangs"):
                    session.delete()
            other = tiered.generate(tokens(100, 7), **GREEDY)
            assert_same(other, tiered.model.generate(tokens(100, 7), **GREEDY), CLOSE)
            assert len(calls) == 1, "nothing is begun while the tier hangs"
        finally:
            hangs.set()
        setattr(owner, what, act)
        tiered.check_integrity()
        while state(tiered) == "hanging":
            tiered.stats()
        tiered.session("alice").delete()
        assert tiered.sessions() == []
        tiered.check_integrity()
    with TieredKV(deep(), config) as tiered:
        assert tiered.sessions() == [] and not tiered.session("alice").token_ids
