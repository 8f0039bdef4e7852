"""Encodings that no two different things share, and labels that never say more than was proven."""

from __future__ import annotations

import struct
import subprocess
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.identity import DIGEST_BYTES, block_identity, canonical, digest, framed, token_content
from kvtier.labels import Labels, at_once
from kvtier.origin import Fingerprint, Origin
from kvtier.padding import Padding
from kvtier.recomputable import Past
from kvtier.step import NewColumns
from kvtier.types import BlockId, MovePurpose, SequenceId, SlotLabel, Tier
from tests.small_tiers import Columns, FakeModel, House, build

# -- encodings --------------------------------------------------------------------------------------------------------

FIELDS = st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=4)), max_size=4)
INTS = st.integers(-(2**31), 2**31 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def unframed(data: bytes) -> list[tuple[str, bytes]]:
    """What `framed` was made of, read back: an encoding that can be decoded has one meaning only."""
    parts = []
    while data:
        length = int.from_bytes(data[:8], "little")
        assert len(data) >= 8 + length
        parts.append(data[8 : 8 + length])
        data = data[8 + length :]
    return [(name.decode(), value) for name, value in zip(parts[::2], parts[1::2], strict=True)]


@given(FIELDS)
def test_framed_fields_can_be_read_back(fields: list[tuple[str, bytes]]) -> None:
    assert unframed(framed(fields)) == fields


def test_a_blocks_content_and_identity_are_framed_as_everything_else() -> None:
    ids, padding = array("i", [5, 6, 7]), array("i", [0, 2])
    content = framed(
        [("ids", ids.tobytes()), ("positions", array("i", [9, 3]).tobytes()), ("padding", padding.tobytes())]
    )
    assert token_content(ids, range(9, 12), [(0, 2)]) == content
    namespace, parent = bytes(32), bytes(range(32))
    for parents in ([], [("parent", parent)]):
        fields = [("namespace", namespace), *parents, ("content", content)]
        assert block_identity(namespace, parent if parents else None, content) == digest("block", fields)


@given(FIELDS, FIELDS, st.sampled_from(["block", "namespace"]), st.sampled_from(["block", "namespace"]))
def test_digests_are_equal_for_equal_fields_of_one_kind_only(
    first: list[tuple[str, bytes]], second: list[tuple[str, bytes]], kind: str, other: str
) -> None:
    assert (digest(kind, first) == digest(other, second)) is ((kind, first) == (other, second))


@given(FIELDS, st.integers(0, 3), st.integers(0, 7))
def test_a_field_cut_in_two_or_moved_to_its_neighbour_is_another_list(
    fields: list[tuple[str, bytes]], where: int, at: int
) -> None:
    fields = [*fields, ("a", b"abcd"), ("a", b"efgh")]
    name, value = fields[where % len(fields)]
    cut = [*fields]
    cut[where % len(fields) : where % len(fields) + 1] = [(name, value[:at]), (name, value[at:])]
    moved = [*fields[:-2], ("a", b"abcdef"), ("a", b"gh")]
    assert len({digest("block", each) for each in (fields, cut, moved)}) == 3


def decoded(data: bytes) -> object:
    """The value that `canonical` encoded, tuples as lists."""
    ((kind, body),) = unframed(data)
    match kind:
        case "none":
            return None
        case "bool":
            return body == b"\1"
        case "int":
            return int(body)
        case "float":
            return float(struct.unpack("<d", body)[0])
        case "str":
            return body.decode("utf-8", "surrogatepass")
        case "bytes":
            return body
        case "list":
            return [decoded(each) for _, each in unframed(body)]
    parts = [decoded(each) for _, each in unframed(body)]
    assert kind == "dict"
    return dict(zip(parts[::2], parts[1::2], strict=True))


@given(VALUES)
def test_a_canonical_value_can_be_read_back(value: object) -> None:
    assert repr_sorted(decoded(canonical(value))) == repr_sorted(value)


def repr_sorted(value: object) -> str:
    """Unlike ==, tells 1 from 1.0 and True, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return repr(sorted((repr(key), repr_sorted(each)) for key, each in value.items()))
    return repr([repr_sorted(each) for each in value]) if isinstance(value, list) else repr(value)


def test_canonical_minds_types_and_not_the_order_of_a_dict() -> None:
    apart = [None, 0, 0.0, -0.0, False, "", b"", [], {}, "0", b"0", 1, 1.0, True, [[]], [None], {"": ""}, ["", ""]]
    assert len({canonical(value) for value in apart}) == len(apart)
    assert canonical({"a": 1, "b": (2, 3)}) == canonical({"b": [2, 3], "a": 1})
    with pytest.raises(TypeError, match="object has no canonical encoding"):
        canonical([object()])


Content = tuple[list[int], list[int], list[tuple[int, int]]]
CONTENTS = st.integers(0, 5).flatmap(
    lambda count: st.tuples(
        st.lists(INTS, min_size=count, max_size=count),
        st.lists(st.integers(0, 6), min_size=count, max_size=count),
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=2),
    )
)


def content(parts: Content) -> bytes:
    return token_content(array("i", parts[0]), array("i", parts[1]), parts[2])


@given(CONTENTS, CONTENTS)
def test_contents_are_equal_for_equal_tokens_only(first: Content, second: Content) -> None:
    assert (content(first) == content(second)) is (first == second)
    positions = unframed(content(first))[1][1]
    runs = array("i", positions)
    spelt = [start + each for start, count in zip(runs[::2], runs[1::2], strict=True) for each in range(count)]
    assert spelt == first[1], "the positions can be read back"


def test_a_block_of_counted_positions_takes_little_more_than_its_ids() -> None:
    ids = array("i", range(256))
    assert len(token_content(ids, array("i", range(512, 768)), [])) < 4 * 256 + 128


def test_namespace_parent_and_content_each_make_another_identity() -> None:
    tokens = content(([1, 2], [0, 1], []))
    base = block_identity(b"n" * 32, None, tokens)
    others = [
        block_identity(b"m" * 32, None, tokens),
        block_identity(b"n" * 32, base, tokens),
        block_identity(b"n" * 32, b"", tokens),
        block_identity(b"n" * 32, None, content(([1, 3], [0, 1], []))),
        block_identity(b"n" * 32, None, content(([1, 2], [0, 2], []))),
        block_identity(b"n" * 32, None, content(([1, 2], [0, 1], [(0, 1)]))),
        digest("namespace", [("namespace", b"n" * 32), ("content", tokens)]),
    ]
    assert len({base, *others}) == 8 and all(len(each) == DIGEST_BYTES for each in (base, *others))


PROGRAM = """
from kvtier.block_table import BlockTable
from kvtier.padding import Padding
from kvtier.identity import block_identity, canonical, digest
table = BlockTable(1, 4)
table.append(8, [5, 6, 7, 8, 9, 10, 11, -1], [0, 1], positions=[0, 1, 2, 3, 9, 10, 30, 31], padding=[Padding(0, 2)])
first = block_identity(bytes(32), None, table.content(0))
value = {name: {1, 2, 3} - {int(name)} == set() or [name, 0.1] for name in {"1", "2", "3"}}
print((first + block_identity(bytes(32), first, table.content(1)) + digest("x", [("", canonical(value))])).hex())
"""


def test_identities_are_equal_in_every_process() -> None:
    def run(seed: str) -> bytes:
        environment = {"PYTHONHASHSEED": seed, "PATH": ""}
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True).stdout

    seen = {run(seed) for seed in ("0", "1", "random")}
    table = BlockTable(SequenceId(1), 4)
    table.append(4, [5, 6, 7, 8], [BlockId(0)], padding=[Padding(0, 2)])
    first = table.content(0)
    assert first is not None
    assert len(seen) == 1 and seen.pop().decode().startswith(block_identity(bytes(32), None, first).hex())


def test_the_format_is_what_it_was() -> None:
    """Not to be mended: files on users' disks were written under these. A new format needs a new number in FORMATS."""
    tokens = token_content(array("i", [5, 6, 7, -8]), array("i", [0, 1, 2, 9]), [(0, 2)])
    assert tokens.hex() == GOLDEN_CONTENT
    assert block_identity(bytes(32), bytes(range(32)), tokens).hex() == GOLDEN_IDENTITY


GOLDEN_CONTENT = (
    "03000000000000006964731000000000000000050000000600000007000000f8ffffff0900000000000000706f736974"
    "696f6e73100000000000000000000000030000000900000001000000070000000000000070616464696e670800000000"
    "0000000000000002000000"
)
GOLDEN_IDENTITY = "c4f417eead1fc3171c4863a22b927bcc5766c1164abc6a8828dd008c53b297fd"


# -- labels -----------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Labelled:
    """A house whose nvme tier outlives it; `mark` is what the wrapper sees of the model."""

    def __init__(self, **values: Any) -> None:
        self.model, self.clock = FakeModel(), Clock()
        self.labels = Labels(self.model, self.clock, beside=at_once)
        self.house: House = build(**{"gpu": 8, "cpu": 0, "nvme": 16, "low_frac": 0.0, **values}, labels=self.labels)

    def batch(self, mark: int = 1, rows: int = 1) -> Batch:
        batch = self.house.manager.new_batch(rows)
        batch.origin = self.labels.origin(mark)
        return batch

    def filled(self, ids: Columns, mark: int = 1) -> Batch:
        """An idle conversation of those tokens."""
        batch = self.batch(mark)
        self.house.append(batch, ids)
        self.house.manager.leave(batch)
        return batch

    def demoted(self) -> list[SlotLabel | None]:
        """Labels of what goes down now, in order of the blocks."""
        before = len(self.house.engine.started)
        self.house.placement.give_up(Tier.GPU, 8)
        self.house.drain()
        moves = self.house.engine.started[before:]
        assert all(move.purpose is MovePurpose.DEMOTE and move.dest is Tier.NVME for move in moves)
        return [move.label for move in sorted(moves, key=lambda move: move.block)]


def known(labels: list[SlotLabel | None]) -> list[SlotLabel]:
    assert None not in labels and labels
    return [label for label in labels if label is not None]


EIGHT = list(range(8))


def test_a_conversation_has_the_same_labels_in_every_house() -> None:
    first, second = Labelled(), Labelled()
    first.filled([9, 9, 9, 9])
    first.demoted()
    first.filled(EIGHT)
    second.filled(EIGHT)
    labels = known(first.demoted())
    assert labels == known(second.demoted()) and len({label.identity for label in labels}) == 2
    assert {label.namespace for label in labels} == {first.model.fingerprint().namespace}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("other", "past"),
    [
        ([7, *EIGHT[1:]], Past.BLOCKS),  # another parent for the second block
        ([None, *EIGHT], Past.STATES),  # padding in front, which has left a trace in what is not kept in blocks
        ([*EIGHT[:2], None, *EIGHT[2:]], Past.STATES),  # padding inside
    ],
    ids=str,
)
def test_other_tokens_or_padding_that_counts_make_other_identities(other: Columns, past: Past) -> None:
    plain, changed = Labelled(past=past), Labelled(past=past)
    plain.filled(EIGHT)
    changed.filled(other)
    mine, theirs = known(plain.demoted()), known(changed.demoted())
    assert [a.identity == b.identity for a, b in zip(mine, theirs, strict=True)] == [False, False]
    assert mine[1].content == theirs[1].content, "only its parent tells the second block apart"


