"""What a plan comes to: tiers, limits, a table over users, predictions; and the JSON document of all that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import __version__
from kvtier.bound import Bound
from kvtier.config import read_config
from kvtier.errors import ConfigError
from kvtier.planner.bound import decode_round, first_token, rows_at_once
from kvtier.planner.copies import short_copies
from kvtier.planner.expected import Expected, expected_round, speeds
from kvtier.planner.layout import Layout, Limit, lay_out
from kvtier.planner.models import find_card
from kvtier.planner.rates import HOW, Rates, read_rates
from kvtier.size import Size, SizeUnit, size_words
from kvtier.types import AttentionMode, Tier

FORMAT = 1
EXIT_FITS, EXIT_BREAKS = 0, 1
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)", re.ASCII)
_THOUSANDS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says, as it was typed. None and "" where it was left out."""

    model: str
    context: str
    users: int
    config: str
    rates: Path | None = None
    dtype: str | None = None
    weights: str = ""
    device_memory: str = ""
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One count of users. The bounds are None without rates, and beyond a limit, where nobody can tell."""

    users: int
    limit: Limit | None
    """The tightest limit that this count is beyond; None: it works."""
    decode: Bound | None
    first_token: Bound | None
    expected: Expected | None = None
    """Of a decode step. None in `gathered` mode too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The result."""

    wishes: Wishes
    layout: Layout
    source: str
    """Where the model's numbers are from."""
    rates: Rates | None
    notes: tuple[str, ...]

    @property
    def first_break(self) -> Limit | None:
        """The first limit that breaks at or before `users`; None: none does."""
        return self.limit_at(self.wishes.users)

    @property
    def exit_status(self) -> int:
        """0: so many users work; 1: a limit breaks before."""
        return EXIT_BREAKS if self.first_break else EXIT_FITS

    @property
    def device_source(self) -> str:
        """Where it is from which device this is about: `assumed`, or the file of the rates."""
        return "assumed" if self.rates is None else self.rates.source

    @property
    def device_bytes_source(self) -> str:
        """Likewise of its memory."""
        if self.wishes.device_memory:
            return "--device-memory"
        return "assumed" if self.rates is None else self.rates.source

    def limit_at(self, users: int) -> Limit | None:
        """The tightest of the limits that `users` are beyond."""
        return next((limit for limit in self.layout.limits if limit.max_users < users), None)

    def free_without(self, users: int) -> int:
        """Bytes of the device's memory beside weights and all KV, without kvtier; negative: so many are missing."""
        layout = self.layout
        return layout.device_bytes - layout.card.weights_bytes - users * layout.card.kv_bytes(layout.context_tokens)

    @property
    def rows(self) -> list[Row]:
        """Powers of two up to `users`, and where either way first fails."""
        most, layout, rates, threads = self.wishes.users, self.layout, self.rates, self.wishes.num_threads
        counts = {most, *(1 << power for power in range(most.bit_length()))}
        for last in (layout.max_users, layout.max_users_without):
            counts |= {last, last + 1}
        rows = []
        for users in sorted(count for count in counts if 1 <= count <= most):
            limit = self.limit_at(users)
            if rates is None or limit is not None:
                rows.append(Row(users, limit, None, None))
                continue
            bounds = decode_round(layout, rates, users, threads), first_token(layout, rates, users, threads)
            rows.append(Row(users, limit, *bounds, expected_round(layout, rates, users, threads)))
        return rows

    def document(self) -> dict[str, Any]:
        """As docs/plan.md describes it, field by field; plain values only."""
        layout, card, context = self.layout, self.layout.card, self.layout.context_tokens
        return {
            "format": FORMAT,
            "kvtier": __version__,
            "model": {
                "name": card.name,
                "source": self.source,
                "family": card.family,
                "dtype": card.dtype,
                "parameters": card.num_parameters,
                "weights_bytes": card.weights_bytes,
                "full_layers": card.num_full,
                "window_layers": card.num_window,
                "window_tokens": card.window_tokens,
                "linear_layers": card.num_linear,
                "heads": card.heads,
                "kv_heads": card.kv_heads,
                "head_dim": card.head_dim,
            },
            "config": self.wishes.config,
            "context_tokens": context,
            "users": self.wishes.users,
            "device": layout.device,
            "device_source": self.device_source,
            "device_bytes": layout.device_bytes,
            "device_bytes_source": self.device_bytes_source,
            "kv": {
                "formulas": card.formulas(context),
                "tiered_bytes": card.tiered_bytes(context),
                "window_bytes": card.window_bytes(context),
                "user_bytes": card.kv_bytes(context),
                "blocks_per_user": layout.blocks_per_user,
                "block_bytes": layout.shape.block_bytes,
            },
            "gpu": self._gpu(),
            "tiers": {
                room.tier.label: {"budget_bytes": room.budget_bytes, "blocks": room.num_slots} for room in layout.rooms
            },
            "limits": [{"name": each.name, "max_users": each.max_users, "why": each.words} for each in layout.limits],
            "first_break": None if self.first_break is None else self.first_break.name,
            "first_failing_users": {"without": layout.max_users_without + 1, "with": layout.max_users + 1},
            "rows": [self._row(row) for row in self.rows],
            "rates": None if self.rates is None else self.rates.source,
            "notes": list(self.notes),
            "exit_status": self.exit_status,
        }

    def _gpu(self) -> dict[str, int] | None:
        gpu = self.layout.gpu
        if gpu is None:
            return None
        return {
            "blocks_bytes": gpu.num_slots * gpu.slot_bytes,
            "ring_bytes": gpu.ring_slices * gpu.slice_bytes,
            "scratch_bytes": gpu.scratch_bytes,
            "gather_bytes": gpu.gather_bytes,
            "untiered_bytes": gpu.untiered_bytes,
            "rows_at_once": rows_at_once(self.layout, self.wishes.users),
        }

    def _row(self, row: Row) -> dict[str, Any]:
        layout, placed = self.layout, self.layout.place(row.users)
        block_bytes = layout.shape.block_bytes
        return {
            "users": row.users,
            "weights_bytes": layout.card.weights_bytes,
            "kv_bytes": row.users * layout.card.kv_bytes(layout.context_tokens),
            "free_bytes_without": self.free_without(row.users),
            "fits_without": self.free_without(row.users) >= 0,
            "fits_with": row.limit is None,
            "limit": None if row.limit is None else row.limit.name,
            "tier_bytes": {room.tier.label: placed.blocks[room.tier] * block_bytes for room in layout.rooms},
            "missing_bytes": placed.missing * block_bytes,
            "predicted_decode": _bound(row.decode, row.users),
            "expected_decode": None if row.expected is None else row.expected.document(row.users),
            "predicted_first_token": _bound(row.first_token, None),
        }


