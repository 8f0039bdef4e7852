"""One prefill, as `benchmarks/prefill.py` times it in its own process and has its memory measured in one of its own.

Run as `python -m kvtier.benchmarks.prefill_child TASK.json`; prints one JSON document as its last line. The task says
the model's folder, torch's threads, the token ids, and a config of kvtier or (null) the chunk of the plain model.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from kvtier import TieredKV
from kvtier.benchmarks.models import load_model
from kvtier.hf import TieredCache, cache_keyword

WARM_TOKENS = 32


def prefill_plain(model: Any, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
    """The logits behind a prompt, `[vocab]`, with `DynamicCache`: in chunks, or (None) in one call."""
    from transformers import DynamicCache

    keyword, cache = cache_keyword(model.forward), DynamicCache(config=model.config)
    size = ids.shape[1] if chunk is None else chunk
    for first in range(0, ids.shape[1], size):
        out = model(ids[:, first : first + size], use_cache=True, logits_to_keep=1, **{keyword: cache})
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def prefill_tiered(tiered: TieredKV, ids: torch.Tensor) -> tuple[torch.Tensor, TieredCache]:
    """The same on tiers, in the chunks that its config says; and the cache, which the caller resets."""
    cache = tiered.new_cache()
    out = tiered(ids, logits_to_keep=1, **{cache_keyword(tiered.model.forward): cache})
    return out.logits[0, -1], cache


def resident_bytes(name: str = "VmRSS") -> int:
    """A line of /proc/self/status: `VmRSS` now, `VmHWM` at most since `forget_peak`. Mapped files count."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status does not say {name}")
    return int(found[1]) * 1024


def give_back() -> None:
    """Freed memory goes back to the system, or the next allocations would not show. Nothing is done without glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_peak() -> None:
    """`VmHWM` begins anew. Raises OSError: the kernel does not let it."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """`peak_bytes`, the most that was resident during the prefill, and `before_bytes`, what the model took before it.

    Budgets in memory that the prefill does not touch are not resident, and are not counted.
    """
    ids = torch.tensor([task["ids"]])
    with torch.no_grad():
        prefill_plain(model, ids[:, :WARM_TOKENS], None)  # weights are mapped: they are resident once they are used
        give_back()
        before_bytes = resident_bytes()
        forget_peak()
        if task["config"] is None:
            prefill_plain(model, ids, task["chunk"])
        else:
            with TieredKV(model, task["config"]) as tiered:
                prefill_tiered(tiered, ids)
    return {"before_bytes": before_bytes, "peak_bytes": resident_bytes("VmHWM")}


def main() -> None:
    """Load the model, prefill, print what it took."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    print(json.dumps(measure(load_model(task["model"]).model, task)))


if __name__ == "__main__":
    main()
