"""The tier manager against a plain model: lists of token ids, and lists of shared blocks."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError, CapacityError, TransferTimeoutError
from kvtier.residency import BlockState
from kvtier.step import Step
from kvtier.types import BlockId, Tier
from tests.small_tiers import BROKEN_POLICIES, POLICIES, Everything, House, build

BLOCK_TOKENS = 4
MAX_SEQUENCES = 6
# tests/mutants.py wants a failure fast, a person wants it small.
NUM_EXAMPLES = int(os.environ.get("KVTIER_TEST_EXAMPLES", "500"))
PHASES = [Phase.generate] if "KVTIER_TEST_FAST" in os.environ else [Phase.generate, Phase.shrink]
EXPECTED = (CapacityError, BlockLostError, TransferTimeoutError)

indexes = st.integers(0, 1 << 16)
counts = st.integers(1, 3 * BLOCK_TOKENS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of warnings of moves that fail on purpose are of no use to anyone."""
    logger = logging.getLogger("kvtier")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@dataclass(eq=False)
class ModelBlock:
    """One block as the design has it: shared by forks, final once sealed."""

    sealed: bool = False


@dataclass
class ModelSequence:
    """What one sequence must hold."""

    table: BlockTable
    tokens: list[int] = field(default_factory=list)
    blocks: list[ModelBlock] = field(default_factory=list)
    entered: int = 0

    @property
    def tail_tokens(self) -> int:
        return len(self.tokens) % BLOCK_TOKENS

    def seal(self) -> None:
        for block in self.blocks[: len(self.tokens) // BLOCK_TOKENS]:
            block.sealed = True


class ManagerMachine(RuleBasedStateMachine):
    """Every rule is something the wrapper, a finalizer, a full disk or a failing device does."""

    house: House

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[ModelSequence] = []
        self.pins: list[tuple[BlockId, Tier]] = []
        self.token_ids = itertools.count(1)
        self.started = False
        self.last: ModelSequence | None = None  # whose step was the last: another one's step makes it idle

    @initialize(
        gpu=st.integers(2, 6),
        cpu=st.integers(0, 5),
        nvme=st.integers(0, 8),
        policy_names=st.tuples(*[st.sampled_from([*POLICIES, *POLICIES, *BROKEN_POLICIES])] * 3),
        marks=st.sampled_from([(1.0, 1.0), (0.9, 0.7), (0.6, 0.3), (0.5, 0.0)]),
        seed=st.integers(0, 1000),
        max_delay=st.integers(0, 4),
        lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
        num_spare=st.integers(0, 6),
    )
    def fill_every_tier(
        self,
        gpu: int,
        cpu: int,
        nvme: int,
        policy_names: tuple[str, str, str],
        marks: tuple[float, float],
        seed: int,
        max_delay: int,
        lengths: list[int],
        num_spare: int,
    ) -> None:
        known = POLICIES | BROKEN_POLICIES
        policies = {tier: known[name]() for tier, name in zip(Tier, policy_names, strict=True)}
        self.good_policies = {tier for tier, name in zip(Tier, policy_names, strict=True) if name in POLICIES}
        self.house = build(
            gpu, cpu, nvme, block_tokens=BLOCK_TOKENS, policies=policies,
            high_frac=marks[0], low_frac=marks[1], seed=seed, max_delay=max_delay,
        )  # fmt: skip
        self.manager, self.placement, self.engine = self.house.manager, self.house.placement, self.house.engine
        self.started = True
        for length in itertools.cycle(lengths):
            if self.num_blocks_held() >= gpu + cpu + nvme - num_spare:
                break
            if len(self.sequences) < MAX_SEQUENCES:
                self.new_sequence()
            sequence = self.sequences[length % len(self.sequences)]
            if not self.step(sequence, min(length, self.manager.max_new_tokens(sequence.table))):
                break

    def num_blocks_held(self) -> int:
        return len({id(block) for sequence in self.sequences for block in sequence.blocks})

    def pick(self, index: int) -> ModelSequence:
        return self.sequences[index % len(self.sequences)]

    def holders(self, block: ModelBlock) -> int:
        return sum(block in sequence.blocks for sequence in self.sequences)

    # -- steps ------------------------------------------------------------------------------------------------------

    def begin(self, sequence: ModelSequence, num_new: int) -> Step | None:
        """A step, or None when there was no room, a loss or a hang: then the sequence must be as before."""
        num_failed = self.placement.metrics.moves_failed
        if self.last is not None and self.last is not sequence and not self.last.entered:
            self.last.seal()
        self.last = sequence
        sequence.seal()
        try:
            step = self.manager.begin_step(sequence.table, num_new)
        except EXPECTED as error:
            note(f"begin_step: {error!r}")
            if isinstance(error, BlockLostError):
                assert self.placement.metrics.moves_failed > num_failed
            if isinstance(error, TransferTimeoutError):
                assert self.engine.hanging
            if isinstance(error, CapacityError) and self.placement.metrics.moves_failed == num_failed:
                self.check_no_room(sequence, num_new)
            return None
        if step.tail_slot is not None:
            tail = sequence.tokens[len(sequence.tokens) - sequence.tail_tokens :]
            assert list(self.house.cells(Tier.GPU, step.tail_slot)[: len(tail)]) == tail
            assert (step.tail_copy is not None) is self.copies_tail(sequence)
        assert sum(write.count for write in step.writes) == num_new
        return step

    def copies_tail(self, sequence: ModelSequence) -> bool:
        return sequence.blocks[-1].sealed or self.holders(sequence.blocks[-1]) > 1

    def check_no_room(self, sequence: ModelSequence, num_new: int) -> None:
        """A CapacityError is the truth: nothing that may leave the gpu tier had a place to go to."""
        if num_new > self.manager.max_new_tokens(sequence.table):
            return
        residency, lower = self.placement.residency, [t for t in self.placement.pools if t is not Tier.GPU]
        pinned = {block for block, _ in self.pins}
        if sequence.tail_tokens and not self.copies_tail(sequence):
            pinned.add(sequence.table.blocks[-1])
        movable = [b for b in residency.blocks() if Tier.GPU in residency[b].copies and b not in pinned]
        if not movable:
            return
        assert not any(residency[block].is_clean(Tier.GPU) for block in movable)
        for tier in lower:
            assert self.placement.pools[tier].num_free == 0
            assert not set(residency.redundant[tier]) - pinned

    def step(self, sequence: ModelSequence, num_new: int) -> bool:
        step = self.begin(sequence, num_new)
        if step is None:
            return False
        self.write_and_commit(sequence, step)
        return True

    def write(self, step: Step) -> list[int]:
        token_ids = list(itertools.islice(self.token_ids, step.num_new))
        for write in step.writes:
            self.house.write(write, token_ids)
        return token_ids

    def write_and_commit(self, sequence: ModelSequence, step: Step) -> None:
        token_ids = self.write(step)
        self.manager.commit_step(step, token_ids)
        if step.tail_copy is not None:
            sequence.blocks[-1] = ModelBlock()
        sequence.tokens += token_ids
        while len(sequence.blocks) * BLOCK_TOKENS < len(sequence.tokens):
            sequence.blocks.append(ModelBlock())

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, num_new=counts, ending=st.sampled_from(["commit", "commit", "abort", "work"]), other=indexes)
    def prefill(self, index: int, num_new: int, ending: str, other: int) -> None:
        sequence = self.pick(index)
        step = self.begin(sequence, num_new)
        if step is None:
            return
        if ending == "commit":
            self.write_and_commit(sequence, step)
        elif ending == "abort":
            self.write(step)  # layers had appended already
            self.manager.abort_step(step)
            self.manager.abort_step(step)
        else:
            self.work_during(step, sequence, self.pick(other))

    def work_during(self, step: Step, sequence: ModelSequence, other: ModelSequence) -> None:
        """Statistics are asked for while a step is open, and another cache is dropped."""
        token_ids = self.write(step)
        if other is not sequence:
            self.drop(self.sequences.index(other), by_finalizer=True)
        self.manager.poll()
        for write in step.writes:  # pinned copies stay
            new = token_ids[write.offset : write.offset + write.count]
            assert list(self.house.cells(Tier.GPU, write.slot)[write.start : write.start + write.count]) == new
        self.placement.check_integrity()
        self.write_and_commit(sequence, step)

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, num_steps=st.integers(1, 6))
    def decode(self, index: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(self.pick(index), 1)

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, num_rejected=st.integers(1, 2 * BLOCK_TOKENS), num_new=st.integers(1, BLOCK_TOKENS))
    def reject_drafts(self, index: int, num_rejected: int, num_new: int) -> None:
        sequence = self.pick(index)
        self.crop(sequence, max(0, len(sequence.tokens) - num_rejected))
        self.step(sequence, num_new)

    # -- sequences --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule()
    def new_sequence(self) -> None:
        self.sequences.append(ModelSequence(self.manager.new_sequence()))

    @precondition(lambda self: self.sequences and len(self.sequences) < MAX_SEQUENCES)
    @rule(index=indexes, steps=st.lists(st.tuples(st.booleans(), st.integers(1, BLOCK_TOKENS)), max_size=3))
    def fork(self, index: int, steps: list[tuple[bool, int]]) -> None:
        sequence = self.pick(index)
        table = self.manager.fork(sequence.table)
        twin = ModelSequence(table, list(sequence.tokens), list(sequence.blocks))
        self.sequences.append(twin)
        for of_twin, num_new in steps:
            self.step(twin if of_twin else sequence, num_new)

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, length=st.one_of(st.just(0), indexes))
    def truncate(self, index: int, length: int) -> None:
        sequence = self.pick(index)
        self.crop(sequence, length % (len(sequence.tokens) + 1))

    def crop(self, sequence: ModelSequence, length: int) -> None:
        self.unpin_all()
        self.manager.truncate(sequence.table, length)
        del sequence.tokens[length:]
        del sequence.blocks[-(-length // BLOCK_TOKENS) :]

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, by_finalizer=st.booleans())
    def drop(self, index: int, by_finalizer: bool) -> None:
        self.unpin_all()
        sequence = self.sequences.pop(index % len(self.sequences))
        self.last = None if self.last is sequence else self.last
        if by_finalizer:
            self.manager.dropped.append(sequence.table.sequence)
            self.manager.poll()
        else:
            self.manager.drop_sequence(sequence.table.sequence)
            self.manager.drop_sequence(sequence.table.sequence)

    @precondition(lambda self: self.sequences)
    @rule(index=indexes, entering=st.booleans())
    def enter_or_leave(self, index: int, entering: bool) -> None:
        sequence = self.pick(index)
        if entering:
            self.manager.enter(sequence.table)
            sequence.entered += 1
            return
        self.manager.leave(sequence.table)
        sequence.entered = max(0, sequence.entered - 1)
        if not sequence.entered:
            sequence.seal()
            self.last = None if self.last is sequence else self.last

    # -- between steps ----------------------------------------------------------------------------------------------

    @rule(num_polls=st.integers(0, 4))
    def poll(self, num_polls: int) -> None:
        self.placement.commit_arrived()
        for _ in range(num_polls):
            self.manager.poll()

    @rule(index=indexes)
    def pin_or_unpin(self, index: int) -> None:
        """Somebody reads a full block, or has read it."""
        residency = self.placement.residency
        tails = {sequence.table.tail for sequence in self.sequences}
        blocks = [block for block in residency.blocks() if residency[block].holders and block not in tails]
        if self.pins or not blocks:
            self.unpin_all()
            return
        block = blocks[index % len(blocks)]
        tier = sorted(residency[block].copies)[index % len(residency[block].copies)]
        residency.pin(block, tier)
        self.pins.append((block, tier))

    def unpin_all(self) -> None:
        for block, tier in self.pins:
            self.placement.residency.unpin(block, tier)
        self.pins.clear()

    # -- misfortune -------------------------------------------------------------------------------------------------

    @rule(misfortune=st.sampled_from(["none", "none", "some fail", "all fail", "hang", "disk full"]), num_slots=counts)
    def misfortune(self, misfortune: str, num_slots: int) -> None:
        self.engine.fail_frac = {"some fail": 0.2, "all fail": 1.0}.get(misfortune, 0.0)
        self.engine.hanging = misfortune == "hang"
        if misfortune == "disk full" and Tier.NVME in self.placement.pools:
            num_slots = self.placement.pools[Tier.NVME].num_used + num_slots % 3
            self.engine.nvme_available_slots = min(self.engine.nvme_available_slots, num_slots)

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        if not self.started:
            return
        self.manager.check_integrity()
        residency = self.placement.residency
        ids: dict[ModelBlock, BlockId] = {}
        for sequence in self.sequences:
            table = sequence.table
            assert table.token_ids() == sequence.tokens
            assert len(table.blocks) == len(sequence.blocks)
            for model_block, block in zip(sequence.blocks, table.blocks, strict=True):
                assert ids.setdefault(model_block, block) == block
                assert residency[block].copies, "a live block has no valid copy"
                assert (residency[block].state is BlockState.SEALED) is model_block.sealed
            assert self.house.read(table) == sequence.tokens
            self.check_every_copy(sequence)
        assert len(set(ids.values())) == len(ids)
        assert {block for block in residency.blocks() if residency[block].holders} == set(ids.values())
        for block, tier in self.pins:
            assert tier in residency[block].copies, "a pinned copy has gone"
        for tier in self.good_policies & set(self.placement.policies):
            believed = set(self.placement.policies[tier].victims(10_000, Everything()))
            assert believed == {block for block in residency.blocks() if tier in residency[block].copies}

    def check_every_copy(self, sequence: ModelSequence) -> None:
        for index, block in enumerate(sequence.table.blocks):
            expected = sequence.tokens[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
            for tier, slot in self.placement.residency[block].copies.items():
                assert list(self.house.cells(tier, slot)[: len(expected)]) == expected

    def teardown(self) -> None:
        if not self.started:
            return
        self.engine.hanging = False
        self.unpin_all()
        while self.sequences:
            self.drop(0, by_finalizer=len(self.sequences) % 2 == 0)
        self.house.drain()
        self.manager.poll()
        self.manager.check_integrity()
        assert self.house.used() == dict.fromkeys(self.house.used(), 0)
        assert all(pool.num_free == pool.ceiling for pool in self.placement.pools.values())
        assert not self.manager.residency_len
        assert not self.placement.sequence_metrics
        assert not self.placement.running_blocks
        assert not self.engine.in_flight()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=40,
    phases=PHASES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
