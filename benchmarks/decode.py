"""Decode speed against transformers' caches, and against what the hardware allows: ms per token, in one process.

Cases, at each context length, all with the same synthetic K and V (no prefill) and the same tokens appended (up to the
model's longest context: the last length is reached with them):

- `dynamic`, `static`: the plain model with `DynamicCache` and with `StaticCache`, sdpa; quote the better of the two;
- `all_gpu`: kvtier with everything on the gpu tier (ordinary memory where there is no CUDA device);
- `gpu25_cpu75`: a quarter of the full blocks on the gpu tier, the rest on cpu. Without CUDA both are the same memory
  (`label` is `host_memory`): it then shows that nothing is copied and nothing is lost, not what PCIe takes;
- `gpu25_cpu25_nvme50`: half of the blocks in files, read past the page cache at every token;
- `no_prefetch`: the same without reading ahead;
- `naive_lru`: the same memory as an LRU cache of slices over the same files, each read when it is touched;
  `naive_lru_parallel`, whose reads of a layer are made 8 at a time; and `naive_lru_block`, which promotes whole blocks
  as the tiers would without a plan, up to 2,048 tokens (`benchmarks/naive_lru.py`);
- `hf_offloaded`: transformers' offloaded cache, where it runs.

All cases of a context take turns in `--pairs` rounds of `--tokens` tokens each (and one before them, not counted). A
ratio is the median over the rounds of the other's time to the case's in the same round: above 1 is faster. `bound_ms`
is the larger of `all_gpu`'s time and of what must come from files over the read rate of fio in the same run (random, 1
MiB, 16 in flight, the faster of two engines); `bound_frac` is the share of it that was reached. A row from files whose
`/proc/self/io` shows less than 95 % of these bytes is invalid, and so is one whose blocks moved meanwhile or whose last
logits are further from `dynamic`'s than 1e-2.

`code` is what kvtier's own code takes of a token, and of each layer, measured on a thin twin of the model
(`benchmarks/decode_code.py`); `code_frac` of `all_gpu` is the share that it has of that row's time.

Run as `python -m kvtier.benchmarks.decode`. Cost: about 10 minutes and 2 GB of disk (one thread, SmolLM2); `--quick`,
4,096 tokens in fewer rounds, under one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.cold import is_cold
from kvtier.benchmarks.command import fill, finish, parse
from kvtier.benchmarks.decode_code import measure_code
from kvtier.benchmarks.decode_sides import SIDES, Given, Sample, Side, make
from kvtier.benchmarks.fio import ReadPeak
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.benchmarks.rounds import alternate, ratio_columns, ratios
from kvtier.errors import ConfigError

CONTEXTS = (512, 2048, 4096, 8192)
QUICK_CASES = ("static", "gpu25_cpu75", "gpu25_cpu25_nvme50", "naive_lru")
REFERENCES = ("dynamic", "all_gpu")
"""Measured whatever is asked for: what ratios and bounds are to."""
MAX_LOGIT_DIFF = 1e-2
"""`StaticCache` is up to 0.003 from `DynamicCache` on the demo's model. One token without its V in one layer makes 0.02
at 4,096 tokens, one wrong slice 2 or more."""
_PLAIN = ("dynamic", "static", "hf_offloaded")
_OTHERS = ("static", "all_gpu", "naive_lru", "naive_lru_block")


def measure(
    loaded: LoadedModel,
    cases: Sequence[str],
    context: int,
    *,
    num_tokens: int,
    num_pairs: int,
    seed: int,
    folder: Path,
    disk: ReadPeak | None,
) -> list[dict[str, Any]]:
    """The rows of one context length.

    Args:
        cases: of `SIDES`; the references are added.
        folder: an empty one on a disk.
        disk: None: no bound by reads is told.
    """
    cases = [case for case in SIDES if case in (*REFERENCES, *cases)]
    num_more = num_pairs * (num_tokens + 1)
    # Beyond its longest context a model's logits rove, the plain caches' too, and a lost token would not show.
    longest = getattr(loaded.model.config, "max_position_embeddings", None) or context + num_more
    given = Given(loaded.model, min(context, longest - num_more), num_more, seed, folder)
    tokens = torch.randint(0, loaded.model.config.vocab_size, (1, num_more), generator=given.generator())
    at = dict.fromkeys(cases, 0)
    sides: dict[str, Side] = {}
    refused: dict[str, str] = {}

    def turn(case: str) -> Sample:
        first, at[case] = at[case], at[case] + num_tokens + 1
        return sides[case].measure(tokens[:, first : at[case]])

    with ExitStack() as stack, torch.no_grad():
        for case in cases:
            made = make(case, given)
            if isinstance(made, str):
                refused[case] = made
            else:
                sides[case] = made
                stack.callback(made.close)
        placed = {case: side.placed() for case, side in sides.items()}
        if disk is not None:
            disk.measure()
        samples = alternate({case: lambda case=case: turn(case) for case in sides}, num_pairs)
        if disk is not None:
            disk.measure()
        has_moved = {case: side.placed() != placed[case] for case, side in sides.items()}
        rows = [
            _refused_row(case, context, refused[case])
            if case in refused
            else to_row(
                case, context, sides[case], samples, has_moved[case], None if disk is None else disk.bytes_per_s
            )
            for case in cases
        ]
    return rows


def _refused_row(case: str, context: int, why: str) -> dict[str, Any]:
    empty = dict.fromkeys(("ms_per_token", "ratio_to_dynamic", "spread", "bound_ms", "bound_frac", "stall_ms"))
    return {"case": case, "context": context, **empty, "unavailable": why}


def to_row(
    case: str,
    context: int,
    side: Side,
    samples: dict[str, list[Sample]],
    has_moved: bool,
    disk_bytes_per_s: float | None,
) -> dict[str, Any]:
    """One case's row: medians over its rounds, ratios within them, and what of it is proven."""
    own = samples[case]
    times = {name: [sample.ms for sample in each] for name, each in samples.items()}
    ratio, spread = ratios(times[case], times["dynamic"])
    cpu_ratio, _ = ratios([s.cpu_ms for s in own], [s.cpu_ms for s in samples["dynamic"]])
    row: dict[str, Any] = {
        "case": case,
        "context": context,
        "ms_per_token": statistics.median(times[case]),
        "ratio_to_dynamic": ratio,
        "spread": spread,
        "cpu_ratio_to_dynamic": cpu_ratio,
        **_bound(case, side.file_bytes, times, disk_bytes_per_s),
        "stall_ms": statistics.median(sample.stall_ms for sample in own),
        "read_bytes_per_token": statistics.median(sample.read_bytes for sample in own),
        "file_bytes_per_token": side.file_bytes,
        "max_logit_diff": max(
            float((ours.logits - plain.logits).abs().max()) for ours, plain in zip(own, samples["dynamic"], strict=True)
        ),
        **side.notes,
    }
    for other in _OTHERS:
        if other in times and other != case and case not in _PLAIN:
            row |= ratio_columns(other, times[case], times[other])
    if side.layout is not None:
        row |= {"block_tokens": side.layout.block_tokens, "placement": side.layout.shares}
    if case == "gpu25_cpu75" and not torch.cuda.is_available():
        row["label"] = "host_memory"
    reasons = _invalid(row, own, has_moved)
    return {**row, "is_valid": not reasons, "invalid": reasons}


