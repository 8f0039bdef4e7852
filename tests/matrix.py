"""Every mode of generation x every family x both attention modes x both dtypes, into docs/matrix.md.

`make matrix`. Exit status 1 if a cell fails. Two processes, a family at a time, so that plain runs are computed once.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import queue
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.e2e.cells import DTYPES, SERVED_FAMILIES, SERVED_MODES, Cell, Refused, run_cell  # noqa: E402
from tests.e2e.families import FAMILIES, MODES  # noqa: E402
from tests.e2e.modes import MODES_BY_NAME  # noqa: E402
from tests.e2e.refused import REFUSED, refusal  # noqa: E402
from tests.e2e.sides import BF16_FACTOR, FP32_TOLERANCE, tolerance_of  # noqa: E402

WORKERS = 2
CELL_SECONDS = 120
TABLES = {
    "One row": ("greedy", "sampling", "own_chunks", "new_tokens_only", "forward_by_hand", "every_extra"),
    "Drafts": ("prompt_lookup", "assistant_often_right", "assistant_rarely_right"),
    "Beams": ("beams", "beams_continued", "beam_sampling", "padded_beams"),
    "Batches": ("left_padded", "right_padded", "left_padded_by_hand", "right_padded_by_hand", "return_sequences"),
    "A cache's own methods": ("reordered", "rows_come_and_go", "cropped", "crop_and_answer_again"),
}
assert sorted(MODES_BY_NAME) == sorted(mode for modes in TABLES.values() for mode in modes)


class Outcome(NamedTuple):
    """What became of a cell."""

    verdict: str
    """`exact`, `exact*`, `refused` or `FAILED`."""
    text: str
    """What was compared, or the reason."""
    difference: float = 0.0
    share: float = 0.0
    """Of what it may differ by."""


Results = dict[Cell, Outcome]

HEADER = """# What was compared

Made by `make matrix` on {date}: kvtier {kvtier}, transformers {transformers}, torch {torch}, Python {python},
{machine}, CPU. {cells} cells, {seconds:.0f} s: {counts}.

A cell runs one way to generate on one tiny random model of a family, in one attention mode and dtype, with prompts and
budgets such that blocks were read that lay on NVMe alone. It compares with the same run on plain transformers
(`DynamicCache`, the same chunks), at every step and, where the model is called by hand, every token.

**exact** means: in fp32 the same tokens, and every logit within {fp32}; in bf16 every logit within {factor} times what
the plain model's own logits change with its prefill chunk size, along the tokens, samples and beams that the plain run
chose. In `attention: gathered` all logits have the same bits in both, except in `own_chunks` and with drafts, where
plain transformers cannot take the same chunks. It holds for `attention: blockwise` and
`gathered`, in fp32 and bf16, or the cell says for which.

**exact\\*** means: in blockwise bf16 the plain model as it is differs by more than that ({starred} cells, at most
{starred_most:.2f} times its own chunking difference), and with its attention computed in fp32 and rounded once it does
not. torch's CPU kernel rounds the softmax weights to 16 bits, alike in every chunk size; kvtier does not
([ADR 0009](adr/0009-sixteen-bits.md)).

The largest differences of a logit: in fp32 {fp32_most:.1e}; in bf16 {bf16_most:.2f} times the plain model's own.

