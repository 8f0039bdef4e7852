"""The simulated link and device by a clock that only waits move, and what `overlap.py` makes of them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtier.benchmarks import overlap
from kvtier.benchmarks.overlap_clock import RealClock, VirtualClock
from kvtier.benchmarks.overlap_link import Device, Direction, Link, LinkedStore, Part, stalls
from kvtier.benchmarks.overlap_methods import LayerAtATime, LruPromotion, Plain
from kvtier.benchmarks.overlap_model import BLOCK_TOKENS, VOCABULARY, build, set_times
from kvtier.benchmarks.overlap_run import METHODS, Bench, idle_times
from kvtier.benchmarks.overlap_shapes import GPUS, LATENCY_S, LINKS, Case, card, cases
from kvtier.stores.cpu import CpuStore
from kvtier.types import BlockShape, Slot

LAYERS = 3


class FakeClock:
    """Stands still but for waits, which never take it back."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s
        self._lock = threading.Lock()

    def now(self) -> float:
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        with self._lock:
            self.now_s = max(self.now_s, at_s)

    def close(self) -> None:
        """Nothing to do."""


# -- the link ---------------------------------------------------------------------------------------------------------


def test_bytes_take_their_time_and_arrive_a_latency_later() -> None:
    direction = Direction(1000.0, 0.25, FakeClock())
    assert direction.book(500) == pytest.approx(100.75)
    assert direction.busy == [(100.0, 100.5)] and direction.carried_bytes == 500


def test_transfers_queue_for_the_link_and_not_for_the_latency() -> None:
    clock = FakeClock()
    direction = Direction(1000.0, 0.25, clock)
    assert [direction.book(100) for _ in range(3)] == pytest.approx([100.35, 100.45, 100.55])
    clock.wait_until(105.0)  # idle since 100.3
    assert direction.book(100) == pytest.approx(105.35)
    assert direction.busy_s(100.0, 106.0) == pytest.approx(0.4)
    assert direction.busy_s(100.05, 100.15) == pytest.approx(0.1)
    assert direction.busy_s(101.0, 105.0) == 0.0


def test_a_transfer_can_be_booked_from_when_the_device_asked_for_it() -> None:
    clock = FakeClock()
    direction = Direction(1000.0, 0.0, clock)
    assert direction.book(100, asked_s=99.0) == pytest.approx(99.1)
    assert direction.book(100, asked_s=99.05) == pytest.approx(99.2), "the link was taken until 99.1"


def test_the_directions_do_not_wait_for_each_other() -> None:
    link = Link(1000.0, 0.0, FakeClock())
    assert link.up.book(5000) == pytest.approx(105.0)
    assert link.down.book(100) == pytest.approx(100.1)