@pytest.mark.parametrize("other", [[None, *EIGHT], [*EIGHT[:2], None, *EIGHT[2:]]], ids=str)
def test_padding_plays_no_part_where_every_layer_is_tiered(other: Columns) -> None:
    plain, padded = Labelled(), Labelled()
    plain.filled(EIGHT)
    padded.filled(other)
    assert known(plain.demoted()) == known(padded.demoted())


def test_salts_have_nothing_in_common_but_the_model() -> None:
    labelled = Labelled()
    origins = [labelled.labels.origin(1, None, salt) for salt in (b"", b"alice", b"bob")]
    assert len({origin.fingerprint.namespace for origin in origins if origin}) == 3
    assert len({origin.fingerprint.model for origin in origins if origin}) == 1
    assert labelled.labels.origin(1, None, b"alice") is origins[1] and labelled.model.num_hashed == 1


def test_what_is_set_on_modules_is_another_model_although_the_mark_is_the_same() -> None:
    labelled = Labelled()
    first = labelled.labels.origin(1, b"before")
    labelled.model.weights = 2
    second = labelled.labels.origin(1, b"after")
    assert first is not None and second is not None and first.fingerprint != second.fingerprint


def test_tails_and_blocks_fed_as_embeddings_and_all_behind_them_have_no_label() -> None:
    labelled = Labelled()
    batch = labelled.filled(EIGHT[:6])
    assert [label is None for label in labelled.demoted()] == [False, True]
    labelled.house.manager.truncate(batch, 4)
    step = labelled.house.manager.begin_step(batch, [NewColumns.of(4)])
    labelled.house.manager.commit_step(step)
    labelled.house.append(batch, [1, 2, 3, 4])
    labelled.house.manager.leave(batch)
    assert labelled.demoted() == [None, None]


