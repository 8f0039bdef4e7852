"""The benchmarks of reuse on a tiny model: their rows, what makes one invalid, and that they count what they say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtier import TieredKV
from kvtier.benchmarks import prefix, resume, worst_case
from kvtier.benchmarks.cold import drop_cache, is_cold
from kvtier.benchmarks.command import encode, finish, parse
from kvtier.benchmarks.models import LoadedModel, twin
from kvtier.benchmarks.residence import put_on
from kvtier.benchmarks.resume_child import resume as resume_here
from kvtier.benchmarks.spent import Spent, spent
from kvtier.system import resident_file_bytes
from kvtier.types import Tier
from tests.e2e.soaking import tiny_loaded


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def call(seconds: float, sequence: tuple[int, ...] = (1, 2), cpu_seconds: float | None = None) -> Spent:
    cpu = seconds if cpu_seconds is None else cpu_seconds
    return Spent(seconds / 2, cpu / 2, 0, seconds, cpu, sequence)


# -- resume -----------------------------------------------------------------------------------------------------------


def test_resume_has_a_row_for_each_case_with_the_tokens_of_an_uninterrupted_run(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    tasks = []

    def restart(task: dict[str, Any], folder: Path) -> dict[str, Any]:
        tasks.append(json.loads(json.dumps(task)))  # what a new process would be told
        return {**resume_here(tiny_loaded().model, tasks[-1]), "load_s": 1.5}

    options = argparse.Namespace(context=600, rounds=2, threads=1, model=None)
    document = resume.run(loaded, options, tmp_path, Console(quiet=True), restart)
    rows = {row["case"]: row for row in document["rows"]}
    assert list(rows) == ["gpu", "cpu", "nvme", "nvme_restart_cold", "prefill"]
    for case, row in rows.items():
        assert row["seconds"] > 0 and row["ratio_to_prefill"] == rows["prefill"]["seconds"] / row["seconds"]
        assert row["same_as_uninterrupted"] and row.get("same_as_plain", True), case
    for case in ("gpu", "cpu", "nvme", "nvme_restart_cold"):
        assert rows[case]["tokens_computed"] == resume.NUM_ASKED + resume.NUM_ANSWERED - 1
    restarted = rows["nvme_restart_cold"]
    assert restarted["load_s"] == 1.5 and restarted["hash_s"] > 0 and restarted["open_s"] < restarted["seconds"]
    assert len(tasks) == 2 and len(tasks[0]["transcript"]) == 600 + resume.NUM_ASKED
    assert document["payload_bytes"] == 600 * 512
    assert "prefill" in str(resume.table(document).columns[0]._cells)
    json.dumps(document)


@pytest.mark.parametrize(("case", "read_bytes", "valid"), [
    ("nvme", 949, False), ("nvme", 950, True), ("nvme_restart_cold", 0, False), ("cpu", 0, True),
])  # fmt: skip
def test_a_row_from_disk_that_was_not_cold_is_invalid_and_says_so(case: str, read_bytes: int, valid: bool) -> None:
    turn = {"seconds": 0.5, "cpu_seconds": 0.25, "sequence": [1, 2], "tokens": 15}
    turns = [{**turn, "read_bytes": each} for each in (1000, read_bytes, 1000)]
    prefill = {"seconds": 20.0, "cpu_seconds": 10.0, "sequences": [[1, 2]]}
    row = resume.to_row(case, turns, prefill=prefill, payload_bytes=1000, expected=[1, 2])
    assert row["is_valid"] is valid and row["disk_frac"] == read_bytes / 1000
    assert row["ratio_to_prefill"] == 40 and row["cpu_ratio_to_prefill"] == 40
    document = {"model": "m", "context": 1, "new_tokens": 8, "rows": [row]}
    assert ("INVALID" in str(resume.table(document).columns[-1]._cells)) is not valid


def test_other_tokens_are_told() -> None:
    turn = {"seconds": 0.5, "cpu_seconds": 0.5, "sequence": [1, 2], "tokens": 15, "read_bytes": 0}
    prefill = {"seconds": 20.0, "cpu_seconds": 20.0, "sequences": [[1, 2]]}
    turns = [turn, {**turn, "sequence": [1, 3]}]
    row = resume.to_row("gpu", turns, prefill=prefill, payload_bytes=1, expected=[1, 2])
    assert not row["same_as_uninterrupted"] and not row["same_as_plain"]


def test_a_conversation_is_put_on_one_tier(loaded: LoadedModel, tmp_path: Path) -> None:
    model = twin(loaded.model)
    with TieredKV(model, resume.config_for(model, 700, tmp_path)) as tiered:
        chat = tiered.session("x")
        chat.generate(encode(loaded, 600), max_new_tokens=1, do_sample=False)
        residency = tiered._runtime.placement.residency
        for tier in (Tier.CPU, Tier.NVME, Tier.GPU, Tier.NVME):
            put_on(tiered, chat, tier)
            blocks = chat.cache.state.batch.tables[0].blocks
            assert {residency[block].fastest for block in blocks} == {tier}
            tiered.check_integrity()


def test_dropped_files_are_not_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(bytes(1 << 20))
    assert resident_file_bytes(tmp_path) >= 1 << 20
    drop_cache(tmp_path)
    assert resident_file_bytes(tmp_path) == 0
    assert is_cold(95, 100) and not is_cold(94, 100)


# -- prefix -----------------------------------------------------------------------------------------------------------


def test_questions_on_one_system_prompt_compute_it_once(loaded: LoadedModel) -> None:
    part = prefix.questions(loaded, 300, 6)
    rows = {row["way"]: row for row in part["rows"]}
    assert list(rows) == ["plain", "copied cache", "kvtier, blocks of 256", "kvtier, blocks of 64"]
    lengths = rows["plain"]["computed"]
    assert len(lengths) == 6 and min(lengths) > 300
    assert rows["copied cache"]["computed"] == [lengths[0], *(length - 300 for length in lengths[1:])]
    for size in prefix.BLOCKS:
        # Full blocks of what a question has in common with those before are found: the system prompt, and its own head.
        computed = rows[f"kvtier, blocks of {size}"]["computed"]
        assert computed[0] == lengths[0]
        found = [length - each for length, each in zip(lengths, computed, strict=True)][1:]
        assert all(300 // size * size <= each <= 300 + size for each in found)
    assert all(row["same_answers"] == 6 for row in part["rows"])


def test_a_chat_computes_only_what_is_new(loaded: LoadedModel) -> None:
    part = prefix.chat(loaded, 250, 6)
    rows = {row["way"]: row for row in part["rows"]}
    assert all(row["same_answers"] == 6 for row in part["rows"])
    assert not rows["plain"]["only_new_computed"], "it computes everything"
    for way in ("kept cache", "kvtier, blocks of 256", "kvtier, blocks of 64"):
        assert rows[way]["only_new_computed"]
    turns = zip(rows["kvtier, blocks of 64"]["computed"], rows["plain"]["new_tokens"], strict=True)
    assert all(new < computed <= new + 64 for computed, new in list(turns)[1:])
    both = {"model": "m", "questions": {**part, "questions": 6, "system_tokens": 1}, "chat": part}
    assert len(prefix.tables(both)) == 2
    json.dumps(both)


def test_one_token_too_many_is_seen() -> None:
    way = prefix.Way("w", lambda: None, lambda: 0, 64)
    way.computed = [900, 30 + 64, 40 + 64]
    assert prefix.only_new(way, [900, 30, 40])
    way.computed[-1] += 1
    assert not prefix.only_new(way, [900, 30, 40])


# -- the worst case ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", worst_case.CASES)
def test_prompts_that_never_repeat_fill_the_tiers_and_nothing_is_found(
    case: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    asked = worst_case.prompts(loaded, 24, 128)
    row = worst_case.measure(case, loaded, asked, tmp_path)
    assert row["is_valid"] and row["reused_tokens"] == 0 and row["same_answers"] == row["pairs"] == 8
    assert 2 <= row["full_pairs"] < 8
    assert (row["nvme_written_bytes"] > 0) is (case != "gpu")
    assert worst_case.table({"model": "m", "prompt_tokens": 128, "rows": [row]}).row_count == 1
    json.dumps(row)


def test_costs_are_medians_of_pairs() -> None:
    calls = {
        "with": [call(1.1, cpu_seconds=1.0), call(4.0, cpu_seconds=2.02), call(2.04, cpu_seconds=2.02)],
        "without": [call(1.0), call(2.0), call(2.0)],
        "plain": [call(1.0, (1, 3))],
    }
    nothing = {
        "prefix_cache": {"reused_tokens": {"gpu": 0}},
        "bytes_moved": {},
        "tiers": {"nvme": {"written_bytes": 0}},
    }
    row = worst_case.to_row("gpu", calls, 1, {"with": nothing})
    assert row["cost_frac"] == pytest.approx(0.1) and row["cpu_cost_frac"] == pytest.approx(0.01)
    assert row["cpu_cost_full_frac"] == pytest.approx(0.01) and row["full_pairs"] == 2
    assert row["cost_to_plain_frac"] == pytest.approx(0.1) and row["is_valid"]
    assert row["same_answers"] == 2, "the plain model gave another one to the first prompt"
    assert not worst_case.to_row("gpu", calls, None, {"with": nothing})["is_valid"], "never full"
    nothing["prefix_cache"]["reused_tokens"]["gpu"] = 1  # type: ignore[index]
    assert not worst_case.to_row("gpu", calls, 1, {"with": nothing})["is_valid"], "something was found"


# -- what they share --------------------------------------------------------------------------------------------------


def test_the_first_token_comes_before_the_last(loaded: LoadedModel) -> None:
    turn = spent(loaded.model.generate, encode(loaded, 40), 5)
    assert 0 < turn.first_token_s < turn.seconds and len(turn.sequence) == 45


def test_a_twin_shares_every_weight_and_no_wrapper(loaded: LoadedModel) -> None:
    other = twin(loaded.model)
    for ours, theirs in zip(loaded.model.parameters(), other.parameters(), strict=True):
        assert ours is theirs
    with TieredKV(other, {"tiers": {"gpu": {"budget": "8MiB"}}}):
        assert "forward" not in vars(loaded.model)


def test_the_document_is_the_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for only in (False, True):
        options = parse(argparse.ArgumentParser(), ["--folder", str(tmp_path), *(["--json"] if only else [])])
        document = {"model": "m", "context": 1, "new_tokens": 8, "rows": []}
        finish(document, [resume.table(document)], options, 0.5)
        out = capsys.readouterr().out
        assert json.loads(out.splitlines()[-1])["machine"]["torch"] == torch.__version__
        assert ("1 tokens resumed" in out) is not only


def test_memory_is_no_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argparse.ArgumentParser(), ["--folder", "/dev/shm"])
    assert "which is memory" in capsys.readouterr().err
