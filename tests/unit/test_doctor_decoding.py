"""What the doctor measures of a decode step: figures for every place, reasons in place of tracebacks, rows that a plan
reads."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from kvtier.doctor import NoWatch, decoding
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.compute import measure_compute
from kvtier.doctor.decoding import HEADS, AttentionRate, DecodeSpeed, StepCost, measure_decoding
from kvtier.doctor.report import Report
from kvtier.doctor.show import print_report
from kvtier.planner.rates import Rates
from tests.unit.test_doctor_proposal import facts, propose


class Steps(NoWatch):
    """Counts what was announced and what came."""

    announced = came = 0

    def phase(self, name: str, estimate_s: float, num_steps: int) -> None:
        self.announced += num_steps

    def step(self) -> None:
        self.came += 1


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def speed(one_core: None) -> DecodeSpeed:
    return measure_decoding(0.0, NoWatch())


def test_there_is_a_figure_for_every_dtype_and_number_of_heads(speed: DecodeSpeed) -> None:
    on_host = [rate for rate in speed.attention if rate.device is None]
    assert {(rate.dtype, rate.heads) for rate in on_host} == {
        (dtype, heads) for dtype in ("float32", "bfloat16", "float16") for heads in HEADS
    }
    assert all(isinstance(rate.bytes_per_s, float) and rate.bytes_per_s > 0 for rate in speed.attention)
    for cost in speed.costs:
        for figure in (cost.step_us, cost.layer_us, cost.call_us):
            assert isinstance(figure, float) and figure > 0
    assert isinstance(speed.handover_us, float) and speed.handover_us > 0


def test_torch_has_as_many_threads_as_before_and_every_step_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "usable_cores", lambda: 2)
    monkeypatch.setattr(decoding, "_costs", lambda device, threads, _: StepCost(None, threads, 1.0, 1.0, 1.0))
    before, watch = torch.get_num_threads(), Steps()
    found = measure_decoding(0.0, watch)
    assert torch.get_num_threads() == before
    assert watch.announced == watch.came > 0
    assert [cost.num_threads for cost in found.costs if cost.device is None] == [1, 2]


def test_without_transformers_the_cost_of_a_layer_has_a_reason_and_the_rest_figures(
    monkeypatch: pytest.MonkeyPatch, one_core: None
) -> None:
    monkeypatch.setitem(sys.modules, "kvtier.hf.tiny", None)
    cost, *_ = measure_decoding(0.0, NoWatch()).costs
    assert isinstance(cost.layer_us, NotMeasured) and "transformers cannot be imported" in cost.layer_us.why
    assert cost.step_us == cost.layer_us and isinstance(cost.call_us, float)


def test_an_error_is_that_figures_reason(monkeypatch: pytest.MonkeyPatch, one_core: None) -> None:
    monkeypatch.setattr(decoding, "memory_available_bytes", lambda: 1 << 20)
    found = measure_decoding(0.0, NoWatch())
    assert {rate.bytes_per_s for rate in found.attention if rate.device is None} == {
        NotMeasured("too little memory is free for 64 MiB")
    }


def test_the_planner_finds_every_figure_by_its_name() -> None:
    places = ((None, 1), (None, 8), (0, 0))
    speed = DecodeSpeed(
        tuple(AttentionRate(*place, "float32", heads, 1e9 * heads) for place in places for heads in HEADS),
        tuple(StepCost(*place, 2000.0, 300.0, 10.0) for place in places),
        25.0,
    )
    found = facts(compute=measure_compute(0.0, NoWatch()), decoding=speed)
    report = Report(found, propose(found, None), "", [], [], True, 1.0)
    rows = {(row.section, row.name): row.value for row in report.rows if isinstance(row.value, int | float)}
    rates = Rates("a test", rows, ())
    for threads in (1, None):
        assert rates.attention("float32", threads, 1) == 1e9 and rates.attention("float32", threads, 4) == 4e9
        costs = [rates.decoding_s(what, threads) for what in ("step", "layer", "call of attention")]
        assert costs == pytest.approx([2e-3, 3e-4, 1e-5])
        if threads == 1:
            assert rates.read_weights("float32", threads, 576)
    assert rates.handover_s == pytest.approx(25e-6)
    out = io.StringIO()
    print_report(report, Console(file=out, width=200), verbose=True)
    assert "attention, 4 query heads, float32, one thread" in out.getvalue() and "300.0 us" in out.getvalue()