def _bound(case: str, file_bytes: int, times: dict[str, list[float]], disk_bytes_per_s: float | None) -> dict[str, Any]:
    """What no schedule can beat: everything resident, and what has no room in memory read at the disk's rate.

    The share of it is the median over the rounds, with the time that everything resident took in the same one.
    """
    if case in _PLAIN or (file_bytes and disk_bytes_per_s is None):
        return {"bound_ms": None, "bound_frac": None, "bound_by": None}
    read_ms = file_bytes / disk_bytes_per_s * 1e3 if disk_bytes_per_s else 0.0
    bounds = [max(resident_ms, read_ms) for resident_ms in times["all_gpu"]]
    bound_ms, bound_frac = statistics.median(bounds), ratios(times[case], bounds)[0]
    by = "reads" if read_ms >= bound_ms else "compute"
    return {"bound_ms": bound_ms, "bound_frac": bound_frac, "bound_by": by, "read_bound_ms": read_ms}


def _invalid(row: dict[str, Any], samples: Sequence[Sample], has_moved: bool) -> list[str]:
    """Why the row says nothing; empty: it does."""
    reasons = []
    if row["file_bytes_per_token"]:
        read_bytes = min(sample.read_bytes for sample in samples)
        if not is_cold(round(read_bytes), row["file_bytes_per_token"]):
            reasons.append(f"warm: {read_bytes / row['file_bytes_per_token']:.0%} of it came from the disk")
    if has_moved:
        reasons.append("blocks moved while it was measured")
    if not row["max_logit_diff"] <= MAX_LOGIT_DIFF:  # NaN too
        reasons.append(f"logits are {row['max_logit_diff']:.1e} from dynamic's")
    return reasons


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    rows = []
    for row in document["rows"]:
        if "unavailable" in row:
            rows.append((row["case"], f"{row['context']:,}", *[""] * (7 + len(_OTHERS)), row["unavailable"]))
            continue
        low, high = row["spread"]
        bound = "" if row["bound_ms"] is None else f"{row['bound_ms']:.0f} {row['bound_by']} {row['bound_frac']:.0%}"
        notes = [f"INVALID: {reason}" for reason in row["invalid"]] + ([row["label"]] if "label" in row else [])
        rows.append((
            row["case"], f"{row['context']:,}", f"{row['ms_per_token']:.1f}", f"{row['ratio_to_dynamic']:.2f}",
            f"{low:.2f} … {high:.2f}", *(_ratio(row, other) for other in _OTHERS), bound,
            f"{row['stall_ms']:.1f}", f"{row['read_bytes_per_token'] / 1e6:.1f}",
            f"{row['max_logit_diff']:.0e}", "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "context", "ms/token", "to dynamic", "spread", *(f"to {other}" for other in _OTHERS),
               "bound, ms", "stall", "MB read", "logit diff", "")  # fmt: skip
    disk = document["disk_bytes_per_s"]
    code = document["code"]
    title = f"Decode, speed to others, {document['model']}, {document['pairs']} rounds of {document['tokens']} tokens"
    return fill(
        Table(title=title + (f"; fio reads {disk / 1e9:.2f} GB/s" if disk else "") + _of_code(code)), columns, rows
    )


def _of_code(code: dict[str, Any] | None) -> str:
    return (
        ""
        if code is None
        else f"; kvtier's code {code['us_per_token']:.0f} us/token, {code['us_per_layer']:.0f} a layer"
    )


def _ratio(row: dict[str, Any], other: str) -> str:
    return f"{row[f'ratio_to_{other}']:.2f}" if f"ratio_to_{other}" in row else ""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="comma list of tokens, at least 128")
    parser.add_argument("--cases", default=",".join(SIDES), help="comma list; dynamic and all_gpu come with any")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each measurement")
    parser.add_argument("--pairs", type=int, default=9, help="rounds, at least 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4,096 tokens, 5 rounds of 3 tokens, fewer cases")
    options = parse(parser, arguments)
    if options.quick:
        options.contexts, options.pairs, options.tokens = "4096", 5, 3
        options.cases = ",".join(QUICK_CASES)
    options.contexts = [int(context) for context in options.contexts.split(",")]
    options.cases = options.cases.split(",")
    if options.pairs < 5:
        parser.error("--pairs: a median of fewer than 5 is noise")
    if options.tokens < 1 or min(options.contexts) < 128 or not set(options.cases) <= set(SIDES):
        parser.error("--tokens must be at least 1, --contexts at least 128; see --cases")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, then one JSON document as the last line."""
    options = _options(arguments)
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-decode-", dir=options.folder) as name:
        try:
            disk = ReadPeak(Path(name), 0.3 if options.quick else 1.0)
        except ConfigError as error:
            console.print(f"no bound by reads: {error}")
            disk = None
        for context in options.contexts:
            with console.status(f"{context} tokens"), tempfile.TemporaryDirectory(dir=name) as own:
                rows += measure(
                    loaded, options.cases, context, num_tokens=options.tokens, num_pairs=options.pairs,
                    seed=options.seed, folder=Path(own), disk=disk,
                )  # fmt: skip
    with console.status("what the code takes"):
        code = measure_code(loaded.model, max(5, options.pairs))
    for row in rows:
        if code is not None and row["case"] == "all_gpu":
            row["code_frac"] = code["us_per_token"] / (row["ms_per_token"] * 1e3)
    document = {
        "benchmark": "decode",
        "quick": options.quick,
        "model": loaded.name,
        "pairs": options.pairs,
        "tokens": options.tokens,
        "disk_bytes_per_s": None if disk is None else disk.bytes_per_s,
        "fio": None if disk is None else disk.version,
        "code": code,
        "rows": rows,
    }
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
