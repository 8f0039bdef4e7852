"""What a soak leaves behind when its caches are dropped and its runtime is closed: nothing, or it fails."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from kvtier.benchmarks.conversations import Run
from kvtier.errors import KVTierError
from kvtier.system import num_threads, open_fds


def drop(run: Run) -> list[str]:
    """Drop every cache; name what the runtime still holds then."""
    for conversation in run.conversations:
        conversation.cache = None
    gc.collect()
    try:
        run.tiered.check_integrity()
    except KVTierError as error:
        run.errors.append(f"{type(error).__name__}: {error}")
    deadline_s = time.monotonic() + 10.0
    # A block that is on its way goes when its move has ended, of which stats() takes note.
    while (stats := run.tiered.stats())["moves_in_flight"] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    # Those that prompts may come to share stay, on purpose, and belong to nobody.
    left = {"blocks": stats["blocks"] - stats["prefix_cache"]["cached_blocks"], "sequences": stats["sequences"]}
    return [f"{count} {name} left after all caches were dropped" for name, count in left.items() if count]


def left_over(fds_before: int, threads_before: int, folder: Path | None) -> list[str]:
    """Name what is left of a closed runtime: its temporary folder, open files, threads."""
    deadline_s = time.monotonic() + 3.0
    while (open_fds() > fds_before or num_threads() > threads_before) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # threads that were told to end may need a moment
    found = []
    if folder and folder.exists():
        found.append(f"the temporary nvme folder {folder} is still there")
    if open_fds() > fds_before:
        found.append(f"{open_fds() - fds_before} more open files than before")
    if num_threads() > threads_before:
        found.append(f"{num_threads() - threads_before} more threads than before")
    return found
