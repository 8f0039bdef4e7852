"""Two hundred sessions in one folder: what a turn of one costs does not grow with the others. Counted, not timed."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.session_record import SessionRecord
from kvtier.stores.nvme import NvmeStore
from tests.e2e.families import BLOCK, tiny, tokens
from tests.e2e.test_session_restart import keeping

NUM_SESSIONS = 200
BRIEF: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a session's blocks were hashed, and how many were looked up in files."""
    counts: Counter[str] = Counter()
    labels, find = SessionRecord.labels, NvmeStore.find

    def counting_labels(record: SessionRecord) -> Any:
        counts["hashed sessions"] += 1
        return labels(record)

    def counting_find(store: NvmeStore, label: Any) -> Any:
        counts["looked up"] += 1
        return find(store, label)

    monkeypatch.setattr(SessionRecord, "labels", counting_labels)
    monkeypatch.setattr(NvmeStore, "find", counting_find)
    return counts


def test_a_turn_costs_what_its_own_blocks_cost_however_many_sessions_there_are(
    tmp_path: Path, calls: Counter[str]
) -> None:
    model = tiny("llama")
    config = keeping(model, tmp_path, nvme=64 << 20)
    with TieredKV(model, config) as tiered:
        for number in range(NUM_SESSIONS):
            tiered.session(f"user {number}").generate(tokens(20, number), **BRIEF)
    blocks = -(-21 // BLOCK)
    calls.clear()
    marks = [time.perf_counter()]
    with TieredKV(model, config) as tiered:
        marks.append(time.perf_counter())
        assert calls["hashed sessions"] <= NUM_SESSIONS, "each once when the folder is opened"
        calls.clear()
        assert len(tiered.sessions()) == NUM_SESSIONS
        marks.append(time.perf_counter())
        assert calls["looked up"] <= NUM_SESSIONS * blocks, "each block once"
        calls.clear()
        chat = tiered.session("user 7")
        for turn in range(3):
            ids = torch.tensor([[*chat.token_ids, *tokens(20, 1000 + turn)[0].tolist()]])
            assert ids.shape[1] == 21 + turn * 21 + 20
            chat.generate(ids, **BRIEF)
            own = -(-ids.shape[1] // BLOCK) + 1
            assert calls["hashed sessions"] <= 4 and calls["looked up"] <= own, calls
            calls.clear()
            marks.append(time.perf_counter())
        tiered.session("user 8").pin()
        assert calls["hashed sessions"] <= 2 and calls["looked up"] <= blocks
        tiered.session("user 8").delete()
        marks.append(time.perf_counter())
    names = ("open", "sessions()", "first turn", "second", "third", "pin and delete")
    took = [f"{name} {1000 * (end - start):.0f} ms" for name, start, end in zip(names, marks, marks[1:], strict=False)]
    print(f"{NUM_SESSIONS} sessions: {', '.join(took)}")
