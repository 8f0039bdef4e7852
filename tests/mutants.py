"""Seeds one bug at a time into a copy of the tree and sees that the fast tests notice. `make mutants`, or with names.

A mutant is (name, file, exact old text, new text). The old text must occur exactly once: one that is no more is an
error, so that this list follows the code. Exit status 1 if a mutant survives or cannot be made, or if the tree as it is
fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_AT_ONCE = 2
TIMEOUT_S = 120
WRONG_MODULE = 97  # exit status of GUARD

CORE_TESTS = (
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            "slots",
            "breaker",
            "block_table",
            "residency",
            "plan",
            "manager",
            "batch",
            "hanging_moves",
            "drop",
            "wear",
        )
    ),
    "tests/stateful/test_manager.py",
)
STORE_TESTS = (
    "tests/unit/test_slot_format.py", "tests/contract/test_stores.py", "tests/fault/test_nvme_store.py",
    "tests/fault/test_restart.py", "tests/fault/test_power_loss.py",
)  # fmt: skip
IO_TESTS = ("tests/contract/test_stores.py", "tests/fault/test_nvme_io.py")
RING_TESTS = ("tests/unit/test_ring.py", "tests/unit/test_read_lane.py")
SPARSE_TESTS = ("tests/fault/test_compression.py", "tests/fault/test_joined_blocks.py")
SESSION_TESTS = ("tests/unit/test_session_record.py", "tests/fault/test_session_files.py")
PREFIX_TESTS = ("tests/unit/test_prefix.py", "tests/unit/test_identity.py", "tests/e2e/test_prefix_cache.py")
REUSE_TESTS = ("tests/unit/test_reuse.py", "tests/e2e/test_prefix_cache.py")
TENSOR_TESTS = ("tests/property/test_attention.py", "tests/property/test_open_step.py")

# Loaded by pytest in the copy: whatever the editable install points to, the mutated file must be what is tested. A
# failure is wanted fast, not small: Hypothesis does not shrink.
GUARD = f"""
import hypothesis, importlib, os, pathlib, pytest

