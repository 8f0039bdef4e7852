"""What a GPU makes of it: copies by piece size, and decoding beside the plain cache, all on the GPU and streamed.

The model is a Llama of the shape of a 1B one, of random weights in bf16, made on the device: nothing is fetched. Cases,
at each context length:

- `dynamic`: the plain model, DynamicCache and sdpa;
- `all_gpu`: kvtier with everything on the gpu tier;
- `gpu25_cpu75`: kvtier with a quarter of the KV on the gpu tier; all the rest is streamed from pinned host memory at
  every token. `bound_ms` is `max(all_gpu, streamed bytes / rate of copies to the device)`, both measured in this run,
  and `bound_frac` how much of it was reached;
- `gpu25_host75`: the same, and the CPU attends to some of what is not on the gpu tier (`host_attention: auto`);
- `hf_offloaded`: transformers' offloaded cache, which moves all KV of a layer both ways at every token.

Each row is the median of `--pairs` rounds of `--tokens` tokens; in a round all cases of a context take turns. Run as
`python -m kvtier.benchmarks.cuda`, or `make bench-cuda`. Cost: under 5 minutes. Without a CUDA device it ends at once.

Written for CUDA and not yet run on a GPU; `tests/unit/test_cuda_benchmark.py` runs its code with a tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.command import fill, finish, parse
from kvtier.budget import gpu_bytes_for
from kvtier.cuda_device import open_device
from kvtier.device import Device
from kvtier.errors import KVTierError
from kvtier.hf import describe
from kvtier.stores.cpu import CpuStore
from kvtier.stores.slab import slot_bytes
from kvtier.types import AttentionMode, BlockShape

BLOCK_TOKENS = 256
PREFILL_CHUNK = 512
PIECES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
COPIED_BYTES = 256 << 20
STREAM_PIECE_BYTES = 1 << 20
"""What the bound goes by: about a slice of the models that people serve."""
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and what it is asked."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32_000
    dtype: torch.dtype = torch.bfloat16


def make_model(size: Size, device: torch.device) -> Any:
    """Random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(size.dtype)
    try:
        with device:
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=size.vocabulary,
                    hidden_size=size.hidden,
                    intermediate_size=size.intermediate,
                    num_hidden_layers=size.layers,
                    num_attention_heads=size.heads,
                    num_key_value_heads=size.kv_heads,
                    max_position_embeddings=1 << 17,
                )
            )
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- copies -----------------------------------------------------------------------------------------------------------