def make_plan(wishes: Wishes) -> Plan:
    """Work the plan out. Reads a config, a model's config.json and the rates; measures and allocates nothing.

    Raises:
        ConfigError: one of them cannot be used, or a number is none; the message says which and what to give.

    Cost: milliseconds, whatever the number of users.
    """
    context = parse_tokens(wishes.context, "--context")
    if wishes.users < 1:
        raise ConfigError(f"--users {wishes.users}: must be at least 1. Mend: give a number of users")
    if wishes.num_threads is not None and wishes.num_threads < 1:
        raise ConfigError(f"--threads {wishes.num_threads}: must be at least 1. Mend: leave it out for all cores")
    config = read_config(wishes.config)
    weights = _size(wishes.weights, "--weights")
    card, source = find_card(wishes.model, dtype=wishes.dtype, weights_bytes=weights)
    rates = None if wishes.rates is None else read_rates(wishes.rates)
    layout = lay_out(card, config, context, rates, _size(wishes.device_memory, "--device-memory"))
    plan = Plan(wishes, layout, source, rates, ())
    return Plan(wishes, layout, source, rates, tuple(_notes(plan)))


def parse_tokens(text: str, option: str) -> int:
    """A number of tokens: 32768, 32k (of 1,024), 1.5k, 1m. Raises ConfigError; `option` is for its message."""
    match = _TOKENS.fullmatch(text.strip())
    tokens = float(match[1]) * _THOUSANDS[match[2].lower()] if match else 0.0
    if tokens < 1 or tokens != int(tokens) or tokens >= 1 << 50:
        raise ConfigError(f"{option} {text}: is not a number of tokens. Mend: give one such as 8192 or 32k (of 1,024)")
    return int(tokens)