def test_without_an_origin_nothing_is_labelled_nor_hashed() -> None:
    labelled = Labelled()
    batch = labelled.house.manager.new_batch()
    labelled.house.append(batch, EIGHT)
    labelled.house.manager.leave(batch)
    assert labelled.demoted() == [None, None]
    assert labelled.model.num_hashed == 0


def test_on_its_way_to_the_cpu_tier_a_block_has_no_label_and_nothing_is_hashed_for_it() -> None:
    labelled = Labelled(cpu=8)
    labelled.filled(EIGHT)
    labelled.house.placement.give_up(Tier.GPU, 8)
    labelled.house.drain()
    assert [(move.dest, move.label) for move in labelled.house.engine.started] == [(Tier.CPU, None)] * 2
    assert labelled.model.num_hashed == 1
    labelled.house.placement.give_up(Tier.CPU, 8)
    assert all(move.label is not None for move in labelled.house.engine.started[2:])


def test_what_was_sealed_without_an_origin_is_not_labelled_by_a_fork_that_has_one() -> None:
    labelled = Labelled()
    batch = labelled.batch()
    labelled.house.append(batch, EIGHT)
    twin = labelled.house.manager.fork(batch)
    batch.origin = None  # a call that no label can tell of
    labelled.house.manager.leave(batch)
    labelled.house.append(twin, [8, 9, 10, 11])
    labelled.house.manager.leave(twin)
    assert labelled.demoted() == [None, None, None]


