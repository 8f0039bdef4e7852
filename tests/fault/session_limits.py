"""A session on a disk that fills, in a mount namespace: `python -m tests.fault.session_limits FOLDER`.

Exit status 0 if each turn had the plain model's tokens, and the one on the full disk its warning.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import torch

from kvtier import TieredKV
from tests.e2e.families import GREEDY, small_config, tiny, tokens
from tests.e2e.test_session import ask
from tests.fault.limits import tmpfs

TOLD: list[str] = []


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        TOLD.append(record.getMessage())


def turn(tiered: TieredKV, ids: torch.Tensor, seed: int) -> tuple[torch.Tensor, list[str]]:
    """One turn longer, and what was said of the session meanwhile."""
    TOLD.clear()
    out, computed = ask(tiered, tiered.session("alice"), torch.cat([ids, tokens(20, seed)], dim=1))
    assert computed == 20 + (ids.shape[1] > 0) + GREEDY["max_new_tokens"] - 1, computed
    return out.sequences, [text for text in TOLD if "'alice'" in text]


def run(folder: Path) -> None:
    model = tiny()
    # A tmpfs is memory: its bytes are the cpu tier's, half of them at most.
    config = small_config(model, folder, prefix_cache=True, gpu_slots=40, cpu_blocks=115, nvme=700_000)
    with tmpfs(folder):
        with TieredKV(model, config) as tiered:
            ids, told = turn(tiered, torch.zeros((1, 0), dtype=torch.long), 0)
            assert not told and tiered.sessions()[0].bytes_per_tier["nvme"]
            filler = folder / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"\xff" * 4096)
                except OSError:
                    pass
            ids, told = turn(tiered, ids, 1)
            assert len(told) == 1 and "No space left" in told[0], told
            filler.unlink()
            time.sleep(1.1)  # the tier may rest
            for seed in (2, 3):
                ids, told = turn(tiered, ids, seed)
            assert not told, told
        with TieredKV(model, config) as tiered:
            assert tiered.session("alice").token_ids == ids[0, :-1].tolist()
            turn(tiered, ids, 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("kvtier").addHandler(Told(logging.WARNING))
    run(Path(sys.argv[1]))