def _size(text: str, option: str) -> int | None:
    if not text:
        return None
    try:
        size = Size.parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}. Mend: give a size such as 16GB or 24GiB") from None
    if size.unit is SizeUnit.PERCENT or not size.amount:
        raise ConfigError(f"{option} {text}: must be in bytes and more than 0. Mend: give a size such as 16GB or 24GiB")
    return int(size.amount)


def _notes(plan: Plan) -> Iterator[str]:
    layout, card, rates = plan.layout, plan.layout.card, plan.rates
    if card.max_tokens is not None and layout.context_tokens > card.max_tokens:
        yield (
            f"the config names {card.max_tokens:,} tokens as the longest context (max_position_embeddings): beyond it "
            "the model's answers may be worthless"
        )
    if card.num_linear:
        yield f"{card.num_linear} layers of linear attention keep a state of fixed size, which is in no figure here"
    if layout.staging_bytes:
        owner = "tiers.cpu.budget" if layout.config.tiers.budget(Tier.CPU).amount else "tiers.nvme.page_cache"
        yield f"{size_words(layout.staging_bytes)} of {owner} are staging between files and the device, by io_threads"
    if words := short_copies(layout, rates):
        yield words
    if plan.wishes.device_memory:
        yield "the device's memory is as --device-memory says"
    elif rates is None:
        yield "the device is assumed to hold weights and tiers.gpu.budget, no more: give --device-memory or --rates"
    if rates is None:
        yield (
            "a CUDA device is assumed, and this machine was not looked at: without one, weights and gpu tier lie in "
            f"host memory too, and other limits break first. For the plan of a machine: {HOW}"
        )
        yield "bytes and places only: nothing here says how fast; that takes the rates of a machine, as above"
        return
    row = plan.rows[-1]
    if row.limit is not None:
        yield f"no prediction for {row.users:,} users: they are beyond a limit"
    for what, bound in (("decode", row.decode), ("the first token", row.first_token)):
        if bound is not None and bound.unmeasured:
            missing = ", ".join(bound.unmeasured)
            yield f"not in the prediction of {what}, for want of a rate: {missing}; it may be slower"
    yield from _expected_notes(row.expected, rates, layout.config.attention)


def _expected_notes(expected: Expected | None, rates: Rates, mode: AttentionMode) -> Iterator[str]:
    if expected is None:
        if mode is AttentionMode.GATHERED:
            yield "only the bound is told of decode: the doctor does not measure how attention: gathered attends"
        return
    if expected.unmeasured:
        missing = ", ".join(expected.unmeasured)
        yield f"only the bound is told of decode: the rates have nothing for {missing}. {HOW}"
    elif rates.device == "cuda":
        yield "the expected time has not been compared with runs on a CUDA device"


def _bound(bound: Bound | None, users: int | None) -> dict[str, Any] | None:
    if bound is None:
        return None
    seconds = bound.seconds
    return {
        "ms": None if seconds is None else seconds * 1e3,
        **({} if users is None else speeds(seconds, users)),
        "binding": bound.binding or None,
        "unmeasured": bound.unmeasured,
        "edges": [
            {
                "name": edge.name,
                "amount": edge.amount,
                "per_s": edge.per_s,
                "ms": None if edge.seconds is None else edge.seconds * 1e3,
            }
            for edge in bound.edges
        ],
    }