def test_forks_share_labels_and_go_on_with_their_own() -> None:
    labelled = Labelled()
    batch = labelled.filled(EIGHT)
    twin = labelled.house.manager.fork(batch)
    labelled.house.append(batch, [8, 9, 10, 11])
    labelled.house.append(twin, [80, 90, 100, 110])
    for each in (batch, twin):
        labelled.house.manager.leave(each)
    labels = known(labelled.demoted())
    fresh = Labelled()
    fresh.filled([*EIGHT, 80, 90, 100, 110])
    assert known(fresh.demoted()) == [*labels[:2], labels[3]]
    assert len({label.identity for label in labels}) == 4


def test_a_label_outlives_the_crop_of_the_sequence_that_sealed_it() -> None:
    labelled = Labelled()
    batch = labelled.filled(EIGHT)
    twin = labelled.house.manager.fork(batch)
    labelled.house.manager.truncate(batch, 6)
    labelled.house.append(batch, [60, 70])
    labelled.house.manager.leave(batch)
    labels = known(labelled.demoted())
    fresh = Labelled()
    fresh.filled(EIGHT)
    assert labels[:2] == known(fresh.demoted())
    assert labels[2].identity not in {label.identity for label in labels[:2]}
    assert labelled.house.read(twin) == EIGHT


def test_weights_changed_after_the_prefill_give_its_blocks_no_label() -> None:
    labelled = Labelled()
    labelled.filled(EIGHT)
    labelled.model.weights = 2  # whether the mark saw it or not
    assert labelled.demoted() == [None, None]
    labelled.model.weights = 1
    labelled.filled([1, 2, 3, 4])  # nothing remembered: hashed anew
    assert known(labelled.demoted())


def test_a_conversation_goes_on_unlabelled_when_an_unseen_change_was_found() -> None:
    labelled = Labelled()
    batch = labelled.filled(EIGHT)
    assert known(labelled.demoted())
    labelled.model.weights = 2
    labelled.house.append(batch, [8, 9, 10, 11])
    labelled.house.manager.leave(batch)
    assert labelled.demoted() == [None]
    labelled.house.append(batch, [12, 13, 14, 15])
    labelled.house.manager.leave(batch)
    labelled.model.weights = 1
    assert labelled.demoted() == [None]


