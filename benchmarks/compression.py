"""What zstd leaves of a model's KV, and what it costs: `python -m kvtier.benchmarks.compression`.

KV of the demo's model (or `--model FOLDER`) over Python's own documentation, in fp32, bf16 and fp16, slice by slice as
the nvme tier stores it. Seconds are of one core's time, which a busy machine stretches less than a clock's. Prints a
table, and one JSON document as its last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.machine import machine
from kvtier.benchmarks.models import load_model
from kvtier.codecs.zstd import ZstdCodec
from kvtier.terminal import print_table

BLOCK_TOKENS = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def slices(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The bytes of each slice of the KV of `ids`, K then V."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    for layer in cache.layers:
        for start in range(0, ids.shape[1] - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parts = (kv[0, :, start : start + BLOCK_TOKENS].to(dtype) for kv in (layer.keys, layer.values))
            yield torch.cat([part.contiguous().flatten() for part in parts]).view(torch.uint8).numpy()


def measure(codec: ZstdCodec, data: list[np.ndarray[Any, np.dtype[np.uint8]]], repeats: int) -> dict[str, float]:
    """Stored bytes per byte, and GB of KV a core's second: medians of `repeats` passes. Checks that all comes back."""
    raw_bytes = sum(each.nbytes for each in data)
    encode_s, decode_s, encoded = [], [], []
    out = np.empty_like(data[0])
    for _ in range(repeats):
        started_s = time.thread_time()
        encoded = [codec.encode(each) for each in data]
        encode_s.append(time.thread_time() - started_s)
        spent_s = 0.0
        for each, stored in zip(data, encoded, strict=True):
            if stored.nbytes == each.nbytes:
                continue
            started_s = time.thread_time()
            codec.decode(stored, out)
            spent_s += time.thread_time() - started_s
            if not np.array_equal(out, each):
                raise SystemExit("a slice came back different")
        decode_s.append(spent_s)
    return {
        "stored_frac": sum(each.nbytes for each in encoded) / raw_bytes,
        "stored_raw_frac": sum(e.nbytes == d.nbytes for e, d in zip(encoded, data, strict=True)) / len(data),
        "encode_gb_s": raw_bytes / statistics.median(encode_s) / 1e9,
        "decode_gb_s": raw_bytes / statistics.median(decode_s) / 1e9 if any(decode_s) else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What zstd leaves of a model's KV, and what it costs.")
    parser.add_argument("--model", help="a local folder; the demo's SmolLM2 by default")
    parser.add_argument("--tokens", type=int, default=1024, help=f"at least {BLOCK_TOKENS}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help=f"{2 * BLOCK_TOKENS} tokens")
    options = parser.parse_args()
    if options.quick:
        options.tokens = 2 * BLOCK_TOKENS
    if options.tokens < BLOCK_TOKENS or options.repeats < 1:
        parser.error(f"give at least {BLOCK_TOKENS} tokens and 1 repeat")
    from pydoc_data.topics import topics

    torch.set_num_threads(1)
    loaded = load_model(options.model)
    text = "\n".join(topics.values())[: 20 * options.tokens]
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens].to(loaded.model.device)
    rows = []
    for name, dtype in DTYPES.items():
        data = list(slices(loaded.model, ids, dtype))
        rows.append({"dtype": name, **measure(ZstdCodec(dtype.itemsize), data, options.repeats)})
    table = Table("dtype", "stored / raw", "slices left raw", "encode GB/s", "decode GB/s", title=loaded.name)
    for each in rows:
        table.add_row(each["dtype"], f"{each['stored_frac']:.3f}", f"{each['stored_raw_frac']:.0%}",
                      f"{each['encode_gb_s']:.2f}", f"{each['decode_gb_s']:.2f}")  # fmt: skip
    print_table(table, Console())
    document = {"benchmark": "compression", "model": loaded.name, "tokens": int(ids.shape[1]),
                "block_tokens": BLOCK_TOKENS, "repeats": options.repeats, "rows": rows,
                "machine": machine()}  # fmt: skip
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
