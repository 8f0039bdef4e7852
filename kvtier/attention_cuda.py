"""Attention on CUDA with log-sum-exp: several kernels have it, and a probe says which are right here.

Written for CUDA and not yet run on a GPU: what is not certain (whether a kernel takes our strides, which way round its
log-sum-exp lies, whether it is there at all) is found out by the probe, against the definition, before it is used.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.log import logger

Result = tuple[torch.Tensor, torch.Tensor]
"""Output `[n, heads, rows, dim]` and log-sum-exp `[n, heads, rows]` in fp32; `n` may be 1 where pieces were merged."""


class Way(enum.Enum):
    """A kernel with log-sum-exp."""

    PAGED = "varlen_attn"
    """torch's varlen_attn over a table of pages: all pieces of the same queries in one call, merged by the kernel."""
    FLASH = "flash"
    """16 bits alone; pieces as rows."""
    EFFICIENT = "efficient"
    """The memory-efficient kernel: fp32 too."""
    REFERENCE = "reference"
    """The definition, in fp32: for what no kernel here does."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a kernel is asked for, as far as it decides whether it can."""

    device: torch.device
    dtype: torch.dtype
    dim: int
    length: int
    """Keys of each piece."""
    causal: bool


_ORDER = (Way.PAGED, Way.FLASH, Way.EFFICIENT)
_HALF = (torch.float16, torch.bfloat16)
# Outputs are rounded to the dtype once, and so are the softmax weights in it: a wrong stride is off by about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> Result | None:
    """Attention over `n` pieces by the best kernel that is right; None: there is none for this.

    Args:
        query: `[n, heads, rows, dim]`; expanded along `n` where all pieces have the same queries.
        keys, values: `[n, kv_heads, length, dim]`, last stride 1. Causal: `rows == length`.
    """
    if keys.shape[-1] != values.shape[-1]:
        return None
    way = way_of(Case(query.device, query.dtype, query.shape[-1], keys.shape[2], causal))
    return None if way is Way.REFERENCE else KERNELS[way](query, keys, values, scale, causal)


def way_of(case: Case) -> Way:
    """The first kernel that takes such tensors and is right. The first call for a case probes, and logs it once.

    Lengths differ at every token in the tail: they share a probe, for a page is either of a length that varlen_attn
    takes, a multiple of 256, or it is not.
    """
    paged = case.length % 256 == 0 and not case.causal
    return _probed(Case(case.device, case.dtype, case.dim, 256 if paged else 96, case.causal))


def kernels_for(device: torch.device, dtype: torch.dtype, dim: int, block_tokens: int) -> dict[str, str]:
    """The kernels that a model's steps will use, by what they are used for, probed now; empty but on CUDA."""
    if device.type != "cuda":
        return {}
    uses = {"blocks": (block_tokens, False), "tails": (1, False), "new_tokens": (1, True)}
    return {use: way_of(Case(device, dtype, dim, length, causal)).value for use, (length, causal) in uses.items()}


@functools.lru_cache(maxsize=64)
def _probed(case: Case) -> Way:
    found, reasons = probe(case)
    logger.info(
        "attention on %s, %s, head size %d, %s: %s%s",
        case.device,
        str(case.dtype).removeprefix("torch."),
        case.dim,
        "causal" if case.causal else f"pieces of {'256 tokens and multiples' if case.length == 256 else 'any length'}",
        found.value,
        "".join(f"; not {way.value}: {reason}" for way, reason in reasons.items()),
    )
    return found


def probe(case: Case, kernels: Mapping[Way, Callable[..., Result]] | None = None) -> tuple[Way, dict[Way, str]]:
    """Try the kernels on tiny tensors with our strides; the first that is right, and why those before are not."""
    reasons: dict[Way, str] = {}
    for way in _ORDER:
        reason = _unfit(way, case) or _tried((kernels or KERNELS)[way], case)
        if reason is None:
            return way, reasons
        reasons[way] = reason
    return Way.REFERENCE, reasons


def _unfit(way: Way, case: Case) -> str | None:
    if way is Way.EFFICIENT:
        return None
    if case.dtype not in _HALF:
        return "16 bits alone"
    if case.dim % 8:
        return "head sizes of multiples of 8 alone"
    if way is Way.PAGED and (case.causal or case.length % 256):
        return "whole pages alone"
    return None