def copy_rows(device: Device, num_bytes: int = COPIED_BYTES) -> list[dict[str, Any]]:
    """Bytes a second both ways, in pieces of each size that are queued at once, as streaming queues them."""
    shape = BlockShape(1, 1, num_bytes // 512, 128, 128, element_bytes=2)
    store = CpuStore(shape, 1, pin=device.is_async)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    host = store.slab()[:num_bytes]
    rows = []
    for to_device in (True, False):
        dest, source = (there, host) if to_device else (host, there)
        queue = device.copy_up if to_device else device.copy_down
        for piece_bytes in (piece for piece in PIECES if piece <= num_bytes):
            starts = range(0, num_bytes, piece_bytes)
            pieces = [(dest[at : at + piece_bytes], source[at : at + piece_bytes]) for at in starts]
            times = []
            for _ in range(_ROUNDS):
                synchronize(device.torch_device)
                started_s = time.perf_counter()
                queue(pieces, device.record()).synchronize()
                times.append(time.perf_counter() - started_s)
            rate = num_bytes / statistics.median(times)
            rows.append({"case": "copy", "direction": "to_device" if to_device else "to_host", "pinned": store.pinned,
                         "piece_bytes": piece_bytes, "bytes_per_s": rate})  # fmt: skip
    store.close()
    return rows


# -- decoding ---------------------------------------------------------------------------------------------------------


class Side:
    """A model with a cache of `context` tokens, that goes on token by token."""

    def __init__(self, forward: Callable[..., Any], cache: Any, ids: torch.Tensor, device: torch.device) -> None:
        self._forward, self._cache, self._device = forward, cache, device
        self._token = ids[:, :1]
        with torch.no_grad():
            for piece in ids.split(PREFILL_CHUNK, 1):
                self._forward(piece, cache=cache, logits_to_keep=1)
        synchronize(device)

    @torch.no_grad()
    def ms_per_token(self, num_tokens: int) -> float:
        """Each token waits for the one before, as in `generate`."""
        synchronize(self._device)
        started_s = time.perf_counter()
        for _ in range(num_tokens):
            logits = self._forward(self._token, cache=self._cache, logits_to_keep=1).logits
            int(logits[0, -1].argmax())
        return (time.perf_counter() - started_s) / num_tokens * 1e3


def config_for(model: Any, context: int, num_extra: int, *, on_gpu_frac: float, host: str) -> dict[str, Any]:
    """Budgets for one conversation, of whose KV `on_gpu_frac` and what a step needs beside it has room on the gpu."""
    group = describe(model, BLOCK_TOKENS)
    shape, num_blocks = group.shape, -(-(context + num_extra) // BLOCK_TOKENS)
    is_whole = on_gpu_frac == 1
    budget = gpu_bytes_for(
        num_blocks + 4 if is_whole else int(num_blocks * on_gpu_frac) + 2,
        shape,
        slot_bytes=slot_bytes(shape),
        heads=group.heads,
        prefill_chunk=PREFILL_CHUNK,
        mode=AttentionMode.BLOCKWISE,
        streams=not is_whole,
        wide=group.is_wide,
    )
    tiers: dict[str, Any] = {"gpu": {"budget": budget, "high": 1.0, "low": 0.97}}
    if not is_whole:
        tiers["cpu"] = {"budget": (num_blocks + 4) * slot_bytes(shape)}
    return {"block_tokens": BLOCK_TOKENS, "prefill_chunk": PREFILL_CHUNK, "prefix_cache": False,
            "host_attention": host, "tiers": tiers}  # fmt: skip


def decode_rows(
    size: Size, device: torch.device, context: int, num_tokens: int, num_pairs: int, copy_bytes_per_s: float
) -> list[dict[str, Any]]:
    """A row a case. A case that cannot run has `error` instead of figures."""
    from transformers import DynamicCache

    from kvtier.benchmarks.models import twin

    model = make_model(size, device)
    vocabulary = torch.arange(1, size.vocabulary)
    ids = vocabulary[torch.randint(0, len(vocabulary), (1, context), generator=torch.Generator().manual_seed(1))]
    ids, num_extra = ids.to(device), num_tokens * (num_pairs + 1)
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        wrapped: dict[str, TieredKV] = {}
        sides: dict[str, Side] = {}

        def tiered(case: str, on_gpu_frac: float, host: str = "never") -> Side:
            other = twin(model)
            config = config_for(model, context, num_extra, on_gpu_frac=on_gpu_frac, host=host)
            wrapped[case] = stack.enter_context(TieredKV(other, config))
            return Side(other, wrapped[case].new_cache(), ids, device)

        makers: dict[str, Callable[[], Side]] = {
            "dynamic": lambda: Side(model, DynamicCache(config=model.config), ids, device),
            "all_gpu": lambda: tiered("all_gpu", 1.0),
            "gpu25_cpu75": lambda: tiered("gpu25_cpu75", 0.25),
            "gpu25_host75": lambda: tiered("gpu25_host75", 0.25, "auto"),
            "hf_offloaded": lambda: Side(model, DynamicCache(config=model.config, offloading=True), ids, device),
        }
        for case, make in makers.items():
            try:
                side = make()
                side.ms_per_token(num_tokens)  # what is done once is not what decoding costs
            except (RuntimeError, KVTierError, TypeError, AssertionError) as error:
                errors[case] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                sides[case] = side
        before = {case: each.stats() for case, each in wrapped.items()}
        for number in range(num_pairs):
            order = list(sides.items())
            for case, side in order if number % 2 else reversed(order):
                times.setdefault(case, []).append(side.ms_per_token(num_tokens))
        after = {case: each.stats() for case, each in wrapped.items()}
    rows: list[dict[str, Any]] = []
    for case in makers:
        row: dict[str, Any] = {"case": case, "context": context}
        if case in errors:
            rows.append({**row, "error": errors[case]})
            continue
        row |= {"ms_per_token": statistics.median(times[case]), "quartiles_ms": _quartiles(times[case])}
        if "dynamic" in times:
            pairs = zip(times["dynamic"], times[case], strict=True)
            row["ratio_to_dynamic"] = statistics.median(theirs / ours for theirs, ours in pairs)
        if case in wrapped:
            then, now, steps = before[case], after[case], num_pairs * num_tokens
            slices = {
                tier: now["tiers"][tier]["slices_read"] - then["tiers"][tier]["slices_read"] for tier in now["tiers"]
            }
            row["slices_read"] = slices
            # What the ring brought; blocks that the CPU attends to stay where they are.
            moved = now["bytes_moved"]["cpu_to_gpu"] - then["bytes_moved"]["cpu_to_gpu"]
            row["streamed_bytes_per_token"] = moved / steps
            row["stall_ms"] = (now["stall_s"] - then["stall_s"]) / steps * 1e3
            row["attention_kernels"] = now["attention_kernels"]
            if case == "gpu25_cpu75" and "all_gpu" in times:
                link_ms = row["streamed_bytes_per_token"] / copy_bytes_per_s * 1e3
                row["bound_ms"] = max(statistics.median(times["all_gpu"]), link_ms)
                row["bound_frac"] = row["bound_ms"] / row["ms_per_token"]
        rows.append(row)
    return rows


def _quartiles(times: list[float]) -> list[float]:
    ordered = sorted(times)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


# -- the report -------------------------------------------------------------------------------------------------------


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """The rows for people."""
    copies = [
        (row["direction"], f"{row['piece_bytes'] >> 10} KiB", "pinned" if row["pinned"] else "PAGEABLE",
         f"{row['bytes_per_s'] / 1e9:.1f}")
        for row in rows if row["case"] == "copy"
    ]  # fmt: skip
    decoded = []
    for row in rows:
        if row["case"] == "copy":
            continue
        if "error" in row:
            decoded.append((row["case"], str(row["context"]), row["error"], "", "", "", "", ""))
            continue
        low, high = row["quartiles_ms"]
        bound = f"{row['bound_ms']:.2f} ({row['bound_frac']:.0%})" if "bound_ms" in row else ""
        streamed = f"{row['streamed_bytes_per_token'] / 1e6:.1f}" if row.get("streamed_bytes_per_token") else ""
        decoded.append((
            row["case"], str(row["context"]), f"{row['ms_per_token']:.2f} ({low:.2f} … {high:.2f})",
            f"{row['ratio_to_dynamic']:.2f}" if "ratio_to_dynamic" in row else "", streamed, bound,
            f"{row['stall_ms']:.2f}" if "stall_ms" in row else "", row.get("attention_kernels", {}).get("blocks", ""),
        ))  # fmt: skip
    return [
        fill(Table(title="Copies, queued at once"), ("direction", "pieces", "host memory", "GB/s"), copies),
        fill(
            Table(title="Decoding"),
            ("case", "context", "ms a token (quartiles)", "to dynamic", "MB streamed", "bound, ms (reached)",
             "stall, ms", "kernel"),
            decoded,
        ),
    ]  # fmt: skip


def stream_rate(rows: list[dict[str, Any]]) -> float:
    """Of copies to the device in pieces like slices."""
    wanted = [row for row in rows if row["direction"] == "to_device" and row["piece_bytes"] <= STREAM_PIECE_BYTES]
    return float(wanted[-1]["bytes_per_s"])


def main() -> None:
    """Measure, print tables, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="4096,16384", help="tokens, comma list")
    parser.add_argument("--tokens", type=int, default=16, help="of each round of each case")
    parser.add_argument("--pairs", type=int, default=7, help="rounds, at least 5")
    parser.add_argument("--quick", action="store_true", help="4,096 tokens and 5 rounds, under a minute")
    options = parse(parser)
    if options.model is not None:
        parser.error("--model: the model is made here; give none")
    if not torch.cuda.is_available():
        raise SystemExit("kvtier.benchmarks.cuda: no CUDA device here, and nothing else would be a measurement of one")
    if options.quick:
        options.contexts, options.pairs = "4096", 5
    if options.pairs < 5:
        parser.error("--pairs must be at least 5")
    load_before, console, size = os.getloadavg()[0], Console(stderr=True), Size()
    place = torch.device("cuda", torch.cuda.current_device())
    device = open_device(place)
    with console.status("copies"):
        rows = copy_rows(device)
    device.close()
    rate = stream_rate(rows)
    for context in map(int, options.contexts.split(",")):
        with console.status(f"decoding at {context} tokens"):
            rows += decode_rows(size, place, context, options.tokens, options.pairs, rate)
    document = {"benchmark": "cuda", "model": "Llama of 1B shapes, random, bfloat16", "rows": rows}
    finish(document, tables(rows), options, load_before)


if __name__ == "__main__":
    main()
