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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.e2e.cells import DTYPES, SERVED_FAMILIES, SERVED_MODES, Cell, Refused, run_cell  # noqa: E402
from tests.e2e.families import FAMILIES, MODES  # noqa: E402
from tests.e2e.modes import MODES_BY_NAME  # noqa: E402
from tests.e2e.sides import BF16_FACTOR, FP32_TOLERANCE  # noqa: E402

WORKERS = 2
CELL_SECONDS = 60
Results = dict[Cell, tuple[str, str]]
"""`exact`, `refused` or `FAILED`, and the reason or what was compared."""

HEADER = """# What was compared

Made by `make matrix` on {date}: kvtier {kvtier}, transformers {transformers}, torch {torch}, Python {python},
{machine}, CPU. {cells} cells, {seconds:.0f} s: {counts}.

A cell runs one mode of generation on one tiny random model, with prompts and budgets such that blocks were read that
lay on NVMe alone, and compares with the same run on plain transformers (`DynamicCache`, the same chunks).

**exact**: in fp32 the same tokens, and every logit at every step within {fp32}; in bf16, token by token on the plain
run's path, every logit within {bf16} times what the plain model's own logits change with its prefill chunk size (beam
searches may part at a near tie, and are compared up to there). It holds for `attention: blockwise` and `gathered`, in
fp32 and bf16, or the cell says which.

A number is a refusal: plain transformers cannot do it either, and kvtier raises `UnsupportedError`; see below.

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
                results.put((cell, "refused", outcome.text))
            else:
                results.put((cell, "exact", f"{outcome.steps} steps, {outcome.difference:.1e}"))
        except Exception as error:
            results.put((cell, "FAILED", f"{type(error).__name__}: {error}"))
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
                cell, verdict, text = results.get(timeout=seconds)
                found[cell] = (verdict, text)
                if verdict == "FAILED":
                    print(f"FAILED {'-'.join(cell)}: {text}", flush=True)
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
                    found.setdefault(cell, ("FAILED", f"its process ended with {process.exitcode} before it"))
                del running[family]
                done = Counter(verdict for cell, (verdict, _) in found.items() if cell.family == family)
                print(f"{family}: {dict(done)} in {time.monotonic() - started:.0f} s", flush=True)
    return found


def table(found: Results, families: list[str], modes: list[str]) -> str:
    notes: list[str] = []
    lines = ["| mode | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for mode in modes:
        marks = []
        for family in families:
            of = {cell: found[cell] for cell in cells_of(family, [mode])}
            verdicts = {verdict for verdict, _ in of.values()}
            if verdicts == {"exact"}:
                marks.append("exact")
            elif verdicts == {"refused"}:
                note = next(iter(of.values()))[1].replace("\n", " ")
                if note not in notes:
                    notes.append(note)
                marks.append(f"[{notes.index(note) + 1}]")
            else:
                marks.append(", ".join(f"{c.attention}/{c.dtype} {verdict}" for c, (verdict, _) in of.items()))
        lines.append(f"| {mode} | " + " | ".join(marks) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    failed = [f"- {'-'.join(cell)}: {text}" for cell, (verdict, text) in found.items() if verdict == "FAILED"]
    return "\n".join(lines + (["", "Failed:", "", *failed] if failed else [])) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", choices=list(MODES_BY_NAME), default=list(SERVED_MODES))
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(SERVED_FAMILIES))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "matrix.md")
    chosen = parser.parse_args()
    import kvtier

    start = time.monotonic()
    found = run(chosen.families, chosen.modes)
    counts = Counter(verdict for verdict, _ in found.values())
    header = HEADER.format(
        date=datetime.datetime.now(tz=datetime.UTC).date(), kvtier=kvtier.__version__,
        transformers=transformers.__version__, torch=torch.__version__, python=platform.python_version(),
        fp32=FP32_TOLERANCE, bf16=BF16_FACTOR,
        machine=f"{platform.system()} {platform.machine()}", cells=len(found), seconds=time.monotonic() - start,
        counts=", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())),
    )  # fmt: skip
    chosen.output.write_text(header + table(found, chosen.families, chosen.modes))
    print(f"{dict(counts)}: {chosen.output}")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
