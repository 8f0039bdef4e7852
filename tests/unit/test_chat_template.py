"""Turns of a conversation as ids: nothing is tokenised twice, and an answer ends once."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.chat_template import ChatParts, chat_parts, closed, encode
from tests.unit.test_documents import Letters

PLAIN = ChatParts("", "\nAnswer:", "Question: ", "\n\n")


def test_the_parts_of_a_template_make_what_it_makes() -> None:
    parts = chat_parts(Letters("toy"))
    assert parts == ChatParts("[system]\n<user>", "</>\n<assistant>", "<user>", "</>\n")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": word} for role, word in zip(roles, "abc", strict=True)]
    whole = Letters("toy").apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{parts.head}a{parts.ask}b{parts.closing}{parts.next_head}c{parts.ask}" == whole


class Twice(Letters):
    def apply_chat_template(self, messages: list[dict[str, str]], **more: Any) -> str:
        return super().apply_chat_template([*messages, *messages], **more)


@pytest.mark.parametrize("tokenizer", [Letters(), Twice("toy")], ids=["none", "unusual"])
def test_plain_lines_where_no_template_can_be_followed(tokenizer: Letters) -> None:
    assert chat_parts(tokenizer) == PLAIN


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([5, 6], [5, 6, 1, 2, 3]),
        ([5, 1], [5, 1, 2, 3]),
        ([5, 1, 2], [5, 1, 2, 3]),
        ([5, 1, 2, 3], [5, 1, 2, 3]),
        ([1, 2, 1], [1, 2, 1, 2, 3]),
        ([], [1, 2, 3]),
    ],
)
def test_an_answer_ends_once(ids: list[int], wanted: list[int]) -> None:
    assert closed(ids, [1, 2, 3]) == wanted
    assert closed(ids, []) == ids


def test_only_the_first_piece_of_a_plain_text_gets_special_tokens() -> None:
    calls: list[bool] = []

    class Noting(Letters):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            calls.append(add_special_tokens)
            return super().__call__(text, add_special_tokens)

    assert encode(Noting(), "ab", first=True) == encode(Noting(), "ab") == [97, 98]
    encode(Noting("toy"), "ab", first=True)
    assert calls == [True, False, False] and encode(Noting(), "") == []
