"""A conversation as token ids, one turn after another: what is there is never tokenised again. Pure Python.

Text that is tokenised again may get other ids, and then nothing of what was computed for the old ones can be reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MARK = "\x00kvtier\x00"


@dataclass(frozen=True, slots=True)
class ChatParts:
    """The text that a chat template puts around what is said."""

    head: str
    """Before the first user's words."""
    ask: str
    """Between a user's words and the answer."""
    next_head: str
    """Before a later user's words."""
    closing: str
    """What ends an answer."""


_PLAIN = ChatParts("", "\nAnswer:", "Question: ", "\n\n")


def chat_parts(tokenizer: Any) -> ChatParts:
    """The parts of the tokenizer's template, or plain lines if it has none, or one that these parts do not make."""
    if not getattr(tokenizer, "chat_template", None):
        return _PLAIN

    def render(*words: str, ask: bool) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": word} for i, word in enumerate(words)]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))

    first = render(_MARK, ask=True)
    answered = render("q", _MARK, ask=False)
    asked_again = render("q", "a", _MARK, ask=True)
    before = render("q", "a", ask=False)
    if any(text.count(_MARK) != 1 for text in (first, answered, asked_again)) or not asked_again.startswith(before):
        return _PLAIN
    head, ask = first.split(_MARK)
    return ChatParts(head, ask, asked_again[len(before) :].split(_MARK)[0], answered.split(_MARK)[1])


def encode(tokenizer: Any, text: str, *, first: bool = False) -> list[int]:
    """The ids of a piece of a conversation; of the `first`, with what a tokenizer without a template puts before it."""
    if not text and not first:
        return []
    # Chat templates write their own begin-of-text token; a plain tokenizer adds it to the first piece only.
    special = first and not getattr(tokenizer, "chat_template", None)
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def closed(ids: Sequence[int], closing: Sequence[int]) -> list[int]:
    """A conversation whose last answer has ended, of one in which as much of the end is there as the model wrote."""
    there = next(n for n in range(min(len(closing), len(ids)), -1, -1) if list(ids[len(ids) - n :]) == [*closing[:n]])
    return [*ids, *closing[there:]]
