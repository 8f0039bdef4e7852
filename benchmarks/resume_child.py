"""The process of `benchmarks/resume.py` that resumes a conversation which another process has left in files.

Run as `python -m kvtier.benchmarks.resume_child TASK.json`; prints one JSON document as its last line. The task says
the model's folder, the config, the session's name, the transcript, how many tokens to generate, and torch's threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvtier import TieredKV
from kvtier.benchmarks.cold import drop_cache
from kvtier.benchmarks.models import load_model
from kvtier.benchmarks.spent import spent
from kvtier.hf.fingerprint import Fingerprints
from kvtier.origin import Fingerprint


@contextmanager
def timed_hashing() -> Iterator[list[tuple[float, float, float]]]:
    """Of each time that a model's weights are hashed: when it ended, seconds and CPU seconds it took."""
    times: list[tuple[float, float, float]] = []
    original = Fingerprints.fingerprint

    def fingerprint(self: Fingerprints) -> Fingerprint:
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        try:
            return original(self)
        finally:
            ended_s = time.perf_counter()
            times.append((ended_s, ended_s - started_s, time.process_time() - cpu_started_s))

    with patch.object(Fingerprints, "fingerprint", fingerprint):
        yield times


def resume(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Wrap a loaded model, resume, and go on: what that took.

    `seconds` runs from before the model is wrapped to the first token, less `hash_s`; `open_s` of it is the wrapping.
    `read_bytes` is what the disk gave after that.
    """
    ids = torch.tensor([task["transcript"]])
    drop_cache(Path(task["config"]["tiers"]["nvme"]["path"]))
    with timed_hashing() as hashes:
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        with TieredKV(model, task["config"]) as tiered:
            opened_s, cpu_opened_s = time.perf_counter(), time.process_time()

            def generate(*args: Any, **kwargs: Any) -> Any:
                return tiered.session(task["session"]).generate(*args, **kwargs)

            turn = spent(generate, ids, task["num_new"])
            stats = tiered.stats()
    before = [each for each in hashes if each[0] <= opened_s + turn.first_token_s]
    hash_s, hash_cpu_s = (sum(each[column] for each in before) for column in (1, 2))
    return {
        "seconds": opened_s - started_s + turn.first_token_s - hash_s,
        "cpu_seconds": cpu_opened_s - cpu_started_s + turn.first_token_cpu_s - hash_cpu_s,
        "open_s": opened_s - started_s,
        "hash_s": hash_s,
        "read_bytes": turn.first_token_read_bytes,
        "sequence": list(turn.sequence),
        "tokens": stats["tokens"],
        "io": stats["tiers"]["nvme"]["io"],
    }


def main() -> None:
    """Load the model, resume, print what it took."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    started_s = time.perf_counter()
    loaded = load_model(task["model"])
    load_s = time.perf_counter() - started_s
    print(json.dumps({**resume(loaded.model, task), "load_s": load_s}))


if __name__ == "__main__":
    main()
