"""Several threads generate at once on one wrapper: steps take turns, and every answer is what one thread gets."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from tests.e2e.families import GREEDY, MODES, assert_same, occupied, small_config, tiny, tokens

NUM_THREADS = 8
NUM_GENERATIONS = 50
HOWS: list[dict[str, Any]] = [
    {},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 3},
    {"session": True},
    {"kept": True},
]


def jobs() -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Twenty different calls: prompts of which some reach nvme, in five ways."""
    return [(tokens(20 + 11 * number, number), HOWS[number % len(HOWS)]) for number in range(20)]


def answer(tiered: TieredKV, who: int, ids: torch.Tensor, how: dict[str, Any]) -> list[Any]:
    """What one job gives: one answer, or those of two turns on a session or a cache of its own."""
    options = {**GREEDY, "max_new_tokens": 3}
    if how.get("session"):
        chat = tiered.session(f"thread {who}")
        first = chat.generate(ids, **options)
        return [first, chat.generate(torch.cat([first.sequences, ids[:, :7]], dim=1), **options)]
    if how.get("kept"):
        cache = tiered.new_cache()
        first = tiered.generate(ids, cache=cache, **options)
        return [first, tiered.generate(torch.cat([first.sequences, ids[:, :7]], dim=1), cache=cache, **options)]
    return [tiered.generate(ids, **options, **how)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_eight_threads_of_fifty_generations_each(mode: str, tmp_path: Path) -> None:
    model, work = tiny(), jobs()
    with TieredKV(model, small_config(model, tmp_path, mode, gpu_slots=12, nvme="16MiB")) as tiered:
        alone = [answer(tiered, 99, *job) for job in work]
        wrong: list[object] = []
        num_done = [0] * NUM_THREADS

        def generate(who: int) -> None:
            order = random.Random(who)
            try:
                for _ in range(NUM_GENERATIONS):
                    number = order.randrange(len(work))
                    for ours, twin in zip(answer(tiered, who, *work[number]), alone[number], strict=True):
                        # A session goes on where an earlier job of its thread left it, in the middle of a chunk.
                        exact = mode == "gathered" and not work[number][1].get("session")
                        assert_same(ours, twin, "gathered" if exact else "blockwise")
                    num_done[who] += 1
            except BaseException as error:
                wrong.append((who, error))

        threads = [threading.Thread(target=generate, args=(who,)) for who in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        assert num_done == [NUM_GENERATIONS] * NUM_THREADS
        assert tiered.stats()["nvme_sole_reads"] > 0
        for who in (*range(NUM_THREADS), 99):
            tiered.session(f"thread {who}").delete()
        alone.clear()  # an answer keeps its cache
        gc.collect()
        assert occupied(tiered) == 0