def test_threads_share_one_link() -> None:
    direction = Direction(1000.0, 0.0, FakeClock())
    threads = [threading.Thread(target=lambda: [direction.book(10) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [end for _, end in direction.busy]
    assert ends == sorted(ends) and direction.book(0) == pytest.approx(102.0)
    assert all(a[1] == b[0] for a, b in zip(direction.busy, direction.busy[1:], strict=False))


def test_the_real_clock_never_returns_early() -> None:
    clock = RealClock()
    for wait_s in (0.0, 0.00005, 0.002):
        at_s = clock.now() + wait_s
        clock.wait_until(at_s)
        assert clock.now() >= at_s
    clock.wait_until(clock.now() - 1.0)


def test_a_store_behind_a_link_gives_its_bytes_and_says_what_layer_needs_them() -> None:
    shape, clock = BlockShape(2, 1, 4, 2, 2, 4), FakeClock()
    inner = CpuStore(shape, 2, pin=False)
    link = Link(float(shape.slice_bytes), 0.0, clock)  # a slice takes a second
    store = LinkedStore(inner, link)
    block = torch.arange(shape.block_bytes, dtype=torch.uint8)
    store.write(Slot(1), block)
    assert clock.now() == 100.0, "where it is not on, nothing waits"
    link.is_on = True
    out = torch.empty(shape.slice_bytes, dtype=torch.uint8)
    for layer in (0, 1):
        store.read_slice(Slot(1), layer, out)
        assert out.equal(block.view(2, -1)[layer])
    assert clock.now() == pytest.approx(102.0)
    assert link.taken(0) == {"up": pytest.approx(101.0)} and link.taken(1) == {"up": pytest.approx(102.0)}
    assert link.taken(1) == {}, "it is asked for once"
    whole = torch.empty_like(block)
    store.read(Slot(1), whole)
    store.write(Slot(0), whole)
    assert whole.equal(block) and inner.block(Slot(0)).equal(block)
    assert (link.up.carried_bytes, link.down.carried_bytes) == (2 * shape.block_bytes, shape.block_bytes)
    assert store.slot_bytes == inner.slot_bytes  # extras
    store.check_integrity()
    store.close()
    assert inner.used_bytes() == store.used_bytes() == 0


def test_virtual_time_passes_for_all_who_wait_in_order_and_for_nothing_else() -> None:
    clock = VirtualClock()
    woken: list[tuple[float, float]] = []

    def wait(*times: float) -> None:
        for at_s in times:
            clock.wait_until(at_s)
            woken.append((at_s, clock.now()))

    threads = [threading.Thread(target=wait, args=times) for times in ((1.0, 500.0), (2.0, 3.0), (3.0,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert woken[0] == (1.0, 1.0) and woken[-1] == (500.0, 500.0), "whatever real time that is"
    assert [now for _, now in woken] == sorted(now for _, now in woken) and all(at == now for at, now in woken)
    sum(range(200_000))  # work takes none of it
    assert clock.now() == 500.0
    clock.wait_until(400.0)
    assert clock.now() == 500.0
    clock.close()
    clock.wait_until(600.0)  # nobody moves it any more, and nobody hangs
    assert not clock._thread.is_alive()


def test_closing_a_virtual_clock_lets_go_of_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(clock, "_all_sleep", lambda own: False)  # somebody is busy
    waiting = threading.Thread(target=clock.wait_until, args=(1.0,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    clock.close()
    waiting.join(30)
    assert not waiting.is_alive() and clock.now() == 0.0


# -- the device -------------------------------------------------------------------------------------------------------


def _work(clock: FakeClock, seconds: float) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        clock.now_s += seconds
        return torch.zeros(1)

    return work


def test_a_part_begins_when_the_one_before_has_ended_and_its_bytes_are_there() -> None:
    clock = FakeClock()
    device, link = Device(clock), Link(1.0, 0.0, clock)
    device.is_on, device.link = True, link
    link.needs(0, "up", 102.0)
    link.needs(0, "up", 101.0)  # the last of them counts
    link.needs(1, "up", 103.0)
    device.begin()
    for number in range(3):
        device.compute(number, _work(clock, 0.25), 4.0)
    assert [(part.free_s, part.begun_s, part.ended_s) for part in device.parts] == [
        (100.0, 102.0, 106.0), (106.0, 106.0, 110.0), (110.0, 110.0, 114.0),
    ]  # fmt: skip
    assert [part.late_s for part in device.parts] == [0.0, 0.0, 0.0], "the real work hides in it"


def test_real_work_that_takes_longer_is_told() -> None:
    clock = FakeClock()
    device = Device(clock)
    device.is_on = True
    device.begin()
    device.compute(0, _work(clock, 5.0), 4.0)
    assert device.parts[0].late_s == pytest.approx(1.0) and clock.now() == 105.0
    device.is_on = False
    device.compute(1, _work(clock, 1.0), 4.0)
    assert clock.now() == 106.0 and len(device.parts) == 1


def test_stalls_are_told_by_cause_and_add_up() -> None:
    clock = FakeClock(0.0)
    link = Link(1.0, 0.5, clock)
    link.up.book(4)  # busy 0 … 4
    clock.wait_until(6.0)
    link.up.book(2)  # busy 6 … 8
    parts = [
        Part(1.0, {"up": 3.0}, 3.0, 3.5, 0.0),  # the first layer
        Part(3.5, {"up": 4.5}, 4.5, 5.0, 0.0),  # half of it behind the last byte
        Part(5.0, {"up": 8.5, "down": 9.0}, 9.0, 9.5, 0.0),
        Part(9.5, {}, 9.5, 10.0, 0.0),
    ]
    found = stalls(parts, link)
    assert found == pytest.approx(
        {"step_boundary": 2.0, "bandwidth": 0.5 + 2.0, "latency": 0.5 + 1.5, "copy_down": 0.5}
    )
    assert sum(found.values()) == pytest.approx(sum(part.begun_s - part.free_s for part in parts))


def test_a_link_is_idle_before_between_and_behind_its_transfers() -> None:
    busy = [(0.0, 2.0), (2.5, 3.0), (3.0, 4.0), (9.0, 10.0)]
    assert idle_times(busy, 1.0, 6.0) == pytest.approx({"before": 0.0, "between": 0.5, "behind": 2.0})
    assert idle_times(busy, 2.25, 9.5) == pytest.approx({"before": 0.25, "between": 5.0, "behind": 0.0})
    assert idle_times(busy, 5.0, 8.0) == pytest.approx({"before": 3.0, "between": 0.0, "behind": 0.0})


# -- proportions ------------------------------------------------------------------------------------------------------


def test_times_follow_from_the_models_shape_and_public_figures() -> None:
    rtx, h100 = GPUS
    case = Case(rtx, 25e9, "balanced", num_blocks=32, num_spilled=12)
    assert case.slice_bytes == 2 * 8 * 128 * 2 * 256  # K and V, KV heads, head dimension, bf16, tokens
    # Query and output 4096², K and V 4096 x 1024, three matrices of the MLP 4096 x 14336: 218.1 million, in two bytes.
    weights = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert case.layer_s == pytest.approx((weights + 8192 * 4096) / 1008e9, rel=1e-3)
    assert case.head_s == pytest.approx(2 * 128256 * 4096 / 1008e9, rel=1e-3)
    assert case.layer_transfer_s == pytest.approx(12 * 256 * 4096 / 25e9)
    assert case.compute_s == pytest.approx(32 * case.layer_s + case.head_s)
    same = Case(h100, 25e9, "balanced", num_blocks=32, num_spilled=12)
    assert case.compute_s / same.compute_s == pytest.approx(3350 / 1008)
    assert case.transfer_s == same.transfer_s == pytest.approx(32 * case.layer_transfer_s)


def test_each_gpu_has_every_link_and_all_three_bounds_occur() -> None:
    found = cases()
    for load in ("balanced", "deep"):
        assert {(case.gpu, case.link_bytes_s) for case in found if case.load == load} == {
            (gpu, link) for gpu in GPUS for link in LINKS
        }
    balanced = [case for case in found if case.load == "balanced"]
    assert {case.binding for case in balanced} == {"link", "both", "compute"}
    own = [case for case in balanced if case.link_bytes_s == case.gpu.own_link_bytes_s]
    assert [case.binding for case in own] == ["both", "both"] and own == cases(("balanced",), own_links=True)
    assert {case.binding for case in found if case.load == "deep"} == {"link"}
    assert all(0 < case.num_spilled < case.num_blocks for case in found)


# -- the others, by the clock -----------------------------------------------------------------------------------------

NUM_BLOCKS, LAYER_S, HEAD_S = 4, 10.0, 5.0


def _offloaded(name: str, slice_s: float, num_slots: int) -> tuple[list[float], Plain, Plain, Any]:
    """Times of three steps of an offloaded cache; itself, a plain one that was fed the same, and its cache.

    `slice_s`: what the link takes for a block in one layer.
    """
    clock = FakeClock()
    device = Device(clock)
    model = build(LAYERS, device)
    set_times(model, LAYER_S, HEAD_S)
    link = Link(BLOCK_TOKENS * 2 * 16 * 4 / slice_s, 0.0, clock)
    cache: Any = (
        LayerAtATime(model.config, link, device)
        if name == "layer_at_a_time"
        else LruPromotion(model.config, link, device, num_slots)
    )
    ours, plain = Plain(model, cache, link), Plain(model)
    ids = torch.randint(VOCABULARY, (1, NUM_BLOCKS * BLOCK_TOKENS + 4), generator=torch.Generator().manual_seed(3))
    took = []
    with torch.no_grad():
        for method in (ours, plain):
            method.feed(ids[:, :-3])
        for at in range(3):
            token = ids[:, ids.shape[1] - 3 + at :][:, :1]
            device.is_on, device.link, link.is_on = True, link, True
            started_s = clock.now()
            logits = ours.feed(token)
            took.append(clock.now() - started_s)
            device.is_on, device.link, link.is_on = False, None, False
            link.due.clear()
            assert (logits - plain.feed(token)).abs().max() <= 1e-5
    return took, ours, plain, cache


@pytest.mark.parametrize("slice_s", [0.25, 1.0, 8.0])
def test_layer_at_a_time_takes_the_way_down_and_compute_one_after_the_other(slice_s: float) -> None:
    took, _, _, cache = _offloaded("layer_at_a_time", slice_s, 0)
    down_s = slice_s * (NUM_BLOCKS + 3 / BLOCK_TOKENS)  # in the second step; the way up hides behind both
    assert took[1] == pytest.approx(LAYERS * (down_s + LAYER_S) + HEAD_S)
    assert set(cache._arrives_s) == {0}, "the next step's first layer is on its way"


@pytest.mark.parametrize(("num_slots", "hits"), [(3, 0), (4, 4)])
def test_lru_on_a_loop_hits_nothing_unless_all_fits(num_slots: int, hits: int) -> None:
    took, _, _, cache = _offloaded("lru_promotion", 1.0, num_slots)
    assert took[0] == pytest.approx(LAYERS * (NUM_BLOCKS + LAYER_S) + HEAD_S)
    assert took[1] == pytest.approx(LAYERS * (NUM_BLOCKS - hits + LAYER_S) + HEAD_S)
    assert (cache.num_hits, cache.num_misses) == (
        2 * LAYERS * hits,
        LAYERS * (NUM_BLOCKS + 2 * (NUM_BLOCKS - hits)),
    )


# -- rows -------------------------------------------------------------------------------------------------------------


CASE = Case(GPUS[0], 25e9, "balanced", num_blocks=8, num_spilled=3)


def _rows(case: Case) -> list[dict[str, Any]]:
    return overlap.measure(case, num_turns=3, num_steps=2, num_layers=LAYERS, clock=FakeClock(), time_scale=1.0)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return _rows(CASE)


def test_every_method_gives_the_plain_caches_logits_and_moves_what_it_says(rows: list[dict[str, Any]]) -> None:
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(row["is_exact"] and row["max_logit_diff"] < 1e-4 and row["num_steps"] == 6 for row in rows)
    kvtier, both_ways, lru = rows
    assert kvtier["up_ratio"] == pytest.approx(1.0) and kvtier["down_ratio"] == 0.0, "what is spilled, and no more"
    assert both_ways["up_ratio"] == pytest.approx(8 / 3, rel=0.05)
    assert both_ways["down_ratio"] == pytest.approx(8 / 3, rel=0.05)
    assert lru["up_ratio"] == pytest.approx(8 / 3) and lru["down_ratio"] == 0.0


def test_what_is_moved_does_not_depend_on_when_what_is_read_ahead_has_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    book, late = Direction.book, itertools.cycle([0.0, 0.003, 0.0, 0.0, 0.003])

    def book_late(direction: Direction, num_bytes: int, asked_s: float | None = None) -> float:
        time.sleep(next(late))  # as on a busy machine: the step that reads ahead may have ended meanwhile
        return book(direction, num_bytes, asked_s)

    monkeypatch.setattr(Direction, "book", book_late)
    assert [row["up_ratio"] for row in _rows(CASE)] == [pytest.approx(ratio, rel=0.05) for ratio in (1.0, 8 / 3, 8 / 3)]


def test_a_rows_parts_add_up(rows: list[dict[str, Any]]) -> None:
    json.dumps(rows)
    for row in rows:
        assert row["bound_ms"] == max(row["compute_ms"], row["transfer_ms"])
        assert row["ratio"] == pytest.approx(row["step_ms"] / row["bound_ms"])
        assert row["step_ms"] == pytest.approx(row["compute_ms"] + row["stall_ms"] + row["overhead_ms"])
        assert set(row["stall_by_cause"]) == {"step_boundary", "bandwidth", "latency", "copy_down"}
        assert set(row["link_idle_ms"]) == {"before", "between", "behind"}
        assert (row["device"], row["link_gb_s"], row["spilled_frac"]) == ("RTX 4090", 25.0, 3 / 8)
    assert set(rows[0]["stats_stalls_s"]) and all(seconds >= 0 for seconds in rows[0]["stats_stalls_s"].values())
    assert rows[1]["stall_by_cause"]["copy_down"] > 0 == rows[0]["stall_by_cause"]["copy_down"]


def test_more_steps_than_the_tail_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="then the tail is full"):
        overlap.measure(cases()[0], num_turns=10, num_steps=5, clock=FakeClock())


def test_in_virtual_time_kvtier_is_at_the_bound_but_for_the_steps_boundary() -> None:
    """The real ring and its threads, by a clock that neither they nor the machine can hurry or delay."""
    case = Case(GPUS[1], 12e9, "deep", num_blocks=8, num_spilled=4)
    clock = VirtualClock()
    (row,) = overlap.measure(
        case, num_turns=2, num_steps=3, num_layers=LAYERS, clock=clock, time_scale=1.0, methods=["kvtier"]
    )
    clock.close()
    assert (
        row["is_exact"] and row["up_ratio"] == pytest.approx(1.0) and row["overhead_ms"] == pytest.approx(0, abs=1e-6)
    )
    assert row["compute_ms"] == pytest.approx((LAYERS * case.layer_s + case.head_s) * 1e3)
    assert row["compute_ms"] == pytest.approx(row["simulated_ms"]) and row["is_quiet"]
    assert row["transfer_ms"] == pytest.approx(LAYERS * case.layer_transfer_s * 1e3)
    # Where the link binds, what is lost is the time that it has nothing to do.
    assert row["lost_ms"] == pytest.approx(sum(row["link_idle_ms"].values()), rel=0.01)
    assert row["lost_ms"] <= (case.layer_s + case.head_s + LAYERS * 4 * LATENCY_S) * 1e3 + 1e-6


def test_a_resident_step_that_took_longer_than_its_parts_is_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = _row_where_resident_took(1.06)
    assert not noisy["is_quiet"] and _row_where_resident_took(1.04)["is_quiet"]
    monkeypatch.setattr(overlap, "measure", lambda case, **_: [noisy])
    overlap.main(["--quick", "--json"])
    assert "NOISY" in capsys.readouterr().err


def _row_where_resident_took(factor: float) -> dict[str, Any]:
    """Of kvtier, whose resident steps took `factor` times what their parts were told to take."""
    case = Case(GPUS[0], 25e9, "balanced", num_blocks=8, num_spilled=3)
    with torch.no_grad():
        bench = Bench.build(case, 1, FakeClock(), 1.0, ["kvtier"])
        times = bench.run(1, 5)
        times["resident"] = [replace(each, wall=factor * bench.simulated_s) for each in times["resident"]]
        (row,) = overlap.to_rows(bench, times)
        bench.close()
    return row


def test_logits_that_differ_are_an_exit_status(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap, "measure", lambda case, **_: rows)
    assert overlap.main(["--quick", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["benchmark"] == "overlap" and len(document["rows"]) == 2 * len(rows)
    assert document["threads"] == 1 and "machine" in document and "layer_at_a_time" in printed.err
    monkeypatch.setattr(overlap, "measure", lambda case, **_: [*rows, rows[0] | {"is_exact": False}])
    assert overlap.main(["--quick"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_a_method_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--methods", "kvtier,magic"])
    assert "magic is none of kvtier, layer_at_a_time, lru_promotion" in capsys.readouterr().err


def test_medians_of_fewer_than_five_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--turns", "2", "--steps", "2"])
    assert "at least 5" in capsys.readouterr().err


def test_the_model_has_as_many_layers_as_what_it_stands_for() -> None:
    assert card().num_full == 32 and card().name == "Llama-3.1-8B"
