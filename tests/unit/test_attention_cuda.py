"""Which kernel is chosen, and how paged attention is asked: against stand-ins for CUDA's kernels, on the CPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import attention_cuda
from kvtier.attention_cuda import Case, Result, Way, definition, probe

CPU = torch.device("cpu")
HALF = Case(CPU, torch.bfloat16, 16, 256, causal=False)


def right(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    output, lse = definition(query, keys, values, scale, causal)
    return output.to(query.dtype), lse.float()


def missing(*arguments: Any) -> Result:
    raise RuntimeError("not compiled for this device\nbacktrace")


def wrong(*arguments: Any) -> Result:
    output, lse = right(*arguments)
    return output + 0.5, lse


def dead(*arguments: Any) -> Result:
    output, lse = right(*arguments)
    return output * float("nan"), lse


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    attention_cuda._probed.cache_clear()
    attention_cuda._heads_come_first.clear()


def varlen(token_major_lse: bool) -> Any:
    """What torch documents of varlen_attn, in plain torch; it refuses what the kernels are not said to take."""

    def attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, starts_k: None, max_q: int,
        max_k: int, *, return_aux: Any, scale: float, seqused_k: torch.Tensor, block_table: torch.Tensor,
    ) -> Result:  # fmt: skip
        assert starts_k is None and return_aux.lse and starts.dtype == block_table.dtype == torch.int32
        assert key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
        page = key.shape[1]
        assert page % 256 == 0 and max_k == int(seqused_k.max())
        outputs, lses = [], []
        for row in range(len(seqused_k)):
            tokens = query[int(starts[row]) : int(starts[row + 1])]
            assert len(tokens) == max_q
            pages = block_table[row]
            k, v = (part[pages].flatten(0, 1)[: int(seqused_k[row])] for part in (key, value))
            output, lse = definition(*(part.transpose(0, 1)[None] for part in (tokens, k, v)), scale, False)
            outputs.append(output[0].transpose(0, 1).to(query.dtype))
            lses.append(lse[0].float())
        whole = torch.cat(lses, 1)
        return torch.cat(outputs), whole.transpose(0, 1) if token_major_lse else whole

    return SimpleNamespace(varlen_attn=attn, AuxRequest=lambda lse: SimpleNamespace(lse=lse))


@pytest.mark.parametrize("token_major_lse", [False, True])
@pytest.mark.parametrize(("heads", "rows"), [(2, 5), (3, 3), (4, 1)])
@pytest.mark.parametrize("is_same", [True, False])
def test_pieces_are_pages_whichever_way_round_the_log_sum_exp_lies(
    monkeypatch: pytest.MonkeyPatch, token_major_lse: bool, heads: int, rows: int, is_same: bool
) -> None:
    monkeypatch.setattr(attention_cuda, "_varlen", lambda: varlen(token_major_lse))
    assert probe(HALF, {**attention_cuda.KERNELS})[0] is Way.PAGED
    slab = torch.randn(6, 3, heads, 256, 16)
    keys, values = slab[2:5, 1], slab[2:5, 2]
    query = torch.randn(1, heads, rows, 16).expand(3, -1, -1, -1) if is_same else torch.randn(3, heads, rows, 16)
    output, lse = attention_cuda.paged(query, keys, values, 0.25, False)
    wanted, wanted_lse = definition(query, keys, values, 0.25, False)
    if is_same:  # merged by the kernel
        weights = torch.softmax(wanted_lse, 0).unsqueeze(-1)
        wanted, wanted_lse = (wanted * weights).sum(0, keepdim=True), wanted_lse.logsumexp(0, keepdim=True)
    assert output.shape == wanted.shape and float((output - wanted).abs().max()) < 1e-5
    assert lse.shape == wanted_lse.shape and float((lse - wanted_lse).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("kernels", "chosen"),
    [
        ({Way.PAGED: right, Way.FLASH: right, Way.EFFICIENT: right}, Way.PAGED),
        ({Way.PAGED: missing, Way.FLASH: right, Way.EFFICIENT: right}, Way.FLASH),
        ({Way.PAGED: wrong, Way.FLASH: dead, Way.EFFICIENT: right}, Way.EFFICIENT),
        ({Way.PAGED: missing, Way.FLASH: wrong, Way.EFFICIENT: dead}, Way.REFERENCE),
    ],
)
def test_the_first_kernel_that_is_right_is_chosen(kernels: dict[Way, Any], chosen: Way) -> None:
    way, reasons = probe(HALF, kernels)
    assert way is chosen
    for each, kernel in kernels.items():
        if kernel is missing:
            assert reasons[each] == "RuntimeError: not compiled for this device"
        elif kernel is not right:
            assert reasons[each].startswith("it is off by ")


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        (Case(CPU, torch.float32, 16, 256, causal=False), Way.EFFICIENT),
        (Case(CPU, torch.bfloat16, 15, 256, causal=False), Way.EFFICIENT),
        (Case(CPU, torch.float16, 16, 100, causal=False), Way.FLASH),
        (Case(CPU, torch.float16, 16, 256, causal=True), Way.FLASH),
    ],
)
def test_what_a_kernel_is_not_made_for_is_not_tried(case: Case, chosen: Way) -> None:
    assert probe(case, dict.fromkeys(attention_cuda.KERNELS, right))[0] is chosen


def test_a_choice_is_made_and_logged_once_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_cuda, "KERNELS", {Way.PAGED: missing, Way.FLASH: right, Way.EFFICIENT: right})
    caplog.set_level(logging.INFO, "kvtier")
    for length in range(1, 600):
        assert attention_cuda.way_of(Case(CPU, torch.bfloat16, 16, length, causal=False)) is Way.FLASH
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "pages, and all other lengths"
    assert any("bfloat16, head size 16" in line and "not varlen_attn: RuntimeError" in line for line in logged)


def test_without_a_kernel_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuda, "KERNELS", dict.fromkeys(attention_cuda.KERNELS, missing))
    query = torch.randn(1, 2, 3, 8)
    assert attention_cuda.attend(query, query, query, 1.0, causal=False) is None
    assert attention_cuda.attend(query, query, torch.randn(1, 2, 3, 4), 1.0, causal=False) is None


def test_a_cpu_has_none_of_them() -> None:
    assert attention_cuda.kernels_for(CPU, torch.float32, 64, 256) == {}
