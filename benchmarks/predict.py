"""Is the planner right? Six placements, predicted from the doctor's rates alone, written down, and only then run.

1. The doctor measures this machine (as `kvtier doctor --json` with one thread's rates; the model is not in it).
2. `kvtier plan`'s formula (docs/plan.md) predicts ms per token of six placements: the expected time, and the bound that
   no run beats. What lies where is what the run puts there: the gpu budget's parts and the slices' sizes follow from
   the run's own config, laid out by the planner, and the blocks on each tier are handed to it by number, as
   `residence.spread` places them (the planner's own rule would place a conversation by watermarks).
3. The predictions are written to a file, with the time, before the model has computed a token.
4. Each placement is run: synthetic KV, files cold, all six in turns, medians over the rounds.

`measured_to_predicted` is the median of measured ms per token by the expected time: above 1 the run was slower.
`within_30`: the prediction is within 30 % of what was measured. A row from files that were not cold, or whose blocks
moved meanwhile, is invalid. The processor's other work falsifies either side: run it on an idle machine.

Run as `python -m kvtier.benchmarks.predict`. Cost: about 3 minutes, 3 GB of memory and 1 GB of disk (SmolLM2);
`--quick`, fewer rounds and the doctor's `--quick`, under 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.budgets import Layout, layout, tier_config
from kvtier.benchmarks.cold import is_cold
from kvtier.benchmarks.command import fill, finish, parse
from kvtier.benchmarks.decode_sides import Given, Sample, Side, tiered
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.benchmarks.rounds import alternate
from kvtier.config import read_config
from kvtier.doctor import NoWatch, Wishes, examine
from kvtier.planner.bound import decode_round
from kvtier.planner.expected import expected_round
from kvtier.planner.layout import Placement, lay_out
from kvtier.planner.model_config import read_card
from kvtier.planner.rates import Rates, read_rates
from kvtier.types import Tier

WITHIN = 0.3
"""How far from what was measured a prediction may be."""


@dataclass(frozen=True)
class Case:
    """A placement of `budgets.SHARES`, at a context length."""

    placement: str
    context: int

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.placement}, {self.context:,}"


CASES = (
    Case("all_gpu", 512),
    Case("all_gpu", 2048),
    Case("all_gpu", 8192),
    Case("gpu25_cpu75", 4096),
    Case("gpu25_cpu25_nvme50", 2048),
    Case("gpu25_cpu25_nvme50", 8192),
)


def measure_machine(folder: Path, *, quick: bool) -> tuple[Rates, dict[str, Any]]:
    """The doctor's rates, read as `kvtier plan --rates` reads them, and its document. `folder`: whose disk counts.

    Raises ConfigError: the doctor could measure nothing.
    """
    document = examine(Wishes(path=folder, is_quick=quick), NoWatch()).document()
    file = folder / "rates.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return read_rates(file), document


def predict(loaded: LoadedModel, case: Case, num_more: int, rates: Rates, num_threads: int) -> dict[str, Any]:
    """What the planner says of one case, by the rates alone. Runs nothing.

    Args:
        num_more: tokens that the run appends; the prediction is for the middle of them.
    """
    wanted = layout(case.placement, case.context, num_more)
    config = read_config(tier_config(loaded.model, wanted, Path("files")))  # of the folder only the name is in it
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    card = read_card(loaded.model.config.to_dict(), loaded.name, dtype=dtype)
    made = lay_out(card, config, case.context + num_more // 2, rates)
    placed = placement(wanted)
    expected = expected_round(made, rates, 1, num_threads, placed)
    assert expected is not None and made.gpu is not None  # the benchmarks' configs are blockwise
    document, bound = expected.document(1), decode_round(made, rates, 1, num_threads, placed)
    return {
        "case": case.placement,
        "context": case.context,
        "predicted_ms": document["ms"],
        "predicted_by": document["binding"],
        "bound_ms": None if bound.seconds is None else bound.seconds * 1e3,
        "bound_by": bound.binding or None,
        "unmeasured": document["unmeasured"],
        "terms": {term["name"]: term["ms"] for term in document["terms"]},
        "blocks": {tier.label: count for tier, count in placed.blocks.items()},
        "blocks_a_call": made.gpu.num_pieces,
    }


def placement(wanted: Layout) -> Placement:
    """The run's own: full blocks as `spread` places them, and the tail on the gpu tier."""
    tail = {Tier.GPU: 1}
    return Placement(1, {tier: wanted.num_blocks.get(tier, 0) + tail.get(tier, 0) for tier in Tier}, 0)


def write_down(predictions: Sequence[Mapping[str, Any]], rates: Mapping[str, Any], folder: Path) -> Path:
    """Into a new file of the folder that stays there: the time, the predictions and the doctor's document."""
    now = datetime.datetime.now(datetime.UTC)
    file = folder / f"kvtier-predictions-{now:%Y%m%dT%H%M%S}-{os.getpid()}.json"
    text = json.dumps({"written_at": now.isoformat(), "predictions": predictions, "doctor": rates})
    with file.open("x", encoding="utf-8") as target:
        target.write(text)
        target.flush()
        os.fsync(target.fileno())
    return file


