"""Real text for the benchmarks, and conversations about it with planted facts.

A session is one conversation: a stretch of a document with a few sentences such as "The access code of Amber Falcon
is 48213." planted in it, then questions about them. No two sessions share a fact, so a cache that serves one session's
keys and values to another answers with the wrong number. Only token ids leave this module, and nothing is ever
tokenised twice: a transcript that were decoded and encoded again could differ from the ids in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.chat_template import chat_parts, closed, encode
from kvtier.errors import ConfigError

FACTS_PER_SESSION = 3
_ADJECTIVES = ("Amber", "Silver", "Quiet", "Crimson", "Hollow", "Northern", "Golden", "Winter", "Iron", "Velvet")
_NOUNS = ("Falcon", "Harbour", "Meadow", "Lantern", "Orchard", "Canyon", "Beacon", "Glacier", "Anchor", "Thistle")
# Of code points, per token wanted, so that one encoding of a window is enough for any tokenizer and most scripts.
_WINDOW_CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class Fact:
    """One planted fact: `value` is five digits, unique over all sessions of a run."""

    subject: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The access code of {self.subject} is {self.value}."


@dataclass(frozen=True)
class PlannedTurn:
    """The ids to append before one answer is generated, and the fact that they ask for (None: a general question)."""

    ids: tuple[int, ...]
    fact: Fact | None


@dataclass(frozen=True)
class SessionPlan:
    """One conversation. `closing_ids` end an answer that stopped before its end-of-turn token."""

    name: str
    facts: tuple[Fact, ...]
    turns: tuple[PlannedTurn, ...]
    closing_ids: tuple[int, ...]

    def continued(self, transcript: Sequence[int], turn: int) -> list[int]:
        """The transcript (which ends with an answer, or is empty) and turn `turn`'s ids, ready for `generate`."""
        ids = list(transcript)
        if ids:
            ids = closed(ids, self.closing_ids)
        return ids + list(self.turns[turn].ids)


def load_text(path: str | None = None) -> str:
    """The text that contexts are cut from: a file, a folder of .txt and .md files, or (None) Python's own manual.

    Raises:
        ConfigError: nothing readable there, or less than 1,000 characters.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    else:
        files = [root]
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    except OSError as error:
        raise ConfigError(f"--documents {path}: {error.strerror}; give a text file or a folder of .txt/.md") from error
    if len(text) < 1000:
        raise ConfigError(f"--documents {path}: {len(text)} characters of text, at least 1000 are needed")
    return text


def make_session_plan(
    tokenizer: Any, text: str, *, index: int, seed: int, context_tokens: int, num_turns: int
) -> SessionPlan:
    """Plan session number `index` of a run: the same arguments give the same ids.

    Args:
        tokenizer: transformers' tokenizer; its chat template is used if it has one.
        index: 0 …; sessions of different index share no fact.
        context_tokens: tokens of document and facts together, before the first question; at least 200.
        num_turns: questions to ask, >= 1. Three of four ask for a planted fact.

    Raises:
        ConfigError: a context too short for its facts.

    Cost: one encoding of about `8 * context_tokens` characters.
    """
    rng = random.Random(f"{seed}:{index}")
    facts = tuple(_fact(index * FACTS_PER_SESSION + i, seed) for i in range(FACTS_PER_SESSION))
    parts = chat_parts(tokenizer)
    context = _context(tokenizer, text, rng, facts, context_tokens)
    turns = []
    for turn in range(num_turns):
        fact = facts[turn % len(facts)] if turn % 4 != 3 else None
        question = f"What is the access code of {fact.subject}?" if fact else "What is the text above about?"
        if turn == 0:
            ids = [
                *encode(tokenizer, parts.head, first=True),
                *context,
                *encode(tokenizer, f"\n\n{question}{parts.ask}"),
            ]
        else:
            ids = encode(tokenizer, f"{parts.next_head}{question}{parts.ask}")
        turns.append(PlannedTurn(tuple(ids), fact))
    return SessionPlan(f"session-{index}", facts, tuple(turns), tuple(encode(tokenizer, parts.closing)))


def _fact(number: int, seed: int) -> Fact:
    """Fact `number` of a run. 48611 is coprime to 90000: numbers below 90000 give different codes."""
    code = 10000 + (48611 * (number + 1) + 7919 * seed) % 90000
    name = f"{_ADJECTIVES[number % 10]} {_NOUNS[(number // 10 + number) % 10]}"
    return Fact(name if number < 100 else f"{name} {number // 100 + 1}", str(code))


def _context(tokenizer: Any, text: str, rng: random.Random, facts: Sequence[Fact], num_tokens: int) -> list[int]:
    planted = [encode(tokenizer, f"\n\n{fact.sentence}\n\n") for fact in facts]
    num_document = num_tokens - sum(len(ids) for ids in planted)
    if num_document < 2 * len(facts):
        raise ConfigError(f"--context {num_tokens}: too short for {len(facts)} planted facts; give at least 200 tokens")
    start = text.find("\n", rng.randrange(len(text))) + 1  # 0 where no line follows: the text's beginning
    window = text[start : start + _WINDOW_CHARS_PER_TOKEN * num_tokens]
    ids = encode(tokenizer, window)
    while len(ids) < num_document:  # a short text is told again from its beginning
        ids += encode(tokenizer, text[: _WINDOW_CHARS_PER_TOKEN * num_tokens])
    ids = ids[:num_document]
    # One fact in each equal part of the context, at a place drawn by lot; from the back, so that places stay valid.
    part = num_document // len(facts)
    for i in reversed(range(len(facts))):
        place = i * part + rng.randrange(part)
        ids[place:place] = planted[i]
    return ids
