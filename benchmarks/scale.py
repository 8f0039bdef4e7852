"""How the control plane's cost grows with the number of blocks, and a token's with the length of its context.

- Operations: microseconds of processor time of each, median of `--rounds` measurements of many, in a house of 1K … 1M
  blocks that lie on three tiers, without tensors. Beside it the instructions of Python that one executes, which nothing
  disturbs: they grow where an operation visits more entries in a larger house. What is done for each block of a
  sequence is told per block.
- Metadata: bytes of a block and of a token, from what is allocated for houses of small and of large blocks, prefix
  index, policies, slot pools and block tables included.
- Contexts: milliseconds of a token at 1K … 128K tokens on a model of one layer, and what of it the manager takes.

Run as `python -m kvtier.benchmarks.scale`. Cost: about 8 minutes and 3 GB of memory; `--quick`, up to 100K blocks and
32K tokens, under one.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tracemalloc
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.benchmarks import scale_context
from kvtier.benchmarks.command import fill, finish, parse
from kvtier.benchmarks.scale_house import Instructions, Stopwatch, build
from kvtier.benchmarks.scale_operations import OPERATIONS

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
TARGET_US = 10.0
TARGET_BLOCK_BYTES, TARGET_TOKEN_BYTES = 800.0, 6.0
BLOCK_SIZES = (16, 256)
"""Tokens of a block in the two houses whose memory is compared."""


def operations(num_blocks: int, num_rounds: int, count: int) -> list[dict[str, Any]]:
    """A row for each operation in a house of that size."""
    house, stopwatch, instructions = build(num_blocks), Stopwatch(), Instructions()
    gc.collect()
    gc.freeze()  # or the collector, which walks through all of the house, would be what is measured
    try:
        for _ in range(num_rounds):
            for operation in OPERATIONS:
                operation(house, stopwatch, count)
        for operation in OPERATIONS:
            operation(house, instructions, min(count, 40))
    finally:
        gc.unfreeze()
    return [
        {
            "case": "operation",
            "operation": name,
            "blocks": num_blocks,
            "us": statistics.median(found),
            "us_spread": [min(found), max(found)],
            "instructions": instructions.found[name][0],
            "target_us": TARGET_US,
        }
        for name, found in stopwatch.found.items()
    ]


def metadata(num_blocks: int) -> dict[str, Any]:
    """Bytes of a block and of a token in houses of that size."""
    found = []
    for block_tokens in BLOCK_SIZES:
        gc.collect()
        tracemalloc.start()
        house = build(num_blocks, block_tokens)
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0] / house.num_blocks)
        tracemalloc.stop()
        del house
    token_bytes = (found[1] - found[0]) / (BLOCK_SIZES[1] - BLOCK_SIZES[0])
    return {
        "case": "metadata",
        "blocks": num_blocks,
        "block_bytes": found[0] - BLOCK_SIZES[0] * token_bytes,
        "token_bytes": token_bytes,
        "target_block_bytes": TARGET_BLOCK_BYTES,
        "target_token_bytes": TARGET_TOKEN_BYTES,
    }


def operation_table(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Table:
    """Operations by size, and how they grow from the smallest to the largest."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["operation"], []).append(row)
    lines = []
    for name, each in by_name.items():
        worst = max(row["us"] for row in each)
        lines.append((
            name, *(f"{row['us']:.1f}" for row in each), f"{each[-1]['us'] / each[0]['us']:.1f}",
            f"{each[0]['instructions']:.0f}", f"{each[-1]['instructions']:.0f}",
            "" if worst < TARGET_US else f"above {TARGET_US:g} us",
        ))  # fmt: skip
    columns = ("operation", *(f"{size:,}" for size in sizes), "growth", "instructions", "at most", "")
    return fill(Table(title="Control plane: us an operation, by blocks"), columns, lines)


def metadata_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Bytes of metadata."""
    lines = [(f"{row['blocks']:,}", f"{row['block_bytes']:.0f}", f"{row['token_bytes']:.2f}") for row in rows]
    title = f"Metadata: at most {TARGET_BLOCK_BYTES:g} bytes a block and {TARGET_TOKEN_BYTES:g} a token are wanted"
    return fill(Table(title=title), ("blocks", "bytes a block", "bytes a token"), lines)


def context_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds of a token by the length of its context."""
    lines = []
    for row, growth in zip(rows, scale_context.per_doubling(rows), strict=True):
        low, high = row["ms_spread"]
        blocks = ", ".join(f"{count} {tier}" for tier, count in row.get("blocks", {}).items() if count)
        control = f"{row['control_us_per_token']:.0f}" if "control_us_per_token" in row else ""
        lines.append((row["case"], f"{row['context']:,}", f"{row['ms_per_token']:.2f}", f"{low:.2f} … {high:.2f}",
                      growth, control, blocks))  # fmt: skip
    columns = ("case", "context", "ms/token", "spread", "growth", "manager, us/token", "blocks")
    return fill(Table(title="One layer, random weights and KV: a token against its context"), columns, lines)


def main() -> None:
    """Measure, print tables, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="comma list of blocks, the smallest first")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="comma list of tokens")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each, at least 5")
    parser.add_argument("--count", type=int, default=1000, help="operations of a measurement")
    parser.add_argument("--quick", action="store_true", help="up to 100K blocks and 32K tokens, 5 rounds of 200")
    options = parse(parser)
    if options.quick:
        options.sizes, options.contexts, options.rounds, options.count = "1000,10000,100000", "1024,32768", 5, 200
    if options.rounds < 5 or options.count < 40:
        parser.error("--rounds: a median of fewer than 5 is noise; --count: at least 40")
    sizes, contexts = ([int(each) for each in text.split(",")] for text in (options.sizes, options.contexts))
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    timed, bytes_of, waited = [], [], []
    for size in sizes:
        with console.status(f"{size:,} blocks"):
            timed += operations(size, options.rounds, options.count)
    with console.status("metadata"):
        bytes_of = [metadata(size) for size in sizes if size <= 100_000][-2:]
    for context in contexts:
        for case in scale_context.CASES:
            with console.status(f"{case} at {context:,} tokens"):
                waited.append(scale_context.measure(case, context, options.rounds))
    waited.sort(key=lambda row: scale_context.CASES.index(row["case"]))
    tables = [operation_table(timed, sizes), metadata_table(bytes_of), context_table(waited)]
    finish({"benchmark": "scale", "rows": [*timed, *bytes_of, *waited]}, tables, options, load_before)


if __name__ == "__main__":
    main()