def measure(
    loaded: LoadedModel, cases: Sequence[Case], *, num_tokens: int, num_rounds: int, seed: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run the cases in turns; by the case's name what was measured, and why it says nothing if it does not."""
    num_more = num_rounds * (num_tokens + 1)
    tokens = torch.zeros((1, num_tokens + 1), dtype=torch.long, device=loaded.model.device)
    with ExitStack() as stack, torch.no_grad():
        sides: dict[str, Side] = {}
        for number, case in enumerate(cases):
            given = Given(loaded.model, case.context, num_more, seed, folder)
            side = sides[case.name] = tiered(given, f"case{number}", case.placement)
            stack.callback(side.close)
        placed = {name: side.placed() for name, side in sides.items()}
        samples = alternate({name: lambda side=side: side.measure(tokens) for name, side in sides.items()}, num_rounds)
        has_moved = {name: side.placed() != placed[name] for name, side in sides.items()}
        return {name: _measured(side, samples[name], has_moved[name]) for name, side in sides.items()}


def _measured(side: Side, samples: Sequence[Sample], has_moved: bool) -> dict[str, Any]:
    reasons = ["blocks moved while it was measured"] if has_moved else []
    read_bytes = min(sample.read_bytes for sample in samples)
    if side.file_bytes and not is_cold(round(read_bytes), side.file_bytes):
        reasons.append(f"warm: {read_bytes / side.file_bytes:.0%} of it came from the disk")
    times = [sample.ms for sample in samples]
    return {
        "ms_per_token": statistics.median(times),
        "ms_spread": [min(times), max(times)],
        "cpu_ms_per_token": statistics.median(sample.cpu_ms for sample in samples),
        "stall_ms": statistics.median(sample.stall_ms for sample in samples),
        "file_bytes_per_token": side.file_bytes,
        "is_valid": not reasons,
        "invalid": reasons,
    }


def judge(prediction: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The case's row. `within_30` is None where the doctor's rates do not suffice for a prediction."""
    predicted, ms = prediction["predicted_ms"], measured["ms_per_token"]
    return {
        **prediction,
        **measured,
        "measured_to_predicted": None if predicted is None else ms / predicted,
        "within_30": None if predicted is None else abs(predicted - ms) <= WITHIN * ms,
    }


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    rows = []
    for row in document["rows"]:
        low, high = row["ms_spread"]
        ratio, verdict = row["measured_to_predicted"], {True: "yes", False: "NO", None: ""}[row["within_30"]]
        notes = [f"INVALID: {reason}" for reason in row["invalid"]]
        notes += [f"no rate for {', '.join(row['unmeasured'])}"] if row["unmeasured"] else []
        rows.append((
            row["case"], f"{row['context']:,}", _ms(row["bound_ms"]), _ms(row["predicted_ms"]),
            row["predicted_by"] or "", _ms(row["ms_per_token"]), f"{low:.1f} … {high:.1f}",
            "" if ratio is None else f"{ratio:.2f}", verdict, "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "context", "bound, ms", "predicted", "by", "measured", "spread", "to predicted", "within 30 %",
               "")  # fmt: skip
    written = document["predictions"]
    title = (
        f"Predictions, {document['model']}, written {written['written_at']}, {document['rounds']} rounds of "
        f"{document['tokens']} tokens"
    )
    return fill(Table(title=title, caption=f"written down in {written['file']}"), columns, rows)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def run(loaded: LoadedModel, cases: Sequence[Case], options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the machine, predict, write down, run: the document. One file stays in `options.folder`."""
    num_more = options.rounds * (options.tokens + 1)
    with tempfile.TemporaryDirectory(prefix="kvtier-predict-", dir=options.folder) as name:
        with console.status("the doctor measures this machine"):
            rates, doctor = measure_machine(Path(name), quick=options.quick)
        predictions = {case.name: predict(loaded, case, num_more, rates, options.threads) for case in cases}
        file = write_down(list(predictions.values()), doctor, options.folder)
        begun = datetime.datetime.now(datetime.UTC).isoformat()
        with console.status("the placements are run"):
            measured = measure(
                loaded, cases, num_tokens=options.tokens, num_rounds=options.rounds, seed=options.seed,
                folder=Path(name),
            )  # fmt: skip
    written = json.loads(file.read_text(encoding="utf-8"))  # what is judged is what was written down
    by_name = dict(zip(predictions, written["predictions"], strict=True))
    return {
        "benchmark": "predict",
        "quick": options.quick,
        "model": loaded.name,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "predictions": {"file": str(file), "written_at": written["written_at"], "run_began_at": begun},
        "rates": {f"{section}: {row}": value for (section, row), value in rates.rows.items()},
        "rows": [judge(by_name[case.name], measured[case.name]) for case in cases],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each measurement")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each case, at least 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5 rounds of 3 tokens, rougher rates")
    options = parse(parser, arguments)
    if options.quick:
        options.rounds, options.tokens = 5, 3
    if options.rounds < 5:
        parser.error("--rounds: a median of fewer than 5 is noise")
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, run, print a table, then one JSON document as the last line."""
    options = _options(arguments)
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    document = run(loaded, CASES, options, console)
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