def test_a_batch_that_begins_under_a_mark_that_missed_a_change_is_found_out() -> None:
    labelled = Labelled()
    labelled.filled(EIGHT)
    assert known(labelled.demoted())
    labelled.model.weights = 2
    labelled.filled([5, 6, 7, 8])
    assert labelled.demoted() == [None]
    labelled.filled([5, 6, 7, 8])
    fresh = Labelled()
    fresh.model.weights = 2
    fresh.filled([5, 6, 7, 8])
    assert known(labelled.demoted()) == known(fresh.demoted())


def test_adapters_in_turn_are_hashed_once_each_and_proven_together() -> None:
    labelled = Labelled()
    first = labelled.filled(EIGHT, mark=1)
    labelled.model.adapter = 1
    second = labelled.filled(EIGHT, mark=2)
    labelled.model.adapter = 0
    assert labelled.model.num_hashed == 2
    labels = known(labelled.demoted())
    assert labelled.model.num_hashed == 3, "one more for all that goes down together"
    assert [label.content for label in labels[:2]] == [label.content for label in labels[2:]]
    assert len({label.identity for label in labels}) == 4 and len({label.namespace for label in labels}) == 2
    assert labelled.house.read(first) == labelled.house.read(second) == EIGHT


def test_hashing_again_is_bounded_in_time_and_what_it_would_take_goes_unlabelled() -> None:
    labelled = Labelled()
    hash_s = 5.0

    def slow() -> Fingerprint | None:
        labelled.clock.now_s += hash_s
        return FakeModel.fingerprint(labelled.model)

    labelled.model.fingerprint = slow  # type: ignore[method-assign]
    labelled.filled([1, 2, 3, 4])
    assert known(labelled.demoted()), "the first is within the burst"
    labelled.filled([2, 2, 3, 4])
    assert labelled.demoted() == [None]
    assert labelled.model.num_hashed == 2
    labelled.clock.now_s += (hash_s - Labels.BURST_S) / Labels.MAX_TIME_FRAC
    labelled.filled([3, 2, 3, 4])
    assert known(labelled.demoted())


def test_a_model_that_cannot_be_hashed_is_said_so_and_has_no_labels(caplog: pytest.LogCaptureFixture) -> None:
    labelled = Labelled()
    labelled.model.error = ValueError("strange")
    labelled.filled(EIGHT)
    assert labelled.demoted() == [None, None]
    assert "the model could not be hashed (strange): its KV will not survive a restart" in caplog.text
    labelled.model.error = None
    batch = labelled.batch(mark=2)
    labelled.house.append(batch, [1, 2, 3, 4])
    labelled.house.manager.leave(batch)
    labelled.model.error = ValueError("broken meanwhile")
    assert labelled.demoted() == [None]
    labelled.house.check()


def test_few_marks_are_remembered() -> None:
    labels = Labels(FakeModel())
    origins = [labels.origin(mark) for mark in range(40)]
    assert all(isinstance(origin, Origin) for origin in origins)
    assert len(labels._remembered) == 16
    assert labels.origin(39) is origins[39] and labels.origin(0) is not origins[0]


def test_a_change_that_is_found_refutes_what_was_sealed_under_a_salt_that_is_no_longer_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found wrong: more salts than are remembered, and blocks of the first of them outlived what refuted the others."""
    monkeypatch.setattr(Labels, "_MAX_ORIGINS", 2)
    model = FakeModel()
    labels = Labels(model)
    origins = [labels.origin(1, b"", b"%d" % number) for number in range(6)]
    sealed = [labels.seal(origin, None, b"tokens", is_first=True) for origin in origins if origin is not None]
    model.weights = 2  # by a way that no mark sees, before or after they were sealed
    assert labels.label(sealed[-1]) is None
    assert [each.is_refuted for each in sealed if each is not None] == [True] * 6
    model.weights = 1
    assert [labels.label(each) for each in sealed] == [None] * 6
    again = labels.seal(labels.origin(1, b"", b"0"), None, b"tokens", is_first=True)  # type: ignore[arg-type]
    assert labels.label(again) is not None and again is not None and not again.is_refuted


def test_canonical_is_not_deceived_by_words_that_say_they_are_equal() -> None:
    class Same(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    assert canonical(Same("a")) == canonical("a") != canonical(Same("b")) == canonical("b")
    apart = [0.0, -0.0, 0, False, 1, 1.0, True, None, "", "None", b"", [], {}]
    assert len({canonical(value) for value in apart * 2}) == len(apart)
