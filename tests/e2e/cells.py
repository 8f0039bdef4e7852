"""A cell of the matrix: a mode, a family, an attention mode, a dtype. And which of them `make test` runs."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from kvtier import TieredKV
from kvtier.errors import UnsupportedError
from kvtier.hf import VERIFIED_FAMILIES
from tests.e2e import modes_rows
from tests.e2e.families import FAMILIES, small_config, tiny
from tests.e2e.modes import MODES_BY_NAME
from tests.e2e.sides import Side, Verdict, compare, plain_side, tiered_side, tolerance_for
from tests.e2e.wide import wide_twin
from tests.sample import rounds

assert modes_rows  # its import fills MODES_BY_NAME
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SERVED_FAMILIES = tuple(name for name, (config, _) in FAMILIES.items() if config.model_type in VERIFIED_FAMILIES)
SERVED_MODES = tuple(MODES_BY_NAME)
PARTNERS = rounds(3, 2)
"""With how many families each mode meets in a sample, and the other way round. `make matrix` has them all."""

# What plain transformers cannot do, and how it says so: kvtier must refuse it by name.
_STATEFUL = "assisted generation is not supported with stateful models"
PLAIN_REFUSALS: dict[tuple[str, str], str] = {
    ("prompt_lookup", "granitemoehybrid"): _STATEFUL,
    ("assistant_often_right", "granitemoehybrid"): _STATEFUL,
    ("assistant_rarely_right", "granitemoehybrid"): _STATEFUL,
    ("cropped", "granitemoehybrid"): "is_croppable is False",
    ("crop_and_answer_again", "granitemoehybrid"): "is_croppable is False",
}


class Cell(NamedTuple):
    """A place in the matrix, by names."""

    mode: str
    family: str
    attention: str
    dtype: str


class Refused(NamedTuple):
    """Plain transformers cannot do it either."""

    text: str


@functools.cache
def reference(mode: str, family: str, dtype: str) -> Side | Refused:
    """The plain run, the same for both attention modes."""
    side = plain_side(tiny(family, DTYPES[dtype]))
    expected = PLAIN_REFUSALS.get((mode, family))
    try:
        MODES_BY_NAME[mode].run(side, family)
    except (AttributeError, RuntimeError, ValueError) as error:
        if expected is None or expected not in str(error):
            raise
        return Refused(f"{type(error).__name__}: {error}")
    assert expected is None, f"plain transformers has learned {mode} of {family}"
    return side


def check(verdict: Verdict, mode: str) -> Verdict:
    """Raise AssertionError if too little was compared to mean anything."""
    least = MODES_BY_NAME[mode].at_least
    assert verdict.steps >= least, f"only {verdict.steps} steps were compared, fewer than {least}"
    return verdict


def run_cell(cell: Cell, folder: Path) -> Verdict | Refused:
    """What kvtier did. Raises whatever shows that it did wrong."""
    dtype, mode = DTYPES[cell.dtype], MODES_BY_NAME[cell.mode]
    model, plain = tiny(cell.family, dtype), reference(cell.mode, cell.family, cell.dtype)
    with TieredKV(model, small_config(model, folder, cell.attention, rows=mode.rows)) as tiered:
        if isinstance(plain, Refused):
            try:
                mode.run(tiered_side(tiered), cell.family)
            except (UnsupportedError, ValueError) as error:
                # generate itself may refuse, before it asks the cache for anything.
                if not isinstance(error, UnsupportedError) and _STATEFUL not in str(error):
                    raise
                return Refused(str(error))
            raise AssertionError(f"kvtier did what plain transformers cannot do: {plain.text}")
        side = tiered_side(tiered, follow=None if dtype is torch.float32 else plain)
        mode.run(side, cell.family)
        tiered.check_integrity()
        stats = tiered.stats()
    assert stats["nvme_sole_reads"] > 0, "nothing was read that lay on NVMe alone"
    return check(_compare(side, plain, cell), cell.mode)


def _compare(side: Side, plain: Side, cell: Cell) -> Verdict:
    if cell.attention == "gathered" and MODES_BY_NAME[cell.mode].same_chunks:
        return compare(side, plain, 0.0)
    dtype = DTYPES[cell.dtype]
    difference = compare(side, plain, math.inf).difference
    try:
        return compare(side, plain, tolerance_for(difference, tiny(cell.family, dtype)))
    except AssertionError:
        if dtype is torch.float32 or cell.attention == "gathered":
            raise
    wide = wide_reference(cell.mode, cell.family)
    tolerance = tolerance_for(compare(side, wide, math.inf).difference, wide_twin(cell.family, dtype))
    verdict = compare(side, wide, tolerance)
    verdict.wide = difference
    return verdict


@functools.cache
def wide_reference(mode: str, family: str) -> Side:
    """The plain run's tokens on its bf16 twin whose attention is computed in fp32 (ADR 0009)."""
    plain = reference(mode, family, "bf16")
    assert isinstance(plain, Side)
    side = plain_side(wide_twin(family, torch.bfloat16), follow=plain)
    MODES_BY_NAME[mode].run(side, family)
    return side