A number is a refusal: plain transformers cannot do it either, and kvtier raises an error, see
[below](#refused-by-generate-or-the-cache). Families that are missing are refused
[when they are wrapped](#refused-when-wrapped).
"""


def cells_of(family: str, modes: list[str]) -> list[Cell]:
    return [Cell(mode, family, attention, dtype) for mode in modes for dtype in DTYPES for attention in MODES]


def work(family: str, modes: list[str], results: Any) -> None:
    """All cells of a family, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"it took more than {CELL_SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    for cell in cells_of(family, modes):
        signal.alarm(CELL_SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcome = run_cell(cell, Path(folder))
            if isinstance(outcome, Refused):
                results.put((cell, Outcome("refused", outcome.text)))
            else:
                text = f"{outcome.steps} steps, {outcome.difference:.1e}"
                share = max(outcome.wide, outcome.difference) / tolerance_of(cell.family, DTYPES[cell.dtype])
                results.put((cell, Outcome("exact*" if outcome.wide else "exact", text, outcome.difference, share)))
        except Exception as error:
            results.put((cell, Outcome("FAILED", f"{type(error).__name__}: {error}")))
        finally:
            signal.alarm(0)


def run(families: list[str], modes: list[str]) -> Results:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    waiting, running = list(families), {}
    found: Results = {}

    def drain(seconds: float) -> None:
        try:
            while True:
                cell, outcome = results.get(timeout=seconds)
                found[cell] = outcome
                if outcome.verdict == "FAILED":
                    print(f"FAILED {'-'.join(cell)}: {outcome.text}", flush=True)
        except queue.Empty:
            return

    while waiting or running:
        while waiting and len(running) < WORKERS:
            family = waiting.pop(0)
            process = context.Process(target=work, args=(family, modes, results))
            process.start()
            running[family] = (process, time.monotonic())
        drain(1.0)
        for family, (process, started) in list(running.items()):
            # An alarm cannot end a call that hangs inside C.
            hangs = time.monotonic() - started > 30 + 1.2 * CELL_SECONDS * len(cells_of(family, modes))
            if hangs:
                process.kill()
            if hangs or not process.is_alive():
                process.join()
                drain(0.5)
                for cell in cells_of(family, modes):
                    found.setdefault(cell, Outcome("FAILED", f"its process ended with {process.exitcode} before it"))
                del running[family]
                done = Counter(outcome.verdict for cell, outcome in found.items() if cell.family == family)
                print(f"{family}: {dict(done)} in {time.monotonic() - started:.0f} s", flush=True)
    return found


def tables(found: Results, families: list[str], modes: list[str]) -> Iterator[str]:
    """A table for each kind of mode, what its modes are, and all refusals."""
    notes: list[str] = []
    for title, names in TABLES.items():
        chosen = [name for name in names if name in modes]
        if not chosen:
            continue
        yield f"\n## {title}\n"
        yield from (f"- `{name}`: {MODES_BY_NAME[name].description}" for name in chosen)
        yield "\n| | " + " | ".join(f"`{name}`" for name in chosen) + " |\n|---" + "|---" * len(chosen) + "|"
        for family in families:
            yield f"| {family} | " + " | ".join(_mark(found, family, mode, notes) for mode in chosen) + " |"
    if notes:
        yield "\n## Refused by generate or the cache\n"
        yield from (f"{number}. {note}" for number, note in enumerate(notes, 1))
    yield "\n## Refused when wrapped\n"
    yield "`TieredKV(model, ...)` raises `UnsupportedModelError`, and the model is as it was:\n"
    yield from (f"- {name}: {_line(refusal(name))}" for name in REFUSED)
    failed = {cell: outcome for cell, outcome in found.items() if outcome.verdict == "FAILED"}
    if failed:
        yield "\n## Failed\n"
        yield from (f"- {'-'.join(cell)}: {_line(outcome.text)}" for cell, outcome in failed.items())


def _mark(found: Results, family: str, mode: str, notes: list[str]) -> str:
    of = {cell: found[cell] for cell in cells_of(family, [mode])}
    verdicts = {outcome.verdict for outcome in of.values()}
    if verdicts <= {"exact", "exact*"}:
        return max(verdicts).replace("*", "\\*")
    if verdicts != {"refused"}:
        return ", ".join(f"{cell.attention}/{cell.dtype} {outcome.verdict}" for cell, outcome in of.items())
    note = _line(next(iter(of.values())).text)
    if note not in notes:
        notes.append(note)
    return f"[{notes.index(note) + 1}]"


def _line(text: str) -> str:
    return text.replace("\n", " ")


def document(found: Results, families: list[str], modes: list[str], seconds: float) -> str:
    """docs/matrix.md."""
    import kvtier

    counts = Counter(outcome.verdict for outcome in found.values())
    of = {dtype: [found[cell] for cell in found if cell.dtype == dtype] for dtype in DTYPES}

    def most(outcomes: list[Outcome]) -> float:
        return BF16_FACTOR * max((outcome.share for outcome in outcomes), default=0.0)

    header = HEADER.format(
        date=datetime.datetime.now(tz=datetime.UTC).date(), kvtier=kvtier.__version__,
        transformers=transformers.__version__, torch=torch.__version__, python=platform.python_version(),
        fp32=FP32_TOLERANCE, factor=BF16_FACTOR, machine=f"{platform.system()} {platform.machine()}", cells=len(found),
        seconds=seconds, counts=", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())),
        fp32_most=max((outcome.difference for outcome in of["fp32"]), default=0.0),
        bf16_most=most([outcome for outcome in of["bf16"] if outcome.verdict == "exact"]),
        starred=counts["exact*"], starred_most=most([outcome for outcome in of["bf16"] if outcome.verdict == "exact*"]),
    )  # fmt: skip
    return header + "\n".join(tables(found, families, modes)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", choices=list(MODES_BY_NAME), default=list(SERVED_MODES))
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(SERVED_FAMILIES))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "matrix.md")
    chosen = parser.parse_args()
    start = time.monotonic()
    found = run(chosen.families, chosen.modes)
    chosen.output.write_text(document(found, chosen.families, chosen.modes, time.monotonic() - start))
    counts = Counter(outcome.verdict for outcome in found.values())
    print(f"{dict(counts)}: {chosen.output}")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