def _tried(kernel: Callable[..., Result], case: Case) -> str | None:
    """Why it is not right here; None: it is."""
    try:
        query, keys, values = _sample(case)
        output, lse = kernel(query, keys, values, case.dim**-0.5, case.causal)
        wanted, wanted_lse = definition(query, keys, values, case.dim**-0.5, case.causal)
        if output.shape[0] == 1 and keys.shape[0] > 1:  # merged by the kernel
            weights = torch.softmax(wanted_lse, 0).unsqueeze(-1)
            wanted, wanted_lse = (wanted * weights).sum(0, keepdim=True), wanted_lse.logsumexp(0, keepdim=True)
        if output.shape != wanted.shape or lse.shape != wanted_lse.shape:
            return f"it gives {tuple(output.shape)} and {tuple(lse.shape)}"
        off = max(float((output - wanted).abs().max()), float((lse - wanted_lse).abs().max()))
    except Exception as error:  # a kernel that is not built for this device says so in any way it likes
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    return None if off <= _TOLERANCE[case.dtype] else f"it is off by {off:.2g}"  # NaN too is off


def _sample(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three pieces in a slab of five slots, between other layers, as the gpu tier lays them out."""
    generator = torch.Generator(device=case.device).manual_seed(0)
    kv_heads, num, rows = 2, 1 if case.causal else 3, case.length if case.causal else 5
    # Twice the queries' heads in a causal tile, whose query is not packed.
    heads = kv_heads * 2 if case.causal else kv_heads
    pieces = torch.randn(5, 4, kv_heads, case.length, case.dim, generator=generator, device=case.device)
    pieces = pieces.to(case.dtype)
    query = torch.randn(1, heads, rows, case.dim, generator=generator, device=case.device).to(case.dtype)
    return query.expand(num, -1, -1, -1), pieces[1 : 1 + num, 1], pieces[1 : 1 + num, 2]


def definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    """Attention as it is defined, in fp64."""
    keys, values = (_for_heads(part, query.shape[1]).double() for part in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return torch.softmax(scores, -1) @ values, scores.logsumexp(-1)


def _for_heads(part: torch.Tensor, heads: int) -> torch.Tensor:
    groups = heads // part.shape[1]
    return part.repeat_interleave(groups, 1) if groups > 1 else part


# -- kernels ----------------------------------------------------------------------------------------------------------


def paged(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    """`varlen_attn` with each piece as a page: a view of the slab `[page, token, head, dim]`, no copy."""
    varlen = _varlen()
    num, heads, rows, dim = query.shape
    is_same = num == 1 or query.stride(0) == 0
    num_rows = 1 if is_same else num
    tables = _tables(num, keys.shape[2], rows, is_same, query.device)
    tokens = query[:num_rows].transpose(1, 2).reshape(num_rows * rows, heads, dim)
    output, lse = varlen.varlen_attn(
        tokens,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        tables.starts,
        None,
        rows,
        tables.longest,
        return_aux=varlen.AuxRequest(lse=True),
        scale=scale,
        seqused_k=tables.used,
        block_table=tables.pages,
    )
    if heads != num_rows * rows:  # its documentation and its kernels differ in which way round it lies
        _heads_come_first[query.device] = lse.shape[0] == heads
    if not _heads_come_first[query.device]:  # known: the probe's shapes tell
        lse = lse.transpose(0, 1)
    lse = lse.float().reshape(heads, num_rows, rows).transpose(0, 1)
    return output.reshape(num_rows, rows, heads, dim).transpose(1, 2), lse


_heads_come_first: dict[torch.device, bool] = {}


@dataclass(frozen=True, slots=True)
class _Tables:
    """`varlen_attn`'s arguments that are the same at every token."""

    starts: torch.Tensor
    used: torch.Tensor
    pages: torch.Tensor
    longest: int


@functools.lru_cache(maxsize=512)
def _tables(num: int, length: int, rows: int, is_same: bool, device: torch.device) -> _Tables:
    pages = torch.arange(num, dtype=torch.int32, device=device)
    num_rows = 1 if is_same else num
    longest = num * length if is_same else length
    starts = torch.arange(0, (num_rows + 1) * rows, rows, dtype=torch.int32, device=device)
    used = torch.full((num_rows,), longest, dtype=torch.int32, device=device)
    return _Tables(starts, used, pages.view(num_rows, -1), longest)


@functools.cache
def _varlen() -> Any:
    from torch.nn.attention import varlen  # newer than the oldest torch that is supported

    return varlen


def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    """The flash kernel of `scaled_dot_product_attention`, with pieces as rows."""
    keys, values = _for_heads(keys, query.shape[1]), _for_heads(values, query.shape[1])
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def efficient(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> Result:
    """The memory-efficient kernel of `scaled_dot_product_attention`, which wants equal heads."""
    keys, values = _for_heads(keys, query.shape[1]), _for_heads(values, query.shape[1])
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, None, True, 0.0, causal, scale=scale
    )
    return found[0], found[1][..., : query.shape[2]].float()  # its lse is padded to a multiple of 32 rows


KERNELS: dict[Way, Callable[..., Result]] = {Way.PAGED: paged, Way.FLASH: flash, Way.EFFICIENT: efficient}