# -- a sample ----------------------------------------------------------------------------------------------------------


def pairwise(
    factors: Mapping[str, Sequence[str]],
    partners: Mapping[tuple[str, str], int],
    cost: Callable[[tuple[str, ...]], float] = lambda _: 0.0,
) -> list[tuple[str, ...]]:
    """Few combinations that hold every pair of values of two factors; always the same ones.

    Args:
        cost: among combinations that bring as many new pairs the cheapest is taken.
        partners: pairs of factors, as they are ordered in `factors`, whose values only have to meet so many of the
            other's each, or all of them if they are fewer.
    """
    names = list(factors)
    cells = list(itertools.product(*factors.values()))
    # Neighbours in the product share nearly all values, and a tie goes to the first: spread them, always the same way.
    random.Random(0).shuffle(cells)
    pairs = list(itertools.combinations(range(len(names)), 2))
    met: set[tuple[int, str, int, str]] = set()
    count: Counter[tuple[int, str, int]] = Counter()

    def gain(cell: tuple[str, ...]) -> int:
        total = 0
        for i, j in pairs:
            if (i, cell[i], j, cell[j]) in met:
                continue
            wanted = partners.get((names[i], names[j]))
            if wanted is None:
                total += 1
            else:
                total += count[i, cell[i], j] < min(wanted, len(factors[names[j]]))
                total += count[j, cell[j], i] < min(wanted, len(factors[names[i]]))
        return total

    chosen = []
    while True:
        best = max(cells, key=lambda cell: (gain(cell), -cost(cell)))
        if gain(best) == 0:
            return chosen
        chosen.append(best)
        for i, j in pairs:
            if (i, best[i], j, best[j]) not in met:
                met.add((i, best[i], j, best[j]))
                count[i, best[i], j] += 1
                count[j, best[j], i] += 1


def sample(modes: Sequence[str] = SERVED_MODES, families: Sequence[str] = SERVED_FAMILIES) -> list[Cell]:
    """Each mode with PARTNERS families and each family with as many modes; every other pair of the four factors.

    Rather on cheap cells: in 16 bits attention on the CPU takes several times as long as in 32.
    """
    factors = {"mode": modes, "family": families, "attention": ("blockwise", "gathered"), "dtype": tuple(DTYPES)}
    return [Cell(*values) for values in pairwise(factors, {("mode", "family"): PARTNERS}, _seconds)]


def _seconds(cell: tuple[str, ...]) -> float:
    mode, _, attention, dtype = cell
    many = 2.0 if "beam" in mode else 1.0
    return many * (4.0 if attention == "blockwise" and dtype == "bf16" else 1.0)
