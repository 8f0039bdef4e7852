"""Conversations for the benchmarks: deterministic, facts unique, ids never encoded twice."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.benchmarks.documents import SessionPlan, load_text, make_session_plan
from kvtier.errors import ConfigError

TEXT = load_text()


class Letters:
    """One token a byte, so that every text survives; `chat_template` switches a toy template on."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8", errors="replace"))}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        words = "[system]\n" + "".join(f"<{message['role']}>{message['content']}</>\n" for message in messages)
        return words + ("<assistant>" if add_generation_prompt else "")


def plan(tokenizer: Any = None, **changes: Any) -> SessionPlan:
    arguments: dict[str, Any] = {"index": 0, "seed": 0, "context_tokens": 1000, "num_turns": 4} | changes
    return make_session_plan(tokenizer or Letters("toy"), TEXT, **arguments)


def test_same_arguments_same_ids() -> None:
    assert plan() == plan()
    assert plan().turns[0] != plan(seed=1).turns[0]
    assert plan().turns[0] != plan(index=1).turns[0]


def test_context_has_its_length_and_its_facts() -> None:
    tokenizer = Letters()  # without a template the first turn is the context, a question and little else
    turn = plan(tokenizer).turns[0]
    text = tokenizer.decode(list(turn.ids))
    assert turn.fact is not None
    assert len(turn.ids) == 1000 + len(f"\n\nWhat is the access code of {turn.fact.subject}?\nAnswer:")
    for fact in plan(tokenizer).facts:
        assert fact.sentence in text


def test_facts_are_unique_over_sessions() -> None:
    facts = [fact for index in range(100) for fact in plan(index=index, num_turns=1).facts]
    assert len({fact.value for fact in facts}) == len({fact.subject for fact in facts}) == 300
    assert all(len(fact.value) == 5 for fact in facts)


def test_chat_template_is_followed_without_repeating_its_head() -> None:
    tokenizer = Letters("toy")
    session = plan(tokenizer)
    first = tokenizer.decode(list(session.turns[0].ids))
    second = tokenizer.decode(list(session.turns[1].ids))
    assert first.startswith("[system]\n<user>") and first.endswith("?</>\n<assistant>")
    assert second.startswith("<user>What is") and second.endswith("?</>\n<assistant>")
    assert tokenizer.decode(list(session.closing_ids)) == "</>\n"


def test_most_turns_ask_for_a_fact() -> None:
    assert [turn.fact is not None for turn in plan(num_turns=8).turns] == [True, True, True, False] * 2


def test_continued_closes_an_answer_once() -> None:
    session = plan()
    closing, question = list(session.closing_ids), list(session.turns[1].ids)
    assert session.continued([], 0) == list(session.turns[0].ids)
    assert session.continued([7, 8], 1) == [7, 8, *closing, *question]
    assert session.continued([7, closing[0]], 1) == [7, *closing, *question]


def test_short_text_is_repeated() -> None:
    session = make_session_plan(Letters(), "word " * 300, index=0, seed=0, context_tokens=5000, num_turns=1)
    assert len(session.turns[0].ids) > 5000


def test_context_too_short_for_its_facts() -> None:
    with pytest.raises(ConfigError, match="--context 50"):
        plan(context_tokens=50)


def test_load_text_takes_a_folder_or_a_file(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("a" * 600)
    (tmp_path / "b.md").write_text("b" * 600)
    (tmp_path / "c.bin").write_bytes(b"\xff" * 600)
    assert load_text(str(tmp_path)) == "a" * 600 + "\n\n" + "b" * 600
    for path in (tmp_path / "nothing", tmp_path / "a.txt"):  # absent; too short
        with pytest.raises(ConfigError, match="--documents"):
            load_text(str(path))