def pytest_configure():
    found = pathlib.Path(importlib.import_module(os.environ["KVTIER_MUTATED_MODULE"]).__file__).resolve()
    if pathlib.Path(__file__).resolve().parent not in found.parents:
        pytest.exit(f"tested {{found}} instead of the copy", returncode={WRONG_MODULE})
    hypothesis.settings.register_profile("first", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("first")
"""


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    file: str
    old: str
    new: str

    @property
    def tests(self) -> tuple[str, ...]:
        if self.file in (RING, READS, LANE):
            return RING_TESTS
        if self.file == AIO:
            return ("tests/fault/test_reads_together.py",)
        if self.file in (ATTENTION, OPEN_STEP, PAST, PLACES, STEP_MEMORY):
            return TENSOR_TESTS
        if self.file in (FILE_IO, DIRECT, PAGE_CACHE, STAGING):
            return IO_TESTS
        if self.file in (SPARSE, PAYLOAD):
            return SPARSE_TESTS
        if self.file in (PREFIX, PREFIX_CACHE, LABELS, ORIGIN):
            return PREFIX_TESTS
        if self.file in (REUSE, KEEPING):
            return REUSE_TESTS
        if self.file == QUOTA:
            return ("tests/e2e/test_quota.py",)
        if self.file == TRANSFER:
            return ("tests/e2e/test_session_transfer.py",)
        if self.file in (RECORD, SESSION_FILES):
            return SESSION_TESTS
        return STORE_TESTS if self.file.startswith("kvtier/stores/") else CORE_TESTS

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


PAST, PLACES, STEP_MEMORY = "kvtier/past.py", "kvtier/places.py", "kvtier/step_memory.py"
SEQUENCES, STEP, ATTENTION, OPEN_STEP = (
    f"kvtier/{name}.py" for name in ("sequences", "step", "attention", "open_step")
)
SEALING, EVICTABLE, PREFIX = (f"kvtier/{name}.py" for name in ("sealing", "evictable", "prefix"))
PREFIX_CACHE, REUSE, QUOTA, KEEPING = (f"kvtier/{name}.py" for name in ("prefix_cache", "reuse", "quota", "keeping"))
LABELS, ORIGIN, TRANSFER = (f"kvtier/{name}.py" for name in ("labels", "origin", "session_transfer"))
RECORD, SESSION_FILES = "kvtier/session_record.py", "kvtier/stores/session_files.py"
MANAGER, PLACEMENT, TABLE = "kvtier/manager.py", "kvtier/placement.py", "kvtier/block_table.py"
PADDING, VICTIMS = "kvtier/padding.py", "kvtier/victims.py"
MOVER, UPKEEP, POLICY = "kvtier/mover.py", "kvtier/upkeep.py", "kvtier/policy.py"
COPIES, USE, HUNG = "kvtier/copies.py", "kvtier/tier_use.py", "kvtier/hung_moves.py"
RESIDENCY, SLOTS, PLAN = "kvtier/residency.py", "kvtier/slots.py", "kvtier/plan.py"
BREAKER, RING, READS, LANE = (f"kvtier/{name}.py" for name in ("breaker", "ring", "slice_reads", "read_lane"))
RUNNING = "kvtier/running.py"
LOSSES = "kvtier/losses.py"
WEAR = "kvtier/wear.py"
NVME, FOLDER, SLAB = (f"kvtier/stores/{name}.py" for name in ("nvme", "folder", "slab"))
SPACE, OPEN, INDEX, HEADERS, FORMAT = (
    f"kvtier/stores/{name}.py" for name in ("nvme_space", "nvme_open", "slot_index", "slot_headers", "slot_format")
)
FILE_IO, DIRECT, PAGE_CACHE, STAGING = (
    f"kvtier/stores/{name}.py" for name in ("file_io", "direct_io", "page_cache", "staging")
)
SPARSE, PAYLOAD = "kvtier/stores/nvme_sparse.py", "kvtier/stores/slot_payload.py"
OTHERS, READER, AIO = (f"kvtier/stores/{name}.py" for name in ("other_files", "slot_reader", "kernel_aio"))

MUTANTS = [
    # the prefix cache
    Mutant("found by hash alone", PREFIX, "own.content == label.content and own.namespace == label.namespace and ", ""),
    Mutant("a refuted block is served", PREFIX, " and not sealed.is_refuted", ""),
    Mutant("a head is taken for a leaf", PREFIX, " and sealed.label.identity in self._leaves", ""),
    Mutant("one salt for all", ORIGIN, '("salt", salt)])', '("salt", b"")])'),
    Mutant("modules play no part", LABELS, "seen = mark, modules", "seen = mark, None"),
    Mutant("a mark of other weights", LABELS, "seen = mark, modules", "seen = 0, modules"),
    Mutant(
        "what cannot be read is found",
        PREFIX_CACHE,
        "if fastest is None or block in placement.unreadable:",
        "if fastest is None:",
    ),
    Mutant("found under a hook", REUSE, "or not self._state.may_reuse()", ""),
    Mutant(
        "padding taken for tokens",
        REUSE,
        "prompts.append(Prompt(padding, row[padding:]))",
        "prompts.append(Prompt(0, row))",
    ),
    Mutant("padding on the right", REUSE, "if not all(seen[padding:]) or", "if"),
    Mutant("the last token is not computed", REUSE, "+ prompts[0].padding - 1", "+ prompts[0].padding"),
    Mutant("slower is loaded", REUSE, "best_cut(in_files, compute_s, load_s)", "first"),
    Mutant("the newest is not kept whole", KEEPING, "chain, {}, makes_room=False", "chain[-1:], {}, makes_room=False"),
    Mutant("a quota in memory", QUOTA, "prefixes.num_of_salt(salt) >= self.num_blocks", "False"),
    Mutant("a quota in files", QUOTA, "files.num_in(namespace) + num_writing < self.num_blocks", "True"),
    Mutant(
        "what lies behind a tail is exported",
        TRANSFER,
        "zero_behind(data.numpy(), runtime",
        "print(data.numpy(), runtime",
    ),
    Mutant(
        "another model's session is taken in",
        TRANSFER,
        "if header.namespace != _namespace(runtime, salt):",
        "if False:",
    ),
    # the manager
    Mutant(
        "fork counts no holder",
        SEQUENCES,
        "        for block in twin.blocks:\n            self.placement.hold(block)",
        "        for block in twin.blocks[1:]:\n            self.placement.hold(block)",
    ),
    Mutant(
        "stale tail copy kept after append",
        MANAGER,
        "for tier in [tier for tier in record.copies if tier is not GPU]:",
        "for tier in [tier for tier in record.copies if tier not in Tier]:",
    ),
    Mutant(
        "seal ignored on crop",
        MANAGER,
        "(record.holders > 1 or record.state is SEALED or is_held)",
        "(record.holders > 1 or is_held)",
    ),
    Mutant(
        "shared tail written in place",
        MANAGER,
        "(record.holders > 1 or record.state is SEALED or is_held)",
        "(record.state is SEALED or is_held)",
    ),
    Mutant("tail grows under a write that hangs", MANAGER, "is SEALED or is_held)", "is SEALED)"),
    Mutant("what lies on a tier that hangs is streamed", MANAGER, "self.placement.check_readable(blocks, tier)", "..."),
    Mutant(
        "moving tail not waited for",
        MANAGER,
        "placement.settle(tail, Stall.TAIL)  # it may itself",
        "pass  # it may itself",
    ),
    Mutant(
        "a block that has just been demoted is promoted",
        UPKEEP,
        "if record.move is not None:  # itself demoted",
        "if record.holders == 0:  # itself demoted",
    ),
    Mutant(
        "tail not pinned during its step",
        MANAGER,
        "                self._reserve_room(batch, new, needs)\n",
        "                late, reserved.pinned = reserved.pinned, []\n"
        "                [self.placement.residency.unpin(block, GPU) for block in late]\n"
        "                self._reserve_room(batch, new, needs)\n"
        "                [self._pin(block, reserved) for block in late]\n",
    ),
    Mutant(
        "aborted step keeps its new blocks",
        MANAGER,
        "self._release(row.new_blocks if row.tail_copy is None else row.pinned)",
        "self._release(row.new_blocks[1:])",
    ),
    Mutant(
        "demotion stops at high instead of low",
        UPKEEP,
        "int(mark.low_frac * pool.ceiling)",
        "int(mark.high_frac * pool.ceiling)",
    ),
    Mutant(
        "promotion fills the tier past low",
        UPKEEP,
        "room = int(placement.watermarks[tier].low_frac * pool.ceiling) - staying",
        "room = pool.ceiling - staying",
    ),
    Mutant(
        "open blocks copied down early",
        SEALING,
        "first = num_full = table.num_tokens // table.block_tokens",
        "first = num_full = len(table.blocks)",
    ),
    Mutant(
        "row without new tokens copies its tail",
        MANAGER,
        "if num_tokens and (record.holders > 1 or",
        "if (record.holders > 1 or",
    ),
    Mutant(
        "tail that did not grow loses its lower copies",
        MANAGER,
        "elif row.tail_slot is not None and num_tokens:",
        "elif tail is not None:",
    ),
    Mutant(
        "tail copied from the first row",
        MANAGER,
        "placement.copy_now(tail, MovePurpose.COPY_TAIL, slot)",
        "placement.copy_now(self._last.tables[0].tail or tail, MovePurpose.COPY_TAIL, slot)",
    ),
    Mutant(
        "failed step keeps the slots of the rows before",
        MANAGER,
        "            self._release(reserved.created)\n            raise",
        "            raise",
    ),
    Mutant(
        "failed step keeps pins of later rows",
        MANAGER,
        "for block in reserved.pinned:",
        "for block in reserved.pinned[:1]:",
    ),
    Mutant(
        "most new tokens of the first row alone",
        MANAGER,
        "each, tails = self.block_tokens, [table.tail_tokens for table in batch.tables]",
        "each, tails = self.block_tokens, [table.tail_tokens for table in batch.tables[:1]]",
    ),
    Mutant(
        "tails read in place are not counted",
        MANAGER,
        "if in_all > ceiling:",
        "if wanted > ceiling:",
    ),
    # rows of a batch
    Mutant(
        "join counts no holder",
        SEALING,
        "self.placement.hold(block)\n        old = table",
        "old = table",
    ),
    Mutant(
        "join on equal tokens alone",
        SEALING,
        "return self._same_bytes(slots[0], slots[1])",
        "return True",
    ),
    Mutant(
        "row named twice is one row",
        SEQUENCES,
        "self._fork_row(table, batch.metrics) if table.sequence in kept else table",
        "table",
    ),
    Mutant(
        "rows that are not named are kept",
        SEQUENCES,
        "if table.sequence not in staying:",
        "if table.sequence < 0:",
    ),
    Mutant(
        "mask_end keeps the blocks",
        SEQUENCES,
        "self._let_go(table, table.mask_end(num_columns))",
        "table.mask_end(num_columns)",
    ),
    Mutant(
        "crop of the first row alone",
        SEQUENCES,
        "for table in batch.tables:\n            self._let_go(table, table.truncate(length))",
        "for table in batch.tables[:1]:\n            self._let_go(table, table.truncate(length))",
    ),
    Mutant(
        "padding behind the last token forgotten",
        STEP,
        "if self.num_columns > column:",
        "if self.num_columns > column + 1:",
    ),
    Mutant(
        "padding placed by column instead of token",
        STEP,
        "found.append(Padding(num_tokens, run.first - column))",
        "found.append(Padding(column, run.first - column))",
    ),
    Mutant(
        "shared block streamed for its first row alone",
        PLAN,
        "streamed[block][3].append(row)",
        "pass",
    ),
    # placement
    Mutant(
        "source dropped before commit",
        PLACEMENT,
        "self.start(block, DEMOTE, tier, *place)",
        "self.start(block, DEMOTE, tier, *place); self.drop_copy(block, tier)",
    ),
    Mutant(
        "source dropped though its copy failed",
        MOVER,
        "            self._abandoned.discard(move_id)\n            self._put_back(result)\n",
        "            self._abandoned.discard(move_id)\n            self._put_back(result)\n"
        "            if is_demotion:\n"
        "                self.drop_copy(block, source)\n",
    ),
    Mutant(
        "promotions push running blocks down",
        PLACEMENT,
        "self.give_up(below, num_wanted - self._leaving[below], idle_only=idle_only, early=early)",
        "self.give_up(below, num_wanted - self._leaving[below])",
    ),
    Mutant(
        "failed move counted as done",
        MOVER,
        "if not is_done or record.holders == 0 or",
        "if record.holders == 0 or",
    ),
    Mutant(
        "dirty block evicted without a copy",
        PLACEMENT,
        "if self._is_clean(block, tier):",
        "if self._is_clean(block, tier) or tier is Tier.CPU:",
    ),
    Mutant("clean by a tier that hangs", VICTIMS, "other > tier and self.is_readable(other)", "other > tier"),
    Mutant(
        "blocks are given up whose slot a late move holds",
        EVICTABLE,
        "            and not (copies.hung.moves and copies.hung.holds(tier, slot))\n",
        "",
    ),
    Mutant(
        "the source of a late move is free",
        HUNG,
        "return {(move.source, move.source_slot), (move.dest, move.dest_slot)}",
        "return {(move.dest, move.dest_slot)}",
    ),
    Mutant("the slots of late moves never go back", HUNG, "if slot not in self._held]", "if False]"),
    Mutant(
        "a late move stays its block's",
        MOVER,
        "        record = self.residency[move.block]\n        record.move = None\n        if move.purpose is",
        "        record = self.residency[move.block]\n        if move.purpose is",
    ),
    Mutant("a tier hangs for ever", BREAKER, "self.overdue_calls.pop(call, None)", "..."),
    Mutant("moves start on a tier that hangs", BREAKER, "return not self.is_hanging and (", "return ("),
    Mutant("a late read's cell is used again", RING, "for cell in cells if cell not in taken", "for cell in cells"),
    Mutant(
        "late reads go on",
        READS,
        "if read.generation != self._generation:\n                return _nothing\n",
        "if False:\n                return _nothing\n",
    ),
    Mutant(
        "others wait behind a read that hangs",
        READS,
        "self._lane = ReadLane(_LANE)\n        return hung",
        "return hung",
    ),
    Mutant("a begun read does not count", READS, "self._running[read] = None", "..."),
    Mutant(
        "a read is ended before others begin",
        LANE,
        "wait=not begun)) is not _NOTHING:",
        "wait=not begun)) is not _NOTHING and not begun:",
    ),
    Mutant("begun reads are left at the end", LANE, "while is_open or begun:", "while is_open:"),
    Mutant("a result is another read's", AIO, "reads.results[row] = result", "reads.results[0] = result"),
    Mutant(
        "a read is over with its first slice",
        AIO,
        "while reads.num_ended < len(reads.results)",
        "while not reads.num_ended",
    ),
    Mutant("a place in flight is given twice", AIO, "self._free[-num:] = chosen[taken:]", "..."),
    Mutant("results are taken after a failure", AIO, " and not self.is_closed:", ":"),
    Mutant(
        "ceiling not lowered on a full disk",
        USE,
        "pool.lower_ceiling(result.available_slots)",
        "pool.lower_ceiling(pool.num_slots)",
    ),
    Mutant(
        "running blocks go before idle ones",
        PLACEMENT,
        "for running in (False,) if idle_only else (False, True):",
        "for running in (False,) if idle_only else (True, False):",
    ),
    Mutant("pins ignored", EVICTABLE, "and not record.pins[tier]", "and record.pins is not None"),
    Mutant(
        "moving block moved again",
        EVICTABLE,
        "record is None or record.move is not None or (slot",
        "record is None or (slot",
    ),
    Mutant(
        "slot of a failed move leaks",
        MOVER,
        "            self._abandoned.discard(move_id)\n            self._put_back(result)\n",
        "            self._abandoned.discard(move_id)\n",
    ),
    Mutant(
        "abandoned tail copy keeps its slot",
        MOVER,
        "self._abandoned.add(move.move_id)",
        "self._abandoned.discard(move.move_id)",
    ),
    Mutant(
        "policy not told of evictions",
        COPIES,
        "        self.policies[tier].removed(block)\n",
        "",
    ),
    Mutant(
        "policy believed whatever it names",
        VICTIMS,
        "good = [block for block in names if block in evictable]",
        "good = [block for block in names if block in self.residency.records]",
    ),
    Mutant(
        "policy believed since it has asked for some block",
        VICTIMS,
        "if names == evictable.granted:",
        "if evictable.granted:",
    ),
    Mutant(
        "policy that names nothing stops the house",
        VICTIMS,
        "if self._oldest_first and len(good) < num_blocks:",
        "if self._oldest_first and len(good) > num_blocks:",
    ),
    Mutant(
        "unreadable block promoted for ever",
        USE,
        "self.unreadable.add(move.block)",
        "self.unreadable.discard(move.block)",
    ),
    # idle blocks dropped for room
    Mutant(
        "running blocks are dropped",
        EVICTABLE,
        "        super().__init__(copies, tier)\n        self._recomputable",
        "        super().__init__(copies, tier, running=True)\n        self._recomputable",
    ),
    Mutant("what cannot be recomputed is dropped", EVICTABLE, " and block in self._recomputable and", " and"),
    Mutant(
        "blocks are dropped for a step that cannot fit",
        PLACEMENT,
        "if min(may_go, len(found)) < num_slots:",
        "if not found:",
    ),
    Mutant(
        "a dropped block is forgotten", PLACEMENT, "self.unreadable.add(block)\n        self.unindex", "self.metrics"
    ),
    Mutant(
        "a batch that is mended is idle",
        LOSSES,
        "self._manager.enter(self._batch)  #",
        "self._manager.running()  #",
    ),
    # the limit to what is written
    Mutant("moves under way are not counted", WEAR, "(self._num_begun + 1) * self._move_bytes <= limit", "0 <= limit"),
    Mutant(
        "a window forgets its oldest part",
        WEAR,
        "first = (self._clock() - self._period_s) // self._bucket_s",
        "first = (self._clock() - self._period_s) // self._bucket_s + 1",
    ),
    Mutant(
        "a promise is not in the ledger",
        WEAR,
        "self._ledger.save(written, promised_bytes)",
        "self._ledger.save(written, 0)",
    ),
    Mutant("early moves spend all", WEAR, "EARLY_FRAC = 0.5", "EARLY_FRAC = 1.0"),
    # tiers that rest or grow
    Mutant("a tier that fails is never left alone", BREAKER, "(not self.is_resting or (", "(True or ("),
    Mutant("a tier that rests is never tried", BREAKER, "self._probe is None and self._rest.is_over)", "False)"),
    Mutant("a tier that rests gets many probes", BREAKER, "(self._probe is None and self._rest", "(self._rest"),
    Mutant("each rest is as short as the first", BREAKER, "2 * self._length_s", "self._length_s"),
    Mutant(
        "an older failure makes the rest longer",
        BREAKER,
        "if move_id == self._probe:\n                ",
        "if True:\n                ",
    ),
    Mutant("a resting tier is tried all the same", PLACEMENT, "if self.takes(below, early=early):", "if self.pools:"),
    Mutant(
        "no space for a slot with backing is tried for ever",
        USE,
        "if move.dest_slot < pool.ceiling and not result.retires_slot:",
        "if move.dest_slot < 0:",
    ),
    Mutant(
        "a disk without the room it promises is asked as often",
        BREAKER,
        "            self._rest.lengthen()\n        return is_news",
        "            self._rest.repeat()\n        return is_news",
    ),
    Mutant(
        "slots in use are free when a ceiling rises",
        SLOTS,
        "            if not self._is_taken[slot]:\n                self._push(slot)\n",
        "            self._push(slot)\n",
    ),
    Mutant(
        "room that a whole segment does not fit in",
        SPACE,
        "                if room_bytes < 0:\n                    break\n",
        "",
    ),
    Mutant(
        "planned anew as if the short segment took nothing",
        SPACE,
        "        more = self._limits.new_segments(self._geometry, taken_bytes)",
        "        more = self._limits.new_segments(self._geometry, 0)",
    ),
    # slots, residency, tables, plans
    Mutant(
        "double free accepted",
        SLOTS,
        "or not is_taken[slot]:\n            raise",
        "or slot < 0:\n            raise",
    ),
    Mutant(
        "slot beyond the ceiling handed out again",
        SLOTS,
        "if slot < self._ceiling:\n            self._free.add",
        "if slot >= 0:\n            self._free.add",
    ),
    Mutant(
        "dropped copy still listed as redundant",
        RESIDENCY,
        "        else:\n            del self.redundant[tier][block]\n",
        "",
    ),
    Mutant(
        "a row that goes idle still runs",
        SEQUENCES,
        "            else:\n                running.stop(",
        "            elif 0:\n                running.stop(",
    ),
    Mutant(
        "a row's last reads are never told",
        SEQUENCES,
        "        if not runs:\n            self.placement.reads.tell(batch)\n",
        "",
    ),
    Mutant(
        "reads are not told before a running block goes",
        VICTIMS,
        "evictable.running:\n                self.reads.tell_all()",
        "evictable.running:\n                pass",
    ),
    Mutant(
        "what came up is still listed below",
        RUNNING,
        "            self._unlist(block)\n            self._list(",
        "            self._list(",
    ),
    Mutant(
        "a block that is used again is still cached",
        COPIES,
        "            self._uncache(block, *record.copies)\n        record.holders += 1",
        "            pass\n        record.holders += 1",
    ),
    Mutant(
        "rows share what they write",
        "kvtier/token_ids.py",
        "self._contents[:], self._rest[:]",
        "self._contents, self._rest",
    ),
    Mutant("a crop forgets a part of a shared block", "kvtier/token_ids.py", "[:part]", "[:0]"),
    Mutant("unpin drops every pin", RESIDENCY, "pins[tier] -= 1", "pins[tier] = 0"),
    Mutant(
        "clean even if the other copy is gone", RESIDENCY, "self.cpu_slot is not None and tier is GPU", "tier is GPU"
    ),
    Mutant(
        "crop drops the new tail",
        TABLE,
        "keep = -(-num_tokens // self.block_tokens)",
        "keep = num_tokens // self.block_tokens",
    ),
    Mutant("forks share their list of blocks", TABLE, "twin.blocks = list(self.blocks)", "twin.blocks = self.blocks"),
    Mutant("crop keeps the ids", TABLE, "keep:]\n        self._ids.truncate(num_tokens)\n", "keep:]\n"),
    Mutant(
        "length forgets padding", TABLE, "return self.num_tokens + self._padding.num_columns", "return self.num_tokens"
    ),
    Mutant(
        "join ignores positions",
        TABLE,
        "self._ids.slice(first, last), self._runs.positions(first, last), padding)",
        "self._ids.slice(first, last), [(0, last - first)], padding)",
    ),
    Mutant(
        "join ignores padding",
        TABLE,
        "self._ids.slice(first, last), self._runs.positions(first, last), padding)",
        "self._ids.slice(first, last), self._positions(first, last), [])",
    ),
    Mutant(
        "join of unknown ids",
        TABLE,
        "if last > len(self._ids):\n            return None",
        "if last > self.num_tokens:\n            return None",
    ),
    Mutant(
        "pieces start in front of the padding",
        PADDING,
        "for p in self.runs if p.at <= first)",
        "for p in self.runs if p.at < first)",
    ),
    Mutant(
        "pieces bridge padding",
        PADDING,
        "column += padding.at - first + padding.count",
        "column += padding.at - first",
    ),
    Mutant("crop keeps a run of padding whole", PADDING, "min(padding.count, left)", "padding.count"),
    Mutant("runs of padding side by side", PADDING, "if self.runs and self.runs[-1].at == at:", "if at < 0:"),
    Mutant("forks share their padding", PADDING, "return PaddingRuns(self.runs)", "return self"),
    Mutant("runs bridge a gap", PLAN, "block.slot == first.slot + count:", "block.slot >= first.slot + count:"),
    # attention
    Mutant(
        "padding is attended to",
        ATTENTION,
        "keys, values = keys.index_select(2, columns), values.index_select(2, columns)",
        "keys, values = keys[:, :, : len(columns)], values[:, :, : len(columns)]",
    ),
    Mutant(
        "padding sees later tokens",
        ATTENTION,
        "keys[:, :, :seen], values[:, :, :seen], kernel)",
        "keys, values, kernel)",
    ),
    Mutant(
        "padding that sees nothing weighs something",
        ATTENTION,
        'torch.full((*grid, num_columns), float("-inf"),',
        "torch.full((*grid, num_columns), 0.0,",
    ),
    Mutant(
        "new tokens see later ones",
        ATTENTION,
        "_call(query, keys, values, kernel, causal=True)",
        "_call(query, keys, values, kernel, causal=False)",
    ),
    Mutant("softcap without its slope", ATTENTION, "torch.tanh(scores / kernel.softcap)", "torch.tanh(scores)"),
    Mutant(
        "sinks of other heads",
        ATTENTION,
        "sinks.float().reshape(1, kv_heads, -1, 1)",
        "sinks.float().flip(0).reshape(1, kv_heads, -1, 1)",
    ),
    Mutant("wide computes in 16 bits", ATTENTION, "if kernel.wide:", "if kernel.wide is None:"),
    Mutant("columns between padding not picked", OPEN_STEP, "if len(runs) == 1:", "if runs:"),
    Mutant(
        "tail attended past its end",
        PAST,
        "(row.tail_slot, row.table.tail_tokens)",
        "(row.tail_slot, row.table.block_tokens)",
    ),
    Mutant("decode leaves out the token itself", PLACES, "cut(slot, 1, 0, start + 1)", "cut(slot, 1, 0, start or 1)"),
    Mutant(
        "rows' tokens leave out themselves",
        PAST,
        "row.writes[0].slot, row.writes[0].start + 1",
        "row.writes[0].slot, row.writes[0].start or 1",
    ),
    Mutant("a token's run of blocks cut too long", PLACES, "min(at_once, end - first)", "min(at_once, run.count)"),
    Mutant(
        "a run of blocks leaves out the token", PLACES, "slab.block_tokens + start + 1", "slab.block_tokens + start"
    ),
    Mutant("a run goes on in a tail that lies elsewhere", PLACES, "end == tail and", "end < tail and"),
    Mutant("a run that its rows do not all see", PLACES, "len(set(group)) == 1", "group"),
    Mutant(
        "joined tokens of another head",
        PLACES,
        "1, heads, num_tokens, dim), (*outer_strides, head_stride, head_stride,",
        "1, heads, num_tokens, dim), (*outer_strides, head_stride, token_stride,",
    ),
    Mutant("streamed block seen by every row", PAST, "if row in source.rows:", "if source.rows:"),
    Mutant("pieces of the next row too", PAST, "min(start + self.at_once, last)", "start + self.at_once"),
    Mutant("stale bytes where padding is", OPEN_STEP, "if step.batch.is_padded:", "if step.batch is None:"),
    Mutant(
        "partial results rounded to 16 bits",
        STEP_MEMORY,
        "Kernel(scale, softcap, self.group.is_wide)",
        "Kernel(scale, softcap, False)",
    ),
    # the stores
    Mutant("nvme checksum not compared", READER, "if actual != expected:", "if expected < 0:"),
    Mutant(
        "nvme checksum of another slice",
        READER,
        "_verify(part, payload.checksums[layer]",
        "_verify(part, payload.checksums[layer - 1]",
    ),
    Mutant(
        "nvme slice read from the next one's place",
        READER,
        "self._read(segment, slot, start + offset_bytes, stored)",
        "self._read(segment, slot, start + offset_bytes + num_bytes, stored)",
    ),
    Mutant(
        "nvme slots of a segment one too few",
        SPACE,
        "PAGE_BYTES + number * self._geometry.slot_bytes",
        "PAGE_BYTES + max(0, number - 1) * self._geometry.slot_bytes",
    ),
    Mutant(
        "nvme slot readable after a write that failed",
        INDEX,
        "            self._payloads.pop(slot, None)\n",
        "            self._payloads.get(slot, None)\n",
    ),
    Mutant(
        "nvme slot found while it is written",
        INDEX,
        "            self._payloads.pop(slot, None)\n            self._forget(slot)\n",
        "            self._payloads.pop(slot, None)\n",
    ),
    Mutant("nvme header not taken back", HEADERS, "if self._index.is_on_disk(slot):", "if not slot < 1 << 60:"),
    Mutant(
        "nvme header before its block is on the medium",
        HEADERS,
        "        if self._syncs:\n            segment.sync()\n        self._index.header_begun(slot,",
        "        self._index.header_begun(slot,",
    ),
    Mutant("nvme header believed without its checksum", FORMAT, "len(rows)) == stored)", "len(rows)) >= 0)"),
    Mutant("nvme absurd content believed", FORMAT, '& (fields["content_bytes"] <= self.max_content_bytes)', ""),
    Mutant("nvme older copy wins", INDEX, "if self._keys[other][1] >= generation:", "if generation >= 0:"),
    Mutant(
        "nvme found by identity alone",
        NVME,
        "        if held != label or",
        "        if held is None or",
    ),
    Mutant("nvme files of others never given up", SPACE, "while self.others and (", "while not self.others and ("),
    Mutant("nvme youngest of others goes first", OTHERS, "self._files.pop(0)", "self._files.pop()"),
    Mutant(
        "nvme files beyond the budget stay",
        OPEN,
        "        if left_bytes >= 0:\n",
        "        if left_bytes >= -(1 << 60):\n",
    ),
    Mutant(
        "nvme found slots handed out youngest first",
        OPEN,
        "groups.sort(key=lambda group: group[0])",
        "groups.sort(key=lambda group: group[0], reverse=True)",
    ),
    Mutant("nvme time to live ignored", OPEN, "if not namespaces.is_expired(age) for", "if age for"),
    Mutant(
        "nvme another user's file read",
        "kvtier/stores/folder_check.py",
        "if status.st_uid != os.geteuid():",
        "if status.st_uid < 0:",
    ),
    Mutant(
        "nvme segments not preallocated",
        FOLDER,
        "in the middle of a write.\n            os.posix_fallocate(fd, 0, PAGE_BYTES if sparse else num_bytes)",
        "in the middle of a write.\n            os.ftruncate(fd, num_bytes)",
    ),
    Mutant("nvme short reads believed", FILE_IO, "if done + got >= needed_bytes:", "if done + got >= 0:"),
    Mutant("nvme short writes believed", FILE_IO, "while done < len(data):", "if done < len(data):"),
    Mutant(
        "nvme part of a page of a short read kept", FILE_IO, "(done + got) // step_bytes * step_bytes", "done + got"
    ),
    Mutant(
        "direct pages written in part are not read first", DIRECT, "if (skipped + taken) % PAGE_BYTES:", "if False:"
    ),
    Mutant(
        "direct reads the page before",
        DIRECT,
        "start = -offset_bytes % PAGE_BYTES",
        "start = offset_bytes % PAGE_BYTES",
    ),
    Mutant("staging without a bound", STAGING, "BoundedSemaphore(self.num_buffers)", "BoundedSemaphore(1000)"),
    Mutant(
        "staging kept by whoever fails", STAGING, "                self._free.append(buffer)", "                pass"
    ),
    Mutant(
        "page cache used before it is released",
        PAGE_CACHE,
        "+ growth_bytes <= self.budget_bytes:",
        "+ growth_bytes >= 0:",
    ),
    Mutant(
        "dirty pages dropped unwritten",
        PAGE_CACHE,
        "        if is_dirty:\n",
        "        if False:\n",
    ),
    # compressed slots
    Mutant("sparse budget not asked", SPARSE, "return fits_budget and self", "return self"),
    Mutant(
        "sparse pages counted after they are allocated",
        SPARSE,
        "                pages.set(local, wanted)\n        try",
        "                pass\n        try",
    ),
    Mutant("sparse surplus kept", SPARSE, "elif held - wanted > wanted // _SLACK:", "elif held < wanted:"),
    Mutant(
        "sparse refused slot keeps its pages",
        SPARSE,
        "                self._shrink(segment, start, pages, local, 0)\n                raise self._refusal(slot, f",
        "                raise self._refusal(slot, f",
    ),
    Mutant(
        "sparse half allocation stays",
        SPARSE,
        "            self._shrink(segment, start, pages, local, 0)  # some of it may",
        "            pages.set(local, 0)  # some of it may",
    ),
    Mutant(
        "sparse refusal forgotten",
        SPARSE,
        "self._ceiling = min(self._ceiling, available)",
        "self._ceiling = self.num_slots",
    ),
    Mutant(
        "sparse slot retired though it is the last",
        SPARSE,
        "retires_slot=slot < available",
        "retires_slot=slot <= available",
    ),
    Mutant(
        "sparse excess not measured",
        SPARSE,
        "self.excess_bytes = max(0, allocated",
        "self.excess_bytes = min(0, allocated",
    ),
    Mutant(
        "sparse leftovers kept at an open", SPARSE, "        if start > end:\n", "        if start > end + (1 << 60):\n"
    ),
    Mutant(
        "sparse holes of copies not filled",
        SPARSE,
        "if segment.allocated_bytes() < int(pages.sum() + 1) * PAGE_BYTES:",
        "if segment.allocated_bytes() < 0:",
    ),
    Mutant("a page between two groups lost", PAYLOAD, "room[:held_bytes] = room[whole_bytes:]", "..."),
    Mutant("encoded last page not cleared", PAYLOAD, "data[end : whole_pages(end)] = 0", "data[end:end] = 0"),
    Mutant(
        "encoded slices decoded as the store's own elements",
        PAYLOAD,
        "self._codecs[codec].decode",
        "(self._encoder or self._codecs[codec]).decode",
    ),
    Mutant(
        "encoded slice decoded unverified",
        READER,
        "        _verify(stored, payload.checksums[layer], slot, layer, segment)\n",
        "",
    ),
    Mutant(
        "crafted offsets of slices believed",
        FORMAT,
        '        good &= (table["offset"] == _starts(stored)).all(axis=1)\n',
        "",
    ),
    Mutant(
        "crafted lengths of slices believed",
        FORMAT,
        "((stored >= 1) & (stored <= self.slice_bytes))",
        "(stored == stored)",
    ),
    Mutant(
        "retired slot handed out again",
        SLOTS,
        "            self._pull(slot)\n            self._retired",
        "            self._retired",
    ),
    Mutant(
        "a slot without room tried for ever",
        USE,
        "result.status is MoveStatus.NO_SPACE and result.retires_slot",
        "result.status is None and result.retires_slot",
    ),
    # sessions on disk
    Mutant("a session believed without its checksum", RECORD, "if data[-CHECKSUM_BYTES:] != _checksum(body):", "if 0:"),
    Mutant("a part of a session longer than what is left", RECORD, "if length > len(rest):", "if length < 0:"),
    Mutant("bytes behind a session's fields", RECORD, "    if data:\n", "    if not _FIELDS:\n"),
    Mutant("a pinned session expires", RECORD, "return not self.is_pinned and", "return"),
    Mutant("a session of two salts", RECORD, '[("salt", salt), ("name",', '[("salt", b""), ("name",'),
    Mutant(
        "sessions beyond their part of the budget", SESSION_FILES, "wanted_bytes > self.room_bytes", "wanted_bytes < 0"
    ),
    Mutant("another's session by file name", SESSION_FILES, "if session_name(record.key()) != name:", "if not name:"),
    Mutant("a session open to others", SESSION_FILES, "if stat.S_IMODE(status.st_mode) & 0o077:", "if 0:"),
    Mutant(
        "what was not finished stays",
        SESSION_FILES,
        "                    folder.unlink(name)\n",
        "                    pass\n",
    ),
    Mutant("values over keys", SLAB, "view(layer, shape.key_bytes, shape", "view(layer, 0, shape"),
    Mutant(
        "slab slice of another layer",
        SLAB,
        "return block[layer] if block.dim()",
        "return block[0] if block.dim()",
    ),
]


def make_copy(folder: Path) -> None:
    """What the tests need of the tree. `policies` and the others appear under kvtier as they do when installed."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("kvtier", "policies", "configs", "benchmarks", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("policies", "configs", "benchmarks"):
        (folder / "kvtier" / name).symlink_to(folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "mutant_guard.py").write_text(GUARD)


def run_tests(folder: Path, module: str, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status of pytest in the copy, and its output. A run past the limit counts as a failed test: 1."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVTIER_MUTATED_MODULE": module,
        "KVTIER_TEST_EXAMPLES": "150",
        "KVTIER_TEST_FAST": "1",
    }
    arguments = ["-x", "-q", "-p", "mutant_guard", "-p", "no:cacheprovider", "--timeout", "60", "--tb=line", *tests]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"FAILED by running for more than {TIMEOUT_S} s"
    return done.returncode, done.stdout + done.stderr


def try_mutant(mutant: Mutant) -> tuple[str, str]:
    """`caught`, `survived` or `error`, and by what."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as name:
        folder = Path(name)
        make_copy(folder)
        path = folder / mutant.file
        source = path.read_text()
        if source.count(mutant.old) != 1:
            return "error", f"its old text occurs {source.count(mutant.old)} times in {mutant.file}: mend the list"
        path.write_text(source.replace(mutant.old, mutant.new))
        status, output = run_tests(folder, mutant.module, mutant.tests)
    if status == 0:
        return "survived", ""
    if status < 0:
        return "caught", f"the tests' process died of signal {-status}"  # what a user would have seen too
    if status != 1:
        return "error", f"pytest ended with {status}: {output[-500:]}"
    failed = re.findall(r"^FAILED (?:tests/)?(.+?)(?: - .*)?$|^ERROR (?:tests/)?(.+?)(?: - .*)?$", output, re.MULTILINE)
    return "caught", "".join(failed[0]) if failed else "?"


def try_unmutated() -> bool:
    """Whether the tests pass on a copy as it is; otherwise catching mutants would prove nothing."""
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as name:
        make_copy(Path(name))
        status, output = run_tests(Path(name), "kvtier.manager", (*CORE_TESTS, *STORE_TESTS, *TENSOR_TESTS))
    if status:
        print(f"the tree as it is fails (pytest ended with {status}):\n{output[-3000:]}")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Seed bugs and see that the tests catch each.")
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    names = parser.parse_args().names
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    started_s = time.monotonic()
    if not try_unmutated():
        return 1
    print(f"the tree as it is passes ({time.monotonic() - started_s:.0f} s); {len(chosen)} mutants", flush=True)
    counts = {"caught": 0, "survived": 0, "error": 0}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for mutant, (verdict, by) in zip(chosen, pool.map(try_mutant, chosen), strict=True):
            counts[verdict] += 1
            print(f"{verdict:9} {mutant.name:46} {mutant.file.removeprefix('kvtier/'):18} {by}", flush=True)
    print(
        ", ".join(f"{number} {verdict}" for verdict, number in counts.items()),
        f"in {time.monotonic() - started_s:.0f} s",
    )
    return 0 if counts["caught"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
